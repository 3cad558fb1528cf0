"""A data set that remembers the pictures it decoded last, all for one size."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from trainer.data.dataset import Dataset, Image


class Recent:
    """`dataset`, of which the `count` pictures that were asked for last are kept, decoded to at least `min_side` px."""

    def __init__(self, dataset: Dataset, count: int, min_side: int) -> None:
        self._dataset, self._count, self._min_side = dataset, count, min_side
        self._pictures: OrderedDict[int, Image] = OrderedDict()
        self.names, self.flips = dataset.names, dataset.flips
        self.name, self.size = dataset.name, dataset.size
        self.labels, self.segments = dataset.labels, dataset.segments

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pictures": OrderedDict()}

    def __len__(self) -> int:
        return len(self._dataset)

    def image(self, index: int, min_side: int = 0) -> Image:
        """The data set's picture; for any `min_side` the same."""
        picture = self._pictures.get(index)
        if picture is None:
            picture = self._dataset.image(index, self._min_side)
            while len(self._pictures) >= self._count:
                self._pictures.popitem(last=False)
            self._pictures[index] = picture
        self._pictures.move_to_end(index)
        return picture
