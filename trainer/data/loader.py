"""Batches for training and validation: the same pictures whatever the number of ranks and workers."""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, get_worker_info

from trainer.config import Hyp
from trainer.data.augment import letterbox, training_picture
from trainer.data.dataset import Dataset
from trainer.data.order import (
    WINDOW,
    Floats,
    Ints,
    PictureWeights,
    Shape,
    aspects_of,
    batches_of_similar_aspect,
    neighbours,
    rect_shape,
    repeats,
    scales,
)
from trainer.data.picture_cache import Exchange, cache_pictures
from trainer.data.recent import Recent
from trainer.data.shared_memory import fit_workers, room
from trainer.dist import World, usable_cores
from trainer.errors import TrainerError

Floats32 = npt.NDArray[np.float32]
STRIDE = 32  # pixels per cell of the coarsest grid of a detector with three levels; P6 models have 64
_GROUP = 32  # validation pictures that share a shape
_VAL_PAD = 0.5  # strides of border around the largest of them
_ORDER, _PICTURE, _SIDE = 1, 2, 3  # first word of the seeds, so that no two uses share a random stream


@dataclass
class Batch:
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
class ValBatch:
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


@dataclass(frozen=True)
class _Share:
    """What a batch is made of: the pictures of one rank in one step."""

    ids: Ints  # (b,)
    shape: Shape
    global_size: int = 0
    epoch: int = 0
    neighbours: list[Ints] = field(default_factory=list)  # for each of them, what its mosaic is made of
    repeats: Ints | None = None  # (b,): how often each of them has been drawn before in this epoch


BatchType = TypeVar("BatchType", Batch, ValBatch)


class _Maker(Generic[BatchType]):
    """Turns a share into a batch, here or in a worker process."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def make(self, share: _Share) -> BatchType:
        raise NotImplementedError

    def __getitem__(self, share: _Share) -> BatchType | TrainerError:
        cv2.setNumThreads(0)  # the processes are the parallelism; OpenCV's threads would only fight them
        try:
            return self.make(share)
        except TrainerError as error:
            return error  # torch would rewrite a raised one into a traceback and lose the hint


def _empty(shape: tuple[int, ...]) -> torch.Tensor:
    """Room for the pictures of a batch: in a worker, in the memory that it shares with the trainer.

    Made elsewhere, they would have to be copied there.
    """
    images = torch.empty(shape, dtype=torch.uint8)
    return images.share_memory_() if get_worker_info() else images  # type: ignore[no-untyped-call]


class _TrainMaker(_Maker[Batch]):
    def __init__(self, dataset: Dataset, min_side: int, seed: int, hyp: Hyp, plain_from: float) -> None:
        """From epoch `plain_from` on, every picture is alone: no mosaic, nothing mixed in."""
        super().__init__(Recent(dataset, WINDOW + WINDOW // 4, min_side))
        self.seed, self.hyp, self.plain_from = seed, hyp, plain_from

    def make(self, share: _Share) -> Batch:
        images = _empty((len(share.ids), *share.shape, 3))
        plain = share.epoch >= self.plain_from
        hyp = replace(self.hyp, mosaic=0.0, mixup=0.0, copy_paste=0.0) if plain else self.hyp
        labels = []
        for k, index in enumerate(share.ids.tolist()):
            again = [] if share.repeats is None else share.repeats[k : k + 1].tolist()
            rng = np.random.default_rng([_PICTURE, self.seed, share.epoch, index, *again])
            near = share.neighbours[k]
            labels.append(training_picture(self.dataset, index, near, hyp, rng, images[k].numpy()))
        owner = np.repeat(np.arange(len(labels), dtype=np.float32), [len(part) for part in labels])
        targets = torch.from_numpy(np.column_stack([owner, np.concatenate(labels)]))
        return Batch(images, targets, torch.tensor(share.ids), share.global_size)


class _ValMaker(_Maker[ValBatch]):
    def __init__(self, dataset: Dataset, imgsz: int) -> None:
        super().__init__(dataset)
        self.imgsz = imgsz

    def make(self, share: _Share) -> ValBatch:
        images = _empty((len(share.ids), *share.shape, 3))
        shapes, pads = [], np.zeros((len(share.ids), 3), np.float32)
        for k, index in enumerate(share.ids.tolist()):
            picture = self.dataset.image(index)
            shapes.append((picture.shape[0], picture.shape[1]))
            pads[k] = letterbox(picture, self.imgsz, images[k].numpy())
        return ValBatch(images, torch.tensor(share.ids), shapes, torch.from_numpy(pads))


def start_forkserver(workers: int) -> None:
    """Start the process that loading processes are forked from, where there will be any: they inherit from it

    which signals they ignore.
    """
    if workers:
        _context()
        multiprocessing.forkserver.ensure_running()


def _context() -> Any:
    # A fork of a process that runs gloo's or CUDA's threads can deadlock; a fork server has none.
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainer.data.loader"])
    return context


def _leave_with_the_trainer(worker: int) -> None:
    """End this worker when the process that feeds it is gone, even if that was killed.

    torch watches a worker's parent, which is the fork server; that in turn stays as long as any worker does.
    A signal is the training process's to answer: it still needs its workers for the batches until the checkpoint.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, name=f"worker-{worker}-watch", daemon=True).start()


class _Shares:
    """What a DataLoader asks for its keys: those that are to come now."""

    coming: Iterable[_Share] = ()

    def __iter__(self) -> Iterator[_Share]:
        return iter(self.coming)


class _Stream(Generic[BatchType]):
    """Batches from this process or, in order, from worker processes that live as long as the stream."""

    def __init__(self, maker: _Maker[BatchType], workers: int, batch_bytes: int, local_size: int) -> None:
        self._maker: Any = maker  # a map-style data set whose keys are shares
        self._workers, self._ahead, note = fit_workers(workers, batch_bytes, local_size, room())
        # What the user should be told once.
        self.notes = [text for text in (note, _too_many(self._workers, local_size, usable_cores())) if text]
        self._shares = _Shares()
        self._loader = self._open()
        self._batches: Iterator[Any] = iter(())
        self._ends: Any = None  # what ends the workers with the process, once there are any

    def _open(self) -> DataLoader[Any]:
        """A loader of whatever `_shares` holds when it is iterated; its workers start at the first pass."""
        options: dict[str, Any] = {}
        if self._workers:
            options = {
                "multiprocessing_context": _context(),
                "persistent_workers": True,
                "prefetch_factor": self._ahead,
                "worker_init_fn": _leave_with_the_trainer,
            }
        with _own_words():
            return DataLoader(
                self._maker,
                batch_size=None,
                sampler=self._shares,
                num_workers=self._workers,
                generator=torch.Generator(),  # else every epoch would draw from the run's global generator
                **options,
            )

    def run(self, shares: Iterable[_Share]) -> Iterator[BatchType]:
        """The batches of `shares`, in their order; an error of a worker is raised here."""
        self._shares.coming = shares
        with _own_words():
            self._batches = iter(self._loader)
        if self._workers and not self._ends:
            # After torch's own, so before it: that waits 5 s for each worker, as it has not told it to end.
            self._ends = atexit.register(_close, weakref.ref(self))
        while (batch := next(self._batches, None)) is not None:
            if isinstance(batch, TrainerError):
                self.close()
                raise batch
            yield batch

    def close(self) -> None:
        """End the workers now; a later run starts others.

        Left to a traceback, they would end by garbage collection, which closes their queues first, and torch would
        then wait 5 s for each of them.
        """
        self._batches = iter(())
        self._loader, self._ends = self._open(), None


def _too_many(workers: int, local_size: int, cores: int) -> str:
    """What to say of more loading processes than cores, as they were asked for; "" where they are not."""
    if workers * local_size <= cores:
        return ""
    ranks = f" on each of {local_size} ranks" if local_size > 1 else ""
    return f"--workers {workers}{ranks}: this machine has {cores} cores, and more processes take turns on them"


@contextlib.contextmanager
def _own_words() -> Iterator[None]:
    """Inside, torch does not warn of many workers: `_too_many` has said it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


def _close(stream: weakref.ref[_Stream[Any]]) -> None:
    if alive := stream():
        alive.close()


@dataclass
class _Plan:
    """Which pictures make up which step of which epoch, and in which shape."""

    count: int  # pictures of the set
    steps: int
    rank: int
    world: int
    seed: int
    epochs: float
    sides: range
    stride: int
    aspects: Floats | None  # (count,), with --rect
    weights: PictureWeights | None
    class_map: list[float] | None = None

    def shares_from(self, epoch: int, first_step: int) -> Iterator[_Share]:
        end = max(self.epochs, epoch + 1)
        while epoch < end:
            batches, again = self.batches(epoch)
            order, sizes = np.concatenate(batches), [len(ids) for ids in batches]
            ends = np.cumsum(sizes)
            for step in range(first_step, self.steps):
                ids = batches[step]
                mine = np.array_split(np.arange(ends[step] - len(ids), ends[step]), self.world)[self.rank]
                yield _Share(
                    ids=order[mine],
                    shape=self._shape(epoch, step, ids),
                    global_size=len(ids),
                    epoch=epoch,
                    neighbours=neighbours(order, mine),
                    repeats=None if again is None else again[mine],
                )
            if self.weights:
                return
            epoch, first_step = epoch + 1, 0

    def _shape(self, epoch: int, step: int, ids: Ints) -> Shape:
        side = self.sides[0]
        if len(self.sides) > 1:
            draw = np.random.default_rng([_SIDE, self.seed, epoch, step])
            side = self.sides[int(draw.integers(len(self.sides)))]
        return (side, side) if self.aspects is None else rect_shape(self.aspects[ids], side, self.stride, 0.0)

    def batches(self, epoch: int) -> tuple[list[Ints], Ints | None]:
        """The pictures of every step of an epoch, and with picture weights how often each was drawn before."""
        rng = np.random.default_rng([_ORDER, self.seed, epoch])
        if self.weights:
            order = rng.choice(self.count, self.count, p=self.weights.shares(self.class_map))
        else:
            order = rng.permutation(self.count)
        if self.aspects is None:
            batches = np.array_split(order, self.steps)
        else:
            batches = batches_of_similar_aspect(order, self.aspects, self.steps, rng)
        return batches, repeats(np.concatenate(batches)) if self.weights else None


class TrainLoader:
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
        if batch < world:
            raise TrainerError(
                f"--batch {batch} is smaller than the number of ranks, {world}",
                f"--batch counts the pictures of all ranks together: use {world} or more",
            )
        self._dataset, count = dataset, len(dataset)
        self.steps = -(-count // batch)
        if count // self.steps < world:
            raise TrainerError(
                f"{count} training pictures in {self.steps} steps of at most {batch}: too few for {world} ranks",
                "use another --batch, or fewer ranks",
            )
        sides = scales(imgsz, stride) if multi_scale else range(imgsz, imgsz + 1)
        self.min_side = sides[-1]  # what pictures are decoded for
        # Cells of the coarsest grid in a rank's smallest share of any step; more than one may be more still.
        self.fewest_cells = count // self.steps // world * (sides[0] // stride)
        self._plan = _Plan(
            count=count,
            steps=self.steps,
            rank=rank,
            world=world,
            seed=seed,
            epochs=epochs,
            sides=sides,
            stride=stride,
            aspects=aspects_of(dataset) if rect else None,
            weights=PictureWeights(dataset) if image_weights else None,
        )
        self._coming: Iterator[Batch] = iter(())
        self._at: tuple[int, int] | None = None  # epoch and step of the first of `_coming`
        plain_from = 0 if rect else epochs - close_mosaic
        batch_bytes = -(-batch // world) * self.min_side**2 * 3
        self._maker = _TrainMaker(dataset, self.min_side, seed, hyp, plain_from)
        self._stream = _Stream(self._maker, workers, batch_bytes, local_size)
        self.notes = list(self._stream.notes)
        if hyp.copy_paste and not any(len(outline) for k in range(count) for outline in dataset.segments(k)):
            self.notes.append("copy_paste has no effect here: it moves objects by their outlines, and these are boxes")

    def __len__(self) -> int:
        return self.steps

    def cache(self, kind: str, homes: list[Path], world: World, exchange: Exchange, threads: int) -> None:
        """Decode all pictures once, before the first epoch (see cache_pictures). The batches stay the same."""
        self._maker.dataset = cache_pictures(self._dataset, self.min_side, kind, homes, world, exchange, threads)

    def weigh(self, class_map: Sequence[float] | None) -> None:
        """Draw the pictures of later epochs so that classes with a low mAP come more often (with `image_weights`).

        `class_map` (nc,) is the last validation's mAP of each class, the same on all ranks; it is all that a resumed
        run needs to know. None (before any validation): all classes as often.
        """
        self._plan.class_map = None if class_map is None else list(class_map)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """This rank's batches of epoch `epoch` from step `first_step` on, of `steps` in all.

        Workers go on with the next epoch's while the last ones of this are used, and while the model is validated.
        """
        if self._at != (epoch, first_step):
            self._coming = self._stream.run(self._plan.shares_from(epoch, first_step))
            self._at = (epoch, first_step)
        for step in range(first_step, self.steps):
            self._at = None  # for as long as a batch is made, which can fail
            batch = next(self._coming)
            # Picture weights may change between epochs: nothing is made ahead.
            last = step + 1 == self.steps
            self._at = None if last and self._plan.weights else (epoch + 1, 0) if last else (epoch, step + 1)
            yield batch

    def names_of(self, epoch: int, step: int) -> list[str]:
        """What the pictures of a step are called, those of all ranks."""
        batches, _ = self._plan.batches(epoch)
        return [self._dataset.name(k) for k in batches[step].tolist()]


class ValLoader:
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
            shares += [_Share(group[k : k + batch], shape) for k in range(0, len(group), batch)]
        self._shares = shares[rank::world]
        batch_bytes = max((len(s.ids) * s.shape[0] * s.shape[1] * 3 for s in shares), default=1)
        self._stream = _Stream(_ValMaker(dataset, imgsz), workers, batch_bytes, local_size)
        self.notes = self._stream.notes

    def __len__(self) -> int:
        return len(self._shares)

    def __iter__(self) -> Iterator[ValBatch]:
        return self._stream.run(self._shares)
