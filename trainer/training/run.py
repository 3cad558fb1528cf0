"""One training: model, loss, optimizer and loaders put together, a step of it, and its whole state."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer import dist, parallel
from trainer.config import Settings
from trainer.errors import TrainerError
from trainer.events import Events
from trainer.precision import full_fp32, native_bf16, pick_dtype
from trainer.tasks import open_task
from trainer.training.optim import (
    CLIP_NORM,
    Ema,
    Schedule,
    averaged,
    build_optimizer,
    parameter_groups,
    set_rates,
)
from trainer.training.record import Record
from trainer.training.screen import Screen
from trainer.training.timing import Clock
from trainer.weights import checkpoint

SCALED_GRADIENTS = torch.float16  # the type whose small gradients vanish, so that the loss is scaled up
LOOK_EVERY = {"cpu": 1, "cuda": 20}  # steps from one look at their numbers to the next: a look waits for a GPU
NONE = -1  # instead of a step's number
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
    best_scores: dict[str, float] = field(default_factory=dict)  # the task's headlines
    skipped: tuple[int, ...] = ()  # steps left out because their loss was not finite
    averaged: bool = False  # whether all ranks have the same statistics of batch norm: the epoch's steps are done


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
        self.mode = parallel.mode_of(s, world, device)
        number, shares = self.mode.share
        if s.batch < shares:
            raise TrainerError(
                f"--batch {s.batch} is smaller than the number of ranks, {shares}",
                f"--batch counts the pictures of all ranks together: use {shares} or more",
            )
        # A bf16 that this rank has not is refused by all of them, once they have met: none shall wait for it till then.
        self.dtype = pick_dtype(s.precision, device, s.precision == "bf16" or native_bf16(device))
        if s.precision == "fp32":
            full_fp32()
        self.task = open_task(s)
        if not len(self.task.val_set) and s.val:
            raise TrainerError(f"--data {s.data}: there is no validation picture", "or train with --noval")
        torch.manual_seed(s.seed)  # every rank begins with the same weights
        self.model = self.task.build(self.screen.say)
        self.frozen = bool(s.freeze)
        if s.freeze:
            frozen = self.task.freeze(self.model, s.freeze)
            which = "all but the head" if s.freeze == (-1,) else f"layers {', '.join(map(str, s.freeze))}"
            until = f", for the first {s.unfreeze} epochs" if s.unfreeze else ""
            self.screen.say(f"frozen: {which} with {frozen:,} parameters{until}")
        self.workers = dist.default_workers(device, world) if s.workers is None else s.workers
        share = {"rank": world.rank, "world": world.size, "local_size": world.local_size}
        share |= {"workers": self.workers, "stride": self.task.stride}
        self.train = self.task.train_loader({**share, "rank": number, "world": shares})
        self._check_batch_norm()
        self.val = self.task.val_loader(share)
        if device.type == "cuda":
            self.train.pin()
            self.val.pin()
        for note in dict.fromkeys((*self.train.notes, *self.val.notes)):
            self.screen.say(note)
        self.schedule = Schedule(s.hyp, s.epochs, self.train.steps, s.batch, s.schedule)
        self.clock = Clock(device)
        self.at = Position()
        self.folder = Path()  # known once the ranks have met
        self.advised: set[str] = set()  # what was said once
        self.history: list[dict[str, float]] = []  # a row for each epoch that is done
        self.class_map: list[float] | None = None  # of the last validation, for --image-weights
        self.record: Record | None = None  # on the rank that writes it
        self.shown: Sequence[Any] = ()  # validation pictures with what was found in them
        self.metric = self.task.metric()  # of the last validation, all ranks' together on rank 0

    def agree_on_precision(self) -> None:
        """Compute in a type that all ranks have, now that they have met: one kind of GPU may lack what another has.

        The ranks' gradients are summed, and those of fp16 are of a loss that is scaled up. A collective.
        """
        devices = [self.device]
        if self.settings.parallel == "dp" and self.device.type == "cuda":
            devices = [torch.device("cuda", gpu) for gpu in dist.gpu_numbers(self.settings.device)]
        natives = dist.all_gather(all(native_bf16(device) for device in devices))
        self.dtype = pick_dtype(self.settings.precision, self.device, all(natives))
        if self.settings.precision == "auto" and any(natives) and not all(natives):
            self.screen.say(f"no bf16 on rank {natives.index(False)}, so that no rank computes in it")

    def _check_batch_norm(self) -> None:
        """An error where a rank would have to normalise a single value: by its own variance, which is none."""
        s, ranks, stride = self.settings, self.world.size, self.task.stride
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
            said = self.task.fit(self.model)
            if said:
                self.screen.say(said)
        self.model.to(device=self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.loss = self.task.loss_of(self.model)
        self.state_names, self.groups = list(self.model.state_dict()), parameter_groups(self.model)
        conditions = parallel.Conditions(
            self.autocast,
            self.clock,
            self.task.least_side,
            self.task.stride,
            always_moves=self.schedule.accumulate == 1,
            least_share=len(self.task.train_set) // self.train.steps // self.mode.share[1],
        )
        self.mode.place(self.model, averaged(self.model), conditions)
        if self.mode.said:
            self.screen.say(self.mode.said)
        self.clock.restart()
        self.net = self.mode.module
        self.ema = Ema(self.net, s.hyp.ema_tau, self.mode.average)
        # By what the layers are in the whole model: a part of it, traced, has lost some of their types.
        own = set(dict(self.net.named_parameters()))
        self.own_groups = [[name for name in group if name in own] for group in self.groups]
        self.optimizer = build_optimizer(self.net, s.optimizer, s.hyp, s.batch, self.own_groups)
        self.parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == SCALED_GRADIENTS)
        self.total = torch.zeros(len(self.task.terms), dtype=torch.float64, device=self.device)
        self.pending = torch.zeros_like(self.total)
        self.pending_of = NONE  # the step whose terms these are
        self.before_of = NONE  # and the step of those that the sum over the ranks has reached
        self.first_bad = torch.full((), NONE, device=self.device)  # the step that was first not finite, this epoch
        self.norm = torch.zeros((), device=self.device)

    def autocast(self) -> torch.autocast:
        """The precision that the network computes in."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    @property
    def number(self) -> int:
        """The next step, counted over the whole run from 0."""
        number: int = self.at.epoch * self.train.steps + self.at.step
        return number

    @property
    def known(self) -> int:
        """The steps so far whose loss is known: within an epoch that of the last one comes with the next one's sums."""
        before: int = self.at.epoch * self.train.steps
        return max(self.pending_of, before)

    def step(self, batch: Any, stop: bool = False, save: bool = False) -> Told:
        """One batch forward and backward, and the weights moved where enough batches have been gathered.

        `stop` and `save` are this rank's wishes; the answer is what any rank wished. They, the counts that the loss
        needs and the loss terms of the step before travel in one sum, so that none costs a collective of its own.
        An epoch's last step always moves the weights: nothing half gathered is left for a checkpoint to keep.
        """
        at, number = self.at, self.number
        rates = self.schedule.at(number)
        is_last = {*range(number + 1, number + self.train.steps - at.step)} <= {*at.skipped}
        moves = is_last or number - at.last_move >= rates.accumulate
        seed_generators(self.settings.seed, number, self.world.rank)
        with self.clock.copying():
            images, truth = self.task.move(batch, self.device)
        assignment = self.loss.assign(truth, len(images), *images.shape[2:])
        counts = assignment.counts
        if not self.mode.sees_outputs:  # another rank counts the same pictures
            counts = torch.zeros_like(counts)
        wishes = counts.new_tensor([float(stop), float(save)])
        sums = torch.cat((counts, self.pending, wishes))
        work = dist.start_sum(sums)  # runs while the network does
        terms = torch.zeros_like(self.pending)
        asked: Callable[[], list[float]] | None = None

        def evaluate(raw: Any) -> Tensor:
            nonlocal terms, asked
            matched, late = self.loss.match(raw, assignment)
            late_work = dist.start_sum(late, self.mode.seeing)  # what only the outputs could tell
            with self.clock.spending("sync"):
                dist.wait(work)
                dist.wait(late_work)
            asked = _coming(sums[-WISHES:])  # before the backward pass: reading it does not wait for that
            terms = self.loss(raw, matched, torch.cat((sums[: len(counts)], late)))
            # The ranks' gradients are summed.
            return self.scaler.scale(terms.sum() * self.task.weight(sums[0].float()))

        self.mode.step(images, evaluate, moves)
        with self.clock.spending("sync"):
            dist.wait(work)  # a rank that does not see the outputs has not yet
        asked = asked or _coming(sums[-WISHES:])
        self.before, self.before_of = sums[len(counts) : -WISHES], self.pending_of
        self._note(self.before, self.before_of)
        if moves:
            self._move(number, rates)
            if not self.scaler.is_enabled():  # with one, the weights do not move by broken gradients
                self._note(self.norm, number)
        self.total += self.before
        self.pending, self.pending_of = terms.detach().double(), number
        at.images += batch.global_size
        at.step += 1
        to_stop, to_save = asked()
        return Told(bool(to_stop), bool(to_save), moves)

    def _move(self, number: int, rates: Any) -> None:
        set_rates(self.optimizer, rates)
        self.norm = self.mode.clip(self.scaler, self.optimizer, self.parameters, CLIP_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not dist.together())
        self.ema.update()
        self.at.last_move = number

    def _note(self, values: Tensor, number: int) -> None:
        """Remember the first step whose values were not finite, without waiting for a GPU (`where` would)."""
        self.first_bad.masked_fill_(~values.isfinite().all() & (self.first_bad == NONE), number)

    def looks(self, step: int) -> bool:
        """Whether this step's numbers are looked at; all of them count, also those that nobody looks at."""
        every = LOOK_EVERY[self.device.type]
        return step % every == 1 % every or step == self.train.steps

    def check_finite(self) -> None:
        """Raise NotFinite, on all ranks together, where a loss before the last step's or a gradient is not finite."""
        found = int(self.first_bad)
        if found != NONE:
            raise NotFinite(found)

    def flush(self) -> Tensor:
        """The last step's loss terms, summed over the ranks: the end of an epoch.

        They stay out of `total`, so that a checkpoint before the validation has the state after any other step.
        """
        last = self.pending.clone()
        with self.clock.spending("sync"):
            dist.wait(dist.start_sum(last))
        self._note(last, self.pending_of)
        self.check_finite()
        return last

    def begin_epoch(self) -> None:
        """Begin the next epoch."""
        self.at.epoch, self.at.step, self.at.images, self.at.averaged = self.at.epoch + 1, 0, 0, False
        if self.at.epoch == self.settings.unfreeze:
            self._unfreeze()
        self.total.zero_()
        self.pending.zero_()
        self.first_bad.fill_(NONE)

    def _unfreeze(self) -> None:
        """Train what was frozen (--unfreeze): the gradients of more parameters are exchanged from now on."""
        if not self.frozen:
            return
        self.frozen = False  # on all ranks, also where this one's part had nothing to unfreeze
        self.net.requires_grad_(True)
        self.mode.refresh()
        self.clock.restart()
        self.screen.say(f"from epoch {self.at.epoch + 1} on, all layers are trained")

    def average_statistics(self) -> None:
        """Make batch norm's statistics those of all ranks: each rank has seen other pictures.

        Once an epoch: the mean of three equal numbers may differ from them in its last bit.
        """
        if self.at.averaged:
            return
        self.at.averaged = True
        for part in (self.net, self.ema.model):
            self.mode.average_(list(_statistics(part).values()))

    @property
    def validates(self) -> bool:
        """Whether the running epoch ends with a validation."""
        s, done = self.settings, self.at.epoch + 1
        return s.val and (done % s.val_period == 0 or done == s.epochs)

    def validate(self, batches: Iterable[Any]) -> Any:
        """The averaged model's scores over the batches of all ranks, on every rank. A collective."""
        metric, self.shown = self.task.evaluate(self.mode.complete(), batches, self.device, self.dtype)
        states = dist.gather(metric.state())
        scores = None
        if states:
            self.metric = self.task.metric()
            for state in states:
                self.metric.merge(state)
            scores = self.metric.compute()
        return dist.broadcast(scores)

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
        self._note(self.pending, self.pending_of)
        mine = {
            "bad": int(self.first_bad),
            "pending": self.pending.cpu(),
            "statistics": [{k: t.cpu() for k, t in _statistics(m).items()} for m in (self.net, self.ema.model)],
        }
        ranks = dist.all_gather(mine)
        bad = [rank["bad"] for rank in ranks if rank["bad"] != NONE]
        if bad:
            raise NotFinite(min(bad))
        stages = self.mode.stages
        shares = [_joined(ranks[k : k + stages], self.state_names) for k in range(0, len(ranks), stages)]
        return {
            "format": checkpoint.FORMAT,
            "model": parallel.model_state(self.mode, self.net, self.state_names),
            "ema": parallel.model_state(self.mode, self.ema.model, self.state_names),
            "updates": self.ema.updates,
            "optimizer": parallel.optimizer_state(self.mode, self.optimizer, self.own_groups, self.groups),
            "scaler": self.scaler.state_dict(),
            "epoch": self.at.epoch,
            "step": self.number,
            "at": dataclasses.asdict(self.at),
            "total": self.total.cpu(),
            "ranks": shares,
            "history": self.history,
            "class_map": self.class_map,
            "hyp": dataclasses.asdict(self.settings.hyp),
            "settings": dataclasses.asdict(self.settings),
            "task": self.settings.task,
            "cfg": self.task.cfg,
            "names": list(self.task.names),
            "imgsz": self.settings.imgsz,
        }

    def restore(self, content: Mapping[str, Any]) -> None:
        """Become what `state` described, on the same number of ranks exactly.

        On another number, batch norm's statistics are the ranks' average and the loss terms their sum; the global
        order of the pictures stays.
        """
        parallel.load_model(self.mode, self.net, content["model"])
        parallel.load_model(self.mode, self.ema.model, content["ema"])
        self.ema.updates = content["updates"]
        parallel.load_optimizer(self.mode, self.optimizer, self.own_groups, self.groups, content["optimizer"])
        if content["scaler"]:  # none in other precisions than fp16, and a device may have another one
            self.scaler.load_state_dict(content["scaler"])
        self.at = Position(**content["at"])
        self.at.skipped = tuple(self.at.skipped)
        if 0 < self.settings.unfreeze <= self.at.epoch:
            self._unfreeze()
        self.total.copy_(content["total"])
        self.first_bad.fill_(NONE)
        self.optimizer.zero_grad(set_to_none=not dist.together())  # what a bad step has left half gathered
        self.history = list(content["history"])
        self.task.cfg = content["cfg"]  # with the anchors that were fitted
        self.weigh(content["class_map"])
        ranks, (number, shares) = content["ranks"], self.mode.share
        same = len(ranks) == shares
        order = {name: j for j, name in enumerate(filter(_is_statistic, self.state_names))}
        for k, part in enumerate((self.net, self.ema.model)):
            for name, tensor in _statistics(part).items():
                values = [rank["statistics"][k][order[name]] for rank in ranks]
                tensor.copy_(values[number] if same else torch.stack(values).mean(0))
        pending = ranks[number]["pending"] if same else sum(rank["pending"] for rank in ranks) / shares
        self.pending.copy_(pending if self.mode.sees_outputs else torch.zeros_like(self.pending))
        self.pending_of = next((n for n in range(self.number - 1, -1, -1) if n not in self.at.skipped), NONE)


def _coming(values: Tensor) -> Callable[[], list[float]]:
    """Begin to bring a few numbers to the host; what is returned waits for them alone, not for what comes after."""
    if values.device.type != "cuda":
        return values.tolist
    there = values.to("cpu", non_blocking=True)  # in pinned memory, as torch has it for such a copy
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        return there.tolist()

    return read


def seed_generators(seed: int, number: int, rank: int) -> None:
    """Seed every global random generator for one step: nothing that is drawn depends on what was drawn before."""
    mixed = int(np.random.SeedSequence([3, seed, number, rank]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def _is_statistic(name: str) -> bool:
    return name.endswith(("running_mean", "running_var"))


def _statistics(part: nn.Module) -> dict[str, Tensor]:
    """Batch norm's running means and variances."""
    return {name: buffer for name, buffer in part.named_buffers() if _is_statistic(name)}


def _joined(ranks: Sequence[Mapping[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """What the ranks say that took the same share of the pictures, each for its part of the model, as one."""
    statistics = []
    for k in range(2):
        of_all = {name: tensor for rank in ranks for name, tensor in rank["statistics"][k].items()}
        statistics.append([of_all[name] for name in filter(_is_statistic, order)])
    return {"pending": sum(rank["pending"] for rank in ranks), "statistics": statistics}
