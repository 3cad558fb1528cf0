"""Cross-entropy of images or pixels: the mean over all ranks together."""

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import IGNORED
from trainer.data.batch import Targets
from trainer.losses.criterion import Criterion, ImageSize


class ClassificationLoss(Criterion):
    """Softmax cross-entropy of the images, with label smoothing (Szegedy 2016)."""

    terms = ("cls",)
    validates = True

    def __init__(self, label_smoothing: float, batches: int) -> None:
        """Take the mean of `batches` batches, which one optimizer step accumulates."""
        super().__init__((1.0,))
        self._smoothing = label_smoothing
        self._batches = batches

    def weight(self, images: Tensor, /) -> float:
        """Return 1 / (accumulated batches), so that the gradient belongs to their mean."""
        return 1 / self._batches

    def forward(self, outputs: Tensor, targets: Targets, size: ImageSize, /) -> tuple[Tensor, Tensor]:
        """Return the summed cross-entropy (1, 1) and the images (1,).

        `outputs` are logits (b, nc), `targets["classes"]` is int64 (b,), or the shares of the classes (b, nc).
        """
        classes = targets["classes"]
        total = F.cross_entropy(outputs.float(), classes, reduction="sum", label_smoothing=self._smoothing)
        return total.reshape(1, 1), torch.full((1,), len(classes), dtype=torch.float64, device=classes.device)


class SegmentationLoss(ClassificationLoss):
    """Softmax cross-entropy of the pixels that are not IGNORED."""

    def forward(self, outputs: Tensor, targets: Targets, size: ImageSize, /) -> tuple[Tensor, Tensor]:
        """Return the summed cross-entropy (1, 2), and the images and counted pixels (2,).

        `outputs` are logits (b, nc, h, w), `targets["masks"]` is uint8 (b, h, w). Zero if no pixel counts.
        """
        classes = targets["masks"].flatten().long()
        counted = (classes != IGNORED).sum(dtype=torch.float64)
        # A row for a pixel: on a GPU torch adds up those in a fixed order, and maps in any.
        rows = outputs.permute(0, 2, 3, 1).reshape(-1, outputs.shape[1]).float()
        total = F.cross_entropy(
            rows, classes, reduction="sum", ignore_index=IGNORED, label_smoothing=self._smoothing
        )
        counts = torch.stack((torch.full_like(counted, len(outputs)), counted))
        return F.pad(total.reshape(1, 1), (1, 0)), counts
