"""Trainer for detection, classification and segmentation, under torchrun or as a single process."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.api import Result, train
    from trainer.engine.callbacks import Callback
    from trainer.errors import TrainerError

__all__ = ["Callback", "Result", "TrainerError", "train"]


def __getattr__(name: str) -> Any:
    """Load the Python interface at its first use, because ranks do not need it."""
    if name not in __all__:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    from trainer import api

    return getattr(api, name)
