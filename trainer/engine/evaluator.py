"""Evaluator: scores the averaged model on the validation images of all ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from trainer.data.loading.dataloader import EvalLoader
from trainer.distributed import comm
from trainer.tasks import Scores, Task


class Evaluator:
    """The validation of a training, and what the last one found."""

    def __init__(self, task: Task, loader: EvalLoader[Any]) -> None:
        self._task = task
        self.loader = loader
        self.metric = task.metric()  # of the last validation; on rank 0 merged over the ranks
        self.samples: Sequence[Any] = ()  # images of this rank with their predictions

    def __call__(
        self, model: nn.Module, batches: Iterable[Any], device: torch.device, dtype: torch.dtype
    ) -> Scores:
        """Return the model's scores over the batches of all ranks. A collective."""
        metric, self.samples = self._task.evaluate(model, batches, device, dtype)
        parts = comm.gather(metric)
        scores: Scores | None = None
        if parts:
            self.metric = self._task.metric()
            for part in parts:
                self.metric.merge(part)
            scores = self.metric.compute()
        merged: Scores = comm.broadcast(scores)
        return merged
