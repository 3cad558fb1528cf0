"""Trainer: model, loss, optimizer and dataloaders of one run, its training step, and its state dict."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import Settings
from trainer.config.settings import layers
from trainer.data.dataloader import on_side_stream
from trainer.distributed import comm
from trainer.distributed.data_parallel import Ddp, Dp
from trainer.distributed.fsdp import Fsdp
from trainer.distributed.pipeline import Pipeline
from trainer.distributed.strategy import Conditions, Strategy
from trainer.engine.display import TrainingDisplay
from trainer.engine.events import Events
from trainer.engine.optim import CLIP_NORM, Ema, Schedule, build_optimizer, ema_copy, parameter_groups, set_rates
from trainer.engine.run_logger import RunLogger
from trainer.engine.state import (
    NotFinite,
    StepResult,
    TrainState,
    is_statistic,
    merge_stages,
    seed_generators,
    statistics_of,
)
from trainer.engine.timing import StepTimer
from trainer.engine.trackers import Tracker
from trainer.errors import TrainerError
from trainer.losses import send
from trainer.models import freeze
from trainer.models.precision import native_bf16, pick_dtype, set_algorithms, set_tf32
from trainer.tasks import open_task
from trainer.weights import checkpoint_file

STRATEGIES: dict[str, type[Strategy]] = {"ddp": Ddp, "dp": Dp, "fsdp": Fsdp, "pipeline": Pipeline}
SCALED_GRADIENTS = torch.float16  # its small gradients underflow, so the loss is scaled up
NONE = -1  # no step
REQUESTS = 2  # values appended to each step's all-reduce: ranks with a stop signal, ranks whose checkpoint is due


class Trainer:
    """One training run: model, loss, optimizer, dataloaders and state."""

    def __init__(self, settings: Settings, world: comm.World, device: torch.device, events: Events) -> None:
        """Check all that needs no other rank; write nothing."""
        self.settings, self.world, self.device, self.events = settings, world, device, events
        self.display = TrainingDisplay(enabled=world.rank == 0, launched=events.launched)
        s = settings
        self.strategy = STRATEGIES[s.parallel](s, world, device)
        number, shares = self.strategy.share
        # A rank without bf16 must not fail here, before the rendezvous: the others would wait for it.
        self.dtype = pick_dtype(s.precision, device, s.precision == "bf16" or native_bf16(device))
        if s.compile and not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))):
            raise TrainerError("--compile: this machine has no C++ compiler", "install g++, or omit --compile")
        if s.precision == "fp32":
            set_tf32(s.tf32)
        if device.type == "cuda":
            set_algorithms(deterministic=s.deterministic, has_one_shape=not (s.multi_scale or s.rect))
        self.task = open_task(s)
        if not len(self.task.val_set) and not s.noval:
            raise TrainerError(f"--data {s.data}: no validation image", "add images to `val`, or use --noval")
        torch.manual_seed(s.seed)  # the same initial weights on every rank
        self.model = self.task.build(self.display.print)
        numbers = layers(s.freeze)
        self.is_frozen = bool(numbers)
        if numbers:
            which = "all but the head" if numbers == (-1,) else f"layers {', '.join(map(str, numbers))}"
            until = f", for the first {s.unfreeze} epochs" if s.unfreeze else ""
            self.display.print(f"frozen: {which} with {freeze(self.model, numbers):,} parameters{until}")
        share = comm.share_of(world, device, s.workers, self.task.stride)
        self.workers: int = share["workers"]
        self.train_loader = self.task.train_loader({**share, "rank": number, "world": shares}, device)
        self._check_batch_norm()
        self.val_loader = self.task.val_loader(share)
        for note in dict.fromkeys((*self.train_loader.notes, *self.val_loader.notes)):
            self.display.print(note)
        self.schedule = Schedule(s.hyp, s.epochs, self.train_loader.steps, s.batch, s.schedule)
        self.timer = StepTimer(device)
        self.state = TrainState()
        self.run_dir = Path()  # set after the rendezvous
        self.history: list[dict[str, float]] = []  # one row per finished epoch
        self.class_map: list[float] | None = None  # of the last validation, for --image-weights
        self.logger: RunLogger | None = None  # rank 0 only
        self.tracker: Tracker | None = None  # rank 0 only
        self.samples: Sequence[Any] = ()  # validation images with their predictions
        self.metric = self.task.metric()  # of the last validation; on rank 0 merged over the ranks

    def agree_on_precision(self) -> None:
        """Choose a dtype that all ranks support, as their GPUs may differ. A collective.

        Gradients are summed over the ranks, and those of fp16 belong to a scaled loss.
        """
        devices = [self.device]
        if self.settings.parallel == "dp" and self.device.type == "cuda":
            devices = [torch.device("cuda", gpu) for gpu in comm.gpu_numbers(self.settings.device)]
        natives = comm.all_gather(all(native_bf16(device) for device in devices))
        self.dtype = pick_dtype(self.settings.precision, self.device, all(natives))
        if self.settings.precision == "auto" and any(natives) and not all(natives):
            self.display.print(f"rank {natives.index(False)} has no bf16, so no rank uses it")

    def _check_batch_norm(self) -> None:
        """Raise TrainerError if batch norm can get a single value per channel on a rank, which has no variance."""
        s, ranks, stride = self.settings, self.world.size, self.task.stride
        normalises = any(isinstance(m, nn.BatchNorm2d) for m in self.model.modules())
        if normalises and self.train_loader.fewest_cells == 1 and not (s.sync_bn and ranks > 1):
            part = "a rank's part of a batch" if ranks > 1 else "a batch"
            raise TrainerError(
                f"--batch {s.batch} with --imgsz {s.imgsz}: {part} can be one image of {stride} x {stride} px, "
                "a single value for batch norm, which has no variance",
                "use a larger --batch or --imgsz" + (", or --sync-bn" if ranks > 1 else ""),
            )

    def start(self, resuming: bool = False) -> None:
        """Place the model on the device by the strategy, and create the optimizer; a resumed run keeps its anchors."""
        s = self.settings
        if not s.noautoanchor and not resuming and (report := self.task.fit(self.model)):
            self.display.print(report)
        self.model.to(device=self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.loss = self.task.loss_of(self.model)
        self.state_names, self.group_names = list(self.model.state_dict()), parameter_groups(self.model)
        always_syncs = self.schedule.accumulate == 1
        share = len(self.task.train_set) // self.train_loader.steps // self.strategy.share[1]
        sides = self.task.least_side, self.task.stride
        conditions = Conditions(self.autocast, self.timer, *sides, always_syncs=always_syncs, min_share=share)
        self.strategy.setup(self.model, ema_copy(self.model), conditions)
        if self.strategy.summary:
            self.display.print(self.strategy.summary)
        self.timer.restart()
        on_gpu = self.device.type == "cuda"
        self._side_stream = torch.cuda.Stream(self.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.local_model = self.strategy.module
        self.ema = Ema(self.local_model, s.hyp.ema_tau, self.strategy.average)
        # Grouped by the layers of the whole model: a traced pipeline stage has lost some layer types.
        local = set(dict(self.local_model.named_parameters()))
        self.local_group_names = [[name for name in group if name in local] for group in self.group_names]
        self.optimizer = build_optimizer(self.local_model, s.optimizer, s.hyp, s.batch, self.local_group_names)
        self.parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        self._zero_gradients()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == SCALED_GRADIENTS)
        self.term_sums = torch.zeros(len(self.task.terms), dtype=torch.float64, device=self.device)
        self.unreduced_terms = torch.zeros_like(self.term_sums)
        self.unreduced_step = NONE  # the step of `unreduced_terms`
        self.reduced_step = NONE  # the step of `reduced_terms`
        self.first_nonfinite_step = torch.full((), NONE, device=self.device)  # of this epoch
        self.grad_norm = torch.zeros((), device=self.device)

    def autocast(self) -> torch.autocast:
        """Return the autocast context of the forward pass."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    @property
    def global_step(self) -> int:
        """The next step, counted over the whole run from 0."""
        return int(self.state.epoch * self.train_loader.steps) + self.state.step

    @property
    def logged_steps(self) -> int:
        """The number of steps whose loss has been reduced and logged; the last step's follows with the next step."""
        return max(self.unreduced_step, int(self.state.epoch * self.train_loader.steps))

    def batches(self) -> Iterator[Any]:
        """Return the rest of the epoch's batches of this rank."""
        batches = self.train_loader.epoch(self.state.epoch, self.state.step)
        return on_side_stream(batches, self._side_stream) if self._side_stream else batches

    def step(self, batch: Any, stop: bool = False, save: bool = False) -> StepResult:
        """Run forward and backward on a batch, and step the optimizer when enough batches are accumulated.

        `stop` and `save` are this rank's requests; the result holds those of any rank. One all-reduce carries them,
        the counts for the loss, and the previous step's loss terms. An epoch's last step always steps the optimizer:
        a checkpoint holds no accumulated gradients.
        """
        state, step = self.state, self.global_step
        rates = self.schedule.at(step)
        is_last = {*range(step + 1, step + self.train_loader.steps - state.step)} <= {*state.skipped}
        updates = is_last or step - state.last_move >= rates.accumulate
        seed_generators(self.settings.seed, step, self.world.rank)
        with self.timer.copying():
            images, truth = self.task.move(batch, self.device)
        assignment = self.loss.assign(truth, len(images), *images.shape[2:])
        counts = assignment.counts
        if not self.strategy.computes_loss:  # another stage counts the same images
            counts = torch.zeros_like(counts)
        requests = send(torch.tensor([float(stop), float(save)], dtype=torch.float64), self.device)
        sums = torch.cat((counts, self.unreduced_terms, requests))
        work = comm.start_sum(sums)  # overlaps with the forward pass
        terms = torch.zeros_like(self.unreduced_terms)
        read_requests: Callable[[], list[float]] | None = None

        def evaluate(raw: Any) -> Tensor:
            nonlocal terms, read_requests
            matched, late = self.loss.match(raw, assignment)
            late_work = comm.start_sum(late, self.strategy.replica_group)  # counts that depend on the outputs
            with self.timer.spending("sync"):
                comm.wait(work)
                comm.wait(late_work)
            if comm.is_distributed():  # before backward, so that reading does not wait for it
                read_requests = comm.copy_to_host(sums[-REQUESTS:])
            terms = self.loss(raw, matched, torch.cat((sums[: len(counts)], late)))
            # Gradients are summed over the ranks, not averaged.
            return self.scaler.scale(terms.sum() * self.task.weight(sums[0].float()))

        self.strategy.step(images, evaluate, updates)
        with self.timer.spending("sync"):
            comm.wait(work)  # a stage without the outputs has not called `evaluate`
        if comm.is_distributed():
            read_requests = read_requests or comm.copy_to_host(sums[-REQUESTS:])
        self.reduced_terms, self.reduced_step = sums[len(counts) : -REQUESTS], self.unreduced_step
        self._record_nonfinite(self.reduced_terms, self.reduced_step)
        if updates:
            set_rates(self.optimizer, rates)
            self.grad_norm = self.strategy.clip(self.scaler, self.optimizer, self.parameters, CLIP_NORM)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self._zero_gradients()
            self.ema.update()
            state.last_move = step
            if not self.scaler.is_enabled():  # the scaler skips steps with non-finite gradients
                self._record_nonfinite(self.grad_norm, step)
        self.term_sums += self.reduced_terms
        self.unreduced_terms, self.unreduced_step = terms.detach().double(), step
        state.images += batch.global_size
        state.step += 1
        to_stop, to_save = read_requests() if read_requests else (stop, save)
        return StepResult(bool(to_stop), bool(to_save), updates)

    def _zero_gradients(self) -> None:
        """Remove the gradients, or zero them where their memory has to stay: DDP's buckets, and under CUDA graphs.

        A gradient that autograd creates is memory of the graph, which the next step overwrites.
        """
        graphs = self.settings.compile_mode != "default"
        self.optimizer.zero_grad(set_to_none=not (graphs or comm.is_distributed()))
        for parameter in self.parameters if graphs else ():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _record_nonfinite(self, values: Tensor, step: int) -> None:
        """Record the first step with non-finite values, without synchronizing a GPU (`where` would)."""
        is_bad = (values.sum() * 0).isnan()
        self.first_nonfinite_step.masked_fill_(is_bad & (self.first_nonfinite_step == NONE), step)

    def check_finite(self) -> None:
        """Raise NotFinite on all ranks if a gradient, or a loss before the last step, is not finite."""
        step = int(self.first_nonfinite_step)
        if step != NONE:
            raise NotFinite(step)

    def reduce_last_terms(self) -> Tensor:
        """Return the loss terms of the epoch's last step, summed over the ranks.

        `term_sums` does not include them, so that a checkpoint before the validation is like that of any other step.
        """
        last = self.unreduced_terms.clone()
        with self.timer.spending("sync"):
            comm.wait(comm.start_sum(last))
        self._record_nonfinite(last, self.unreduced_step)
        self.check_finite()
        return last

    def begin_epoch(self) -> None:
        """Advance to the next epoch."""
        self.state.epoch, self.state.step, self.state.images, self.state.averaged = self.state.epoch + 1, 0, 0, False
        if self.state.epoch == self.settings.unfreeze:
            self._unfreeze()
        self.term_sums.zero_()
        self.unreduced_terms.zero_()
        self.first_nonfinite_step.fill_(NONE)

    def _unfreeze(self) -> None:
        """Train the frozen layers (--unfreeze) and reduce their gradients."""
        if not self.is_frozen:
            return
        self.is_frozen = False  # also on a pipeline stage without frozen layers
        self.local_model.requires_grad_(True)
        self.strategy.refresh()
        self._zero_gradients()
        self.timer.restart()
        self.display.print(f"from epoch {self.state.epoch + 1} on, all layers are trained")

    def average_statistics(self) -> None:
        """Average batch norm's statistics over the ranks, once per epoch.

        A second average would not be exact: the mean of three equal floats can differ in the last bit.
        """
        if self.state.averaged:
            return
        self.state.averaged = True
        for model in (self.local_model, self.ema.model):
            comm.average_(list(statistics_of(model).values()), self.strategy.replica_group)

    @property
    def has_validation(self) -> bool:
        """Whether the current epoch ends with a validation."""
        s, done = self.settings, self.state.epoch + 1
        return not s.noval and (done % s.val_period == 0 or done == s.epochs)

    def validate(self, batches: Iterable[Any]) -> Any:
        """Return the EMA model's scores over the batches of all ranks. A collective."""
        metric, self.samples = self.task.evaluate(self.strategy.gather_average(), batches, self.device, self.dtype)
        parts = comm.gather(metric)
        scores = None
        if parts:
            self.metric = self.task.metric()
            for part in parts:
                self.metric.merge(part)
            scores = self.metric.compute()
        return comm.broadcast(scores)

    def set_class_map(self, class_map: list[float] | None) -> None:
        """Store the per-class scores; with --image-weights they set how often a class's images are sampled."""
        self.class_map = self.train_loader.sampler.class_map = class_map

    def state_dict(self) -> dict[str, Any]:
        """Return all that an exact resume needs, the same on every rank: tensors and plain values. A collective.

        Batch norm's statistics within an epoch and the last step's loss terms are stored per rank. Random generators
        need no state: every step seeds them from its number.
        """
        self._record_nonfinite(self.unreduced_terms, self.unreduced_step)
        models = (self.local_model, self.ema.model)
        statistics = [{k: t.cpu() for k, t in statistics_of(model).items()} for model in models]
        bad_step = int(self.first_nonfinite_step)
        mine = {"bad": bad_step, "pending": self.unreduced_terms.cpu(), "statistics": statistics}
        ranks = comm.all_gather(mine)
        bad = [rank["bad"] for rank in ranks if rank["bad"] != NONE]
        if bad:
            raise NotFinite(min(bad))
        stages = self.strategy.stages
        shares = [merge_stages(ranks[k : k + stages], self.state_names) for k in range(0, len(ranks), stages)]
        return {
            "format": checkpoint_file.FORMAT,
            "model": self.strategy.model_state(self.local_model, self.state_names),
            "ema": self.strategy.model_state(self.ema.model, self.state_names),
            "updates": self.ema.updates,
            "optimizer": self.strategy.optimizer_state(self.optimizer, self.local_group_names, self.group_names),
            "scaler": self.scaler.state_dict(),
            "epoch": self.state.epoch,
            "step": self.global_step,
            "at": dataclasses.asdict(self.state),
            "total": self.term_sums.cpu(),
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

    def load_state_dict(self, content: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`, bit for bit on the same number of ranks.

        On another number, batch norm's statistics are averaged and the loss terms summed over the saved ranks. The
        order of the images does not change.
        """
        self.strategy.load_model(self.local_model, content["model"])
        self.strategy.load_model(self.ema.model, content["ema"])
        self.ema.updates = content["updates"]
        self.strategy.load_optimizer(self.optimizer, self.local_group_names, self.group_names, content["optimizer"])
        if content["scaler"]:  # empty unless fp16; this device may use another dtype
            self.scaler.load_state_dict(content["scaler"])
        self.state = TrainState(**content["at"])
        self.state.skipped = tuple(self.state.skipped)
        if 0 < self.settings.unfreeze <= self.state.epoch:
            self._unfreeze()
        self.term_sums.copy_(content["total"])
        self.first_nonfinite_step.fill_(NONE)
        self._zero_gradients()  # those that were accumulated before a non-finite step
        self.history = list(content["history"])
        self.task.cfg = content["cfg"]  # with the fitted anchors
        self.set_class_map(content["class_map"])
        ranks, (number, shares) = content["ranks"], self.strategy.share
        is_same_count = len(ranks) == shares
        order = {name: j for j, name in enumerate(filter(is_statistic, self.state_names))}
        for k, model in enumerate((self.local_model, self.ema.model)):
            for name, tensor in statistics_of(model).items():
                values = [rank["statistics"][k][order[name]] for rank in ranks]
                tensor.copy_(values[number] if is_same_count else torch.stack(values).mean(0))
        pending = ranks[number]["pending"] if is_same_count else sum(rank["pending"] for rank in ranks) / shares
        self.unreduced_terms.copy_(pending if self.strategy.computes_loss else torch.zeros_like(self.unreduced_terms))
        earlier = range(self.global_step - 1, -1, -1)
        self.unreduced_step = next((n for n in earlier if n not in self.state.skipped), NONE)
