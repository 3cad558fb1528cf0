"""Measures one point of a benchmark: real steps and a real validation of a training on ranks of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import platform
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer import contract, dist
from trainer.bench.memory import device_bytes, host_bytes
from trainer.config import Settings
from trainer.data import Batch, start_forkserver
from trainer.data.picture_cache import picture_folders
from trainer.data.shared_memory import PREFETCH
from trainer.errors import TrainerError
from trainer.events import Events
from trainer.heap import keep_freed_memory
from trainer.ranks import Line, error_of, run_ranks
from trainer.training.memory import HINT, is_out_of_memory
from trainer.training.run import Run
from trainer.verify import settings_from
from trainer.weights import checkpoint

SECONDS = 5.0  # of steps, where their number is not given
FEWEST, MOST = 4, 500  # steps that these seconds may come to
ENDLESS = 1_000_000  # epochs
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Effort:
    """How a point is measured."""

    warmup: int = 3  # first steps, which do not count; with workers also those that use up what they made ahead
    steps: int = 0  # that count; 0: as many as take SECONDS
    threads: int = 1  # of each rank
    loader: bool = False  # also the loader by itself


@dataclass(frozen=True)
class Measured:
    """What all ranks together did; rates are of the steps that count."""

    images_per_s: float
    val_images_per_s: float | None  # None without validation
    step_images: float  # pictures of a step, on all ranks
    steps: int  # that were counted
    epoch_steps: int
    train_images: int  # of the data set
    val_images: int
    val_counted: int  # pictures that the validation was timed on
    device_bytes: int | None  # the most that a rank took; None on a CPU
    host_bytes: int  # of all ranks and their workers
    shares: dict[str, float]  # of the counted seconds, the ranks' mean: data, transfer, compute, sync
    workers: int  # of each rank
    device: str
    precision: str  # that the network computed in
    loader_images_per_s: float | None = None  # of the loader by itself

    @property
    def train_s(self) -> float:
        """Seconds of an epoch's training, at the measured rate."""
        return self.train_images / self.images_per_s

    @property
    def val_s(self) -> float | None:
        """Seconds of an epoch's validation, at the measured rate."""
        return self.val_images / self.val_images_per_s if self.val_images_per_s else None

    @property
    def extrapolated(self) -> bool:
        """Whether an epoch is longer than what was measured of it."""
        return self.steps < self.epoch_steps or (self.val_s is not None and self.val_counted < self.val_images)


class NoMemory(TrainerError):
    """A point does not fit into memory."""


def measure(settings: Settings, ranks: int, effort: Effort) -> Measured:
    """Train as `settings` says on `ranks` ranks of this machine for a few steps, validate, and time both.

    Raises NoMemory where that does not fit, TrainerError as a rank does. Ctrl-C ends the ranks.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        asked, answer = Path(folder) / "asked.json", Path(folder) / "answer.json"
        content = {"settings": dataclasses.asdict(settings), "effort": dataclasses.asdict(effort)}
        asked.write_text(json.dumps(content), encoding="utf-8")
        run_recorded(["bench", "scaling", "--record", f"{asked},{answer}"], ranks, effort.threads)
        return Measured(**json.loads(answer.read_text(encoding="utf-8")))


def run_recorded(arguments: list[str], ranks: int, threads: int) -> None:
    """Run ranks whose output is for nobody, `threads` threads each; raises NoMemory or TrainerError if they fail."""
    said: list[Line] = []
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CLUSTER_")}
    environment |= {contract.JOB_ID: "bench", "OMP_NUM_THREADS": str(threads)}  # events tell a rank's error
    failed = run_ranks(arguments, ranks, environment, said.append)
    if -signal.SIGKILL in failed.values():
        raise NoMemory(f"{OUT_OF_MEMORY}, it seems: the system has killed a rank")
    if failed:
        error = error_of(failed, said)
        raise NoMemory(error.message, error.hint) if error.message.startswith(OUT_OF_MEMORY) else error


def record(asked: Path, answer: Path) -> None:
    """What one rank does; rank 0 writes what all have measured."""
    content: dict[str, Any] = json.loads(asked.read_text(encoding="utf-8"))
    effort = Effort(**content["effort"])
    with short_memory_said():
        run = begin(settings_from(content["settings"]), effort.threads)
        found = time_run(run, effort)
    ranks = dist.all_gather(found)
    if run.world.rank == 0:
        on_device = [r["device_bytes"] for r in ranks if r["device_bytes"] is not None]
        together = {
            **found,
            "val_counted": sum(r["val_counted"] for r in ranks),
            "val_images_per_s": found["val_images_per_s"] and sum(r["val_images_per_s"] for r in ranks),
            "device_bytes": max(on_device, default=None),
            "host_bytes": sum(r["host_bytes"] for r in ranks),
            "shares": {k: sum(r["shares"][k] for r in ranks) / len(ranks) for k in found["shares"]},
        }
        checkpoint.write_bytes(answer, json.dumps(together).encode())
    dist.leave()


@contextlib.contextmanager
def short_memory_said() -> Iterator[None]:
    """Inside, what torch or Python says when it runs out of memory becomes a TrainerError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainerError(OUT_OF_MEMORY, HINT) from None


def begin(settings: Settings, threads: int) -> Run:
    """A training that has met its ranks and is about to take its first step; nothing is written anywhere.

    It has no warm-up, in which gradients are gathered over fewer steps than later, and rates at which its weights
    hardly move: the cost is the same, and an untrained network does not get out of hand. Its end is far away, so that
    small sets do not come to the epochs in which something is different.
    """
    hyp = dataclasses.replace(settings.hyp, warmup_epochs=0.0, lr0=1e-9)
    settings = dataclasses.replace(settings, hyp=hyp, epochs=ENDLESS, unfreeze=0)
    world = dist.world_of(os.environ)
    device = dist.pick_device(settings.device, world, several=settings.parallel == "dp")
    torch.set_num_threads(threads)
    if device.type == "cpu":
        keep_freed_memory()
    run = Run(settings, world, device, Events({}))
    if settings.batch > len(run.task.train_set):
        raise TrainerError(f"there are only {len(run.task.train_set)} training pictures for a step of {settings.batch}")
    start_forkserver(run.workers > 0)
    dist.join(world, device)
    run.agree_on_precision()
    run.start(going_on=True)  # with the anchors of the model file
    if settings.cache:
        run.train.cache(settings.cache, picture_folders(settings.data), world, dist.all_gather, threads)
    run.net.train()
    return run


def steps_of(run: Run) -> Iterator[Batch]:
    """The batches of a training without end."""
    while True:
        yield from run.train.epoch(run.at.epoch, run.at.step)
        run.begin_epoch()


def time_run(run: Run, effort: Effort) -> dict[str, Any]:
    """This rank's part of a Measured. A collective."""
    coming = run.clock.waiting(steps_of(run))
    ahead = PREFETCH * run.workers
    loading = None
    if effort.loader:
        for _ in range(1 + ahead):
            next(coming)
        loading, *_ = _taken(run, coming, effort.steps, lambda _: None, 1)
    for _ in range(effort.warmup + ahead):
        run.step(next(coming))
    rate, images, steps = _taken(run, coming, effort.steps, run.step, run.schedule.accumulate)
    found: dict[str, Any] = {
        "images_per_s": rate,
        "loader_images_per_s": loading,
        "step_images": images / steps,
        "steps": steps,
        "epoch_steps": run.train.steps,
        "train_images": len(run.task.train_set),
        "shares": {k: v for k, v in run.clock.shares().items() if k != "val"},
        "host_bytes": host_bytes(),  # while the workers live
        "workers": run.workers,
        "device": device_name(run.device),
        "precision": {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(run.dtype, "fp32"),
        "val_images": len(run.task.val_set),
        "val_images_per_s": None,
        "val_counted": 0,
    }
    if run.settings.val:
        found |= _time_validation(run, effort)
    found["host_bytes"] = max(found["host_bytes"], host_bytes())
    return {**found, "device_bytes": device_bytes(run.device)}


def _taken(
    run: Run, coming: Iterator[Batch], steps: int, use: Callable[[Batch], object], multiple: int
) -> tuple[float, int, int]:
    """Pictures per second, pictures and steps of the next `steps` batches, or of as many as take SECONDS.

    Those are a multiple of `multiple`, so that the weights move as often as in the rest of the training.
    """
    pilot = steps or _rounded_up(max(FEWEST, 2 * run.workers), multiple)
    images, taken, wanted = 0, 0, pilot
    dist.barrier()
    begun = _now(run)
    run.clock.restart()
    while taken < wanted:
        batch = next(coming)
        images += batch.global_size
        use(batch)
        taken += 1
        if taken == pilot and not steps:  # all ranks go on for as long as rank 0 finds right
            whole = pilot * SECONDS / (_now(run) - begun)
            wanted = dist.broadcast(_rounded_up(max(pilot, min(int(whole), MOST)), multiple))
    return images / (_now(run) - begun), images, taken


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _time_validation(run: Run, effort: Effort) -> dict[str, Any]:
    run.average_statistics()
    run.validate(itertools.islice(run.val, 1))
    counted = 0

    def counting() -> Iterator[Any]:
        nonlocal counted
        for number, batch in enumerate(run.val, start=1):
            counted += len(batch.images)
            yield batch
            if number == effort.steps or (not effort.steps and number >= FEWEST and _now(run) - begun > SECONDS):
                return

    dist.barrier()
    begun = _now(run)
    run.validate(counting())
    return {"val_counted": counted, "val_images_per_s": counted / (_now(run) - begun)}


def _now(run: Run) -> float:
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    return time.perf_counter()


def device_name(device: torch.device) -> str:
    """What the device is called by its maker."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
