"""Classification task: one class per image, with any torchvision model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.config import Settings
from trainer.data.classification import open_classification
from trainer.data.torchvision_loaders import ClassificationBatch, ClassificationCollate, mix_batch
from trainer.errors import TrainerError
from trainer.losses.cross_entropy import ClassificationLoss
from trainer.metrics.confusion import Accuracy, TopK
from trainer.models.torchvision_nets import Classifier, build_classifier
from trainer.tasks.base import COMMON_HYP, TorchvisionTask
from trainer.tasks.detector import to_device

SHOWN = 12  # validation images in the plot of predictions
_MAGNITUDES = 30  # the strongest of torchvision's 31


class Classification(TorchvisionTask):
    """Training of a torchvision model on images with one class each.

    An image that is shown is (uint8 (h, w, 3) RGB, its class, the predicted class, its score).
    """

    kind = "classify"
    headlines: Mapping[str, str] = {"top1": "top-1", "top5": "top-5"}
    columns = Accuracy.COLUMNS
    metric_type = TopK
    default_cfg = "resnet18"
    hyp_keys = (*COMMON_HYP, "flipud", "fliplr", "mixup", "cutmix", "randaugment", "pad")
    loss_type = ClassificationLoss
    collate_type = ClassificationCollate
    stride = 32  # of nearly all torchvision models

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        s = settings
        if s.hyp.mixup + s.hyp.cutmix > 1:
            raise TrainerError("--hyp: mixup and cutmix are shares of the steps, together at most 1")
        if s.hyp.randaugment % 1 or not 0 <= s.hyp.randaugment <= _MAGNITUDES:
            raise TrainerError(
                f"--hyp: randaugment is {s.hyp.randaugment:g}, it must be a whole number from 0 to {_MAGNITUDES}",
                "9 is usual, 0 is off",
            )
        self.train_set, self.val_set = open_classification(s.data, "train"), open_classification(s.data, "val")
        self.names = self.train_set.names
        if self.val_set.names != self.names:
            odd = sorted(set(self.names) ^ set(self.val_set.names))
            raise TrainerError(
                f"--data {s.data}: training and validation have different classes: {', '.join(odd[:5])}",
                "each needs a folder for every class",
            )
        self.least_side = s.imgsz

    def network(self) -> Classifier:
        """Return the untrained network for the classes of the data."""
        return build_classifier(self.cfg["torchvision"], len(self.names), self._settings.imgsz)

    def move(self, batch: ClassificationBatch, device: torch.device) -> tuple[Tensor, Tensor]:
        """Move a batch to the device: images in 0..1 and classes, with mixup or cutmix."""
        images, labels = to_device(batch.images, device), batch.labels.to(device, non_blocking=True)
        if batch.mix_seed >= 0:
            images, labels = mix_batch(images, labels, len(self.names), batch.mix_seed, self._settings.hyp)
            images = images.contiguous(memory_format=torch.channels_last)
        return images, labels

    def count(self, batch: ClassificationBatch, logits: Tensor, metric: TopK, shown: list[Any]) -> None:
        """Add a batch to the metric, and some images of all classes to `shown`."""
        logits = logits.float().cpu()
        metric.update(logits, batch.labels)
        sure, found = logits.softmax(1).max(1)
        for k in range(len(batch.ids)):
            seen = sum(s[1] == int(batch.labels[k]) for s in shown)
            if len(shown) < SHOWN and seen <= len(shown) // len(self.names):
                shown.append((batch.images[k].numpy(), int(batch.labels[k]), int(found[k]), float(sure[k])))
