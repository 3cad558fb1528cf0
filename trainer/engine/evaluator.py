"""Evaluator: scores the averaged model on the validation images of all ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from trainer.data.loading.dataloader import EvalLoader
from trainer.distributed import comm
from trainer.losses.criterion import Criterion, LossSums
from trainer.tasks import Scores, Task


class Evaluator:
    """The validation of a training, and what the last one found."""

    def __init__(self, task: Task, loader: EvalLoader[Any]) -> None:
        self._task = task
        self.loader = loader
        self.metric = task.metric()  # of the last validation; on rank 0 merged over the ranks
        self.samples: Sequence[Any] = ()  # images of this rank with their predictions
        self.losses: dict[str, float] = {}  # terms of the loss over the batches of all ranks

    def __call__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        device: torch.device,
        dtype: torch.dtype,
        criterion: Criterion,
    ) -> Scores:
        """Return the model's scores over the batches of all ranks. A collective."""
        metric, self.samples, losses = self._task.evaluate(model, batches, device, dtype, criterion)
        parts = comm.gather((metric, losses))
        scores: Scores | None = None
        if parts:
            self.metric = self._task.metric()
            whole = LossSums()
            for part, part_losses in parts:
                self.metric.merge(part)
                whole.merge(part_losses)
            self.losses = whole.terms(criterion)
            scores = self.metric.compute()
        merged: Scores
        merged, self.losses = comm.broadcast((scores, self.losses))
        return merged
