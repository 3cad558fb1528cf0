"""Batch sampler of all tasks: divides each step's batch among the ranks, chooses images and shape, from seeds alone."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from trainer.data.dataset import Dataset, Floats, Ints
from trainer.errors import TrainerError

Shape = tuple[int, int]  # (height, width) in pixels
WINDOW = 64  # images; each worker keeps these decoded in memory
ORDER, IMAGE, SIDE, MIX = 1, 2, 3, 4  # first word of each seed: keeps the random streams independent


@dataclass(frozen=True)
class BatchSpec:
    """The images of one rank in one step, and the shape of its batch."""

    ids: Ints  # (b,)
    shape: Shape
    global_size: int = 0
    epoch: int = 0
    step: int = 0
    previous: int = -1  # the image before `ids` in the global batch, cyclically
    neighbours: list[Ints] = field(default_factory=list)  # for each image, the candidates of its mosaic
    repeats: Ints | None = None  # (b,): earlier draws of each image in this epoch
    number: int = 0  # of this batch in the order in which a loader yields them, see resident_images.PASS


def scales(imgsz: int, stride: int) -> range:
    """Return the sides of --multi-scale: the multiples of `stride` from 0.5 to 1.5 x `imgsz`."""
    return range(-(-imgsz // (2 * stride)) * stride, 3 * imgsz // 2 + 1, stride)


def aspects_of(dataset: Dataset) -> Floats:
    """Return height / width of every image (n,)."""
    sizes = np.array([dataset.size(k) for k in range(len(dataset))], np.float64).reshape(-1, 2)
    aspects: Floats = sizes[:, 0] / sizes[:, 1]
    return aspects


def rect_shape(aspects: Floats, side: int, stride: int, pad: float) -> Shape:
    """Return the smallest shape that holds images of these aspects with their longer side scaled to `side`.

    Both sides get a border of `pad` strides (YOLOv5: 0.5) and are rounded up to a multiple of `stride`.
    """
    low = float(aspects.min())
    high = float(aspects.max())
    tall = min(1.0, high)
    wide = min(1.0, 1 / low)
    tolerance = 1e-6  # 3 / 4 of 640 must give 15 strides in spite of rounding
    height, width = (math.ceil(part * side / stride + pad - tolerance) * stride for part in (tall, wide))
    return height, width


def neighbours(order: Ints, positions: Ints) -> list[Ints]:
    """Return the mosaic candidates for each of `positions` in `order`: the last WINDOW images up to it.

    A random order makes them random images of the dataset, independent of batch size and number of ranks.
    A worker has most of them decoded already, and decoding is most of its work. A window as small as a batch would
    save as much, but give each batch too few different images.
    """
    ends = np.maximum(positions + 1, WINDOW).tolist()
    return [order[max(0, end - WINDOW) : end] for end in ends]


def repeats(order: Ints) -> Ints:
    """Return the number of earlier occurrences of each entry of `order` (n,)."""
    drawn = Counter[int]()
    result = np.empty(len(order), np.int64)
    for k, index in enumerate(order.tolist()):
        result[k] = drawn[index]
        drawn[index] += 1
    return result


class ImageWeights:
    """Sampling weights of images (--image-weights), from the classes of their boxes.

    YOLOv5's formula: a class weighs (1 - mAP)^2 / number of boxes, an image the sum over its boxes. An image without
    boxes is never drawn.
    """

    def __init__(self, dataset: Dataset) -> None:
        labels = [dataset.labels(k)[:, 0].astype(np.int32) for k in range(len(dataset))]
        self._count = len(dataset)
        self._nc = len(dataset.names)
        self._classes = np.concatenate(labels)
        self._owners = np.repeat(np.arange(self._count), [len(part) for part in labels])

    def probabilities(self, class_map: Sequence[float] | None) -> Floats:
        """Return each image's probability (n,); NaN in `class_map` (nc,) marks a class without a measurement."""
        maps = np.zeros(self._nc) if class_map is None else np.array(class_map, np.float64)
        is_measured = np.isfinite(maps)
        maps[~is_measured] = maps[is_measured].mean() if is_measured.any() else 0.0
        boxes = np.bincount(self._classes, minlength=self._nc)
        by_class = (1 - maps) ** 2 / np.maximum(boxes, 1)
        weights = np.bincount(self._owners, by_class[self._classes], self._count)
        total = weights.sum()
        return weights / total if total > 0 else np.full(self._count, 1 / self._count)


@dataclass
class BatchSampler:
    """Batch sampler of one rank: a permutation of the dataset per epoch, split into steps and ranks."""

    count: int  # images of the dataset
    batch: int  # images of a step on all ranks together
    rank: int
    world: int
    seed: int
    epochs: float  # length of the run
    sides: range  # of the images in pixels; each step draws one
    stride: int  # the model's largest stride in pixels
    aspects: Floats | None = None  # (count,): height / width of each image, for batches of similar aspect
    weights: ImageWeights | None = None  # draw the images with these weights
    class_map: Sequence[float] | None = None  # mAP of each class, equal on all ranks; None: not validated yet

    def __post_init__(self) -> None:
        if self.batch < self.world:
            what = f"--batch {self.batch} is smaller than the number of ranks, {self.world}"
            raise TrainerError(
                what, f"--batch counts the images of all ranks together: use {self.world} or more"
            )
        self.steps = -(-self.count // self.batch)  # of an epoch
        if not self.steps or self.count // self.steps < self.world:
            raise TrainerError(
                f"{self.count} training images in {self.steps} steps of at most {self.batch}: "
                f"too few for {self.world} ranks",
                "use another --batch, or fewer ranks",
            )

    def specs_from(self, epoch: int, first_step: int) -> Iterator[BatchSpec]:
        """Yield this rank's batch specs from a step of `epoch` to the end of the run, with weights of the epoch."""
        end = max(self.epochs, epoch + 1)
        while epoch < end:
            batches, repeated = self.batches(epoch)
            order = np.concatenate(batches)
            ends = np.cumsum([len(ids) for ids in batches])
            for step in range(first_step, self.steps):
                ids = batches[step]
                begin = ends[step] - len(ids)
                mine = np.array_split(np.arange(begin, ends[step]), self.world)[self.rank]
                yield BatchSpec(
                    ids=order[mine],
                    shape=self._shape(epoch, step, ids),
                    global_size=len(ids),
                    epoch=epoch,
                    step=step,
                    previous=int(ids[int(mine[0] - begin) - 1]),
                    neighbours=neighbours(order, mine),
                    repeats=None if repeated is None else repeated[mine],
                )
            if self.weights:  # they may change after each epoch
                return
            epoch = epoch + 1
            first_step = 0

    def _shape(self, epoch: int, step: int, ids: Ints) -> Shape:
        """Return the shape of the images `ids` of a step."""
        rng = np.random.default_rng([SIDE, self.seed, epoch, step])
        side = self.sides[int(rng.integers(len(self.sides)))]
        if self.aspects is None:
            return side, side
        return rect_shape(self.aspects[ids], side, self.stride, 0.0)

    def batches(self, epoch: int) -> tuple[list[Ints], Ints | None]:
        """Return the image ids of every step of `epoch` and, with image weights, the repeats of each."""
        rng = np.random.default_rng([ORDER, self.seed, epoch])
        if self.weights:
            order = rng.choice(self.count, self.count, p=self.weights.probabilities(self.class_map))
        else:
            order = rng.permutation(self.count)
        if self.aspects is None:
            batches = np.array_split(order, self.steps)
        else:
            ordered = order[np.argsort(self.aspects[order], kind="stable")]
            by_aspect = np.array_split(ordered, self.steps)
            batches = [by_aspect[k] for k in rng.permutation(self.steps)]
        return batches, repeats(np.concatenate(batches)) if self.weights else None
