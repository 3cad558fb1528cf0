"""The course of a training: epochs, validation, checkpoints, and what happens when it is stopped or goes wrong."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer import callback, contract, dist
from trainer.config import Settings
from trainer.data import start_forkserver
from trainer.data.dataset import fingerprint_of
from trainer.data.faults import note_left_out
from trainer.data.picture_cache import picture_folders
from trainer.errors import TrainerError
from trainer.events import Events
from trainer.heap import keep_freed_memory
from trainer.tasks import Scores
from trainer.training import memory, results, resume
from trainer.training.record import Record
from trainer.training.run import NotFinite, Run
from trainer.training.signals import StopSignals, ignored
from trainer.training.watchdog import Watchdog
from trainer.weights import checkpoint

MAX_SKIPPED = 3  # batches that --on-nan skip leaves out before it gives up


def train(settings: Settings) -> None:
    """Train as told; raises TrainerError for anything that the user can put right, Stopped after a signal."""
    events = Events(os.environ)
    world = dist.world_of(os.environ)
    heard = callback.load(settings.callback) if settings.callback else None
    if heard and world.rank == 0:
        events.listener = functools.partial(callback.tell, heard)
    device = dist.pick_device(settings.device, world, several=settings.parallel == "dp")
    dist.limit_threads(world)
    if device.type == "cpu":
        keep_freed_memory()
    begin = time.monotonic()
    run = Run(settings, world, device, events)
    with ignored():  # a signal to the whole group is this process's to answer, not its loading processes'
        start_forkserver(run.workers > 0)
    with dist.meeting(world, device):
        backend = dist.join(world, device)
        run.agree_on_precision()
    parameters = sum(p.numel() for p in run.model.parameters())
    met = {"world_size": world.size, "backend": backend or "none", "device": device.type, "parameters": parameters}
    events.emit(contract.READY, rank=world.rank, **met)
    store = dist.second_store()
    with StopSignals(store) as signals:
        with Watchdog(world, settings.stall_s, events, store) as watchdog:
            course = Course(run, _agreed_folder(settings, world), signals, watchdog)
            course.begin()
            _introduce(run, backend)
            course.run_epochs()
        dist.barrier()  # rank 0's process hosts the store: no other rank's heartbeat may use it any more
        if world.rank == 0:  # unwatched: the other ranks end meanwhile
            results.finish(run, time.monotonic() - begin)
        # Not after an error: where a rank is lost, leaving in good order can wait for it.
        dist.leave()


def _agreed_folder(settings: Settings, world: dist.World) -> Path:
    """The run's folder: the launcher's on each node, else one that rank 0 makes; if one cannot, all ranks stop."""
    folder, error = None, None
    launched = bool(os.environ.get(contract.RUN_DIR))
    if launched or world.rank == 0:
        try:
            if settings.resume and not launched:
                folder = resume.find(settings.resume, settings.project)
                checkpoint.check_writable(folder)
            else:
                folder = checkpoint.make_run_dir(os.environ, settings.project, settings.name, settings.exist_ok)
        except TrainerError as found:
            error = found
    dist.agree(error)
    first = dist.broadcast(folder)
    return folder or first


def _introduce(run: Run, backend: str) -> None:
    parameters = sum(p.numel() for p in run.model.parameters())
    size = run.world.size
    ranks = f"{size} rank{'s' if size > 1 else ''} over {backend}" if backend else "1 process"
    kind = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[run.dtype]
    s = run.settings
    run.screen.say(
        f"{s.data}: {len(run.task.names)} classes, {parameters:,} parameters, {ranks} on {run.device.type}, "
        f"{kind}, {s.imgsz} px, batch {s.batch}, {run.train.steps} steps an epoch"
        + ("" if run.events.listening else f" -> {run.folder}")
    )


def _check_same_data(run: Run) -> str:
    """An error on all ranks where they have not the same pictures and boxes: a half-copied set on one machine.

    Gives what the training set's can be known by.
    """
    sets = {"training": run.task.train_set, "validation": run.task.val_set}
    mine = {kind: (fingerprint_of(data), len(data)) for kind, data in sets.items()}
    everyone = dist.all_gather(mine)
    for rank, other in enumerate(everyone):
        for kind in sets:
            if other[kind] != everyone[0][kind]:
                counts = f"{other[kind][1]} {kind} pictures, rank 0 has {everyone[0][kind][1]}"
                raise TrainerError(
                    f"--data {run.settings.data} is not the same everywhere: rank {rank} has {counts}"
                    + ("; their boxes or sizes differ" if other[kind][1] == everyone[0][kind][1] else ""),
                    "copy the set anew to that machine, and compare: trainer data check --data ...",
                )
    return mine["training"][0]


class Course:
    """Runs the epochs of one training and keeps its checkpoints."""

    def __init__(self, run: Run, folder: Path, signals: StopSignals, watchdog: Watchdog) -> None:
        self.run, self.signals, self.watchdog = run, signals, watchdog
        run.folder = folder
        self.every = Every(run.settings.save_every)
        self.last: dict[str, Any] | None = None  # the last checkpoint, for --on-nan skip

    def begin(self) -> None:
        """Start the run, from a checkpoint where it is to go on."""
        run, s = self.run, self.run.settings
        resume.check_same_everywhere(s)
        was_there = run.folder.exists()
        self.data = _check_same_data(run)
        # Not before all have come here: a machine that shares the disk would find it there already.
        if dist.together() and run.world.local_rank == 0:
            run.folder.mkdir(parents=True, exist_ok=True)
        # Where the nodes have no common disk, each keeps a complete checkpoint: any of them may be the one left.
        self.writes = resume.is_writer(run.folder, run.world)
        goes_on = resume.asked(s.resume, os.environ)
        if not (goes_on or s.exist_ok or os.environ.get(contract.RUN_DIR)):
            another = self.writes and run.world.rank and was_there
            text = f"{run.folder} is there already: rank 0 has made a new one of that name on its machine"
            dist.agree(TrainerError(text, "give the run a --name of its own") if another else None)
        if self.writes:
            resume.discard_unfinished(run.folder)
            if not goes_on and (kept := resume.set_aside(run.folder)):
                run.screen.say(f"{run.folder}: begins anew; the last checkpoint that was there is now {kept}")
        content = None
        if goes_on:
            content = resume.newest_of_all(run.folder)
            if not content and s.resume:  # under a launcher every job has a folder of its own
                content = resume.newest_of_all(Path(s.resume))
                if not content:
                    raise TrainerError(f"--resume: no complete checkpoint in {s.resume}", "start without --resume")
                if self.writes:
                    resume.bring_best(Path(s.resume), run.folder)
            if not content:
                run.screen.say(f"attempt {os.environ[contract.ATTEMPT]}: no checkpoint yet, from the beginning")
        if content:
            resume.check_same(content, s, self.data)
        run.start(going_on=bool(content))
        if s.cache:
            threads = max(1, dist.usable_cores() // run.world.local_size)
            run.train.cache(s.cache, picture_folders(s.data), run.world, dist.all_gather, threads)
        if self.writes:
            for line in note_left_out(run.task.left_out, run.folder):
                run.screen.say(line)
        if content:
            run.restore(content)
            resume.share_best(run.folder / resume.BEST, run.at.best_epoch, self.writes)
        if self.writes:
            results.write_table(run.history, run.folder / "results.csv")
            resume.discard_after(run.folder / "steps.csv", run.known)
        if content:
            run.screen.say(f"goes on in epoch {run.at.epoch + 1} after step {run.at.step} of {run.train.steps}")
        if run.world.rank == 0:
            run.record = Record(run.folder, run.task, run.at.epoch + 1)
            if not content:
                run.record.begin()
        if s.on_nan == "skip":
            self.last = checkpoint.copied(run.state())
        logs = s.log_steps and run.world.rank == 0
        self.steps = results.StepLog(run.folder / "steps.csv", run.task.terms) if logs else None

    def run_epochs(self) -> None:
        """Train until the last epoch, or until the score has not risen for --patience epochs."""
        run, s = self.run, self.run.settings
        while run.at.epoch < s.epochs and not self._no_better():
            try:
                scores, losses, rate = self._epoch()
            except NotFinite as error:
                self._not_finite(error.number)
                continue
            shares = dist.all_gather({**run.clock.shares(), "seconds": run.clock.seconds(), "images_per_s": rate})
            best = scores is not None and scores.fitness > run.at.best
            if scores and best:
                if run.record:
                    run.record.best(run.metric, scores)
                run.at.best, run.at.best_epoch = scores.fitness, run.at.epoch
                run.at.best_scores = {k: v for k, v in scores.columns().items() if k in run.task.headlines}
            if scores:
                run.weigh(scores.by_class(run.task.names))
            results.report(run, losses, scores, shares)
            if self.writes:
                results.write_table(run.history, run.folder / "results.csv")
            ended = run.at.epoch
            run.begin_epoch()
            self._save(
                best=best or (not s.val and run.at.epoch == s.epochs),
                keep=f"epoch{ended + 1}.pt" if s.save_period and not (ended + 1) % s.save_period else "",
            )
            self._stop_if_told(dist.any_rank(bool(self.signals.received)))

    def _no_better(self) -> bool:
        """Whether the score has not risen for --patience epochs; a run that goes on after the last one ends, too."""
        at, s = self.run.at, self.run.settings
        scored = s.val and at.epoch and not at.step and at.epoch % s.val_period == 0
        if not (s.patience and scored and at.epoch - 1 - at.best_epoch >= s.patience):
            return False
        self.run.screen.say(
            f"no better score for {s.patience} epochs (--patience): the best was epoch {at.best_epoch + 1}"
        )
        return True

    def _epoch(self) -> tuple[Scores | None, list[float], float]:
        """The rest of the running epoch: its scores, mean losses and images per second."""
        run = self.run
        run.clock.restart()
        losses, rate = self._train_epoch()
        with run.clock.spending("val"), self.watchdog.during("validation"):
            run.average_statistics()
            if run.validates:
                self._save()  # a signal during the validation costs that alone
                scores = run.validate(self._until_told(run.val))
                self._stop_if_told(dist.any_rank(bool(self.signals.received)))
            else:
                scores = None
        return scores, losses.tolist(), rate

    def _until_told(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, until any rank is told to stop: a validation can take longer than the grace."""
        for batch in batches:
            if self.signals.received_anywhere():
                return
            self.watchdog.moved()
            yield batch

    def _train_epoch(self) -> tuple[Tensor, float]:
        run = self.run
        at, steps = run.at, run.train.steps
        run.net.train()
        run.screen.begin_epoch(at.epoch + 1, run.settings.epochs, steps)
        begin, images, stopping, saving = time.perf_counter(), at.images, False, False
        for batch in self._batches():
            if run.number in at.skipped:
                at.step += 1
                continue
            if run.record and run.number == 0:
                run.record.first_batch(batch)
            try:
                told = run.step(batch, bool(self.signals.received), self.every.due(run.number))
            except (RuntimeError, MemoryError) as error:
                if not memory.is_out_of_memory(error):
                    raise
                raise memory.step_error(run, batch) from None
            self.watchdog.step(run.number)
            if run.looks(at.step):
                run.check_finite()
            self._log(run.before_of + 1, run.before)
            stopping, saving = stopping or told.stop, saving or told.save
            saving = saving and not (at.step == steps and run.validates)  # the epoch's end is saved in a moment
            if (stopping or saving) and told.moved:  # in between there are gradients that a checkpoint does not hold
                self._save()
                self._stop_if_told(stopping)
                saving = False
            self._tell(time.perf_counter() - begin, at.images - images)
        last = run.flush()
        self._log(run.pending_of + 1, last)
        return (run.total + last) / steps, (at.images - images) / max(time.perf_counter() - begin, 1e-9)

    def _batches(self) -> Iterator[Any]:
        batches = self.run.clock.waiting(self.run.train.epoch(self.run.at.epoch, self.run.at.step))
        while True:
            with self.watchdog.during("loading"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _log(self, number: int, terms: Tensor) -> None:
        """Log the step whose terms are now known: the last one that the sum over the ranks has reached."""
        if self.steps and number > self.run.at.epoch * self.run.train.steps:
            self.steps.write(number, terms.tolist())

    def _tell(self, seconds: float, images: int) -> None:
        run, at = self.run, self.run.at
        if not run.looks(at.step) or at.step < 2:  # a step's loss is known at the next one
            return
        told: dict[str, Any] = {
            "epoch": at.epoch + 1,
            "epochs": run.settings.epochs,
            "step": at.step,
            "steps": run.train.steps,
            "loss": float(run.before.sum()),
            "images_per_s": images / seconds,
            "eta_s": (run.train.steps - at.step) * seconds * run.settings.batch / max(images, 1),
        }
        run.events.progress(**told)
        run.screen.progress(**told)

    def _save(self, best: bool = False, keep: str = "") -> None:
        run = self.run
        with self.watchdog.during("checkpoint"):
            content = {**run.state(), "data": self.data}
            self.every.saved(run.number)
            if run.settings.on_nan == "skip":
                self.last = checkpoint.copied(content)
            if self.writes:
                # last.pt at the end: who is killed in between does this epoch's end again, with its best.pt
                for name in ([resume.BEST] if best else []) + ([keep] if keep else []):
                    checkpoint.save(run.folder / name, content)
                path = resume.write(run.folder, content)
                run.events.emit(contract.CHECKPOINT, path=str(path), epoch=run.at.epoch, step=run.number)
            dist.barrier()  # a rank that ends now must not take the others down before they have written

    def _stop_if_told(self, stop: bool) -> None:
        if stop:
            raise self.signals.stopped()

    def _not_finite(self, number: int) -> None:
        """Say which batch it was, and stop or go back to the last checkpoint and leave that batch out."""
        run = self.run
        epoch, step = divmod(number, run.train.steps)
        names = run.train.names_of(epoch, step)
        some = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        what = f"the loss is no longer finite (epoch {epoch + 1}, step {step + 1}; the batch: {some})"
        hint = "lower lr0 in --hyp, use --precision fp32, or leave such batches out with --on-nan skip"
        if run.settings.on_nan == "stop":
            raise TrainerError(what, hint)
        if self.last is None or len(run.at.skipped) >= MAX_SKIPPED:
            raise TrainerError(what + f"; {len(run.at.skipped)} batches were already left out", hint)
        skipped = (*run.at.skipped, number)
        run.restore(self.last)
        run.at.skipped = skipped
        if self.writes:
            resume.discard_after(run.folder / "steps.csv", run.known)
        run.screen.say(f"{what}: back to step {run.number}, without that batch")


class Every:
    """When the next checkpoint is due, by --save-every: so many seconds or so many steps."""

    def __init__(self, seconds_or_steps: tuple[float, int]) -> None:
        self._seconds, self._steps = seconds_or_steps
        self._at, self._number = time.monotonic(), -1

    def due(self, number: int) -> bool:
        """Whether it is, once step `number` is done."""
        if self._number < 0:
            self._number = number
        return (self._seconds > 0 and time.monotonic() - self._at >= self._seconds) or (
            self._steps > 0 and number + 1 - self._number >= self._steps
        )

    def saved(self, number: int) -> None:
        """A checkpoint holds the first `number` steps."""
        self._at, self._number = time.monotonic(), number
