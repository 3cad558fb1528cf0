"""Loss functions, normalised over all ranks so that the number of ranks does not change the training."""

from typing import Any, Protocol

from torch import Tensor

__all__ = ["Loss"]


class Assigned(Protocol):
    """What a loss works out from the targets; `counts` float64 (c,), the batch's pictures first."""

    @property
    def counts(self) -> Tensor:
        """This rank's part of what the loss divides by; to be summed over the ranks."""
        ...


class Loss(Protocol):
    """A batch's loss in three steps, so that the ranks can sum their counts as soon as these are known.

    `assign` needs only the targets: its counts are summed while the network runs. `match` sees the outputs: its
    counts (possibly none) are summed next. The call takes all sums and gives this rank's share of the terms.
    """

    terms: tuple[str, ...]

    def assign(self, targets: Tensor, images: int, height: int, width: int) -> Assigned:
        """Of the targets (n, 6) [image, class, cx, cy, w, h] of `images` pictures of height x width px."""
        ...

    def match(self, raw: Any, assigned: Any, /) -> tuple[Any, Tensor]:
        """What the call needs of the assignment, and the counts that only the outputs tell, float64 (c2,)."""
        ...

    def __call__(self, raw: Any, matched: Any, counts: Tensor, /) -> Tensor:
        """This rank's share of the terms (t,) float32 with gradients; `counts` (c + c2,) of all ranks."""
        ...
