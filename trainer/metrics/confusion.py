"""Scores from confusion matrices, whose counts ranks exchange: accuracy of a classifier, IoU of a segmentation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.metrics.scores import Scores

Ints = npt.NDArray[np.int64]
_TOP = 5


class ClassAccuracy(NamedTuple):
    """One class: number of images, recall and precision."""

    images: int
    recall: float
    precision: float


@dataclass(frozen=True)
class Accuracy(Scores):
    """Top-1 and top-5 accuracy."""

    COLUMNS = ("top1", "top5")
    MAIN = "recall"
    TABLE = (("images", "images", "images"), ("found", "top1", "recall"), ("right", "top1", "precision"))

    top1: float
    top5: float
    images: int
    per_class: dict[str, ClassAccuracy]


class ClassOverlap(NamedTuple):
    """One class: number of pixels, IoU and recall."""

    pixels: int
    iou: float
    recall: float


@dataclass(frozen=True)
class Overlap(Scores):
    """Mean IoU (Jaccard index) of the classes in the masks, and pixel accuracy."""

    COLUMNS = ("miou", "accuracy")
    MAIN = "iou"
    TABLE = (("pixels", "pixels", "pixels"), ("IoU", "miou", "iou"), ("found", "accuracy", "recall"))

    miou: float
    accuracy: float
    pixels: int
    per_class: dict[str, ClassOverlap]


class Confusion:
    """Confusion matrix of pixels; `merge` adds another rank's."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.confusion: Ints = np.zeros((len(names), len(names)), np.int64)  # rows: predicted, columns: true

    def update(self, found: Tensor, masks: Tensor) -> None:
        """Add predicted classes (b, h, w) and masks (b, h, w); mask values beyond the classes are ignored."""
        nc = len(self.names)
        counted = masks < nc
        pairs = found[counted].long() * nc + masks[counted].long()
        self.confusion += torch.bincount(pairs, minlength=nc * nc).view(nc, nc).cpu().numpy()

    def merge(self, other: Any) -> None:
        """Add the counts of another rank."""
        self.confusion = self.confusion + other.confusion

    def compute(self) -> Scores:
        """Return the scores, nan without data."""
        right = np.diag(self.confusion)
        true = self.confusion.sum(0)
        found = self.confusion.sum(1)
        iou = right / np.maximum(true + found - right, 1)
        recall = right / np.maximum(true, 1)
        rows = zip(self.names, true.tolist(), iou.tolist(), recall.tolist(), strict=True)
        per_class = {name: ClassOverlap(*row) for name, *row in rows if row[0]}
        miou = float(np.mean([score.iou for score in per_class.values()] or [np.nan]))
        return Overlap(miou, float(right.sum() / (true.sum() or np.nan)), int(true.sum()), per_class)


class TopK(Confusion):
    """Confusion matrix of images, and top-5 hits."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._among_five = 0

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add images: logits (b, nc) on the CPU, classes (b,). Ties go to the first class."""
        order = (-logits.double()).argsort(dim=1, stable=True)[:, :_TOP]
        np.add.at(self.confusion, (order[:, 0].numpy(), labels.numpy()), 1)
        self._among_five += int((order == labels[:, None]).any(1).sum())

    def merge(self, other: Any) -> None:
        """Add the counts of another rank."""
        super().merge(other)
        self._among_five += other._among_five

    def compute(self) -> Scores:
        """Return the scores, nan without data."""
        right = np.diag(self.confusion)
        true = self.confusion.sum(0)
        found = self.confusion.sum(1)
        recall = right / np.maximum(true, 1)
        precision = right / np.maximum(found, 1)
        rows = zip(self.names, true.tolist(), recall.tolist(), precision.tolist(), strict=True)
        per_class = {name: ClassAccuracy(*row) for name, *row in rows if row[0]}
        count = true.sum() or np.nan
        return Accuracy(
            float(right.sum() / count), float(self._among_five / count), int(true.sum()), per_class
        )
