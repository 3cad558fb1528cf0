"""Cross-entropy of images or pixels: the mean over those of all ranks together."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import IGNORED
from trainer.losses import Loss


@dataclass(frozen=True)
class Labels:
    """The classes of a batch's images or pixels, and `counts` float64: the images, and for masks the counted pixels."""

    classes: Tensor
    counts: Tensor


class ClassificationLoss(Loss):
    """Softmax cross-entropy of the images, with label smoothing (Szegedy 2016)."""

    terms = ("cls",)

    def __init__(self, label_smoothing: float) -> None:
        self._smoothing = label_smoothing

    def assign(self, targets: Tensor, images: int, height: int, width: int) -> Labels:
        """Classes (b,) or shares (b, nc) of `images` images -> the targets, and this rank's count."""
        return Labels(targets, torch.full((1,), images, dtype=torch.float64, device=targets.device))

    def __call__(self, raw: Tensor, labels: Labels, counts: Tensor) -> Tensor:
        """This rank's share of the mean cross-entropy, (1,) float32 with gradients; `raw` logits (b, nc)."""
        total = F.cross_entropy(raw.float(), labels.classes, reduction="sum", label_smoothing=self._smoothing)
        return (total / counts[0].float()).reshape(1)


class SegmentationLoss(ClassificationLoss):
    """Softmax cross-entropy of the pixels that are not IGNORED."""

    def assign(self, targets: Tensor, images: int, height: int, width: int) -> Labels:
        """Masks uint8 (b, h, w) of `images` images -> classes (b h w,), and this rank's images and counted pixels."""
        classes = targets.flatten().long()
        counted = (classes != IGNORED).sum(dtype=torch.float64)
        return Labels(classes, torch.stack((torch.full_like(counted, images), counted)))

    def __call__(self, raw: Tensor, labels: Labels, counts: Tensor) -> Tensor:
        """This rank's share of the mean cross-entropy, (1,) float32 with gradients; `raw` logits (b, nc, h, w).

        Zero where no pixel of any rank counts.
        """
        # A row for a pixel: on a GPU torch adds up those in a fixed order, and maps in any.
        rows = raw.permute(0, 2, 3, 1).reshape(-1, raw.shape[1]).float()
        total = F.cross_entropy(
            rows, labels.classes, reduction="sum", ignore_index=IGNORED, label_smoothing=self._smoothing
        )
        return (total / counts[1].clamp(min=1).float()).reshape(1)
