"""What a task is: the data, model, loss and metric of one kind of training, for the loop to put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.losses import Loss


class Scores(Protocol):
    """What a validation found."""

    @property
    def fitness(self) -> float:
        """What the best checkpoint is chosen by; higher is better."""

    def columns(self) -> dict[str, float]:
        """The columns of results.csv, in the order of the task's `columns`."""

    def by_class(self, names: Sequence[str]) -> list[float]:
        """The score of each class, nan where it was not measured."""


class Metric(Protocol):
    """Collects a validation's results; `merge` adds the state of another rank's."""

    def state(self) -> Any:
        """What another process needs in order to merge this."""

    def merge(self, state: Any, /) -> None:
        """Add what another rank collected."""

    def compute(self) -> Any:
        """The Scores of everything collected."""


class Batches(Protocol):
    """A validation loader."""

    notes: list[str]

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def pin(self) -> None:
        """Hand over batches in pinned memory, for a GPU; before the first one is made."""


class Task(Protocol):
    """One kind of training; made from the settings, it has opened and checked its data and its weights file."""

    kind: str  # its name on the command line
    headlines: Mapping[str, str]  # columns that the screen and the events tell of, with their titles
    columns: tuple[str, ...]  # of the scores in results.csv
    names: list[str]  # of the classes
    train_set: Any
    val_set: Any
    left_out: list[Any]  # faults of the data that were asked to be left out
    cfg: dict[str, Any]  # what builds the model again, kept in checkpoints
    stride: int  # pixels per cell of the coarsest grid
    least_side: int  # pixels of the smallest picture that the network takes

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the loss's terms."""

    def build(self, say: Callable[[str], None]) -> nn.Module:
        """The network, with the weights that it begins with; the same on all ranks by the caller's seed."""

    def freeze(self, model: Any, layers: Sequence[int]) -> int:
        """Keep layers as they are: how many parameters that is."""

    def fit(self, model: Any) -> str:
        """Fit the untrained model to the data, and say how; "" where nothing was changed."""

    def loss_of(self, model: Any) -> Loss:
        """The loss for a model that is on its device."""

    def weight(self, images: Tensor) -> Tensor:
        """What the mean loss of a step with so many pictures (a scalar) is multiplied by before its gradient."""

    def train_loader(self, share: Mapping[str, Any]) -> Any:
        """Epochs of this rank; `share` has rank, world, local_size, workers and stride."""

    def val_loader(self, share: Mapping[str, Any]) -> Batches:
        """The validation batches of this rank."""

    def move(self, batch: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        """A training batch on the device: images float (b, 3, h, w), channels last, and what its loss assigns."""

    def metric(self) -> Metric:
        """An empty metric."""

    def evaluate(
        self, model: Any, batches: Iterable[Any], device: torch.device, dtype: torch.dtype
    ) -> tuple[Metric, list[Any]]:
        """This rank's metric over its batches, and a few pictures with what was found in them."""

    def table(self, scores: Any) -> str:
        """The scores by class as a table of lines, "" where that would be too long."""

    def validation(self, folder: str) -> list[str]:
        """The command line that scores the folder's best.pt anew."""
