"""Configuration: settings of a training, hyper-parameters, and presets with the defaults."""

from trainer.config.presets import CIFAR, DIGITS, IGNORED, PRESETS, TASKS, Hyp, load_hyp, preset_for
from trainer.config.settings import PARALLEL, PRECISIONS, Settings

__all__ = ["CIFAR", "DIGITS", "IGNORED", "PARALLEL", "PRECISIONS", "PRESETS", "TASKS", "Hyp", "Settings"]
__all__ += ["load_hyp", "preset_for"]
