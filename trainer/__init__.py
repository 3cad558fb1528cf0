"""Trains a detector, a classifier or a segmentation under torchrun or alone: model, data, loss, metric and loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.api import Result, train
    from trainer.callback import Callback
    from trainer.errors import TrainerError

__all__ = ["Callback", "Result", "TrainerError", "train"]


def __getattr__(name: str) -> Any:
    """The Python interface, loaded when it is asked for: every rank imports this package, and few need it."""
    if name not in __all__:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    from trainer import api

    return getattr(api, name)
