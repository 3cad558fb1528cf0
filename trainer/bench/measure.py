"""Measurement of one benchmark point: steps and validation of a real training."""

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.bench.processes import Runner, request_of, run_here
from trainer.config import Settings, traits_of
from trainer.data.batch import TrainBatch
from trainer.data.cache.image_cache import image_folders
from trainer.data.loading.dataloader import PREFETCH, start_forkserver
from trainer.distributed import comm
from trainer.engine.events import Events
from trainer.engine.memory import keep_freed_memory
from trainer.engine.trainer import Trainer
from trainer.errors import TrainerError

SECONDS = 5.0  # of steps, if their number is not given
FEWEST = 4  # limits of the number of these steps
MOST = 500
ENDLESS = 1_000_000  # epochs


@dataclass(frozen=True)
class Effort:
    """Number of steps and threads of a measurement."""

    warmup: int = 3  # steps before the measurement; with workers, plus the prefetched batches
    steps: int = 0  # measured steps; 0: as many as take SECONDS
    threads: int = 1  # per rank
    loader: bool = False  # also measure the dataloader alone


@dataclass(frozen=True)
class Measurement:
    """Result of all ranks together. Rates are of the measured steps."""

    train_images_per_s: float
    val_images_per_s: float | None  # None without validation
    images_per_step: float  # over all ranks
    steps: int  # measured
    epoch_steps: int
    train_images: int  # of the data set
    val_images: int
    val_counted: int  # images in the timed validation
    device_bytes: int | None  # maximum over the ranks; None on a CPU
    host_bytes: int  # sum over the ranks and their workers
    data_share: float  # of the measured time, mean over the ranks: waiting for data
    sync_share: float  # the same: communication
    workers: int  # per rank
    device: str
    precision: str  # of the forward pass
    loader_images_per_s: float | None = None  # of the dataloader alone

    @property
    def train_epoch_s(self) -> float:
        """Seconds of an epoch's training at the measured rate."""
        return self.train_images / self.train_images_per_s

    @property
    def val_epoch_s(self) -> float | None:
        """Seconds of an epoch's validation at the measured rate."""
        return self.val_images / self.val_images_per_s if self.val_images_per_s else None


def threads_of(device: str, ranks: int) -> int:
    """Return the CPU threads per rank of a training on --device, with `ranks` ranks on this machine."""
    return 1 if comm.gpu_numbers(device) else max(1, comm.usable_cores() // ranks)


def measure(settings: Settings, ranks: int, effort: Effort, run: Runner = run_here) -> Measurement:
    """Time a few training steps and a validation of `settings` on `ranks` ranks.

    Raises NoMemory if a rank runs out of memory, and TrainerError for any other failure. Ctrl-C stops the ranks.
    """
    request = request_of("measure", settings, **dataclasses.asdict(effort))
    return Measurement(**run(request, ranks))


def record(settings: Settings, **effort: Any) -> dict[str, Any]:
    """Run one rank of `measure`, and return the measurement of all ranks."""
    run = start_trainer(settings, effort["threads"])
    own = time_run(run, Effort(**effort))
    ranks = comm.all_gather(own)
    val_rate = own["val_images_per_s"]  # None without validation
    if val_rate:
        val_rate = sum(rank["val_images_per_s"] for rank in ranks)
    on_device = [rank["device_bytes"] for rank in ranks if rank["device_bytes"] is not None]
    return {
        **own,
        "val_counted": sum(rank["val_counted"] for rank in ranks),
        "val_images_per_s": val_rate,
        "device_bytes": max(on_device, default=None),
        "host_bytes": sum(rank["host_bytes"] for rank in ranks),
        "data_share": sum(rank["data_share"] for rank in ranks) / len(ranks),
        "sync_share": sum(rank["sync_share"] for rank in ranks) / len(ranks),
    }


def start_trainer(settings: Settings, threads: int) -> Trainer:
    """Return a training that has joined its ranks and is ready for its first step. It writes no files.

    It has no warm-up, which would change the gradient accumulation, and a learning rate near zero, so that an
    untrained network does not diverge. It has so many epochs that it never reaches the last ones, which differ.
    """
    hyp = dataclasses.replace(settings.hyp, warmup_epochs=0.0, lr0=1e-9)
    settings = dataclasses.replace(settings, hyp=hyp, epochs=ENDLESS, unfreeze=0)
    world = comm.world_of(os.environ)
    one_process = traits_of(settings.parallel).one_process
    device = comm.pick_device(settings.device, world, several=one_process)
    torch.set_num_threads(threads)
    if device.type == "cpu":
        keep_freed_memory()
    run = Trainer(settings, world, device, Events({}))
    images = len(run.task.train_set)
    if settings.batch > images:
        raise TrainerError(f"batch {settings.batch} is larger than the {images} training images")
    start_forkserver(run.workers > 0)
    comm.join(world, device)
    run.agree_on_precision()
    run.start(resuming=True)  # keeps the anchors of the model file
    folders = image_folders(settings.data)
    run.train_loader.cache(settings.cache, folders, world, comm.all_gather, _decoders(world), lambda _: None)
    run.local_model.train()
    return run


def steps_of(run: Trainer) -> Iterator[TrainBatch]:
    """Yield the batches of an endless training."""
    while True:
        yield from run.batches()
        run.begin_epoch()


def warm_up(run: Trainer, batches: Iterator[TrainBatch], steps: int) -> None:
    """Train the first steps, then decode the images that later epochs find in the cache (--cache). A collective."""
    for _ in range(steps):
        run.step(next(batches))
    run.train_loader.fill_cache(run.world, comm.all_gather, _decoders(run.world))


def _decoders(world: comm.World) -> int:
    return max(1, comm.usable_cores() // world.local_size)


def time_run(run: Trainer, effort: Effort) -> dict[str, Any]:
    """Return this rank's fields of a Measurement. A collective."""
    batches = run.timer.waiting(steps_of(run))
    ahead = PREFETCH * run.workers
    warm_up(run, batches, effort.warmup)
    loader_rate = None
    if effort.loader:
        for _ in range(1 + ahead):
            next(batches)
        loader_rate, *_ = _time_batches(run, batches, effort.steps, lambda _: None, 1)
    for _ in range(ahead):
        run.step(next(batches))
    rate, images, steps = _time_batches(run, batches, effort.steps, run.step, run.schedule.accumulate)
    shares = run.timer.shares()
    on_gpu = run.device.type == "cuda"
    device = torch.cuda.get_device_name(run.device) if on_gpu else cpu_name()
    validation = {"val_counted": 0, "val_images_per_s": None}
    if not run.settings.noval:
        validation = _time_validation(run, effort)
    return {
        "train_images_per_s": rate,
        "loader_images_per_s": loader_rate,
        "images_per_step": images / steps,
        "steps": steps,
        "epoch_steps": run.train_loader.steps,
        "train_images": len(run.task.train_set),
        "data_share": shares["data"],
        "sync_share": shares["sync"],
        "workers": run.workers,
        "device": device,
        "precision": {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(run.dtype, "fp32"),
        "val_images": len(run.task.val_set),
        **validation,
        "host_bytes": host_bytes(),
        "device_bytes": torch.cuda.max_memory_reserved(run.device) if on_gpu else None,
    }


def _time_batches(
    run: Trainer,
    batches: Iterator[TrainBatch],
    steps: int,
    use: Callable[[TrainBatch], object],
    multiple: int,
) -> tuple[float, int, int]:
    """Return images per second, images and steps of the next `steps` batches, or of as many as take SECONDS.

    Their number is a multiple of `multiple`, so that the share of steps with an update is the same as in training.
    """
    pilot = steps or _rounded_up(max(FEWEST, 2 * run.workers), multiple)
    images = 0
    taken = 0
    wanted = pilot
    comm.barrier()
    begun = comm.now(run.device)
    run.timer.restart()
    while taken < wanted:
        batch = next(batches)
        images += batch.global_size
        use(batch)
        taken += 1
        if taken == pilot and not steps:  # rank 0 decides for all ranks
            steps_in_time = int(pilot * SECONDS / (comm.now(run.device) - begun))
            own_wanted = _rounded_up(max(pilot, min(steps_in_time, MOST)), multiple)
            wanted = comm.broadcast(own_wanted)
    return images / (comm.now(run.device) - begun), images, taken


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _time_validation(run: Trainer, effort: Effort) -> dict[str, Any]:
    run.average_statistics()
    run.validate(itertools.islice(run.evaluator.loader, 1))
    counted = 0

    def counting() -> Iterator[Any]:
        nonlocal counted
        for number, batch in enumerate(run.evaluator.loader, start=1):
            counted += len(batch.images)
            yield batch
            if effort.steps:
                is_enough = number == effort.steps
            else:
                is_enough = number >= FEWEST and comm.now(run.device) - begun > SECONDS
            if is_enough:
                return

    comm.barrier()
    begun = comm.now(run.device)
    run.validate(counting())
    seconds = comm.now(run.device) - begun
    return {"val_counted": counted, "val_images_per_s": counted / seconds}


def cpu_name() -> str:
    """Return the processor's model name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def host_bytes() -> int:
    """Return the peak resident bytes of this process and its workers, shared pages in each; 0 without /proc."""
    workers = [worker.pid for worker in multiprocessing.active_children()]
    total = 0
    for process in (os.getpid(), *workers):
        with contextlib.suppress(OSError):  # it has exited meanwhile
            for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
    return total
