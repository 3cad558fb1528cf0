"""Trainer: what a run is made of, and its state dict."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import DIGITS, Settings, traits_of
from trainer.config.settings import layers
from trainer.data.batch import TrainBatch
from trainer.data.loading.dataloader import on_side_stream
from trainer.distributed import comm
from trainer.engine.compilation import GRAPHS, Compilation, choose_mode
from trainer.engine.display import TrainingDisplay
from trainer.engine.ema import ema_copy
from trainer.engine.evaluator import Evaluator
from trainer.engine.events import Events
from trainer.engine.meter import NONE, LossMeter
from trainer.engine.optimizer import parameter_groups
from trainer.engine.schedule import Schedule, too_few_steps
from trainer.engine.state import (
    NotFinite,
    RankState,
    StepResult,
    TrainState,
    is_statistic,
    merge_stages,
    statistics_of,
)
from trainer.engine.step import TrainStep
from trainer.engine.timing import StepTimer
from trainer.engine.update import WeightUpdate
from trainer.errors import TrainerError
from trainer.models import freeze
from trainer.models.precision import native_bf16, pick_dtype, set_algorithms, set_tf32
from trainer.strategies.network_with_loss import NetworkWithLoss
from trainer.strategies.strategy import Conditions, Strategy
from trainer.tasks import Scores, open_task
from trainer.weights import checkpoint_file
from trainer.weights.checkpoint import ShareState, TrainerState


class Trainer:
    """One training run.

    `task` has the data and makes the network; `strategy` divides them among the ranks. `train_step` computes a step
    (step.py), `update` changes the weights (update.py), `meter` counts the loss (meter.py), `evaluator` scores.
    """

    train_step: TrainStep
    update: WeightUpdate
    meter: LossMeter
    compilation: Compilation

    def __init__(self, settings: Settings, world: comm.World, device: torch.device, events: Events) -> None:
        """Check all that needs no other rank; write nothing."""
        self.settings = settings
        self.world = world
        self.device = device
        self.events = events
        self.display = TrainingDisplay(enabled=world.rank == 0, launched=events.launched)
        s = settings
        self.strategy: Strategy = traits_of(s.parallel).load()(s, world, device)
        # A rank without bf16 must not fail here, before the rendezvous: the others would wait for it.
        self.dtype = pick_dtype(s.precision, device, s.precision == "bf16" or native_bf16(device))
        if s.precision == "fp32":
            set_tf32(s.tf32)
        if device.type == "cuda":
            set_algorithms(deterministic=s.deterministic, has_one_shape=not (s.multi_scale or s.rect))
        self.task = open_task(s)
        if not len(self.task.val_set) and not s.noval:
            raise TrainerError(f"--data {s.data}: no validation image", "add images to `val`, or use --noval")
        torch.manual_seed(s.seed)  # the same initial weights on every rank
        self.model = self.task.build(self.display.print)
        self._freeze()
        share = comm.share_of(world, device, s.workers, self.task.stride)
        self.workers: int = share["workers"]
        number, shares = self.strategy.share
        self.train_loader = self.task.train_loader({**share, "rank": number, "world": shares}, device)
        self._check_batch_norm()
        self.evaluator = Evaluator(self.task, self.task.val_loader(share))
        for note in dict.fromkeys((*self.train_loader.notes, *self.evaluator.loader.notes)):
            self.display.print(note)
        self.schedule = Schedule(s.hyp, s.epochs, self.train_loader.steps, s.batch, s.schedule)
        note = "" if s.data == DIGITS else too_few_steps(self.schedule, has_weights=bool(s.weights))
        if note:
            self.display.print(note)
        steps = s.epochs * self.train_loader.steps
        mode, note = choose_mode(s, device, world.size, steps, can_compile=self.task.can_compile)
        self.compilation = Compilation(mode, s, self.display.print)
        if note:
            self.display.print(note)
        self.timer = StepTimer(device)
        self.state = TrainState()

    def _freeze(self) -> None:
        """Freeze the layers of --freeze."""
        s = self.settings
        numbers = layers(s.freeze)
        self.is_frozen = bool(numbers)
        if numbers:
            which = "all but the head" if numbers == (-1,) else f"layers {', '.join(map(str, numbers))}"
            until = f", for the first {s.unfreeze} epochs" if s.unfreeze else ""
            self.display.print(f"frozen: {which} with {freeze(self.model, numbers):,} parameters{until}")

    def _check_batch_norm(self) -> None:
        """Raise TrainerError if batch norm can get a single value per channel on a rank, which has no variance."""
        s = self.settings
        ranks = self.world.size
        side = self.train_loader.sampler.sides[0]
        normalises = any(isinstance(m, nn.BatchNorm2d) for m in self.model.modules())
        cells = -(-side // (self.task.norm_stride or self.task.stride))  # of an image, on a side
        if normalises and cells * self.train_loader.fewest_images == 1 and not (s.sync_bn and ranks > 1):
            part = "a rank's part of a batch" if ranks > 1 else "a batch"
            raise TrainerError(
                f"--batch {s.batch} with --imgsz {s.imgsz}: {part} can be one image of {side} x {side} px, "
                "and batch norm cannot compute the variance of its single value",
                "use a larger --batch or --imgsz" + (", or --sync-bn" if ranks > 1 else ""),
            )

    def agree_on_precision(self) -> None:
        """Choose a dtype that all ranks support, as their GPUs may differ. A collective.

        Gradients are summed over the ranks, and those of fp16 belong to a scaled loss.
        """
        natives = comm.all_gather(all(map(native_bf16, self.strategy.devices)))
        self.dtype = pick_dtype(self.settings.precision, self.device, all(natives))
        if self.settings.precision == "auto" and any(natives) and not all(natives):
            self.display.print(f"rank {natives.index(False)} has no bf16, so no rank uses it")

    def start(self, resuming: bool = False) -> None:
        """Place the model on the device by the strategy, and create the optimizer; a resumed run keeps its anchors."""
        s = self.settings
        task = self.task
        if not s.noautoanchor and not resuming and (report := task.fit(self.model)):
            self.display.print(report)
        self.model.to(device=self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._state_names = list(self.model.state_dict())
        groups = parameter_groups(self.model, task.backbone)
        criterion = task.criterion().to(self.device)
        self._whole = NetworkWithLoss(self.model, criterion, self.autocast)
        share = len(task.train_set) // self.train_loader.steps // self.strategy.share[1]
        conditions = Conditions(
            self.timer,
            task.least_side,
            task.stride,
            always_syncs=self.schedule.accumulate == 1,
            min_share=share,
        )
        self.strategy.setup(self._whole, ema_copy(self.model), conditions)
        if self.strategy.summary:
            self.display.print(self.strategy.summary)
        self.timer.restart()
        on_gpu = self.device.type == "cuda"
        self._side_stream = torch.cuda.Stream(self.device) if on_gpu else None  # type: ignore[no-untyped-call]
        in_graphs = self.compilation.mode == GRAPHS
        self.update = WeightUpdate(s, self.schedule, self.strategy, groups, self.dtype, in_graphs=in_graphs)
        self.meter = LossMeter(len(task.terms), self.world.rank, self.device)
        self.train_step = TrainStep(
            task, self.strategy, self._whole, self.update, self.meter, self.timer, s.seed
        )
        self._prepare_targets()
        self._prepare_loss()

    def _prepare_targets(self) -> None:
        """Let the dataloader make the targets of the loss, for the anchors that the model has now."""
        # On a CPU, rows that pad only cost time, unless compiled code needs fixed shapes.
        pads = self.device.type != "cpu" or bool(self.compilation.mode)
        self.task.prepare_targets(self.train_loader, self.evaluator.loader, self.model, pads=pads)

    def _prepare_loss(self) -> None:
        """Let the loss know the current epoch."""
        self._whole.criterion.begin_epoch(self.state.epoch, self.settings.epochs)

    def autocast(self) -> torch.autocast:
        """Return the autocast context of the forward pass."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    @property
    def local_model(self) -> nn.Module:
        """The part of the model on this rank."""
        return self.strategy.module

    @property
    def global_step(self) -> int:
        """The next step, counted over the whole run from 0."""
        return int(self.state.epoch * self.train_loader.steps) + self.state.step

    @property
    def logged_steps(self) -> int:
        """The number of steps whose loss has been reduced and logged; the last step's follows with the next step."""
        return max(self.meter.last_step, int(self.state.epoch * self.train_loader.steps))

    def batches(self) -> Iterator[TrainBatch]:
        """Return the rest of the epoch's batches of this rank."""
        batches = self.train_loader.epoch(self.state.epoch, self.state.step)
        return on_side_stream(batches, self._side_stream) if self._side_stream else batches

    def step(self, batch: TrainBatch, stop: bool = False, save: bool = False) -> StepResult:
        """Train on the next batch of the epoch: see `TrainStep`."""
        if self.compilation.is_due(batch.global_size):
            moved = self.task.move(batch, self.device)
            self.compilation.run(self._whole, self.meter, self.strategy, *moved, batch.global_size)
        number = self.global_step
        following_steps = self.train_loader.steps - self.state.step - 1
        skipped = [step for step in self.state.skipped if number < step <= number + following_steps]
        is_last = len(skipped) == following_steps
        return self.train_step(batch, self.state, number, is_last=is_last, stop=stop, save=save)

    def begin_epoch(self) -> None:
        """Advance to the next epoch."""
        self.state.epoch = self.state.epoch + 1
        self.state.step = 0
        self.state.images = 0
        self.state.averaged = False
        if self.state.epoch == self.settings.unfreeze:
            self._unfreeze()
        self.meter.begin_epoch()
        self._prepare_loss()

    def _unfreeze(self) -> None:
        """Train the frozen layers (--unfreeze) and reduce their gradients."""
        if not self.is_frozen:
            return
        self.is_frozen = False  # also on a pipeline stage without frozen layers
        self.local_model.requires_grad_(True)
        self.strategy.refresh()
        self.compilation.forget()
        self.update.zero_gradients()
        self.timer.restart()
        self.display.print(f"from epoch {self.state.epoch + 1} on, all layers are trained")

    def average_statistics(self) -> None:
        """Average batch norm's statistics over the ranks, once per epoch.

        A second average would not be exact: the mean of three equal floats can differ in the last bit.
        """
        if self.state.averaged:
            return
        self.state.averaged = True
        for model in self.update.models:
            comm.average_(list(statistics_of(model).values()), self.strategy.replica_group)

    @property
    def validates_loss(self) -> bool:
        """Whether a validation computes the loss, and not the scores alone."""
        return self._whole.criterion.validates and not self.settings.noval

    @property
    def has_validation(self) -> bool:
        """Whether the current epoch ends with a validation."""
        s = self.settings
        done = self.state.epoch + 1
        return not s.noval and (done % s.val_period == 0 or done == s.epochs)

    def validate(self, batches: Iterable[Any]) -> Scores:
        """Return the averaged model's scores over the batches of all ranks. A collective."""
        return self.evaluator(
            self.strategy.gather_average(), batches, self.device, self.dtype, self._whole.criterion
        )

    def state_dict(self) -> TrainerState:
        """Return all that an exact resume needs, the same on every rank: tensors and plain values. A collective.

        Batch norm's statistics within an epoch and the last step's loss terms are stored per rank. Random generators
        need no state: every step seeds them from its number.
        """
        on_cpu = [
            {name: tensor.cpu() for name, tensor in statistics_of(model).items()}
            for model in self.update.models
        ]
        state_of_rank: RankState = {**self.meter.state_of_rank(), "statistics": on_cpu}
        ranks = comm.all_gather(state_of_rank)
        bad_steps = [rank["bad"] for rank in ranks if rank["bad"] != NONE]
        if bad_steps:
            raise NotFinite(min(bad_steps))
        stages = self.strategy.stages
        pipelines = [ranks[first : first + stages] for first in range(0, len(ranks), stages)]
        shares = [merge_stages(pipeline, self._state_names) for pipeline in pipelines]
        return {
            "format": checkpoint_file.FORMAT,
            **self.update.state_dict(self.strategy, self._state_names),
            "epoch": self.state.epoch,
            "step": self.global_step,
            "at": dataclasses.asdict(self.state),
            "total": self.meter.sums.cpu(),
            "ranks": shares,
            "class_map": self.train_loader.sampler.class_map,
            "hyp": dataclasses.asdict(self.settings.hyp),
            "settings": dataclasses.asdict(self.settings),
            "task": self.settings.task,
            "cfg": self.task.cfg,
            "names": list(self.task.names),
            "imgsz": self.settings.imgsz,
        }

    def load_state_dict(self, content: TrainerState) -> None:
        """Restore the state of `state_dict`, bit for bit on the same number of ranks.

        On another number, batch norm's statistics are averaged and the loss terms summed over the saved ranks. The
        order of the images does not change.
        """
        self.update.load_state_dict(self.strategy, content)
        self.state = TrainState(**content["at"])
        self.state.skipped = tuple(self.state.skipped)
        if 0 < self.settings.unfreeze <= self.state.epoch:
            self._unfreeze()
        self.task.cfg = content["cfg"]  # with the fitted anchors
        self._prepare_targets()
        self._prepare_loss()
        self.train_loader.sampler.class_map = content["class_map"]
        self._load_statistics(content["ranks"])
        self.meter.load(content["total"], self._pending_of(content["ranks"]), self._last_trained_step())

    def _load_statistics(self, saved_shares: Sequence[ShareState]) -> None:
        """Restore batch norm's statistics."""
        share, shares = self.strategy.share
        row_of = {name: row for row, name in enumerate(filter(is_statistic, self._state_names))}
        for k, model in enumerate(self.update.models):
            for name, tensor in statistics_of(model).items():
                values = [saved["statistics"][k][row_of[name]] for saved in saved_shares]
                tensor.copy_(values[share] if len(values) == shares else torch.stack(values).mean(0))

    def _pending_of(self, saved_shares: Sequence[ShareState]) -> Tensor:
        """Return this rank's loss terms that are not reduced yet."""
        share, shares = self.strategy.share
        pending = [saved["pending"] for saved in saved_shares]
        if not self.strategy.computes_loss:
            return torch.zeros_like(pending[0])
        if len(pending) == shares:
            return pending[share]
        return sum(pending, start=torch.zeros_like(pending[0])) / shares

    def _last_trained_step(self) -> int:
        """Return the last global step before the next one that was not skipped, or NONE."""
        for step in range(self.global_step - 1, -1, -1):
            if step not in self.state.skipped:
                return step
        return NONE
