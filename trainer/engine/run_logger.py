"""Run logger: plots at the start and end of a run, and TensorBoard's event file."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.data.batch import TrainBatch
from trainer.metrics.scores import Metric, Scores
from trainer.tasks import Task

_SPEED = ("images_per_s", "seconds")
_SUFFIX = ".trainer"  # of the event files
_TABLE_CLASSES = 25  # no table above this number of classes


class RunLogger:
    """Plots and TensorBoard events of one run, on rank 0."""

    def __init__(self, folder: Path, task: Task, epoch: int = 1) -> None:
        """Open the event file; `epoch` (from 1) is the first of this process, whose older events are discarded."""
        from torch.utils.tensorboard import SummaryWriter  # slow import

        self._folder = folder
        self._task = task
        if epoch == 1:  # event files of an earlier run (--exist-ok)
            for old in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
                old.unlink()
        self._events = SummaryWriter(folder, purge_step=epoch, filename_suffix=_SUFFIX)
        self._best: tuple[Metric, Scores] | None = None
        self._shown: Sequence[Any] = ()

    @property
    def _drawings(self) -> Any:
        from trainer.plots import DRAWINGS  # slow import (matplotlib)

        return DRAWINGS[self._task.kind]

    def begin(self) -> None:
        """Plot the statistics of the training labels."""
        self._drawings.labels(self._task.train_set, self._folder / "labels.png")

    def first_batch(self, batch: TrainBatch) -> None:
        """Draw the first training batch."""
        self._drawings.batch(batch, self._task.names, self._folder / "train_batch0.jpg")

    def epoch(self, epoch: int, row: dict[str, float], shown: Sequence[Any]) -> None:
        """Log an epoch (from 1): its row of results.csv, and at epochs 1, 2, 4, 8, ... its predictions."""
        values = {
            self._tag(name): value for name, value in row.items() if name != "epoch" and not math.isnan(value)
        }
        for tag, value in values.items():
            self._events.add_scalar(tag, value, epoch)
        self._shown = shown
        # Without a validation, `shown` is of an earlier epoch.
        validated = any(self._tag(key) in values for key in self._task.headlines)
        if shown and validated and epoch & (epoch - 1) == 0:
            self._show(epoch)
        self._events.flush()  # for a TensorBoard that is open during the run

    def best(self, metric: Metric, scores: Scores) -> None:
        """Keep the metric of the best epoch so far, for the plots and the table at the end."""
        self._best = metric, scores

    def finish(self, epoch: int) -> str:
        """Draw the plots after the last epoch (from 1); return the best epoch's table, "" if it is too long."""
        from trainer.plots import plot_results

        plot_results(self._folder / "results.csv", self._folder / "results.png")
        if self._shown:
            self._show(epoch)
        self._events.close()
        if not self._best:
            return ""
        metric, scores = self._best
        self._drawings.metric(metric, self._folder)
        return scores.table() if len(scores.per_class) <= _TABLE_CLASSES else ""

    def _show(self, epoch: int) -> None:
        drawn = self._drawings.shown(self._shown, self._task.names, self._folder / "predictions.jpg")
        self._events.add_image("predictions", drawn, epoch, dataformats="HWC")

    def _tag(self, name: str) -> str:
        """Return the TensorBoard tag of a column of results.csv."""
        if name.startswith("val/"):
            return name
        if name.endswith("_loss"):
            return f"loss/{name.removesuffix('_loss')}"
        if name in self._task.columns:
            return f"val/{self._task.headlines.get(name, name)}"
        return name if name == "lr" else f"{'speed' if name in _SPEED else 'share'}/{name}"
