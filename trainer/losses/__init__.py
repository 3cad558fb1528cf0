"""Loss functions, normalised over all ranks so that the number of ranks does not change the training."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy values of the host to a device. The host does not wait for a GPU."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class Loss(ABC):
    """A batch's loss in three steps, so that the ranks can sum their counts as soon as these are known.

    `assign` needs only the targets: its counts are summed while the network runs. `match` sees the outputs: its
    counts (possibly none) are summed next. The call takes all sums and gives this rank's share of the terms.
    """

    terms: tuple[str, ...]

    @abstractmethod
    def assign(self, targets: Tensor, images: int, height: int, width: int) -> Any:
        """Assign the targets of `images` images of height x width px.

        The targets may be on the CPU; the result is on the loss's device. It has `counts` float64 (c,): this rank's
        part of what the loss divides by, the images first.
        """

    def match(self, raw: Any, assigned: Any, /) -> tuple[Any, Tensor]:
        """Return the call's second argument, and the counts that depend on the outputs, float64 (c2,); here none."""
        return assigned, assigned.counts[:0]

    @abstractmethod
    def __call__(self, raw: Any, matched: Any, counts: Tensor, /) -> Tensor:
        """Return this rank's share of the terms (t,) float32 with gradients; `counts` (c + c2,) of all ranks."""
