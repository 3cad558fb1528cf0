"""Callbacks: user code that runs after each epoch, checkpoint and run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer import contract
from trainer.config import imports
from trainer.errors import TrainerError


class Callback:
    """Base class of callbacks. The fields are described in docs/reference/contract.md."""

    def on_epoch_end(self, metrics: Mapping[str, Any]) -> None:
        """Handle the end of an epoch: epoch, epochs, scores (nan without validation), losses, images_per_s."""

    def on_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Handle a new checkpoint: path, epoch, step."""

    def on_end(self, result: Mapping[str, Any]) -> None:
        """Handle the end of the run: seconds, the scores of the best epoch, best (the path of best.pt)."""


def dispatch(callback: Callback, event: str, fields: Mapping[str, Any]) -> None:
    """Call the callback's method for an event, if it has one."""
    methods = {
        contract.METRIC: callback.on_epoch_end,
        contract.CHECKPOINT: callback.on_checkpoint,
        contract.DONE: callback.on_end,
    }
    if event in methods:
        methods[event](fields)


def load(path: str) -> Callback:
    """Import `package.module:Class` and return an instance, created without arguments."""
    callback = imports.load(path, "--callback")()
    if not isinstance(callback, Callback):
        raise TrainerError(
            f"--callback {path}: it creates a {type(callback).__name__}",
            "derive the class from trainer.Callback",
        )
    return callback
