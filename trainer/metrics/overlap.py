"""How well a segmentation fits: the same whatever the number of ranks, as only counts of pixels are exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]


class ClassOverlap(NamedTuple):
    """One class: pixels of it, pixels that are it and were found over those that are either, and the share found."""

    pixels: int
    iou: float
    recall: float


@dataclass(frozen=True)
class Overlap:
    """The mean IoU (Jaccard index) of the classes that occur in the masks, and the share of pixels that are right."""

    miou: float
    accuracy: float
    pixels: int
    per_class: dict[str, ClassOverlap]

    @property
    def fitness(self) -> float:
        """What the best checkpoint is chosen by."""
        return self.miou

    def columns(self) -> dict[str, float]:
        """The columns of results.csv."""
        return {"miou": self.miou, "accuracy": self.accuracy}

    def by_class(self, names: Sequence[str]) -> list[float]:
        """The IoU of each class, nan where there was none of it."""
        found = (self.per_class.get(name) for name in names)
        return [score.iou if score else float("nan") for score in found]


class Confusion:
    """Counts pixels by true and found class; `merge` adds those of another rank."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.confusion: Ints = np.zeros((len(names), len(names)), np.int64)  # found by row, true by column

    def update(self, found: Tensor, masks: Tensor) -> None:
        """Add pictures: found classes (b, h, w), and masks (b, h, w) whose values beyond the classes do not count."""
        nc = len(self.names)
        counted = masks < nc
        pairs = found[counted].long() * nc + masks[counted].long()
        self.confusion += torch.bincount(pairs, minlength=nc * nc).view(nc, nc).cpu().numpy()

    def state(self) -> Ints:
        """What another process needs in order to merge this."""
        return self.confusion

    def merge(self, state: Ints) -> None:
        """Add what another rank counted."""
        self.confusion = self.confusion + state

    def compute(self) -> Overlap:
        """The scores of everything counted; nan where that is nothing."""
        right = np.diag(self.confusion)
        true, found = self.confusion.sum(0), self.confusion.sum(1)
        count = int(true.sum())
        per_class = {
            name: ClassOverlap(
                int(true[k]), float(right[k] / (true[k] + found[k] - right[k])), float(right[k] / true[k])
            )
            for k, name in enumerate(self.names)
            if true[k]
        }
        if not count:
            return Overlap(float("nan"), float("nan"), 0, {})
        miou = float(np.mean([score.iou for score in per_class.values()]))
        return Overlap(miou, float(right.sum() / count), count, per_class)
