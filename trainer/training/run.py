"""One training: model, loss, optimizer and loaders put together, a step of it, and its whole state."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer import dist
from trainer.config import Settings, check_data_path
from trainer.data import Batch, TrainLoader, ValBatch, ValLoader, left_out, open_dataset
from trainer.errors import TrainerError
from trainer.events import Events
from trainer.metrics import BoxScores
from trainer.models.sync import synchronise
from trainer.models.yolo import freeze, load_cfg
from trainer.precision import native_bf16, pick_dtype
from trainer.tasks.autoanchor import fit_anchors
from trainer.tasks.detection import Detection, Shown, prepare
from trainer.training.optim import Ema, Schedule, build_optimizer, clip_gradients, set_rates
from trainer.training.record import Record
from trainer.training.screen import Screen
from trainer.training.timing import Clock
from trainer.weights import checkpoint

DEFAULT_CFG = "yolov5n.yaml"
SCALED_GRADIENTS = torch.float16  # the type whose small gradients vanish, so that the loss is scaled up
WISHES = 2  # numbers that travel with every step's sums: ranks that were told to stop, ranks that want a checkpoint


class NotFinite(Exception):
    """A loss or gradient is infinite or no number; `number` is the step over the whole run, the same on all ranks."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class Position:
    """Where a training is: what moves from step to step beside weights and optimizer."""

    epoch: int = 0  # the running one, from 0
    step: int = 0  # its steps that are done
    last_move: int = -1  # the step, over the whole run, at which the weights moved last
    images: int = 0  # of this epoch, on all ranks
    best: float = -1.0
    best_epoch: int = -1
    best_scores: tuple[float, float] = (math.nan, math.nan)  # mAP50, mAP50-95
    skipped: tuple[int, ...] = ()  # steps left out because their loss was not finite


@dataclass
class Told:
    """What a step was told by all ranks together."""

    stop: bool = False
    save: bool = False
    moved: bool = False


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
            taken, kept = self.weights["ema"], other_anchors(self.model, self.weights["ema"]) if s.cfg else ()
            fit, of = checkpoint.transfer(self.model, {k: v for k, v in taken.items() if k not in kept}, s.weights)
            self.screen.say(
                f"weights from {s.weights}: {fit}/{of} tensors"
                + (f"; the anchors are those of {where}" if kept else "")
            )
        if s.freeze:
            count = freeze(self.model, s.freeze)
            self.screen.say(f"frozen: layers {', '.join(map(str, s.freeze))} with {count:,} parameters")
        self.workers = s.workers if s.workers is not None else dist.default_workers(device, world)
        stride = max(self.model.detect.strides)
        share: dict[str, Any] = {"rank": world.rank, "world": world.size, "local_size": world.local_size}
        share |= {"workers": self.workers, "stride": stride}
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
        self._check_batch_norm(stride)
        self.val = ValLoader(self.val_set, imgsz=s.imgsz, batch=s.batch, **share)
        for note in dict.fromkeys((*self.train.notes, *self.val.notes)):
            self.screen.say(note)
        self.schedule = Schedule(s.hyp, s.epochs, self.train.steps, s.batch, s.cos_lr)
        self.clock = Clock(device)
        self.at = Position()
        self.folder = Path()  # known once the ranks have met
        self.last_advice = ""
        self.history: list[dict[str, float]] = []  # a row for each epoch that is done
        self.class_map: list[float] | None = None  # of the last validation, for --image-weights
        self.record: Record | None = None  # on the rank that writes it
        self.shown: Sequence[Shown] = ()
        self.metric = self.task.metric()  # of the last validation, all ranks' together on rank 0

    def _check_batch_norm(self, stride: int) -> None:
        """An error where a rank would have to normalise a single value: by its own variance, which is none."""
        s, ranks = self.settings, self.world.size
        normalises = any(isinstance(m, nn.BatchNorm2d) for m in self.model.modules())
        if normalises and self.train.fewest_cells == 1 and not (s.sync_bn and ranks > 1):
            who = "a rank's share of a step" if ranks > 1 else "a step"
            raise TrainerError(
                f"--batch {s.batch} with --imgsz {s.imgsz}: {who} can be one picture of {stride} x {stride} px, "
                "a single value for batch norm, which has no variance",
                "use a larger --batch or --imgsz" + (", or --sync-bn" if ranks > 1 else ""),
            )

    def start(self, going_on: bool = False) -> None:
        """Move to the device and wrap for several ranks; a run that goes on keeps the anchors that it had."""
        s = self.settings
        if s.autoanchor and not going_on:
            fitted = fit_anchors(
                self.model, self.cfg, self.train_set, imgsz=s.imgsz, anchor_t=s.hyp.anchor_t, seed=s.seed
            )
            self.cfg, said = fitted
            if said:
                self.screen.say(said)
        self.model.to(device=self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if s.sync_bn and dist.together():
            synchronise(self.model, self.device)
        self.loss = self.task.loss_of(self.model)
        self.ema = Ema(self.model, s.hyp.ema_tau)
        self.optimizer = build_optimizer(self.model, s.optimizer, s.hyp, s.batch)
        self.parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == SCALED_GRADIENTS)
        self.total = torch.zeros(len(self.task.terms), dtype=torch.float64, device=self.device)
        self.pending = torch.zeros_like(self.total)
        self.norm = torch.zeros((), device=self.device)
        if s.compile:
            self.model.compile()
        self.net: nn.Module = self.model
        if dist.together():
            # no_sync, which accumulation needs, does not go with a static graph.
            ddp = dist.wrap(self.model, self.device, static=self.schedule.accumulate == 1)
            self.clock.watch(ddp, compress=s.grad_compress == "bf16")
            self.net = ddp
            self._settle_buckets()

    def _settle_buckets(self) -> None:
        """Run the network once for nothing: DDP orders its gradient buckets anew after the first backward pass.

        From three ranks on, the order of the buckets decides in which order the ranks' gradients are added up. After
        this, a run that goes on from a checkpoint adds them up as the run did that wrote it.
        """
        before = [b.clone() for b in self.model.buffers()]
        side = 2 * max(self.model.detect.strides)
        images = torch.zeros(2, 3, side, side, device=self.device).to(memory_format=torch.channels_last)
        self.net.train()
        for _ in range(2):  # the new order is put in place by the second forward pass
            with self.autocast():
                raw = self.net(images)
            torch.stack([t.float().sum() for t in _tensors(raw)]).sum().backward()  # type: ignore[no-untyped-call]
            self.clock.after_backward()
        self.optimizer.zero_grad(set_to_none=False)
        for buffer, value in zip(self.model.buffers(), before, strict=True):
            buffer.copy_(value)
        self.clock.restart()

    def autocast(self) -> torch.autocast:
        """The precision that the network computes in."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    @property
    def number(self) -> int:
        """The next step, counted over the whole run from 0."""
        return self.at.epoch * self.train.steps + self.at.step

    def step(self, batch: Batch, stop: bool = False, save: bool = False) -> Told:
        """One batch forward and backward, and the weights moved where enough batches have been gathered.

        `stop` and `save` are this rank's wishes; the answer is what any rank wished. They, the counts that the loss
        needs and the loss terms of the step before travel in one sum, so that none costs a collective of its own.
        An epoch's last step always moves the weights: nothing half gathered is left for a checkpoint to keep.
        """
        at, number = self.at, self.number
        rates = self.schedule.at(number)
        moves = at.step + 1 == self.train.steps or number - at.last_move >= rates.accumulate
        seed_generators(self.settings.seed, number, self.world.rank)
        with self.clock.spending("transfer"):
            prepared = prepare(batch, self.loss, self.device)
        counts = prepared.assignment.counts
        wishes = counts.new_tensor([float(stop), float(save)])
        sums = torch.cat((counts, self.pending, wishes))
        work = dist.start_sum(sums)  # runs while the network does
        quiet = isinstance(self.net, nn.parallel.DistributedDataParallel) and not moves
        with self.net.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[operator]
            with self.autocast():
                raw = self.net(prepared.images)
            matched, late = self.loss.match(raw, prepared.assignment)
            late_work = dist.start_sum(late)  # what only the outputs could tell
            with self.clock.spending("sync"):
                dist.wait(work)
                dist.wait(late_work)
            terms = self.loss(raw, matched, torch.cat((sums[: len(counts)], late)))
            # YOLOv5's loss is the batch's mean times its pictures; the ranks' gradients are summed.
            self.scaler.scale(terms.sum() * sums[0].float()).backward()  # type: ignore[no-untyped-call]
        if not quiet:
            self.clock.after_backward()
        if moves:
            self._move(number, rates)
        self.before = sums[len(counts) : -WISHES]
        self.total += self.before
        self.pending = terms.detach().double()
        at.images += batch.global_size
        at.step += 1
        asked = sums[-WISHES:].tolist() if self.looks(at.step) else [0.0, 0.0]
        return Told(bool(asked[0]), bool(asked[1]), moves)

    def _move(self, number: int, rates: Any) -> None:
        set_rates(self.optimizer, rates)
        self.scaler.unscale_(self.optimizer)
        self.norm = clip_gradients(self.parameters)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not dist.together())
        self.ema.update()
        self.at.last_move = number

    def looks(self, step: int) -> bool:
        """Whether this step's numbers are looked at: on a GPU a look waits for the device, so only now and then."""
        return self.device.type == "cpu" or step % 20 == 1 or step == self.train.steps

    def check_finite(self) -> None:
        """Raise NotFinite, on all ranks together, where the loss of the steps before the last one is not finite."""
        if not bool(self.total.isfinite().all()):
            raise NotFinite(max(0, self.number - 2))

    def flush(self) -> Tensor:
        """The last step's loss terms, summed over the ranks: the end of an epoch.

        They stay out of `total`, so that a checkpoint before the validation has the state after any other step.
        """
        last = self.pending.clone()
        with self.clock.spending("sync"):
            dist.wait(dist.start_sum(last))
        if not bool((self.total + last).isfinite().all()) or self._broken_gradients():
            raise NotFinite(self.number - 1)
        return last

    def _broken_gradients(self) -> bool:
        """Whether the weights last moved by gradients that were not finite; with a scaler, they do not."""
        return not self.scaler.is_enabled() and not bool(self.norm.isfinite())

    def begin_epoch(self) -> None:
        """Begin the next epoch."""
        self.at.epoch, self.at.step, self.at.images = self.at.epoch + 1, 0, 0
        self.total.zero_()
        self.pending.zero_()

    def average_statistics(self) -> None:
        """Make batch norm's statistics those of all ranks: each rank has seen other pictures."""
        for model in (self.model, self.ema.model):
            dist.average_(_statistics(model))

    @property
    def validates(self) -> bool:
        """Whether the running epoch ends with a validation."""
        s, done = self.settings, self.at.epoch + 1
        return s.val and (done % s.val_period == 0 or done == s.epochs)

    def validate(self, batches: Iterable[ValBatch]) -> BoxScores:
        """The averaged model's scores over the batches of all ranks, on every rank. A collective."""
        metric, self.shown = self.task.evaluate(self.ema.model, batches, self.val_set, self.device, self.dtype)
        states = dist.gather(metric.state())
        scores = None
        if states:
            self.metric = self.task.metric()
            for state in states:
                self.metric.merge(state)
            scores = self.metric.compute()
        return dist.broadcast(scores)  # type: ignore[no-any-return]

    def weigh(self, class_map: list[float] | None) -> None:
        """Let the scores of each class decide how often its pictures come, with --image-weights."""
        self.class_map = class_map
        if self.settings.image_weights:
            self.train.weigh(class_map)

    def state(self) -> dict[str, Any]:
        """All that the run needs to go on exactly, the same on every rank: tensors and plain values. A collective.

        What the ranks do not share (batch norm's statistics between two epochs, the last step's loss terms) is kept
        for each of them. Random generators need no state: every step seeds them from its number.
        """
        mine = {
            "bad": not bool(self.pending.isfinite().all()) or self._broken_gradients(),
            "pending": self.pending.cpu(),
            "statistics": [[t.cpu() for t in _statistics(m)] for m in (self.model, self.ema.model)],
        }
        ranks = dist.all_gather(mine)
        if any(rank.pop("bad") for rank in ranks):
            raise NotFinite(self.number - 1)
        return {
            "format": checkpoint.FORMAT,
            "model": self.model.state_dict(),
            "ema": self.ema.model.state_dict(),
            "updates": self.ema.updates,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": self.at.epoch,
            "step": self.number,
            "at": dataclasses.asdict(self.at),
            "total": self.total.cpu(),
            "ranks": ranks,
            "history": self.history,
            "class_map": self.class_map,
            "hyp": dataclasses.asdict(self.settings.hyp),
            "settings": dataclasses.asdict(self.settings),
            "cfg": self.cfg,
            "names": list(self.task.names),
            "imgsz": self.settings.imgsz,
        }

    def restore(self, content: Mapping[str, Any]) -> None:
        """Become what `state` described, on the same number of ranks exactly.

        On another number, batch norm's statistics are the ranks' average and the loss terms their sum; the global
        order of the pictures stays.
        """
        self.model.load_state_dict(content["model"])
        self.ema.model.load_state_dict(content["ema"])
        self.ema.updates = content["updates"]
        self.optimizer.load_state_dict(content["optimizer"])
        self.scaler.load_state_dict(content["scaler"])
        self.at = Position(**{**content["at"], "best_scores": tuple(content["at"]["best_scores"])})
        self.at.skipped = tuple(self.at.skipped)
        self.total.copy_(content["total"])
        self.norm = torch.zeros_like(self.norm)  # of no move of these weights
        self.history = list(content["history"])
        self.cfg = content["cfg"]  # with the anchors that were fitted
        self.weigh(content["class_map"])
        ranks = content["ranks"]
        same = len(ranks) == self.world.size
        for k, model in enumerate((self.model, self.ema.model)):
            for j, tensor in enumerate(_statistics(model)):
                values = [rank["statistics"][k][j] for rank in ranks]
                tensor.copy_(values[self.world.rank] if same else torch.stack(values).mean(0))
        if same:
            self.pending.copy_(ranks[self.world.rank]["pending"])
        else:
            self.pending.copy_(sum(rank["pending"] for rank in ranks) / self.world.size)


def other_anchors(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """The names of the model's anchors, where those of `state` are others of the same number."""
    own = {k: v for k, v in model.state_dict().items() if k.endswith(".anchors") and k in state}
    return [k for k, v in own.items() if v.shape == state[k].shape and not torch.allclose(v, state[k].to(v), rtol=1e-3)]


def seed_generators(seed: int, number: int, rank: int) -> None:
    """Seed every global random generator for one step: nothing that is drawn depends on what was drawn before."""
    mixed = int(np.random.SeedSequence([3, seed, number, rank]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def _statistics(model: nn.Module) -> list[Tensor]:
    """Batch norm's running means and variances."""
    return [b for name, b in model.named_buffers() if name.endswith(("running_mean", "running_var"))]


def _tensors(value: Any) -> list[Tensor]:
    """All tensors of nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [t for part in parts for t in _tensors(part)]
