"""Dataloader: batches made in this process or in worker processes, across epochs."""

import atexit
import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import os
import shutil
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader

from trainer.data.batch import BatchData, TrainBatch
from trainer.data.cache.image_cache import Exchange
from trainer.data.loading.batch_sampler import IMAGE, BatchSampler, BatchSpec
from trainer.distributed.comm import World
from trainer.errors import TrainerError

BatchType = TypeVar("BatchType", bound=BatchData, covariant=True)
TrainBatchType = TypeVar("TrainBatchType", bound=TrainBatch)
PREFETCH = 3  # batches that each worker prefetches if /dev/shm has room
_SHM = Path("/dev/shm")
_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_IN_TRANSIT = 2  # batches of a rank that are neither prefetched nor released
_LOADERS: weakref.WeakSet[Any] = weakref.WeakSet()
_USABLE_SHARE = 0.45  # of the free shared memory: during validation, prefetched training batches stay in it


class Collate(Generic[BatchType]):
    """Map-style dataset of batches whose keys are batch specs; runs in this process or in a worker."""

    channels = 3  # bytes of a pixel in a batch
    extra: ClassVar = 0  # images that each rank's batch holds in addition to its own

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def collate(self, spec: BatchSpec) -> BatchType:
        """Return the batch of `spec`."""
        raise NotImplementedError

    def __getitem__(self, spec: BatchSpec) -> BatchType | TrainerError:
        cv2.setNumThreads(0)  # OpenCV's threads would compete with the other workers
        try:
            return self.collate(spec)
        except TrainerError as error:
            return error  # torch would turn a raised error into a traceback and lose the hint


def fit_workers(
    workers: int, batch_bytes: int, local_size: int, bytes_free: int | None
) -> tuple[int, int, str]:
    """Return (workers per rank, prefetch factor, warning if workers were reduced) that fit into /dev/shm.

    Workers that exhaust /dev/shm die with "Bus error". The prefetch factor is reduced before the workers. `bytes_free`
    is None on a system without /dev/shm.
    """
    if not workers or bytes_free is None:
        return workers, PREFETCH, ""
    batches = bytes_free // (local_size * batch_bytes) - _IN_TRANSIT
    if workers <= batches:
        return workers, min(PREFETCH, batches // workers), ""
    fewer = max(0, batches)
    needed = (workers + _IN_TRANSIT) * local_size * batch_bytes
    warning = (
        f"/dev/shm has room for {bytes_free >> 20} MiB, but {workers} workers on each of {local_size} ranks need "
        f"{(needed >> 20) + 1} MiB: starting {fewer}. Start the container with --shm-size=8g or --ipc=host"
    )
    return fewer, 1, warning


def start_forkserver(wanted: bool) -> None:
    """Start the fork server if `wanted`; workers inherit the signals that this process ignores now.

    They also inherit one thread for numpy's BLAS, which reads its variable when it is loaded. torch sets its own number
    of threads in a worker, and Collate that of OpenCV.
    """
    if not wanted:
        return
    _context()
    added = [name for name in _BLAS_THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name in added:
            del os.environ[name]


def _context() -> Any:
    # Forking a process with threads of gloo or CUDA can deadlock; the fork server has no such threads.
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainer.data.loading.detection_loader"])
    return context


def _init_worker(worker: int) -> None:
    """Ignore SIGTERM, and exit when the training process ends, even if it was killed.

    torch watches a worker's parent, but that is the fork server, which outlives the training process. On SIGTERM the
    training process still needs batches until its checkpoint.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, name=f"worker-{worker}-watch", daemon=True).start()


class _Sampler:
    """Sampler of a DataLoader whose batch specs are replaced before each pass."""

    specs: Iterable[BatchSpec] = ()

    def __iter__(self) -> Iterator[BatchSpec]:
        return iter(self.specs)


class BatchLoader(Generic[BatchType]):
    """DataLoader over batch specs with persistent workers, sized to the shared memory."""

    def __init__(self, collate: Collate[BatchType], workers: int, batch_pixels: int, local_size: int) -> None:
        """Open the loader; `batch_pixels` are those of a rank's largest batch, `local_size` the ranks of this node."""
        self._collate: Any = collate
        self._batch_pixels = batch_pixels
        batch_bytes = batch_pixels * collate.channels
        usable = int(shutil.disk_usage(_SHM).free * _USABLE_SHARE) if _SHM.is_dir() else None
        self._workers, self._prefetch, warning = fit_workers(workers, batch_bytes, local_size, usable)
        self.notes = [warning] if warning else []
        self._specs = _Sampler()
        self._loader: DataLoader[Any] | None = None  # open during and between passes
        self._running: Iterator[Any] = iter(())
        self._kill: Callable[[], object] = lambda: None  # kills the workers that still run
        _LOADERS.add(self)

    def _open(self) -> DataLoader[Any]:
        start_forkserver(self._workers > 0)  # if a program that uses this class has not
        options: dict[str, Any] = {}
        if self._workers:
            options = {"multiprocessing_context": _context(), "worker_init_fn": _init_worker}
            options |= {"persistent_workers": True, "prefetch_factor": self._prefetch}
        return DataLoader(
            self._collate,
            batch_size=None,
            sampler=self._specs,
            num_workers=self._workers,
            pin_memory=torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]  # by a model on a GPU
            generator=torch.Generator(),  # without it, each epoch would draw from the global generator
            **options,
        )

    def start(self, specs: Iterable[BatchSpec]) -> None:
        """Begin a pass over `specs`, whose batches `take` returns in order."""
        self._specs.specs = specs
        if self._loader is not None:
            self._running = iter(self._loader)
            return
        self._loader = self._open()
        before = multiprocessing.active_children()
        self._running = iter(self._loader)
        workers = [child for child in multiprocessing.active_children() if child not in before]
        # Also if this loader is dropped without `close`.
        finalizer = weakref.finalize(self, _kill, workers)
        finalizer.atexit = False
        self._kill = finalizer

    def take(self) -> BatchType | None:
        """Return the next batch of the pass, None after the last. Raise the TrainerError of a worker."""
        batch = next(self._running, None)
        if isinstance(batch, TrainerError):
            self.close()
            raise batch
        return batch

    def close(self) -> None:
        """Stop the workers; a later pass starts new ones."""
        self._running = iter(())
        # torch now asks the workers to exit, unless a traceback or a generator keeps the pass.
        self._loader = None
        self._kill()


def _kill(workers: list[multiprocessing.process.BaseProcess]) -> None:
    """Kill the workers that still run: they ignore SIGTERM, with which multiprocessing would end them."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    for worker in workers:
        worker.join()


@atexit.register
def _close_all() -> None:
    """Close the loaders that are still open at exit, and join the threads that feed their queues.

    It runs before the exit functions of torch, which waits 5 s for each worker, and of multiprocessing, which waits for
    all of them: both modules were imported before. Python would warn of a leaked semaphore if it killed such a thread.
    """
    for loader in list(_LOADERS):
        loader.close()
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(timeout=1)


class EpochLoader(BatchLoader[BatchType]):
    """Training dataloader of one rank: each epoch has every image of the dataset once.

    The steps of an epoch differ by at most one image. The global batch does not depend on the number of ranks and
    workers, nor on the step at which an epoch is resumed.
    """

    def __init__(
        self, collate: Collate[BatchType], *, workers: int, local_size: int = 1, **sampling: Any
    ) -> None:
        """Open the loader; `local_size` are the ranks of this node, `sampling` the fields of BatchSampler."""
        self.sampler = sampler = BatchSampler(len(collate.dataset), **sampling)
        self.steps = sampler.steps
        sides = sampler.sides
        self._next: tuple[int, int] | None = None  # epoch and step of the next batch of the pass
        self.fewest_images = sampler.count // self.steps // sampler.world  # in a rank's part of a batch
        images = -(-sampler.batch // sampler.world) + collate.extra
        super().__init__(collate, workers, images * sides[-1] ** 2, local_size)

    def __len__(self) -> int:
        return self.steps

    def cache(
        self,
        kind: str,
        folders: list[Path],
        world: World,
        exchange: Exchange,
        threads: int,
        say: Callable[[str], None],
    ) -> None:
        """Keep decoded images (--cache). A loader of a task without that option keeps none."""

    def fill_cache(self, world: World, exchange: Exchange, threads: int) -> None:
        """Decode the images that `cache` would keep and that no batch has needed yet."""

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[BatchType]:
        """Yield this rank's batches of `epoch` from `first_step` on; workers then prefetch the next epoch."""
        for step in range(first_step, self.steps):
            if self._next != (epoch, step):
                self.start(self.sampler.specs_from(epoch, step))
            self._next = None  # the pass is unusable if the next line raises
            batch = self.take()
            assert batch is not None
            if step + 1 < self.steps:
                self._next = epoch, step + 1
            elif not self.sampler.weights:
                self._next = epoch + 1, 0
            # Otherwise image weights may change before the next epoch, so nothing is prefetched beyond this step.
            yield batch

    def names_of(self, epoch: int, step: int) -> list[str]:
        """Return the names of a step's images on all ranks."""
        batches, _ = self.sampler.batches(epoch)
        return [self._collate.dataset.name(k) for k in batches[step].tolist()]


def on_side_stream(batches: Iterator[TrainBatchType], stream: torch.cuda.Stream) -> Iterator[TrainBatchType]:
    """Yield the batches with images and targets on the stream's GPU, prepared while it computes the last step.

    An epoch must not use a new stream: the memory of a stream's tensors is not reused for those of another.
    """
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    while True:
        with torch.cuda.stream(stream):
            batch = next(batches, None)
            if batch is None:
                return
            images = batch.images.to(stream.device, non_blocking=True)
            targets = {}
            for name, values in batch.targets.items():
                targets[name] = values.to(stream.device, non_blocking=True)
        current.wait_stream(stream)
        for tensor in (images, *targets.values()):
            tensor.record_stream(current)  # its memory is reused only after the step
        yield replace(batch, images=images, targets=targets)


class EvalLoader(BatchLoader[BatchType]):
    """Validation dataloader of one rank: the same batches in every pass."""

    def __init__(
        self, collate: Collate[BatchType], specs: list[BatchSpec], workers: int, local_size: int
    ) -> None:
        self._all = specs
        largest = max((len(spec.ids) * spec.shape[0] * spec.shape[1] for spec in specs), default=1)
        super().__init__(collate, min(workers, len(specs)), largest, local_size)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[BatchType]:
        self.start(self._all)
        while (batch := self.take()) is not None:
            yield batch


@contextlib.contextmanager
def seeded_rng(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Seed torch's CPU generator from (seed, epoch, image), and restore its state on exit."""
    word = np.random.SeedSequence([IMAGE, seed, epoch, index]).generate_state(1)[0]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(word))
        yield
