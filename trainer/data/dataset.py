"""What every data set offers to the loaders, whatever format it was read from."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Image = npt.NDArray[np.uint8]  # (h, w, 3), RGB
Labels = npt.NDArray[np.float32]  # (n, 5): class, cx, cy, w, h as fractions of the picture's sides
Segment = npt.NDArray[np.float32]  # (k, 2): the corners x, y of a polygon as fractions; (0, 2) where there is none


def reduction(longer: int, min_side: int) -> int:
    """By how much, 1, 2, 4 or 8, a reader may shrink a picture whose longer side is `longer` px (see Dataset.image)."""
    return next((by for by in (8, 4, 2) if min_side and longer >= by * min_side), 1)


class Dataset(Protocol):
    """Pictures with labelled boxes, addressed by a number from 0 to len - 1."""

    @property
    def names(self) -> list[str]:
        """The class names; a label's class is an index into them."""

    @property
    def flips(self) -> bool:
        """Whether a mirrored picture is still a true one (a mirrored digit is not)."""

    def __len__(self) -> int: ...

    def size(self, index: int) -> tuple[int, int]:
        """(height, width) in pixels of the picture as stored, known without decoding it."""

    def name(self, index: int) -> str:
        """What the picture is called in messages and in results: its file."""

    def image(self, index: int, min_side: int = 0) -> Image:
        """The picture as uint8 (h, w, 3) RGB, not to be written to.

        With `min_side` the reader may shrink it while decoding, its longer side to no less than `min_side` px.
        """

    def labels(self, index: int) -> Labels:
        """The boxes as float32 (n, 5): class, cx, cy, w, h as fractions of the picture's sides."""

    def segments(self, index: int) -> list[Segment]:
        """The outlines of the boxes of `labels(index)`, in their order; empty, (0, 2), for one that is only a box."""


def fingerprint_of(dataset: Dataset) -> str:
    """Equal on two machines with the same pictures and boxes.

    A data set tells by `fingerprint()`; of one without, only the number of pictures and the classes are compared.
    """
    own = getattr(dataset, "fingerprint", None)
    return str(own()) if own else f"{len(dataset)} {dataset.names}"
