"""The classifier's loss: cross-entropy, the mean over the pictures of all ranks together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Wanted:
    """The classes (b,) of a batch's pictures, or their shares (b, nc), and `counts` float64 (1,): the pictures."""

    classes: Tensor
    counts: Tensor


class ClassificationLoss:
    """Softmax cross-entropy with label smoothing (Szegedy 2016): nothing is left to match."""

    terms: tuple[str, ...] = ("cls",)

    def __init__(self, label_smoothing: float) -> None:
        self._smoothing = label_smoothing

    def assign(self, targets: Tensor, images: int, height: int, width: int) -> Wanted:
        """Classes (b,) or shares (b, nc) of `images` pictures -> what is wanted, and this rank's count."""
        return Wanted(targets, torch.tensor([images], dtype=torch.float64, device=targets.device))

    def match(self, raw: Any, wanted: Wanted) -> tuple[Wanted, Tensor]:
        """What is wanted, as it is."""
        return wanted, wanted.counts[:0]

    def __call__(self, raw: Tensor, wanted: Wanted, counts: Tensor) -> Tensor:
        """This rank's share of the mean cross-entropy, (1,) float32 with gradients; `raw` logits (b, nc)."""
        total = F.cross_entropy(raw.float(), wanted.classes, reduction="sum", label_smoothing=self._smoothing)
        return (total / counts[0].float()).reshape(1)
