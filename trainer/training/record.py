"""What a run leaves for people to look at: pictures at its start and its end, and TensorBoard's event file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.tasks import Task

# The groups that TensorBoard shows the columns of results.csv in.
_GROUPS = {"top1": "val/top-1", "top5": "val/top-5", "miou": "val/mIoU", "accuracy": "val/pixel accuracy"}
_GROUPS |= {"map50": "val/mAP50", "map": "val/mAP50-95", "precision": "val/precision", "recall": "val/recall"}
_SPEED = ("images_per_s", "seconds")
_SUFFIX = ".trainer"  # of the event files


class Record:
    """The record of one run; made on the one rank that writes."""

    def __init__(self, folder: Path, task: Task, epoch: int = 1) -> None:
        """`epoch` (from 1) is the first that this process trains: later ones in the folder are void."""
        from torch.utils.tensorboard import SummaryWriter  # only the rank that writes loads TensorBoard

        self._folder, self._task = folder, task
        if epoch == 1:  # an earlier run with --exist-ok left them
            for old in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
                old.unlink()
        self._events = SummaryWriter(folder, purge_step=epoch, filename_suffix=_SUFFIX)
        self._best: tuple[Any, Any] | None = None
        self._shown: Sequence[Any] = ()

    @property
    def _drawings(self) -> Any:
        from trainer.plots import DRAWINGS  # matplotlib loads slowly

        return DRAWINGS[self._task.kind]

    def begin(self) -> None:
        """Draw the training labels' statistics."""
        self._drawings.labels(self._task.train_set, self._folder / "labels.png")

    def first_batch(self, batch: Any) -> None:
        """Draw what the network is given first."""
        self._drawings.batch(batch, self._task.names, self._folder / "train_batch0.jpg")

    def epoch(self, epoch: int, row: dict[str, float], shown: Sequence[Any]) -> None:
        """Add an epoch (from 1): its row of results.csv, and at epochs 1, 2, 4, 8, ... what was found."""
        values = {_tag(name): value for name, value in row.items() if name != "epoch" and not math.isnan(value)}
        for tag, value in values.items():
            self._events.add_scalar(tag, value, epoch)
        self._shown = shown
        # Else the pictures are those of an epoch before.
        validated = any(_tag(key) in values for key in self._task.headlines)
        if shown and validated and epoch & (epoch - 1) == 0:
            self._show(epoch)
        self._events.flush()  # TensorBoard can follow the run

    def best(self, metric: Any, scores: Any) -> None:
        """Keep the metric of the best epoch so far: the curves and the table at the end are its."""
        self._best = metric, scores

    @property
    def knows_best(self) -> bool:
        """Whether the best epoch was one of this process's, so that there is something to draw of it."""
        return self._best is not None

    def finish(self, epoch: int) -> str:
        """Draw everything after the last epoch (from 1); returns the best epoch's table, "" if that is too long."""
        from trainer.plots import plot_results

        plot_results(self._folder / "results.csv", self._folder / "results.png")
        if self._shown:
            self._show(epoch)
        self._events.close()
        if not self._best:
            return ""
        metric, scores = self._best
        self._drawings.metric(metric, self._folder)
        return self._task.table(scores)

    def _show(self, epoch: int) -> None:
        drawn = self._drawings.shown(self._shown, self._task.names, self._folder / "predictions.jpg")
        self._events.add_image("predictions", drawn, epoch, dataformats="HWC")


def _tag(name: str) -> str:
    """The name in TensorBoard of a column of results.csv."""
    if name.endswith("_loss"):
        return f"loss/{name.removesuffix('_loss')}"
    if name in _GROUPS:
        return _GROUPS[name]
    return name if name == "lr" else f"{'speed' if name in _SPEED else 'share'}/{name}"
