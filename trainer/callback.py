"""What a user's own code is told while a training runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer import contract, imports
from trainer.errors import TrainerError


class Callback:
    """Derive from it and override what you want to hear; the fields are those of docs/contract.md."""

    def on_epoch_end(self, metrics: Mapping[str, Any]) -> None:
        """An epoch is over: epoch, epochs, the scores (nan without validation), the losses, images_per_s."""

    def on_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """A checkpoint was written: path, epoch, step."""

    def on_end(self, result: Mapping[str, Any]) -> None:
        """The training is done: seconds, map50, map or top1, top5 or miou, accuracy, best (the path of best.pt)."""


def tell(callback: Callback, event: str, fields: Mapping[str, Any]) -> None:
    """Pass an event on, where it is one that a callback hears."""
    if event == contract.METRIC:
        callback.on_epoch_end(fields)
    elif event == contract.CHECKPOINT:
        callback.on_checkpoint(fields)
    elif event == contract.DONE:
        callback.on_end(fields)


def load(path: str) -> Callback:
    """The callback that `package.module:Class` makes, called without arguments."""
    if not imports.is_import_path(path):
        raise TrainerError(f"--callback {path}: not an import path", "it reads package.module:Class")
    made = imports.load(path, "--callback")()
    if not isinstance(made, Callback):
        raise TrainerError(
            f"--callback {path}: it makes a {type(made).__name__}", "derive the class from trainer.Callback"
        )
    return made
