"""Which pictures make up which batch, and in which shape: numbers alone, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trainer.data.dataset import Dataset

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Shape = tuple[int, int]  # (height, width) in pixels
WINDOW = 64  # pictures; decoded, they are what every loading process keeps in memory


def scales(imgsz: int, stride: int) -> range:
    """The sides that --multi-scale draws from: the multiples of `stride` from 0.5 to 1.5 x `imgsz`."""
    return range(-(-imgsz // (2 * stride)) * stride, 3 * imgsz // 2 + 1, stride)


def aspects_of(dataset: Dataset) -> Floats:
    """Height / width of every picture (n,)."""
    sizes = np.array([dataset.size(k) for k in range(len(dataset))], np.float64).reshape(-1, 2)
    aspects: Floats = sizes[:, 0] / sizes[:, 1]
    return aspects


def rect_shape(aspects: Floats, side: int, stride: int, pad: float) -> Shape:
    """The smallest shape that holds pictures of these aspects, their longer side made `side`.

    Both sides are rounded up to a multiple of `stride`, after `pad` strides more. YOLOv5 validates with pad 0.5.
    """
    low, high = float(aspects.min()), float(aspects.max())
    tall, wide = min(1.0, high), min(1.0, 1 / low)
    near = 1e-6  # 3 / 4 of 640 is 15 strides, however its last bit was rounded
    height, width = (math.ceil(part * side / stride + pad - near) * stride for part in (tall, wide))
    return height, width


def batches_of_similar_aspect(order: Ints, aspects: Floats, steps: int, rng: np.random.Generator) -> list[Ints]:
    """`order` in `steps` batches of similar aspect; these, and pictures of equal aspect, in random order."""
    ordered = order[np.argsort(aspects[order], kind="stable")]
    batches = np.array_split(ordered, steps)
    return [batches[k] for k in rng.permutation(steps)]


def neighbours(order: Ints, positions: Ints) -> list[Ints]:
    """For each of `positions` in `order`, the pictures that its mosaic is made of: the last WINDOW up to it.

    In a random order these are random pictures of the whole set, others in every epoch, and the same for any batch and
    number of ranks. A process that makes one batch after the other has them decoded already, which is most of a
    loader's work; a window of the batch's own size would save the same, but leave too few pictures to learn from in
    each batch.
    """
    ends = np.maximum(positions + 1, WINDOW).tolist()
    return [order[max(0, end - WINDOW) : end] for end in ends]


def repeats(order: Ints) -> Ints:
    """How often each entry of `order` (n,) has stood in it before."""
    by_value = np.argsort(order, kind="stable")
    ordered = order[by_value]
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(order)])
    counts = np.diff(np.append(first, len(order)))
    result = np.empty(len(order), np.int64)
    result[by_value] = np.arange(len(order)) - np.repeat(first, counts)
    return result


class PictureWeights:
    """How often each picture should be drawn (--image-weights): by the classes of its boxes.

    A class weighs (1 - its mAP)^2 / its number of boxes, a picture the sum over its boxes (YOLOv5's formula), so a
    picture without a box is never drawn.
    """

    def __init__(self, dataset: Dataset) -> None:
        labels = [dataset.labels(k)[:, 0].astype(np.int32) for k in range(len(dataset))]
        self._count, self._nc = len(dataset), len(dataset.names)
        self._classes = np.concatenate(labels)
        self._owners = np.repeat(np.arange(self._count), [len(part) for part in labels])

    def shares(self, class_map: Sequence[float] | None) -> Floats:
        """Each picture's probability (n,); `class_map` (nc,) may hold NaN for classes that were not measured."""
        maps = np.zeros(self._nc) if class_map is None else np.array(class_map, np.float64)
        known = np.isfinite(maps)
        maps[~known] = maps[known].mean() if known.any() else 0.0
        boxes = np.bincount(self._classes, minlength=self._nc)
        by_class = (1 - maps) ** 2 / np.maximum(boxes, 1)
        weights = np.bincount(self._owners, by_class[self._classes], self._count)
        total = weights.sum()
        return weights / total if total > 0 else np.full(self._count, 1 / self._count)
