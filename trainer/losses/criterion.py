"""Criterion: what the trainer asks of a loss. Its value does not depend on the number of ranks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.batch import Assign, BoxLabels, Rows, Targets, exact

ImageSize = tuple[int, int]  # height and width in pixels of all images of a batch
Outputs = Any  # of a network in training, as it returns them: each family's own structure of tensors


def as_labels(
    labels: BoxLabels, images: int, height: int, width: int, rows: Rows = exact
) -> dict[str, Tensor]:
    """Return the labels of a batch, float32 (n, 6) as `BoxLabels`, as its targets; without rows that pad."""
    return {"labels": torch.from_numpy(labels)}


class Criterion(nn.Module, ABC):
    """The loss of a batch, as sums and what they are divided by.

    Each term of a detector's loss is a mean over boxes, cells or images, and the mean is over all ranks together. A
    criterion therefore returns this rank's sums and its counts. The step adds up the counts of all ranks and divides,
    so the ranks' gradients add up exactly to the gradients of one process with the whole batch.
    """

    terms: tuple[str, ...]
    gains: Tensor
    validates = False  # whether there are validation losses: see `validation_outputs`

    def __init__(self, gains: Sequence[float]) -> None:
        """Start a criterion with a factor for each of its t terms."""
        super().__init__()
        self.register_buffer("gains", torch.tensor(gains, dtype=torch.float32))

    @abstractmethod
    def forward(self, outputs: Outputs, targets: Targets, size: ImageSize, /) -> tuple[Tensor, Tensor]:
        """Return this rank's sums (t, d) float32 with gradients, and its counts (d,) float64.

        `size` is the images' height and width, for a loss in pixels.

        The loss is the sum over t of `gains[t] * sum over d of sums[t, d] / divisors[d]`, where `divisors` makes the
        divisors from the counts of all ranks.
        Every output of the network takes part, if only with a zero, so that no parameter is without a gradient. The
        shapes of the result and of everything on the way depend on the shapes of the arguments alone.
        """

    def outputs_of(self, network: nn.Module, images: Tensor, targets: Targets, /) -> Outputs:
        """Run the network on a training batch; a network that learns from noisy copies of the targets gets them here.

        `images` are float (b, 3, h, w) in 0..1.
        """
        return network(images)

    def validation_outputs(self, network: nn.Module, images: Tensor, /) -> Outputs:
        """Run the network in evaluation mode; the outputs go to `postprocess` too, and to this loss if it `validates`.

        `images` are float (b, 3, h, w) in 0..1. A detector gets a copy of its network, which may be changed here.
        """
        return network(images)

    def divisors(self, counts: Tensor, /) -> Tensor:
        """Return what the sums are divided by, (d,), from the counts of all ranks (d,)."""
        return counts

    def begin_epoch(self, epoch: int, epochs: int, /) -> None:
        """Prepare for an epoch (from 0) of `epochs`. Tensors change in place, so that compiled code sees it."""
        return

    def without_noise(self) -> None:
        """Draw no random numbers from now on: each rank draws its own, which `trainer verify` could not compare."""
        return

    def assigner(self, model: Any, /) -> Assign:
        """Return what makes the targets of a detector's batch in a dataloader worker, for the model as it is now.

        By default they are the labels.
        """
        return as_labels

    def weight(self, images: Tensor, /) -> Tensor | float:
        """Return the factor by which the mean loss of a step with `images` images (a scalar) is multiplied."""
        return 1.0


def mean_terms(sums: Tensor, counts: Tensor, gains: Tensor) -> Tensor:
    """Return the loss terms (t,) from sums (t, d), counts (d,) to divide by, and gains (t,)."""
    return (sums / counts.clamp(min=1).float()).sum(1) * gains


class LossSums:
    """Sums and counts of the batches of a validation, whose terms do not depend on batch size and number of ranks."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None  # (t, d) float64; None: no batch
        self._counts: Tensor | None = None  # (d,) float64

    def add(self, sums: Tensor, counts: Tensor) -> None:
        """Add a batch's sums (t, d) and counts (d,), as a criterion returns them."""
        sums = sums.detach().double()
        self._sums = sums if self._sums is None else self._sums + sums
        self._counts = counts if self._counts is None else self._counts + counts

    def merge(self, other: "LossSums") -> None:
        """Add what another rank has added up."""
        if other._sums is not None and other._counts is not None:
            self.add(other._sums, other._counts)

    def terms(self, criterion: Criterion) -> dict[str, float]:
        """Return the mean of each term of the criterion; none without a batch."""
        if self._sums is None or self._counts is None:
            return {}
        gains = criterion.gains.to(self._sums)
        means = mean_terms(self._sums, criterion.divisors(self._counts), gains)
        return dict(zip(criterion.terms, means.tolist(), strict=True))

    def __getstate__(self) -> dict[str, Tensor | None]:
        # Each rank has its own device.
        return {name: None if value is None else value.cpu() for name, value in vars(self).items()}
