"""Configuration: settings of a training, hyper-parameters, and presets with the defaults."""

from trainer.config.families import FAMILIES, ModelCfg, family_of, named_families
from trainer.config.presets import (
    CIFAR,
    DIGITS,
    IGNORED,
    PRESETS,
    TASKS,
    Hyp,
    hyp_keys,
    load_hyp,
    preset_for,
)
from trainer.config.settings import PRECISIONS, Settings
from trainer.config.strategies import DEFAULT_STRATEGY, PARALLEL, STRATEGIES, traits_of

__all__ = [
    "CIFAR",
    "DIGITS",
    "IGNORED",
    "PARALLEL",
    "PRECISIONS",
    "PRESETS",
    "TASKS",
    "Hyp",
    "ModelCfg",
    "Settings",
]
__all__ += ["DEFAULT_STRATEGY", "FAMILIES", "STRATEGIES"]
__all__ += ["family_of", "hyp_keys", "load_hyp", "named_families", "preset_for", "traits_of"]
