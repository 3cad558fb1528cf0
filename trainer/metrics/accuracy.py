"""How often a classifier is right: the same whatever the number of ranks, as only counts are exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int64]
_TOP = 5


class ClassAccuracy(NamedTuple):
    """One class: pictures of it, the share of them that was found, and the share of its finds that was right."""

    pictures: int
    recall: float
    precision: float


@dataclass(frozen=True)
class Accuracy:
    """The share of pictures whose class is the likeliest (`top1`) or among the five likeliest (`top5`)."""

    top1: float
    top5: float
    pictures: int
    per_class: dict[str, ClassAccuracy]

    @property
    def fitness(self) -> float:
        """What the best checkpoint is chosen by."""
        return self.top1

    def columns(self) -> dict[str, float]:
        """The columns of results.csv."""
        return {"top1": self.top1, "top5": self.top5}

    def by_class(self, names: Sequence[str]) -> list[float]:
        """The recall of each class, nan where there was none of it."""
        found = (self.per_class.get(name) for name in names)
        return [score.recall if score else float("nan") for score in found]


class TopK:
    """Counts the right answers of a validation; `merge` adds those of another rank."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.confusion: Ints = np.zeros((len(names), len(names)), np.int64)  # found by row, true by column
        self._among_five = 0

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add pictures: logits (b, nc) on the CPU, classes (b,). Of equal logits the first class counts as likelier."""
        order = (-logits.double()).argsort(dim=1, stable=True)[:, :_TOP]
        np.add.at(self.confusion, (order[:, 0].numpy(), labels.numpy()), 1)
        self._among_five += int((order == labels[:, None]).any(1).sum())

    def state(self) -> tuple[Ints, int]:
        """What another process needs in order to merge this."""
        return self.confusion, self._among_five

    def merge(self, state: tuple[Ints, int]) -> None:
        """Add what another rank counted."""
        self.confusion = self.confusion + state[0]
        self._among_five += state[1]

    def compute(self) -> Accuracy:
        """The scores of everything counted; nan where that is nothing."""
        right = np.diag(self.confusion)
        true, found = self.confusion.sum(0), self.confusion.sum(1)
        count = int(true.sum())
        per_class = {
            name: ClassAccuracy(int(true[k]), float(right[k] / true[k]), float(right[k] / max(found[k], 1)))
            for k, name in enumerate(self.names)
            if true[k]
        }
        if not count:
            return Accuracy(float("nan"), float("nan"), 0, {})
        return Accuracy(float(right.sum() / count), self._among_five / count, count, per_class)
