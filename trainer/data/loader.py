"""Batches for training and validation: the same pictures whatever the number of ranks and workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.config import Hyp
from trainer.data.augment import letterbox, training_picture
from trainer.data.dataset import Dataset
from trainer.data.order import WINDOW, Ints, PictureWeights, aspects_of, rect_shape, scales
from trainer.data.picture_cache import Exchange, cache_pictures
from trainer.data.recent import Recent
from trainer.data.stream import PICTURE, Batches, EpochLoader, Maker, Pinnable, Plan, Share, empty, steps_of
from trainer.dist import World
from trainer.errors import TrainerError

Floats32 = npt.NDArray[np.float32]
STRIDE = 32  # pixels per cell of the coarsest grid of a detector with three levels; P6 models have 64
_GROUP = 32  # validation pictures that share a shape
_VAL_PAD = 0.5  # strides of border around the largest of them


@dataclass
class Batch(Pinnable):
    """One rank's share of a global training batch."""

    images: torch.Tensor  # uint8 (b, h, w, 3), RGB; h = w = imgsz unless --rect or --multi-scale
    targets: torch.Tensor  # float32 (n, 6): index in this batch, class, cx, cy, w, h as fractions of w and h
    ids: torch.Tensor  # int64 (b,)
    global_size: int  # pictures of this step on all ranks together

    def __reduce__(self) -> tuple[Any, ...]:
        # A tensor travels from a worker as a file of its own, which takes longer than to send a few numbers.
        return _batch, (self.images, self.targets.numpy(), self.ids.numpy(), self.global_size)


def _batch(images: torch.Tensor, targets: Floats32, ids: Ints, global_size: int) -> Batch:
    return Batch(images, torch.from_numpy(targets), torch.from_numpy(ids), global_size)


@dataclass
class ValBatch(Pinnable):
    """Letterboxed pictures: original_xy = (xy - pad) / scale."""

    images: torch.Tensor  # uint8 (b, h, w, 3), RGB
    ids: torch.Tensor  # int64 (b,)
    shapes: list[tuple[int, int]]  # (height, width) of the original pictures
    pads: torch.Tensor  # float32 (b, 3): scale, pad_x, pad_y


def _check_imgsz(imgsz: int, stride: int) -> None:
    if imgsz < stride or imgsz % stride:
        near = max(stride, round(imgsz / stride) * stride)
        raise TrainerError(
            f"--imgsz {imgsz} is not a multiple of {stride}, the model's largest stride", f"use --imgsz {near}"
        )


class _TrainMaker(Maker[Batch]):
    def __init__(self, dataset: Dataset, min_side: int, seed: int, hyp: Hyp, plain_from: float) -> None:
        """From epoch `plain_from` on, every picture is alone: no mosaic, nothing mixed in."""
        super().__init__(Recent(dataset, WINDOW + WINDOW // 4, min_side))
        self.seed, self.hyp, self.plain_from = seed, hyp, plain_from

    def make(self, share: Share) -> Batch:
        images = empty((len(share.ids), *share.shape, 3))
        plain = share.epoch >= self.plain_from
        hyp = replace(self.hyp, mosaic=0.0, mixup=0.0, copy_paste=0.0) if plain else self.hyp
        labels = []
        for k, index in enumerate(share.ids.tolist()):
            again = [] if share.repeats is None else share.repeats[k : k + 1].tolist()
            rng = np.random.default_rng([PICTURE, self.seed, share.epoch, index, *again])
            near = share.neighbours[k]
            labels.append(training_picture(self.dataset, index, near, hyp, rng, images[k].numpy()))
        owner = np.repeat(np.arange(len(labels), dtype=np.float32), [len(part) for part in labels])
        targets = torch.from_numpy(np.column_stack([owner, np.concatenate(labels)]))
        return Batch(images, targets, torch.tensor(share.ids), share.global_size)


class _ValMaker(Maker[ValBatch]):
    def __init__(self, dataset: Dataset, imgsz: int) -> None:
        super().__init__(dataset)
        self.imgsz = imgsz

    def make(self, share: Share) -> ValBatch:
        images = empty((len(share.ids), *share.shape, 3))
        shapes, pads = [], np.zeros((len(share.ids), 3), np.float32)
        for k, index in enumerate(share.ids.tolist()):
            picture = self.dataset.image(index)
            shapes.append((picture.shape[0], picture.shape[1]))
            pads[k] = letterbox(picture, self.imgsz, images[k].numpy())
        return ValBatch(images, torch.tensor(share.ids), shapes, torch.from_numpy(pads))


class TrainLoader(EpochLoader[Batch]):
    """Augmented batches: one permutation of the whole set per epoch, of which each rank takes its share.

    A picture's augmentation and mosaic partners follow from (seed, epoch, picture) alone and a step's shape from
    (seed, epoch, step), so that the global batch is the same for any number of ranks and workers, and from whatever
    step an epoch is taken up again. Every picture comes once: the steps of an epoch are as few as `batch` allows and
    differ by one picture at most, so that none is left with a handful.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        imgsz: int,
        batch: int,
        rank: int,
        world: int,
        seed: int,
        workers: int,
        hyp: Hyp,
        epochs: float = math.inf,
        close_mosaic: float = 0,
        multi_scale: bool = False,
        rect: bool = False,
        image_weights: bool = False,
        stride: int = STRIDE,
        local_size: int = 1,
    ) -> None:
        """`batch` counts the pictures of a step on all ranks together; `stride` is the model's largest.

        `epochs` is the length of the run, of which the last `close_mosaic` are without mosaics; with `rect` all
        are. `image_weights` draws pictures by their classes (see `weigh`). `local_size` ranks share this machine.
        """
        _check_imgsz(imgsz, stride)
        count = len(dataset)
        sides = scales(imgsz, stride) if multi_scale else range(imgsz, imgsz + 1)
        self.min_side = sides[-1]  # what pictures are decoded for
        plan = Plan(
            count=count,
            steps=steps_of(count, batch, world),
            rank=rank,
            world=world,
            seed=seed,
            epochs=epochs,
            sides=sides,
            stride=stride,
            aspects=aspects_of(dataset) if rect else None,
            weights=PictureWeights(dataset) if image_weights else None,
        )
        self._set = dataset
        self._pictures = _TrainMaker(dataset, self.min_side, seed, hyp, 0 if rect else epochs - close_mosaic)
        super().__init__(dataset, self._pictures, plan, workers, -(-batch // world) * self.min_side**2 * 3, local_size)
        if hyp.copy_paste and not any(len(outline) for k in range(count) for outline in dataset.segments(k)):
            self.notes.append("copy_paste has no effect here: it moves objects by their outlines, and these are boxes")

    def cache(self, kind: str, homes: list[Path], world: World, exchange: Exchange, threads: int) -> None:
        """Decode all pictures once, before the first epoch (see cache_pictures). The batches stay the same."""
        self._pictures.dataset = cache_pictures(self._set, self.min_side, kind, homes, world, exchange, threads)

    def weigh(self, class_map: Sequence[float] | None) -> None:
        """Draw the pictures of later epochs so that classes with a low mAP come more often (with `image_weights`).

        `class_map` (nc,) is the last validation's mAP of each class, the same on all ranks; it is all that a resumed
        run needs to know. None (before any validation): all classes as often.
        """
        self._plan.class_map = None if class_map is None else list(class_map)


class ValLoader(Batches[ValBatch]):
    """Letterboxed pictures, those of similar aspect together; every picture on exactly one rank.

    The set, sorted by aspect, is cut into groups of one shape, and these into batches, that are dealt out to the
    ranks: how a picture is letterboxed, and what is beside it, does not depend on how many ranks there are.
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
        """`batch` pictures at a time, at most 32; without `rect` all are letterboxed to `imgsz` x `imgsz`."""
        _check_imgsz(imgsz, stride)
        aspects = aspects_of(dataset)
        order = np.argsort(aspects, kind="stable") if rect else np.arange(len(dataset))
        shares = []
        for group in (order[k : k + _GROUP] for k in range(0, len(order), _GROUP)):
            shape = rect_shape(aspects[group], imgsz, stride, _VAL_PAD) if rect else (imgsz, imgsz)
            shares += [Share(group[k : k + batch], shape) for k in range(0, len(group), batch)]
        largest = max((len(s.ids) * s.shape[0] * s.shape[1] * 3 for s in shares), default=1)
        super().__init__(_ValMaker(dataset, imgsz), shares[rank::world], workers, largest, local_size)
