"""Batches for training and validation: the same pictures whatever the number of ranks and workers."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader

from trainer.config import Hyp
from trainer.data.augment import letterbox, training_picture
from trainer.data.dataset import Dataset
from trainer.errors import TrainerError

STRIDE = 32  # pixels per cell of the coarsest grid of a detector with three levels; P6 models have 64
_PREFETCH = 3  # batches that each worker makes ahead
_ORDER, _PICTURE, _SIDE = 1, 2, 3  # first word of the seeds, so that no two uses share a random stream


@dataclass
class Batch:
    """One rank's share of a global training batch."""

    images: torch.Tensor  # uint8 (b, side, side, 3), RGB; the side is imgsz unless the scale varies
    targets: torch.Tensor  # float32 (n, 6): index in this batch, class, cx, cy, w, h as fractions of the side
    ids: torch.Tensor  # int64 (b,)
    global_size: int  # pictures of this step on all ranks together


@dataclass
class ValBatch:
    """Letterboxed pictures: original_xy = (xy - pad) / scale."""

    images: torch.Tensor  # uint8 (b, imgsz, imgsz, 3), RGB
    ids: torch.Tensor  # int64 (b,)
    shapes: list[tuple[int, int]]  # (height, width) of the original pictures
    pads: torch.Tensor  # float32 (b, 3): scale, pad_x, pad_y


def _check_imgsz(imgsz: int, stride: int) -> None:
    if imgsz < stride or imgsz % stride:
        near = max(stride, round(imgsz / stride) * stride)
        raise TrainerError(
            f"--imgsz {imgsz} is not a multiple of {stride}, the model's largest stride", f"use --imgsz {near}"
        )


def scales(imgsz: int, stride: int) -> range:
    """The sides that --multi-scale draws from: the multiples of `stride` from 0.5 to 1.5 x `imgsz`."""
    return range(-(-imgsz // (2 * stride)) * stride, 3 * imgsz // 2 + 1, stride)


def _check_shared_memory(workers: int, pictures: int, imgsz: int) -> None:
    """Workers hand their batches over in /dev/shm; where that is too small, they die of "Bus error"."""
    folder = Path("/dev/shm")
    if not workers or not folder.is_dir():
        return
    needed = workers * _PREFETCH * pictures * imgsz * imgsz * 3
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise TrainerError(
            f"/dev/shm has {free >> 20} MiB free, {workers} workers need {(needed >> 20) + 1} MiB",
            "give the container more (docker run --shm-size=8g, or --ipc=host), or use --workers 0",
        )


@dataclass(frozen=True)
class _Share:
    """What a batch is made of: the pictures of one rank in one step."""

    epoch: int
    ids: tuple[int, ...]
    global_size: int
    side: int


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


class _TrainMaker(_Maker[Batch]):
    def __init__(self, dataset: Dataset, seed: int, hyp: Hyp) -> None:
        super().__init__(dataset)
        self.seed, self.hyp = seed, hyp

    def make(self, share: _Share) -> Batch:
        images = torch.empty((len(share.ids), share.side, share.side, 3), dtype=torch.uint8)
        labels = []
        for k, index in enumerate(share.ids):
            rng = np.random.default_rng([_PICTURE, self.seed, share.epoch, index])
            labels.append(training_picture(self.dataset, index, self.hyp, rng, images[k].numpy()))
        owner = np.repeat(np.arange(len(labels), dtype=np.float32), [len(part) for part in labels])
        targets = torch.from_numpy(np.column_stack([owner, np.concatenate(labels)]))
        return Batch(images, targets, torch.tensor(share.ids, dtype=torch.int64), share.global_size)


class _ValMaker(_Maker[ValBatch]):
    def make(self, share: _Share) -> ValBatch:
        images = torch.empty((len(share.ids), share.side, share.side, 3), dtype=torch.uint8)
        shapes, pads = [], np.zeros((len(share.ids), 3), np.float32)
        for k, index in enumerate(share.ids):
            picture = self.dataset.image(index)
            shapes.append((picture.shape[0], picture.shape[1]))
            pads[k] = letterbox(picture, share.side, images[k].numpy())
        return ValBatch(images, torch.tensor(share.ids, dtype=torch.int64), shapes, torch.from_numpy(pads))


def _leave_with_the_trainer(worker: int) -> None:
    """End this worker when the process that feeds it is gone, even if that was killed.

    torch watches a worker's parent, which is the fork server; that in turn stays as long as any worker does.
    """
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, name=f"worker-{worker}-watch", daemon=True).start()


class _Stream(Generic[BatchType]):
    """Batches from this process or, in order, from worker processes that live as long as the stream."""

    def __init__(self, maker: _Maker[BatchType], workers: int) -> None:
        self._maker: Any = maker  # a map-style data set whose keys are shares
        self._workers = workers
        self._shares: list[_Share] = []
        self._loader = self._open()

    def _open(self) -> DataLoader[Any]:
        """A loader of whatever `_shares` holds when it is iterated; its workers start at the first pass."""
        options: dict[str, Any] = {}
        if self._workers:
            # A fork of a process that runs gloo's or CUDA's threads can deadlock; a fork server has none.
            context = torch.multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["trainer.data.loader"])
            options = {
                "multiprocessing_context": context,
                "persistent_workers": True,
                "prefetch_factor": _PREFETCH,
                "worker_init_fn": _leave_with_the_trainer,
            }
        return DataLoader(
            self._maker,
            batch_size=None,
            sampler=self._shares,
            num_workers=self._workers,
            generator=torch.Generator(),  # else every epoch would draw from the run's global generator
            **options,
        )

    def run(self, shares: list[_Share]) -> Iterator[BatchType]:
        """The batches of `shares`, in their order; an error of a worker is raised here."""
        self._shares[:] = shares
        error = None
        for batch in self._loader:
            if isinstance(batch, TrainerError):
                error = batch
                break
            yield batch
        if error:
            # Ends the workers now. Left to the error's traceback, they would end by garbage collection, which
            # closes their queues first, and torch would then wait 5 s for each of them.
            self._loader = self._open()
            raise error


class TrainLoader:
    """Augmented batches: one permutation of the whole set per epoch, of which each rank takes its share.

    A picture's augmentation and mosaic partners follow from (seed, epoch, picture) alone and a step's side from
    (seed, epoch, step), so that the global batch is the same for any number of ranks and workers, and from whatever
    step an epoch is taken up again. A last batch that is not full is kept if every rank
    gets at least one picture of it; else it is left out for this epoch.
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
        multi_scale: bool = False,
        stride: int = STRIDE,
    ) -> None:
        """`batch` counts the pictures of a step on all ranks together; `stride` is the model's largest."""
        _check_imgsz(imgsz, stride)
        if batch < world:
            raise TrainerError(
                f"--batch {batch} is smaller than the number of ranks, {world}",
                f"--batch counts the pictures of all ranks together: use {world} or more",
            )
        if len(dataset) < world:
            raise TrainerError(f"{len(dataset)} training pictures cannot feed {world} ranks", "use fewer ranks")
        self._sides = scales(imgsz, stride) if multi_scale else range(imgsz, imgsz + 1)
        _check_shared_memory(workers, -(-batch // world), self._sides[-1])
        self._count, self._batch, self._rank, self._world, self._seed = len(dataset), batch, rank, world, seed
        full, rest = divmod(self._count, batch)
        self.steps = full + (rest >= world)
        self._stream = _Stream(_TrainMaker(dataset, seed, hyp), workers)

    def __len__(self) -> int:
        return self.steps

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """This rank's batches of epoch `epoch` from step `first_step` on, of `steps` in all."""
        order = np.random.default_rng([_ORDER, self._seed, epoch]).permutation(self._count)
        shares = []
        for step in range(first_step, self.steps):
            whole = order[step * self._batch : (step + 1) * self._batch]
            mine = np.array_split(whole, self._world)[self._rank]
            shares.append(_Share(epoch, tuple(mine.tolist()), len(whole), self._side(epoch, step)))
        return self._stream.run(shares)

    def _side(self, epoch: int, step: int) -> int:
        if len(self._sides) == 1:
            return self._sides[0]
        return self._sides[int(np.random.default_rng([_SIDE, self._seed, epoch, step]).integers(len(self._sides)))]


class ValLoader:
    """Letterboxed pictures, `batch` at a time on each rank; every picture on exactly one rank."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        imgsz: int,
        batch: int,
        rank: int,
        world: int,
        workers: int,
        stride: int = STRIDE,
    ) -> None:
        _check_imgsz(imgsz, stride)
        _check_shared_memory(workers, batch, imgsz)
        mine = range(rank, len(dataset), world)
        self._shares = [_Share(0, tuple(mine[k : k + batch]), batch, imgsz) for k in range(0, len(mine), batch)]
        self._stream = _Stream(_ValMaker(dataset), workers)

    def __len__(self) -> int:
        return len(self._shares)

    def __iter__(self) -> Iterator[ValBatch]:
        return self._stream.run(self._shares)
