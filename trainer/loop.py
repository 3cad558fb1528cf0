"""The training of one model, from the checked settings to the last checkpoint."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer import callback, checkpoint, contract, dist
from trainer.config import Settings, check_data_path
from trainer.data import Batch, TrainLoader, ValLoader, left_out, open_dataset
from trainer.data.faults import note_left_out
from trainer.data.picture_cache import picture_folders
from trainer.errors import TrainerError
from trainer.events import Events
from trainer.heap import keep_freed_memory
from trainer.metrics import BoxScores
from trainer.models.sync import synchronise
from trainer.models.yolo import freeze, load_cfg
from trainer.optim import Ema, Schedule, build_optimizer, clip_gradients, set_rates
from trainer.screen import Screen
from trainer.tasks.autoanchor import fit_anchors
from trainer.tasks.detection import Detection, prepare
from trainer.timing import Clock

DEFAULT_CFG = "yolov5n.yaml"
CHECK_EVERY = {"cpu": 1, "cuda": 20}  # steps between looks at the loss: on a GPU a look waits for the device


class Run:
    """Everything of one training; made only once the input has been found good."""

    def __init__(self, settings: Settings, world: dist.World, device: torch.device, events: Events) -> None:
        """Check everything that can be checked without other ranks; nothing is written."""
        self.settings, self.world, self.device, self.events = settings, world, device, events
        self.screen = Screen(lit=world.rank == 0, listening=events.listening)
        s = settings
        if s.batch < world.size:
            raise TrainerError(
                f"--batch {s.batch} is smaller than the number of ranks, {world.size}",
                f"--batch counts the pictures of all ranks together: use {world.size} or more",
            )
        check_data_path(s.data)
        self.weights = checkpoint.load(s.weights) if s.weights else None
        where = s.cfg or (s.weights if self.weights else DEFAULT_CFG)
        self.cfg = self.weights["cfg"] if self.weights and not s.cfg else load_cfg(where)
        self.dtype = pick_dtype(s.precision, device, native_bf16(device))
        how: dict[str, Any] = {"imgsz": s.imgsz, "single_cls": s.single_cls, "allow_bad_labels": s.allow_bad_labels}
        self.train_set = train = open_dataset(s.data, "train", **how)
        self.val_set = open_dataset(s.data, "val", **how)
        self.left_out = left_out(train, self.val_set)
        if not len(self.val_set) and s.val:
            raise TrainerError(f"--data {s.data}: there is no validation picture", "or train with --noval")
        torch.manual_seed(s.seed)  # every rank begins with the same weights
        self.task = Detection(self.cfg, where, train.names, s.hyp, s.imgsz)
        self.model = self.task.build()
        if self.weights:
            fit, of = checkpoint.transfer(self.model, self.weights["ema"], s.weights)
            self.screen.say(f"weights from {s.weights}: {fit} of {of} tensors fit")
        if s.freeze:
            count = freeze(self.model, s.freeze)
            self.screen.say(f"frozen: layers {', '.join(map(str, s.freeze))} with {count:,} parameters")
        workers = s.workers if s.workers is not None else default_workers(device, world)
        stride = max(self.model.detect.strides)
        share: dict[str, Any] = {"rank": world.rank, "world": world.size, "local_size": world.local_size}
        share |= {"workers": workers, "stride": stride}
        self.train = TrainLoader(
            train,
            imgsz=s.imgsz,
            batch=s.batch,
            seed=s.seed,
            hyp=s.hyp,
            epochs=s.epochs,
            close_mosaic=self.task.close_mosaic,
            multi_scale=s.multi_scale,
            rect=s.rect,
            image_weights=s.image_weights,
            **share,
        )
        self.val = ValLoader(self.val_set, imgsz=s.imgsz, batch=s.batch, **share)
        for note in self.train.notes or self.val.notes:
            self.screen.say(note)
        if not self.train.steps:
            raise TrainerError(f"--data {s.data}: {len(train)} training pictures do not fill a batch of {s.batch}")
        self.schedule = Schedule(s.hyp, s.epochs, self.train.steps, s.batch, s.cos_lr)
        self.clock = Clock(device)
        self.last_step = -1  # the last one at which the weights moved
        self.best = -1.0

    def start(self, folder: Path) -> None:
        """Move to the device and wrap for several ranks."""
        self.folder = folder
        if self.world.rank == 0:
            for line in note_left_out(self.left_out, folder):
                self.screen.say(line)
        if self.settings.autoanchor:
            s = self.settings
            self.cfg, said = fit_anchors(
                self.model, self.cfg, self.train_set, imgsz=s.imgsz, anchor_t=s.hyp.anchor_t, seed=s.seed
            )
            if said:
                self.screen.say(said)
        self.model.to(device=self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.settings.sync_bn and dist.together():
            synchronise(self.model, self.device)
        self.loss = self.task.loss_of(self.model)
        self.ema = Ema(self.model, self.settings.hyp.ema_tau)
        self.optimizer = build_optimizer(self.model, self.settings.optimizer, self.settings.hyp, self.settings.batch)
        self.parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        self.net: nn.Module = self.model
        if dist.together():
            # no_sync, which accumulation needs, does not go with a static graph.
            ddp = dist.wrap(self.model, self.device, static=self.schedule.accumulate == 1)
            self.clock.watch(ddp)
            self.net = ddp
        self.check_every = CHECK_EVERY[self.device.type]
        if self.settings.cache:
            threads = max(1, dist.usable_cores() // self.world.local_size)
            homes = picture_folders(self.settings.data)
            self.train.cache(self.settings.cache, homes, self.world, lambda v: dist.broadcast(dist.gather(v)), threads)

    def train_epoch(self, epoch: int) -> tuple[Tensor, float]:
        """One pass (epoch from 0): the mean loss terms over the steps and all ranks, and images per second."""
        s, steps = self.settings, self.train.steps
        self.net.train()
        self.screen.begin_epoch(epoch + 1, s.epochs, steps)
        pending = torch.zeros(len(self.task.terms), dtype=torch.float64, device=self.device)
        total = torch.zeros_like(pending)
        images, loss = 0, math.nan
        begin = time.perf_counter()
        for step, batch in enumerate(self.clock.waiting(self.train.epoch(epoch))):
            pending, before = self._step(epoch * steps + step, batch, pending)
            total += before
            images += batch.global_size
            if step % self.check_every == 0:
                self._check_finite(total, epoch, step)
                loss = float(before.sum())
            rate = images / (time.perf_counter() - begin)
            told: dict[str, Any] = {
                "epoch": epoch + 1,
                "epochs": s.epochs,
                "step": step + 1,
                "steps": steps,
                "loss": loss,
                "images_per_s": rate,
                "eta_s": (steps - step - 1) * (time.perf_counter() - begin) / (step + 1),
            }
            if step >= self.check_every:  # the first step's loss is known at the second
                self.events.progress(**told)
                self.screen.progress(**told)
        with self.clock.spending("sync"):
            dist.wait(dist.start_sum(pending))
        total += pending
        self._check_finite(total, epoch, steps - 1)
        return total / steps, images / (time.perf_counter() - begin)

    def _step(self, number: int, batch: Batch, pending: Tensor) -> tuple[Tensor, Tensor]:
        """One batch. `pending` is this rank's share of the previous step's loss terms, float64.

        Returns this step's share and the previous step's terms summed over the ranks: the sums travel with the
        counts that the loss needs anyway, so that watching the loss costs no collective of its own.
        """
        rates = self.schedule.at(number)
        moves = number - self.last_step >= rates.accumulate
        prepared = prepare(batch, self.loss, self.device)
        counts = prepared.assignment.counts
        sums = torch.cat((counts, pending))
        work = dist.start_sum(sums)  # runs while the network does
        quiet = isinstance(self.net, nn.parallel.DistributedDataParallel) and not moves
        with self.net.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[operator]
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                raw = self.net(prepared.images)
            matched, late = self.loss.match(raw, prepared.assignment)
            late_work = dist.start_sum(late)  # what only the outputs could tell
            with self.clock.spending("sync"):
                dist.wait(work)
                dist.wait(late_work)
            terms = self.loss(raw, matched, torch.cat((sums[: len(counts)], late)))
            # YOLOv5's loss is the batch's mean times its pictures; the ranks' gradients are summed.
            (terms.sum() * sums[0].float()).backward()  # type: ignore[no-untyped-call]
        if not quiet:
            self.clock.after_backward()
        if moves:
            set_rates(self.optimizer, rates)
            clip_gradients(self.parameters)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=not dist.together())
            self.ema.update()
            self.last_step = number
        return terms.detach().double(), sums[len(counts) :]

    def _check_finite(self, total: Tensor, epoch: int, step: int) -> None:
        # The sum is the same on all ranks, so that all of them stop here together.
        if not bool(total.isfinite().all()):
            raise TrainerError(
                f"the loss is no longer finite (epoch {epoch + 1}, at or before step {step + 1})",
                "lower lr0 in --hyp, or use --precision fp32",
            )

    def validate(self) -> BoxScores | None:
        """The averaged model's scores over all ranks' pictures, on every rank; None with --noval."""
        # Each rank has seen other pictures: its batch norm statistics are its own until here.
        for model in (self.model, self.ema.model):
            dist.average_([b for b in model.buffers() if b.is_floating_point()])
        if not self.settings.val:
            return None
        metric, self.shown = self.task.evaluate(self.ema.model, self.val, self.val_set, self.device, self.dtype)
        states = dist.gather(metric.state())
        scores = None
        if states:
            whole = self.task.metric()
            for state in states:
                whole.merge(state)
            scores = whole.compute()
        return dist.broadcast(scores)  # type: ignore[no-any-return]

    def save(self, epoch: int, fitness: float) -> None:
        """Write last.pt, and best.pt if this epoch (from 0) is the best so far."""
        content = {
            "format": checkpoint.FORMAT,
            "model": self.model.state_dict(),
            "ema": self.ema.model.state_dict(),
            "updates": self.ema.updates,
            "optimizer": self.optimizer.state_dict(),
            "epoch": epoch + 1,
            "step": (epoch + 1) * self.train.steps,
            "last_step": self.last_step,
            "fitness": fitness,
            "hyp": dataclasses.asdict(self.settings.hyp),
            "cfg": self.cfg,
            "names": list(self.task.names),
            "imgsz": self.settings.imgsz,
        }
        checkpoint.save(self.folder / "last.pt", content)
        if fitness >= self.best:
            self.best = fitness
            checkpoint.save(self.folder / "best.pt", content)
        self.events.emit(
            contract.CHECKPOINT,
            path=str(self.folder / "last.pt"),
            epoch=epoch + 1,
            step=content["step"],
        )


def train(settings: Settings) -> None:
    """Train as told; raises TrainerError for anything that the user can put right."""
    events = Events(os.environ)
    world = dist.world_of(os.environ)
    heard = callback.load(settings.callback) if settings.callback else None
    if heard and world.rank == 0:
        events.listener = functools.partial(callback.tell, heard)
    device = dist.pick_device(settings.device, world)
    dist.limit_threads(world)
    if device.type == "cpu":
        keep_freed_memory()
    begin = time.monotonic()
    run = Run(settings, world, device, events)
    backend = dist.join(world, device)
    events.emit(contract.READY, rank=world.rank, world_size=world.size, backend=backend or "none", device=device.type)
    run.start(_agreed_folder(settings, world))
    _introduce(run, backend)
    _epochs(run, begin)
    dist.leave()  # not after an error: where a rank is lost, leaving in good order can wait for it


def _agreed_folder(settings: Settings, world: dist.World) -> Path:
    """The run's folder, made by rank 0; where it cannot, all ranks stop."""
    folder, error = None, None
    if world.rank == 0:
        try:
            folder = checkpoint.make_run_dir(os.environ, settings.project, settings.name, settings.exist_ok)
        except TrainerError as found:
            error = found
    dist.agree(error)
    return dist.broadcast(folder)  # type: ignore[no-any-return]


def _introduce(run: Run, backend: str) -> None:
    parameters = sum(p.numel() for p in run.model.parameters())
    ranks = f"{run.world.size} ranks over {backend}" if backend else "1 process"
    kind = {torch.bfloat16: "bf16", torch.float32: "fp32"}[run.dtype]
    s = run.settings
    run.screen.say(
        f"{s.data}: {len(run.task.names)} classes, {parameters:,} parameters, {ranks} on {run.device.type}, "
        f"{kind}, {s.imgsz} px, batch {s.batch}, {run.train.steps} steps an epoch"
        + ("" if run.events.listening else f" -> {run.folder}")
    )


def _epochs(run: Run, begin: float) -> None:
    s = run.settings
    scores: BoxScores | None = None
    best = (math.nan, math.nan)
    for epoch in range(s.epochs):
        run.clock.restart()
        losses, rate = run.train_epoch(epoch)
        with run.clock.spending("val"):
            scores = run.validate()
        if run.world.rank == 0:
            map50, map_ = (scores.map50, scores.map) if scores else (math.nan, math.nan)
            fitness = 0.1 * map50 + 0.9 * map_ if scores else float(epoch)
            if fitness >= run.best:
                best = (map50, map_)
            _report(run, epoch, losses.tolist(), rate, (map50, map_))
            run.save(epoch, fitness)
    if run.world.rank == 0:
        _finish(run, time.monotonic() - begin, best)


def _report(run: Run, epoch: int, losses: list[float], rate: float, maps: tuple[float, float]) -> None:
    shares, seconds = run.clock.shares(), run.clock.seconds()
    named = dict(zip((f"{t}_loss" for t in run.task.terms), losses, strict=True))
    row = {
        "epoch": epoch + 1,
        **named,
        "map50": maps[0],
        "map": maps[1],
        "lr": run.schedule.at((epoch + 1) * run.train.steps - 1).lr,
        "images_per_s": rate,
        "seconds": seconds,
        **{k: shares[k] for k in ("data", "compute", "sync", "val")},
    }
    path = run.folder / "results.csv"
    with path.open("a" if epoch else "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(row))
        if not epoch:
            table.writeheader()
        table.writerow({k: v if isinstance(v, int) else f"{v:.6g}" for k, v in row.items()})
    run.events.emit(
        contract.METRIC,
        epoch=epoch + 1,
        epochs=run.settings.epochs,
        map50=maps[0],
        map=maps[1],
        **named,
        images_per_s=rate,
        shares=shares,
    )
    spent = "  ".join(f"{k} {shares[k]:.0%}" for k in ("data", "compute", "sync", "val"))
    scored = f"mAP50 {maps[0]:.3f}  mAP50-95 {maps[1]:.3f}  " if run.settings.val else ""
    run.screen.end_epoch(
        f"epoch {epoch + 1}/{run.settings.epochs}  {scored}loss {sum(losses):.3f}  {rate:.0f} img/s  {spent}"
    )


def _finish(run: Run, seconds: float, best: tuple[float, float]) -> None:
    from trainer.plots import draw_predictions, plot_results  # draws only here: matplotlib loads slowly

    plot_results(run.folder / "results.csv", run.folder / "results.png")
    if run.settings.val:
        draw_predictions(run.shown, run.task.names, run.folder / "predictions.jpg")
    run.events.emit(contract.DONE, seconds=seconds, map50=best[0], map=best[1], best=str(run.folder / "best.pt"))
    if not run.events.listening:  # a launcher says this itself, with the paths of the machine that it runs on
        scored = f"   mAP50 {best[0]:.3f}   mAP50-95 {best[1]:.3f}" if run.settings.val else ""
        run.screen.say(f"done in {seconds // 60:.0f} min {seconds % 60:.0f} s{scored}   {run.folder / 'best.pt'}")


def native_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16 by itself; emulated, it would be slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split())
    except OSError:
        return False
    return bool(flags & ({"avx512_bf16", "amx_bf16"} if platform.machine() in ("x86_64", "AMD64") else {"bf16"}))


def pick_dtype(precision: str, device: torch.device, native: bool) -> torch.dtype:
    """The type that convolutions compute in; weights, their averages and the optimizer stay in fp32."""
    if precision == "bf16" and not native and device.type == "cuda":
        raise TrainerError("--precision bf16: this GPU has no bf16", "use --precision fp32 or auto")
    wanted = precision == "bf16" or (precision == "auto" and native)
    return torch.bfloat16 if wanted else torch.float32


def default_workers(device: torch.device, world: dist.World) -> int:
    """Loader processes per rank: none on the CPU, where they would take the cores from the training."""
    return 0 if device.type == "cpu" else min(8, dist.usable_cores() // world.local_size)
