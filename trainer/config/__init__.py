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
from trainer.config.settings import PARALLEL, PRECISIONS, Settings

__all__ = ["CIFAR", "DIGITS", "IGNORED", "PARALLEL", "PRECISIONS", "PRESETS", "TASKS", "Hyp", "Settings"]
__all__ += ["FAMILY_PRESETS", "family_of", "hyp_keys", "load_hyp", "preset_for"]
