"""Configuration: settings of a training, hyper-parameters, and presets with the defaults."""

from trainer.config.presets import (
    CIFAR,
    DIGITS,
    FAMILY_PRESETS,
    IGNORED,
    PRESETS,
    TASKS,
    Hyp,
    family_of,
    hyp_keys,
    load_hyp,
    preset_for,
)
from trainer.config.settings import PRECISIONS, Settings
from trainer.config.strategies import DEFAULT_STRATEGY, PARALLEL, STRATEGIES, traits_of

__all__ = ["CIFAR", "DIGITS", "IGNORED", "PARALLEL", "PRECISIONS", "PRESETS", "TASKS", "Hyp", "Settings"]
__all__ += ["DEFAULT_STRATEGY", "FAMILY_PRESETS", "STRATEGIES"]
__all__ += ["family_of", "hyp_keys", "load_hyp", "preset_for", "traits_of"]
