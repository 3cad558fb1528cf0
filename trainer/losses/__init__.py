"""Losses whose value does not depend on the number of ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Targets = Mapping[str, Tensor]
Rows = Callable[[str, int], int]  # the name of a list and the entries that it needs -> the rows to give it


def exact(_: str, needed: int) -> int:
    """Give every list the rows that it needs: the `Rows` of a step whose shapes may change."""
    return needed


class Criterion(ABC):
    """The loss of a batch, as sums and what they are divided by.

    Each term of a detector's loss is a mean over boxes, cells or images, and the mean is over all ranks together. A
    criterion therefore returns this rank's sums and its counts. The step adds up the counts of all ranks and divides,
    so the ranks' gradients add up to exactly those of one process with the whole batch.
    """

    terms: tuple[str, ...]
    gains: Tensor  # (t,) float32, one factor per term

    @abstractmethod
    def __call__(self, outputs: Any, targets: Targets, /) -> tuple[Tensor, Tensor]:
        """Return this rank's sums (t, d) float32 with gradients, and its counts (d,) float64.

        The loss is the sum over t of `gains[t] * sum over d of sums[t, d] / counts[d]`, with the counts of all ranks.
        Every output of the network takes part, if only with a zero, so that no parameter is without a gradient. The
        shapes of the result and of everything on the way depend on the shapes of the arguments alone.
        """

    def weight(self, images: Tensor, /) -> Tensor | float:
        """Return the factor by which the mean loss of a step with `images` images (a scalar) is multiplied."""
        return 1.0
