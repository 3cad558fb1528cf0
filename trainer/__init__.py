"""Trainer for detection, classification and segmentation, under torchrun or as a single process."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.api import Result, load, train
    from trainer.engine.callbacks import Callback
    from trainer.errors import TrainerError
    from trainer.inference.model import Model
    from trainer.inference.predictors import Prediction

_HOMES = {
    "Callback": "trainer.engine.callbacks",
    "Model": "trainer.inference.model",
    "Prediction": "trainer.inference.predictors",
    "Result": "trainer.api",
    "TrainerError": "trainer.errors",
    "load": "trainer.api",
    "train": "trainer.api",
}
__all__ = ["Callback", "Model", "Prediction", "Result", "TrainerError", "load", "train"]


def __getattr__(name: str) -> Any:
    """Load the Python interface at its first use, because ranks do not need it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
