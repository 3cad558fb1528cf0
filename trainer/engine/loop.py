"""Training loop: epochs, validation, checkpoints, stop signals, and non-finite losses."""

import contextlib
import functools
import os
import shlex
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer import contract
from trainer.config import Settings, traits_of
from trainer.config.faults import note_left_out
from trainer.config.settings import interval
from trainer.data.batch import TrainBatch
from trainer.data.cache.image_cache import image_folders
from trainer.data.dataset import fingerprint_of
from trainer.data.loading.dataloader import start_forkserver
from trainer.distributed import comm, neighbours
from trainer.engine import callbacks, checkpoints, memory, results
from trainer.engine.events import Events
from trainer.engine.heartbeats import texts_of
from trainer.engine.run_logger import RunLogger
from trainer.engine.signals import StopSignals, ignored
from trainer.engine.state import NotFinite
from trainer.engine.trackers import Tracker
from trainer.engine.trainer import Trainer
from trainer.engine.watchdog import Watchdog
from trainer.errors import TrainerError
from trainer.tasks import Scores
from trainer.weights import checkpoint_file
from trainer.weights.checkpoint import RunCheckpoint, RunState

MAX_SKIPPED = 3  # batches that --on-nan skip may leave out
MOST_NAMES = 8  # of images in an error
# Steps between two reads of the loss on the host, which synchronize a GPU.
READBACK_EVERY = {"cpu": 1, "cuda": 20}


def train(settings: Settings) -> None:
    """Train; raise TrainerError for invalid input, Stopped after a signal."""
    events = Events(os.environ)
    world = comm.world_of(os.environ)
    callback = callbacks.load(settings.callback) if settings.callback else None
    if callback and world.rank == 0:
        events.listener = functools.partial(callbacks.dispatch, callback)
    device = comm.pick_device(settings.device, world, several=traits_of(settings.parallel).one_process)
    comm.limit_threads(world, device)
    if device.type == "cpu":
        memory.keep_freed_memory()
    begin = time.monotonic()
    training = Trainer(settings, world, device, events)
    with ignored():  # dataloader workers must survive a signal to the whole process group
        start_forkserver(training.workers > 0)
    with comm.rendezvous_errors(world, device):
        backend = comm.join(world, device)
        training.agree_on_precision()
    parameters = sum(p.numel() for p in training.model.parameters())
    fields = {
        "world_size": world.size,
        "backend": backend or "none",
        "device": device.type,
        "parameters": parameters,
    }
    events.emit(contract.READY, rank=world.rank, **fields)
    store = comm.connect_store()
    near = neighbours.find(world, texts_of(world.size))
    signals = StopSignals(store)
    with signals.handled():
        with Watchdog(world, settings.stall_timeout, events, store, near) as watchdog:
            loop = TrainLoop(training, _make_run_dir(settings, world), signals, watchdog)
            loop.begin()
            _print_summary(training, loop.results.run_dir, backend, parameters)
            loop.run_epochs()
        comm.barrier()  # rank 0 hosts the store, and may exit once no heartbeat uses it
        if world.rank == 0:  # outside the watchdog, because the other ranks exit meanwhile
            results.finish(loop.results, training, time.monotonic() - begin)
        # Not after an error: leaving the group can wait for a rank that is lost.
        comm.leave()


def _make_run_dir(settings: Settings, world: comm.World) -> Path:
    """Return the launcher's folder of each node, else a new one of rank 0; an error stops all ranks."""
    run_dir = None
    error = None
    launched = bool(os.environ.get(contract.RUN_DIR))
    if launched or world.rank == 0:
        try:
            if settings.resume and not launched:
                run_dir = checkpoints.find(settings.resume, settings.project)
                checkpoint_file.check_writable(run_dir)
            else:
                run_dir = checkpoint_file.make_run_dir(
                    os.environ, settings.project, settings.name, settings.exist_ok
                )
        except TrainerError as found:
            error = found
    comm.raise_on_all_ranks(error)
    first = comm.broadcast(run_dir)
    return run_dir or first


def _print_summary(training: Trainer, run_dir: Path, backend: str, parameters: int) -> None:
    s = training.settings
    size = training.world.size
    ranks = f"{size} rank{'s' if size > 1 else ''} over {backend}" if backend else "1 process"
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[training.dtype]
    model = f"{len(training.task.names)} classes, {parameters:,} parameters"
    steps = f"{s.imgsz} px, batch {s.batch}, {training.train_loader.steps} steps an epoch"
    folder = "" if training.events.launched else f" -> {run_dir}"
    text = f"{s.data}: {model}, {ranks} on {training.device.type}, {precision}, {steps}{folder}"
    training.display.print(text)


def _check_same_data(training: Trainer) -> str:
    """Raise TrainerError on all ranks if their images or labels differ; return the training set's fingerprint."""
    sets = {"training": training.task.train_set, "validation": training.task.val_set}
    first, *others = comm.all_gather({kind: (fingerprint_of(data), len(data)) for kind, data in sets.items()})
    for rank, other in enumerate(others, 1):
        for kind in sets:
            if other[kind] != first[kind]:
                raise TrainerError(
                    f"--data {training.settings.data}: rank {rank} has {other[kind][1]} {kind} images, rank 0 has "
                    f"{first[kind][1]}, and their files, sizes or boxes differ",
                    "copy the data set to that machine again, and compare: trainer data check --data ...",
                )
    return str(first["training"][0])


class TrainLoop:
    """Runs the epochs of one training and keeps its checkpoints."""

    def __init__(self, training: Trainer, run_dir: Path, signals: StopSignals, watchdog: Watchdog) -> None:
        self.training = training
        self.signals = signals
        self.watchdog = watchdog
        self.run_dir = run_dir
        self.results = results.Results(run_dir)
        self.saved = time.monotonic(), -1  # time of the last checkpoint and number of its steps
        self.last: RunState | None = None  # the last checkpoint's content, for --on-nan skip

    def begin(self) -> None:
        """Start the run, or resume it from a checkpoint."""
        training = self.training
        s = self.training.settings
        checkpoints.check_same_everywhere(s)
        self.data = _check_same_data(training)
        is_restart = os.environ.get(contract.ATTEMPT, "1") not in ("", "0", "1")  # by a launcher
        resumes = bool(s.resume) or is_restart
        self._take_folder(resumes)
        content = self._checkpoint() if resumes else None
        training.start(resuming=bool(content))
        self._cache_images()
        if self.writes:
            for line in note_left_out(s.data, training.task.left_out, self.run_dir):
                training.display.print(line)
        if content:
            self._restore(content)
        if self.writes:
            self.results.write_table()
            checkpoints.discard_after(self.run_dir / "steps.csv", training.logged_steps)
            results.write_options(self.run_dir / "args.yaml", s)
        if training.world.rank == 0:
            self.results.logger = RunLogger(self.run_dir, training.task, training.state.epoch + 1)
            if not content:
                self.results.logger.begin()
        if s.track:
            self._open_tracker()
        if s.on_nan == "skip":
            self.last = checkpoint_file.copied(self._content())

    def _cache_images(self) -> None:
        """Keep decoded images as --cache says. A collective."""
        training = self.training
        s = training.settings
        threads = max(1, comm.usable_cores() // training.world.local_size)
        folders = image_folders(s.data)
        say = training.display.print
        training.train_loader.cache(s.cache, folders, training.world, comm.all_gather, threads, say)

    def _restore(self, content: RunCheckpoint) -> None:
        """Resume from a checkpoint. A collective."""
        training = self.training
        training.load_state_dict(content)
        self.results.history = list(content["history"])
        best_epoch = training.state.best_epoch + 1 or training.settings.epochs  # with --noval the last one
        checkpoints.share_best(self.run_dir / checkpoints.BEST, best_epoch, self.writes)
        epochs = training.settings.epochs
        if training.state.epoch < epochs:
            step = f"step {training.state.step} of {training.train_loader.steps}"
            training.display.print(f"resuming in epoch {training.state.epoch + 1} after {step}")
        else:
            done = f"epoch {epochs}/{epochs}"
            training.display.print(f"nothing left to train after {done}: only the end of the run is repeated")
        ranks_before = len(content["ranks"])
        _, ranks_now = training.strategy.share
        if ranks_before != ranks_now:
            text = f"the checkpoint was written by {ranks_before} ranks, and this training has {ranks_now}"
            training.display.print(text)

    def _content(self) -> RunState:
        """Return the content of a checkpoint. A collective."""
        return {**self.training.state_dict(), "history": self.results.history, "data": self.data}

    def _open_tracker(self) -> None:
        """Start or continue the run of --track on rank 0. Raise TrainerError on all ranks. A collective."""
        training = self.training
        s = self.training.settings
        kind, run_id = training.state.tracker
        problem = None
        if training.world.rank == 0:
            try:
                run_id = run_id if kind == s.track else ""
                self.results.tracker = Tracker(s, self.run_dir, run_id, len(self.results.history))
            except TrainerError as error:
                problem = error
        comm.raise_on_all_ranks(problem)
        training.state.tracker = (
            s.track,
            comm.broadcast(self.results.tracker.id if self.results.tracker else ""),
        )

    def _take_folder(self, resumes: bool) -> None:
        """Create the folder, choose its writer, and rename the checkpoints of an earlier run in it. A collective."""
        training = self.training
        s = self.training.settings
        folder = self.run_dir
        world = training.world
        existed = folder.exists()
        comm.barrier()  # another node with the same disk must not find the folder in `existed`
        if comm.is_distributed() and world.local_rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
        # Without a shared disk each node writes a complete checkpoint, so that any of them can be lost.
        self.writes = checkpoints.is_writer(folder, world)
        if not (resumes or s.exist_ok or os.environ.get(contract.RUN_DIR)):
            is_other_run = self.writes and world.rank and existed
            text = f"{folder} exists on rank {world.rank}, but is new on rank 0's machine"
            comm.raise_on_all_ranks(TrainerError(text, "choose another --name") if is_other_run else None)
        if self.writes:
            for path in (*folder.glob(".*.pt.*.tmp"), *folder.glob(".common-*")):  # of a killed process
                path.unlink(missing_ok=True)
            if not resumes and (kept := checkpoints.set_aside(folder)):
                training.display.print(f"{folder}: new run; the previous run's checkpoint is now {kept}")

    def _checkpoint(self) -> RunCheckpoint | None:
        """Return the newest checkpoint of the run's folder, else of --resume. A collective."""
        training = self.training
        s = self.training.settings
        content = checkpoints.newest_of_all(self.run_dir)
        if not content and s.resume:  # each job of a launcher has its own folder
            content = checkpoints.newest_of_all(Path(s.resume))
            if not content:
                raise TrainerError(f"--resume {s.resume}: no complete checkpoint", "start without --resume")
            best = Path(s.resume, checkpoints.BEST)
            if self.writes and best.is_file():
                checkpoint_file.write_bytes(self.run_dir / checkpoints.BEST, best.read_bytes())
        if content:
            checkpoints.check_same(content, s, self.data, training.task.cfg)
        else:
            training.display.print(
                f"attempt {os.environ[contract.ATTEMPT]}: no checkpoint yet, starting from epoch 1"
            )
        return content

    def run_epochs(self) -> None:
        """Train until the last epoch, or until early stopping (--patience)."""
        training = self.training
        s = self.training.settings
        while training.state.epoch < s.epochs and not self._stops_early():
            try:
                scores, losses, rate = self._epoch()
            except NotFinite as error:
                self._handle_nonfinite(error.step)
                continue
            times = {**training.timer.shares(), "seconds": training.timer.seconds(), "images_per_s": rate}
            shares = comm.all_gather(times)
            is_best = scores is not None and scores.fitness > training.state.best
            if scores and is_best:
                if self.results.logger:
                    self.results.logger.best(training.evaluator.metric, scores)
                training.state.best = scores.fitness
                training.state.best_epoch = training.state.epoch
                training.state.best_scores = {
                    k: v for k, v in scores.columns().items() if k in training.task.headlines
                }
            if scores:
                training.train_loader.sampler.class_map = scores.by_class(training.task.names)
            results.report(self.results, training, losses, scores, shares)
            if self.writes:
                self.results.write_table()
            finished = training.state.epoch + 1
            training.begin_epoch()
            keep = f"epoch{finished}.pt" if s.save_period and not finished % s.save_period else ""
            self._save(best=is_best or (s.noval and finished == s.epochs), keep=keep)
            self._stop_if(any(comm.all_gather(self.signals.received)))

    def _stops_early(self) -> bool:
        """Return whether the score has not improved for --patience epochs."""
        state = self.training.state
        s = self.training.settings
        is_scored = not s.noval and state.epoch and not state.step and state.epoch % s.val_period == 0
        if not (s.patience and is_scored and state.epoch - 1 - state.best_epoch >= s.patience):
            return False
        text = (
            f"no better score for {s.patience} epochs (--patience): the best was epoch {state.best_epoch + 1}"
        )
        self.training.display.print(text)
        return True

    def _epoch(self) -> tuple[Scores | None, list[float], float]:
        """Train the rest of the current epoch and validate; return scores, mean losses and images per second."""
        training = self.training
        training.timer.restart()
        losses, rate = self._train_epoch()
        with training.timer.spending("val"), self.watchdog.during("validation"):
            training.average_statistics()
            if training.has_validation:
                self._save()  # a signal during the validation loses no training step
                scores = training.validate(self._until_signal(training.evaluator.loader))
                self._stop_if(any(comm.all_gather(self.signals.received)))
            else:
                scores = None
        return scores, losses.tolist(), rate

    def _until_signal(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches until any rank gets a stop signal: a validation can outlast the grace period."""
        for batch in batches:
            if self.signals.received_anywhere():
                return
            self.watchdog.progress()
            yield batch

    def _train_epoch(self) -> tuple[Tensor, float]:
        training = self.training
        state = training.state
        steps = training.train_loader.steps
        training.local_model.train()
        training.display.begin_epoch(state.epoch + 1, training.settings.epochs, steps)
        begin = time.perf_counter()
        images_before = state.images
        stopping = False
        saving = False
        for batch in self._batches():
            if training.global_step in state.skipped:
                state.step += 1
                continue
            if self.results.logger and training.global_step == 0:
                self.results.logger.first_batch(batch)
            count, height, width = batch.images.shape[:3]
            with self._memory_errors(f"with {count} images of {width} x {height} px"):
                result = training.step(
                    batch, bool(self.signals.received), self._is_save_due(training.global_step)
                )
            self.watchdog.step(training.global_step)
            if self._is_readback_step():
                training.meter.check_finite()
            self._log(training.meter.reduced_step + 1, training.meter.reduced)
            stopping = stopping or result.stop
            saving = saving or result.save
            if state.step == steps and training.has_validation:  # which saves a checkpoint anyway
                saving = False
            if (stopping or saving) and result.updated:  # a checkpoint holds no accumulated gradients
                self._save()
                self._stop_if(stopping)
                saving = False
            self._report_progress(time.perf_counter() - begin, state.images - images_before)
        with training.timer.spending("sync"):
            last = training.meter.reduce_last()
        self._log(training.meter.last_step + 1, last)
        seconds = max(time.perf_counter() - begin, 1e-9)
        losses = (training.meter.sums + last) / steps
        return losses, (state.images - images_before) / seconds

    def _batches(self) -> Iterator[TrainBatch]:
        batches = self.training.timer.waiting(self.training.batches())
        while True:
            with self.watchdog.during("loading"), self._memory_errors("while a batch was prepared"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    @contextlib.contextmanager
    def _memory_errors(self, when: str) -> Iterator[None]:
        """Turn a failed allocation of the block into a TrainerError."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not memory.is_out_of_memory(error):
                raise
            training = self.training
            rank = f"rank {training.world.rank}: " if training.world.size > 1 else ""
            raise TrainerError(f"{rank}out of memory on {training.device} {when}", memory.HINT) from None

    def _is_save_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after global step `step` (--save-every)."""
        seconds, steps = interval(self.training.settings.save_every)
        saved_at, saved_step = self.saved
        if saved_step < 0:  # the first step of this process
            saved_step = step
            self.saved = saved_at, saved_step
        return 0 < seconds <= time.monotonic() - saved_at or 0 < steps <= step + 1 - saved_step

    def _is_readback_step(self) -> bool:
        """Return whether the host reads the loss of the epoch's step."""
        step = self.training.state.step
        every = READBACK_EVERY[self.training.device.type]
        return step % every == 1 % every or step == self.training.train_loader.steps

    def _log(self, number: int, terms: Tensor) -> None:
        """Log the reduced loss terms of global step `number` (from 1)."""
        training = self.training
        is_logged = training.settings.log_steps and training.world.rank == 0
        if is_logged and number > training.state.epoch * training.train_loader.steps:
            results.write_step(self.run_dir / "steps.csv", training.task.terms, number, terms.tolist())

    def _report_progress(self, seconds: float, images: int) -> None:
        training = self.training
        state = self.training.state
        if not self._is_readback_step() or state.step < 2:  # a step's loss is reduced with the next step
            return
        steps = training.train_loader.steps
        epochs = training.settings.epochs
        step_s = seconds * training.settings.batch / max(images, 1)
        epoch_ends_in_s = (steps - state.step) * step_s
        # The last epoch's time includes its validation.
        epoch_s = self.results.history[-1]["seconds"] if self.results.history else steps * step_s
        losses = training.meter.reduced.tolist()
        fields: dict[str, Any] = {
            "epoch": state.epoch + 1,
            "epochs": epochs,
            "step": state.step,
            "steps": steps,
            "loss": sum(losses),
            "images_per_s": images / seconds,
            "eta_s": epoch_ends_in_s,
            "run_eta_s": epoch_ends_in_s + (epochs - state.epoch - 1) * epoch_s,
        }
        training.events.progress(**fields)
        terms = dict(zip(training.task.terms, losses, strict=True))
        training.display.progress(**fields, terms=terms, memory=memory.reserved(training.device))

    def _save(self, best: bool = False, keep: str = "") -> None:
        training = self.training
        with self.watchdog.during("checkpoint"):
            content = self._content()
            self.saved = time.monotonic(), training.global_step
            if training.settings.on_nan == "skip":
                self.last = checkpoint_file.copied(content)
            if self.writes:
                # last.pt at the end: after a kill in between, a resume repeats the epoch's end and writes best.pt
                if best:
                    checkpoints.write_best(self.run_dir, content)
                if keep:
                    checkpoint_file.save(self.run_dir / keep, content)
                path = checkpoints.write(self.run_dir, content)
                at = {"epoch": training.state.epoch, "step": training.global_step}
                training.events.emit(contract.CHECKPOINT, path=str(path), **at)
            comm.barrier()  # a rank must not exit while others still write

    def _stop_if(self, stop: bool) -> None:
        if stop:
            stopped = self.signals.stopped()
            stopped.hint = f"to continue: trainer train --resume {shlex.quote(str(self.run_dir))}"
            raise stopped

    def _handle_nonfinite(self, global_step: int) -> None:
        """Stop with an error that names the batch, or restore the last checkpoint and skip the batch (--on-nan)."""
        training = self.training
        epoch, step = divmod(global_step, training.train_loader.steps)
        names = training.train_loader.names_of(epoch, step)
        listed = ", ".join(names[:MOST_NAMES])
        if len(names) > MOST_NAMES:
            listed += f" and {len(names) - MOST_NAMES} more"
        message = f"the loss is no longer finite (epoch {epoch + 1}, step {step + 1}; the batch: {listed})"
        hint = "lower lr0 in --hyp, use --precision fp32, or skip such batches with --on-nan skip"
        if training.settings.on_nan == "stop":
            raise TrainerError(message, hint)
        if self.last is None or len(training.state.skipped) >= MAX_SKIPPED:
            raise TrainerError(
                message + f"; {len(training.state.skipped)} batches were already left out", hint
            )
        skipped = (*training.state.skipped, global_step)
        training.load_state_dict(self.last)
        self.results.history = list(self.last["history"])
        training.state.skipped = skipped
        if self.writes:
            checkpoints.discard_after(self.run_dir / "steps.csv", training.logged_steps)
        training.display.print(f"{message}: back to step {training.global_step}, without that batch")
