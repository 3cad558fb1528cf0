"""Segmentation task: one class per pixel, with torchvision's models."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.config import Settings
from trainer.data.segmentation import open_segmentation
from trainer.data.torchvision_loaders import SegmentationBatch, SegmentationCollate
from trainer.errors import TrainerError
from trainer.losses.cross_entropy import SegmentationLoss
from trainer.metrics.confusion import Confusion, Overlap
from trainer.models.torchvision_nets import Segmenter, build_segmenter
from trainer.tasks.base import COMMON_HYP, TorchvisionTask
from trainer.tasks.detector import to_device

SHOWN = 9  # validation images in the plot of predictions


class Segmentation(TorchvisionTask):
    """Training of a torchvision model on images with one class per pixel.

    An image that is shown is (uint8 (h, w, 3) RGB, its mask (h, w), the found classes (h, w)).
    """

    kind = "segment"
    headlines: Mapping[str, str] = {"miou": "mIoU", "accuracy": "pixel accuracy"}
    columns = Overlap.COLUMNS
    metric_type = Confusion
    default_cfg = "lraspp_mobilenet_v3_large"  # small enough for a CPU
    hyp_keys = (*COMMON_HYP, "scale", "flipud", "fliplr")
    loss_type = SegmentationLoss
    collate_type = SegmentationCollate
    stride = 16  # of the coarsest normalised feature map
    least_side = 64

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if settings.hyp.scale >= 1:
            raise TrainerError(
                f"--hyp: scale is {settings.hyp.scale:g}, it must be below 1", "0.5 is from half to one and a half"
            )
        self.train_set, self.val_set = open_segmentation(settings.data, settings.imgsz)
        self.names = self.train_set.names

    def network(self) -> Segmenter:
        """Return the untrained network for the classes of the data."""
        model = build_segmenter(self.cfg["torchvision"], len(self.names))
        if model.pools:
            self.stride = self._settings.imgsz
        return model

    def move(self, batch: SegmentationBatch, device: torch.device) -> tuple[Tensor, Tensor]:
        """Move a batch to the device: images in 0..1, and masks."""
        return to_device(batch.images, device), batch.masks.to(device, non_blocking=True)

    def count(self, batch: SegmentationBatch, logits: Tensor, metric: Confusion, shown: list[Any]) -> None:
        """Add a batch to the metric, and its first images to `shown`."""
        found = logits.argmax(1).to(torch.uint8)
        metric.update(found, batch.masks.to(found.device))
        for k in range(min(len(batch.ids), SHOWN - len(shown))):
            shown.append((batch.images[k].numpy(), batch.masks[k].numpy(), found[k].cpu().numpy()))
