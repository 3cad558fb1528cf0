"""The segmentation loss: cross-entropy of every pixel, the mean over the counted pixels of all ranks together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import IGNORED


@dataclass(frozen=True)
class Wanted:
    """The classes int64 (b h w,) of a batch's pixels, and `counts` float64 (2,): its pictures, its counted pixels."""

    classes: Tensor
    counts: Tensor


class SegmentationLoss:
    """Softmax cross-entropy of the pixels that are not IGNORED: nothing is left to match."""

    terms: tuple[str, ...] = ("cls",)

    def __init__(self, label_smoothing: float) -> None:
        self._smoothing = label_smoothing

    def assign(self, targets: Tensor, images: int, height: int, width: int) -> Wanted:
        """Masks uint8 (b, h, w) of `images` pictures -> what is wanted, and this rank's counts."""
        classes = targets.flatten().long()
        counted = (classes != IGNORED).sum(dtype=torch.float64)
        return Wanted(classes, torch.stack((counted.new_tensor(images), counted)))

    def match(self, raw: Any, wanted: Wanted) -> tuple[Wanted, Tensor]:
        """What is wanted, as it is."""
        return wanted, wanted.counts[:0]

    def __call__(self, raw: Tensor, wanted: Wanted, counts: Tensor) -> Tensor:
        """This rank's share of the mean cross-entropy, (1,) float32 with gradients; `raw` logits (b, nc, h, w).

        Zero where no pixel of any rank counts.
        """
        # A row for a pixel: on a GPU torch adds up those in a fixed order, and maps in any.
        rows = raw.permute(0, 2, 3, 1).reshape(-1, raw.shape[1]).float()
        total = F.cross_entropy(
            rows, wanted.classes, reduction="sum", ignore_index=IGNORED, label_smoothing=self._smoothing
        )
        return (total / counts[1].clamp(min=1).float()).reshape(1)
