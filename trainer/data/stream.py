"""Batches from this process or from worker processes, epoch after epoch, whatever it is that they are made of."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, Protocol, TypeVar

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from trainer.data.order import (
    Floats,
    Ints,
    PictureWeights,
    Shape,
    batches_of_similar_aspect,
    neighbours,
    rect_shape,
    repeats,
)
from trainer.data.shared_memory import fit_workers, room
from trainer.dist import usable_cores
from trainer.errors import TrainerError

BatchType = TypeVar("BatchType")
ORDER, PICTURE, SIDE, MIX = 1, 2, 3, 4  # first word of the seeds, so that no two uses share a random stream


@dataclass(frozen=True)
class Share:
    """What a batch is made of: the pictures of one rank in one step."""

    ids: Ints  # (b,)
    shape: Shape
    global_size: int = 0
    epoch: int = 0
    step: int = 0
    before: int = -1  # the picture that stands before the first of them in the whole step, whose row is a circle
    neighbours: list[Ints] = field(default_factory=list)  # for each of them, what its mosaic is made of
    repeats: Ints | None = None  # (b,): how often each of them has been drawn before in this epoch


class Pinnable:
    """A batch, which is a dataclass, as a DataLoader that pins memory needs it."""

    def pin_memory(self: Any) -> Any:
        """The same batch in pinned memory, from which a GPU copies while it computes."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{k: v.pin_memory() for k, v in values.items() if isinstance(v, torch.Tensor)})


class Maker(Generic[BatchType]):
    """Turns a share into a batch, here or in a worker process."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def make(self, share: Share) -> BatchType:
        """The batch of a share."""
        raise NotImplementedError

    def __getitem__(self, share: Share) -> BatchType | TrainerError:
        cv2.setNumThreads(0)  # the processes are the parallelism; OpenCV's threads would only fight them
        try:
            return self.make(share)
        except TrainerError as error:
            return error  # torch would rewrite a raised one into a traceback and lose the hint


def empty(shape: tuple[int, ...]) -> torch.Tensor:
    """Room for the pictures of a batch: in a worker, in the memory that it shares with the trainer.

    Made elsewhere, they would have to be copied there.
    """
    images = torch.empty(shape, dtype=torch.uint8)
    return images.share_memory_() if get_worker_info() else images  # type: ignore[no-untyped-call]


def start_forkserver(wanted: bool) -> None:
    """Start the process that loading processes are forked from, where there will be any: they inherit from it

    which signals they ignore.
    """
    if wanted:
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

    coming: Iterable[Share] = ()

    def __iter__(self) -> Iterator[Share]:
        return iter(self.coming)


class Stream(Generic[BatchType]):
    """Batches from this process or, in order, from worker processes that live as long as the stream."""

    def __init__(self, maker: Maker[BatchType], workers: int, batch_bytes: int, local_size: int) -> None:
        self._maker: Any = maker  # a map-style data set whose keys are shares
        self._workers, self._ahead, note = fit_workers(workers, batch_bytes, local_size, room())
        # What the user should be told once.
        self.notes = [text for text in (note, _too_many(self._workers, local_size, usable_cores())) if text]
        self._shares = _Shares()
        self._pins = False
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
                pin_memory=self._pins,
                generator=torch.Generator(),  # else every epoch would draw from the run's global generator
                **options,
            )

    def run(self, shares: Iterable[Share]) -> Iterator[BatchType]:
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

    def pin(self) -> None:
        """Hand over batches in pinned memory from the next run on."""
        self._pins = True
        self.close()

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
    return f"--workers {workers}{ranks}: there are {cores} cores here, and more processes take turns on them"


@contextlib.contextmanager
def _own_words() -> Iterator[None]:
    """Inside, torch does not warn of many workers: `_too_many` has said it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


def _close(stream: weakref.ref[Stream[Any]]) -> None:
    if alive := stream():
        alive.close()


@atexit.register  # before any stream's own, so after all of them
def _await_feeders() -> None:
    """Let the threads that fed the workers end: torch does not wait for them.

    One that the end of the process cuts off while it gives its semaphore back makes Python warn of a leak.
    """
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(timeout=1)


@dataclass
class Plan:
    """Which pictures make up which step of which epoch, and in which shape."""

    count: int  # pictures of the set
    steps: int
    rank: int
    world: int
    seed: int
    epochs: float
    sides: range
    stride: int
    aspects: Floats | None = None  # (count,), with --rect
    weights: PictureWeights | None = None
    class_map: list[float] | None = None

    def shares_from(self, epoch: int, first_step: int) -> Iterator[Share]:
        """This rank's share of every step from one of `epoch` on, to the end of the run."""
        end = max(self.epochs, epoch + 1)
        while epoch < end:
            batches, again = self.batches(epoch)
            order, sizes = np.concatenate(batches), [len(ids) for ids in batches]
            ends = np.cumsum(sizes)
            for step in range(first_step, self.steps):
                ids = batches[step]
                begin = ends[step] - len(ids)
                mine = np.array_split(np.arange(begin, ends[step]), self.world)[self.rank]
                yield Share(
                    ids=order[mine],
                    shape=self._shape(epoch, step, ids),
                    global_size=len(ids),
                    epoch=epoch,
                    step=step,
                    before=int(ids[int(mine[0] - begin) - 1]),
                    neighbours=neighbours(order, mine),
                    repeats=None if again is None else again[mine],
                )
            if self.weights:
                return
            epoch, first_step = epoch + 1, 0

    def _shape(self, epoch: int, step: int, ids: Ints) -> Shape:
        side = self.sides[0]
        if len(self.sides) > 1:
            draw = np.random.default_rng([SIDE, self.seed, epoch, step])
            side = self.sides[int(draw.integers(len(self.sides)))]
        return (side, side) if self.aspects is None else rect_shape(self.aspects[ids], side, self.stride, 0.0)

    def batches(self, epoch: int) -> tuple[list[Ints], Ints | None]:
        """The pictures of every step of an epoch, and with picture weights how often each was drawn before."""
        rng = np.random.default_rng([ORDER, self.seed, epoch])
        if self.weights:
            order = rng.choice(self.count, self.count, p=self.weights.shares(self.class_map))
        else:
            order = rng.permutation(self.count)
        if self.aspects is None:
            batches = np.array_split(order, self.steps)
        else:
            batches = batches_of_similar_aspect(order, self.aspects, self.steps, rng)
        return batches, repeats(np.concatenate(batches)) if self.weights else None


class Named(Protocol):
    """A data set, as far as it is asked here."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What the picture is called in messages."""


def steps_of(count: int, batch: int, world: int) -> int:
    """The steps of an epoch of `count` pictures, as few as `batch` allows; an error where a rank would have none."""
    if batch < world:
        raise TrainerError(
            f"--batch {batch} is smaller than the number of ranks, {world}",
            f"--batch counts the pictures of all ranks together: use {world} or more",
        )
    steps = -(-count // batch)
    if not steps or count // steps < world:
        raise TrainerError(
            f"{count} training pictures in {steps} steps of at most {batch}: too few for {world} ranks",
            "use another --batch, or fewer ranks",
        )
    return steps


class EpochLoader(Generic[BatchType]):
    """One permutation of the whole set per epoch, of which each rank takes its share; every picture comes once.

    The steps of an epoch are as few as `batch` allows and differ by one picture at most, so that none is left with a
    handful. The global batch is the same for any number of ranks and workers, and from whatever step an epoch is
    taken up again.
    """

    def __init__(
        self, dataset: Named, maker: Maker[BatchType], plan: Plan, workers: int, batch_bytes: int, local_size: int
    ) -> None:
        """`batch_bytes` are those of a rank's largest batch; `local_size` ranks share this machine."""
        self._dataset, self._maker, self._plan, self.steps = dataset, maker, plan, plan.steps
        self._coming: Iterator[BatchType] = iter(())
        self._at: tuple[int, int] | None = None  # epoch and step of the first of `_coming`
        # Cells of the coarsest grid in a rank's smallest share of any step; more than one may be more still.
        self.fewest_cells = plan.count // plan.steps // plan.world * (plan.sides[0] // plan.stride)
        self._stream = Stream(maker, workers, batch_bytes, local_size)
        self.notes = list(self._stream.notes)

    def __len__(self) -> int:
        return self.steps

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[BatchType]:
        """This rank's batches of epoch `epoch` from step `first_step` on, of `steps` in all.

        Workers go on with the next epoch's while the last ones of this are used, and while the model is validated.
        """
        for step in range(first_step, self.steps):
            if self._at != (epoch, step):
                self._coming = self._stream.run(self._plan.shares_from(epoch, step))
            self._at = None  # for as long as a batch is made, which can fail
            batch = next(self._coming)
            # Picture weights may change between epochs: nothing is made ahead.
            last = step + 1 == self.steps
            self._at = None if last and self._plan.weights else (epoch + 1, 0) if last else (epoch, step + 1)
            yield batch

    def pin(self) -> None:
        """Hand over batches in pinned memory, for a GPU; before the first one is made."""
        self._stream.pin()

    def names_of(self, epoch: int, step: int) -> list[str]:
        """What the pictures of a step are called, those of all ranks."""
        batches, _ = self._plan.batches(epoch)
        return [self._dataset.name(k) for k in batches[step].tolist()]


class Batches(Generic[BatchType]):
    """This rank's batches of a validation, the same every time."""

    def __init__(
        self, maker: Maker[BatchType], shares: list[Share], workers: int, batch_bytes: int, local_size: int
    ) -> None:
        self._shares = shares
        self._stream = Stream(maker, workers, batch_bytes, local_size)
        self.notes = self._stream.notes

    def __len__(self) -> int:
        return len(self._shares)

    def __iter__(self) -> Iterator[BatchType]:
        return self._stream.run(self._shares)

    def pin(self) -> None:
        """Hand over batches in pinned memory, for a GPU; before the first one is made."""
        self._stream.pin()
