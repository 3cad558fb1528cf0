"""Dataloaders of detection: batches of augmented images (augment/), and letterboxed validation batches."""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.config import Hyp
from trainer.data.augment.device_painter import DevicePainter, Painting, pack
from trainer.data.augment.paint import letterbox, paint
from trainer.data.augment.recipe import Recipe, recipe_of
from trainer.data.batch import Assign, BatchData, BoxLabels, Rows, TrainBatch, empty_images, exact
from trainer.data.cache.image_cache import CachedImages, Exchange, Layout, cache_images, decode_all
from trainer.data.cache.resident_images import PASS, ResidentImages, ResidentTable
from trainer.data.dataset import Dataset, Image
from trainer.data.loading.batch_sampler import (
    IMAGE,
    WINDOW,
    BatchSpec,
    ImageWeights,
    aspects_of,
    rect_shape,
    scales,
)
from trainer.data.loading.dataloader import Collate, EpochLoader, EvalLoader
from trainer.distributed.comm import World
from trainer.errors import TrainerError

STRIDE = 32  # largest stride of a detector with three levels, in pixels; P6 models have 64
_GROUP = 32  # validation images that share a shape
_PACKED = 4  # sources of a mosaic: at scale 0.5 it shows them completely, and it may take them to the device
_VAL_PAD = 0.5  # strides of padding around the largest image of a group


_SAMPLED = 8  # steps whose targets show how many rows they need
_SPARE = 1.25  # times as many rows


@dataclass
class Batch(TrainBatch):
    """One rank's part of a global training batch of detection.

    The images are square, of the side imgsz, unless --rect or --multi-scale. In a batch from a worker, they may be a
    `Painting`, for the painter on the GPU. The targets are empty until `TrainLoader.assign_with`.
    """

    labels: torch.Tensor  # `BoxLabels`


@dataclass(frozen=True)
class Capacity:
    """Numbers of rows for lists of targets: powers of two, at least `least`, so that they hardly ever change.

    A compiled step is compiled again for other shapes.
    """

    least: Mapping[str, int]

    def __call__(self, name: str, needed: int) -> int:
        """Return the rows of the list `name`, which needs `needed`."""
        return max(self.least.get(name, 1), 1 << max(needed - 1, 0).bit_length())


@dataclass
class ValBatch(BatchData):
    """A batch of letterboxed images: original_xy = (xy - pad) / scale."""

    images: torch.Tensor  # uint8 (b, h, w, 3), RGB
    ids: torch.Tensor  # int64 (b,)
    shapes: list[tuple[int, int]]  # (height, width) of the original images
    pads: torch.Tensor  # float32 (b, 3): scale, pad_x, pad_y
    targets: dict[str, torch.Tensor]  # see `Targets`; empty until `ValLoader.assign_with`


def check_imgsz(imgsz: int, stride: int) -> None:
    """Raise TrainerError for an image side that is no multiple of the stride."""
    if imgsz < stride or imgsz % stride:
        near = max(stride, round(imgsz / stride) * stride)
        what = f"--imgsz {imgsz} is not a multiple of {stride}, the model's largest stride"
        raise TrainerError(what, f"use --imgsz {near}")


class _TrainCollate(Collate[Batch]):
    cached: CachedImages | None = None
    assign: Assign | None = None
    rows: Rows = staticmethod(exact)  # as many as a batch needs
    resident: ResidentTable | None = None  # of the images on the painter's device
    stores_resident = True  # whether `cached` also stores images that stay on the device

    def __init__(
        self, dataset: Dataset, min_side: int, seed: int, hyp: Hyp, plain_from: float, *, paints: bool = True
    ) -> None:
        """Disable mosaic, mixup and copy-paste from epoch `plain_from` on; unless `paints`, pack the recipes."""
        super().__init__(dataset)
        self.min_side = min_side
        self.seed = seed
        self.hyp = hyp
        self.plain_from = plain_from
        self.paints = paints
        self.layout = Layout(dataset, min_side)
        if not paints:
            scenes = 2 if hyp.mixup else 1
            self.channels = scenes * _PACKED * -(-self.layout.largest_bytes // min_side**2)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "image"}

    @cached_property
    def image(self) -> Callable[[int], Image]:
        """Return a function that decodes an image by its number and keeps the last ones."""
        source = self.cached or self.dataset
        side = self.min_side
        return lru_cache(WINDOW + WINDOW // 4)(lambda index: source.image(index, side))

    def recipes(self, spec: BatchSpec) -> list[Recipe]:
        """Return the recipes of a batch's images."""
        plain = spec.epoch >= self.plain_from
        hyp = replace(self.hyp, mosaic=0.0, mixup=0.0, copy_paste=0.0) if plain else self.hyp
        recipes = []
        for k, index in enumerate(spec.ids.tolist()):
            repeat = [] if spec.repeats is None else spec.repeats[k : k + 1].tolist()
            rng = np.random.default_rng([IMAGE, self.seed, spec.epoch, index, *repeat])
            recipes.append(recipe_of(self.dataset, index, spec.neighbours[k], hyp, rng, spec.shape))
        return recipes

    def targets(self, labels: BoxLabels, spec: BatchSpec) -> dict[str, torch.Tensor]:
        """Return what the loss needs of a batch's labels."""
        return self.assign(labels, len(spec.ids), *spec.shape, self.rows) if self.assign else {}

    def collate(self, spec: BatchSpec) -> Batch:
        recipes = self.recipes(spec)
        images: Any
        if self.paints:
            images = empty_images((len(spec.ids), *spec.shape, 3))
            for recipe, out in zip(recipes, images.numpy(), strict=True):
                paint(recipe, self.image, out)
        else:
            images = self._packed(recipes, spec.number)
        labels = labels_of(recipes)
        targets = self.targets(labels, spec)
        return Batch(images, targets, torch.tensor(spec.ids), spec.global_size, torch.from_numpy(labels))

    def _packed(self, recipes: list[Recipe], number: int) -> Painting:
        if not (self.resident and self.resident.is_open):
            return pack(recipes, self.image)
        if self.cached and not self.stores_resident:
            self.cached.stores = False
        return pack(recipes, self.image, self.resident, number)


def labels_of(recipes: Sequence[Recipe]) -> BoxLabels:
    """Return the labels of a batch."""
    labels = [recipe.labels for recipe in recipes]
    owner = np.repeat(np.arange(len(labels), dtype=np.float32), [len(part) for part in labels])
    return np.column_stack([owner, np.concatenate(labels)])


def _has_polygons(dataset: Dataset) -> bool:
    outlines = itertools.chain.from_iterable(map(dataset.segments, range(len(dataset))))
    return any(map(len, outlines))


class _ValCollate(Collate[ValBatch]):
    assign: Assign | None = None

    def __init__(self, dataset: Dataset, imgsz: int) -> None:
        super().__init__(dataset)
        self.imgsz = imgsz

    def collate(self, spec: BatchSpec) -> ValBatch:
        images = empty_images((len(spec.ids), *spec.shape, 3))
        shapes = []
        pads = np.zeros((len(spec.ids), 3), np.float32)
        for k, index in enumerate(spec.ids.tolist()):
            image = self.dataset.image(index)
            shapes.append((image.shape[0], image.shape[1]))
            pads[k] = letterbox(image, self.imgsz, images[k].numpy())
        targets = self._targets(spec, shapes, pads) if self.assign else {}
        return ValBatch(images, torch.tensor(spec.ids), shapes, torch.from_numpy(pads), targets)

    def _targets(
        self, spec: BatchSpec, shapes: Sequence[tuple[int, int]], pads: npt.NDArray[np.float32]
    ) -> dict[str, torch.Tensor]:
        """Return what the loss needs of the labels, which move with the letterboxed images."""
        assert self.assign
        canvas = np.array([spec.shape[1], spec.shape[0]])
        rows = [np.empty((0, 6), np.float32)]
        for k, index in enumerate(spec.ids.tolist()):
            labels = self.dataset.labels(index)
            scale, *pad = pads[k].tolist()
            height, width = shapes[k]
            side = np.array([width, height]) * scale
            owner = np.full(len(labels), k)
            centre = (labels[:, 1:3] * side + pad) / canvas
            size = labels[:, 3:] * side / canvas
            rows.append(np.column_stack([owner, labels[:, 0], centre, size]).astype(np.float32))
        return self.assign(np.concatenate(rows), len(spec.ids), *spec.shape)


class TrainLoader(EpochLoader[Batch]):
    """Training dataloader of augmented images and their boxes.

    An image's augmentation and mosaic depend on (seed, epoch, image) alone, a step's shape on (seed, epoch, step).
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        imgsz: int,
        seed: int,
        hyp: Hyp,
        epochs: float = math.inf,
        close_mosaic: float = 0,
        multi_scale: bool = False,
        rect: bool = False,
        image_weights: bool = False,
        stride: int = STRIDE,
        painter: DevicePainter | None = None,
        **options: Any,
    ) -> None:
        """Open the loader; the last `close_mosaic` epochs have no mosaics, with `rect` no epoch has them.

        `image_weights` draws images by the classes of their boxes. `painter` paints them on its device, otherwise the
        workers do. `options` are those of EpochLoader.
        """
        check_imgsz(imgsz, stride)
        sides = scales(imgsz, stride) if multi_scale else range(imgsz, imgsz + 1)
        self._painter = painter
        self._passes = 0
        plain_from = 0 if rect else epochs - close_mosaic
        super().__init__(
            _TrainCollate(dataset, sides[-1], seed, hyp, plain_from, paints=painter is None),
            sides=sides,
            seed=seed,
            epochs=epochs,
            stride=stride,
            aspects=aspects_of(dataset) if rect else None,
            weights=ImageWeights(dataset) if image_weights else None,
            **options,
        )
        if hyp.copy_paste and not _has_polygons(dataset):
            self.notes.append(
                "copy_paste has no effect here: it needs polygon labels, and this dataset has boxes only"
            )

    def cache(
        self,
        kind: str,
        folders: list[Path],
        world: World,
        exchange: Exchange,
        threads: int,
        say: Callable[[str], None],
    ) -> None:
        """Keep the decoded images on the painter's device if there is room, else as cache_images does (see there).

        They are decoded when a batch first needs them, except for `disk`. The batches stay the same. `say` prints which
        and why. A collective.
        """
        if kind == "none":
            return
        collate = self._collate
        layout = self._collate.layout
        collate.cached, reason = cache_images(
            collate.dataset, layout, kind, folders, world, exchange, threads
        )
        if self._painter and sys.platform == "linux":
            reason = self._plan_resident(kind, reason, world, exchange, say)
        say(reason)

    def _plan_resident(
        self, kind: str, otherwise: str, world: World, exchange: Exchange, say: Callable[[str], None]
    ) -> str:
        """Let the images stay on the painter's device if there is room; return which and why. A collective."""

        def refused(why: str) -> None:
            if world.rank:  # `say` is silent
                print(f"rank {world.rank}: {why}; {otherwise}", file=sys.stderr, flush=True)
            else:
                say(f"{why}; {otherwise}")

        collate = self._collate
        painter = self._painter
        assert painter
        sizes = {"largest_batch": self._batch_pixels, "local_size": world.local_size}
        resident = ResidentImages(collate.dataset, collate.layout, painter.device, refused=refused, **sizes)
        fits = exchange(resident.may_fit())
        differing = [str(rank) for rank, does in enumerate(fits) if does != fits[0]]
        others = ""
        if differing:
            others = f" ({'not' if fits[0] else 'but'} on the devices of ranks {', '.join(differing)})"
        if not fits[world.rank]:
            return f"{otherwise}; they do not stay on {painter.device}{others}: {resident.need}"
        painter.resident = resident
        collate.resident = resident.table
        # Several ranks share what one of them has decoded; a single one has no use for a second copy.
        collate.stores_resident = kind != "auto" or world.local_size > 1
        also = f"; {otherwise}" if collate.stores_resident else ""
        return f"images stay on {painter.device}{others}: {resident.need}{also}"

    def fill_cache(self, world: World, exchange: Exchange, threads: int) -> None:
        """Decode the images that the cache lacks, for example before a measurement. A collective."""
        collate = self._collate
        count = self.sampler.count
        resident = self._painter.resident if self._painter else None
        source: CachedImages | Dataset = collate.cached or collate.dataset
        if resident:
            resident.open()
        is_open = bool(resident and resident.is_open)

        def decode(index: int) -> Image:
            return source.image(index, collate.min_side)

        def put(index: int) -> None:
            assert resident
            resident.put(index, decode(index))

        is_stored = collate.cached is not None and (collate.stores_resident or not is_open)
        share = range(world.local_rank, count, world.local_size) if is_stored else range(0)
        for work, mine in ((decode, share), (put, range(count if is_open else 0))):
            if any(exchange(bool(mine))):
                decode_all(work, mine, count, world, exchange, threads)

    def start(self, specs: Iterable[BatchSpec]) -> None:
        """Begin a pass over `specs`, and number its batches."""
        self._passes += 1
        first = self._passes * PASS
        super().start(replace(spec, number=first + k) for k, spec in enumerate(specs))

    def assign_with(self, assign: Assign, *, pads: bool) -> None:
        """Let the workers make the loss's targets, before the first epoch.

        With `pads` the targets of all batches have the same shapes, unless a batch has far more objects than
        those of the first steps.
        """
        collate = self._collate
        collate.assign = assign
        if not pads:
            return
        most_rows: dict[str, int] = {}

        def record(name: str, needed: int) -> int:
            most_rows[name] = max(needed, most_rows.get(name, 0))
            return needed

        collate.rows = record
        for spec in itertools.islice(self.sampler.specs_from(0, 0), _SAMPLED):
            collate.targets(labels_of(collate.recipes(spec)), spec)
        round_up = Capacity({})
        collate.rows = Capacity(
            {name: round_up(name, int(needed * _SPARE)) for name, needed in most_rows.items()}
        )

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches of `epoch` from `first_step` on, painted."""
        painter = self._painter
        for batch in super().epoch(epoch, first_step):
            if not painter:
                yield batch
                continue
            following, self._next = self._next, None  # a batch that is not painted may lack in the pool
            assert isinstance(batch.images, Painting)
            painted = painter(batch.images)
            self._next = following
            yield replace(batch, images=painted)
            if painter.resident:
                painter.resident.step_done(painted.shape[0] * painted.shape[1] * painted.shape[2])


class ValLoader(EvalLoader[ValBatch]):
    """Validation dataloader of letterboxed images, each on exactly one rank.

    The images are sorted by aspect and split into groups of one shape, the groups into batches. Ranks take batches
    in turn, so an image's shape does not depend on the number of ranks.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        imgsz: int,
        batch: int,
        rank: int,
        world: int,
        workers: int,
        rect: bool = True,
        stride: int = STRIDE,
        local_size: int = 1,
    ) -> None:
        """Open the loader; a batch has at most 32 images. Without `rect` every shape is `imgsz` x `imgsz`."""
        check_imgsz(imgsz, stride)
        aspects = aspects_of(dataset)
        order = np.argsort(aspects, kind="stable") if rect else np.arange(len(dataset))
        specs = []
        for first in range(0, len(order), _GROUP):
            group = order[first : first + _GROUP]
            shape = rect_shape(aspects[group], imgsz, stride, _VAL_PAD) if rect else (imgsz, imgsz)
            for begin in range(0, len(group), batch):
                specs.append(BatchSpec(group[begin : begin + batch], shape))
        super().__init__(_ValCollate(dataset, imgsz), specs[rank::world], workers, local_size)

    def assign_with(self, assign: Assign) -> None:
        """Let the workers make the loss's targets, before the first pass."""
        self._collate.assign = assign
