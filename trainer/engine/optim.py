"""Optimization: parameter groups, learning-rate schedule with warm-up, and moving average of the weights."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.config.presets import Hyp, gathered, nominal_batch
from trainer.engine.musgd import MUON, MuSGD

EMA_DECAY = 0.9999
KINDS = ("biases", "scales", "weights")  # of parameters; scales are the weights of norms


@dataclass(frozen=True)
class Rates:
    """Batches to accumulate, learning rates and momentum of one step."""

    accumulate: int
    lr_bias: float
    lr: float
    momentum: float


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule: a function of the step alone, so that a checkpoint needs no state of it.

    `linear` and `cosine` are YOLOv5's, with its warm-up; `one-cycle` (Smith and Topin 2017) needs none.
    """

    hyp: Hyp
    epochs: int
    steps: int  # per epoch
    batch: int  # over all ranks
    kind: str = "linear"

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up: at least 100, or 0 if warmup_epochs is 0."""
        if self.hyp.warmup_epochs <= 0:
            return 0
        return max(round(self.hyp.warmup_epochs * self.steps), 100)

    @property
    def accumulate(self) -> int:
        """Batches per optimizer step after the warm-up."""
        return gathered(self.hyp, self.batch)

    def factor(self, epoch: int) -> float:
        """Return the learning rate of an epoch (from 0) as a fraction of lr0; it falls to lrf."""
        lrf = self.hyp.lrf
        if self.kind == "cosine":
            return (1 - math.cos(math.pi * epoch / self.epochs)) / 2 * (lrf - 1) + 1
        return (1 - epoch / self.epochs) * (1 - lrf) + lrf

    def at(self, step: int) -> Rates:
        """Return the rates of a global step (from 0)."""
        hyp = self.hyp
        if self.kind == "one-cycle":
            return self._one_cycle(step)
        lr = hyp.lr0 * self.factor(step // self.steps)
        if step > self.warmup_steps or not self.warmup_steps:
            return Rates(self.accumulate, lr, lr, hyp.momentum)
        x = step / self.warmup_steps
        return Rates(
            accumulate=max(1, round(1 + x * (nominal_batch(hyp, self.batch) / self.batch - 1))),
            lr_bias=hyp.warmup_bias_lr + x * (lr - hyp.warmup_bias_lr),
            lr=x * lr,
            momentum=hyp.warmup_momentum + x * (hyp.momentum - hyp.warmup_momentum),
        )

    def _one_cycle(self, step: int) -> Rates:
        """Rise from lr0 / 25 to lr0 in three tenths of the run, then fall to lr0 / 250 000, along cosines.

        The momentum falls by 0.1 and rises again. The constants are torch's, from OneCycleLR.
        """
        hyp = self.hyp
        last = max(1, self.epochs * self.steps - 1)
        peak = max(0.3 * (last + 1) - 1, 1e-9)
        x = step / peak if step <= peak else (step - peak) / max(last - peak, 1e-9)
        start, end = (1 / 25, 1.0) if step <= peak else (1.0, 1 / 25e4)
        slow, fast = (0.0, 0.1) if step <= peak else (0.1, 0.0)
        turn = (1 + math.cos(math.pi * min(x, 1.0))) / 2
        lr = hyp.lr0 * (end + (start - end) * turn)
        return Rates(self.accumulate, lr, lr, hyp.momentum - (fast + (slow - fast) * turn))


#: Fewer optimizer steps than these have not taught a network with random weights to find one box (8 images of bccd, 60
#: and 300 steps of yolov5n and yolov8n: mAP50 0.04 and 0.41, 0.01 and 0.76; 2 cores, 2026-11-28).
_FEWEST_STEPS = 200
_ENOUGH_STEPS = 300


def too_few_steps(schedule: Schedule, *, has_weights: bool) -> str:
    """Return a note if a run has too few steps to learn, as with a first data set of a few images; else ""."""
    steps = schedule.epochs * schedule.steps
    warmup = 0 if schedule.kind == "one-cycle" else schedule.warmup_steps
    if not has_weights and steps < _FEWEST_STEPS:
        epochs = math.ceil(_ENOUGH_STEPS / schedule.steps)
        return (
            f"--epochs {schedule.epochs}: {steps} steps ({schedule.steps} per epoch) are too few to train from "
            f"random weights; use --epochs {epochs} or more, or start from trained weights with --weights"
        )
    if steps <= warmup:
        return (
            f"--epochs {schedule.epochs}: the learning rate warms up for {warmup} steps, and the run has only {steps} "
            f"({schedule.steps} per epoch); use more --epochs, or warmup_epochs: 0 in --hyp"
        )
    return ""


def build_optimizer(
    model: nn.Module, name: str, hyp: Hyp, batch: int, groups: Sequence[Sequence[str]]
) -> Optimizer:
    """Create SGD (nesterov), MuSGD, Adam or AdamW over the groups of parameter names that `parameter_groups` returns.

    Only weights other than those of norms decay, by `weight_decay` times the images per optimizer step over the
    nominal batch. A backbone's groups carry the factor of their learning rate.
    """
    named = dict(model.named_parameters())
    decay = hyp.weight_decay * batch * gathered(hyp, batch) / nominal_batch(hyp, batch)
    options: list[dict[str, Any]] = []
    for k, group in enumerate(groups):
        factor = {"lr_factor": hyp.backbone_lr} if k >= len(KINDS) else {}
        decays = decay if KINDS[k % len(KINDS)] == "weights" else 0.0
        options.append({"params": [named[name] for name in group], "weight_decay": decays, **factor})
    # Fused: one kernel for all tensors instead of a Python loop. Fused SGD does not support shards.
    is_sharded = any(isinstance(p, DTensor) for p in named.values())
    if name == "SGD":
        optimizer = torch.optim.SGD(
            options, lr=hyp.lr0, momentum=hyp.momentum, nesterov=hyp.momentum > 0, fused=not is_sharded
        )
        # If fp16's scaler skips the first step, the fused kernel starts from uninitialized memory.
        for parameter in (parameter for group in options for parameter in group["params"]):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer
    if name == "MuSGD":
        for k, option in enumerate(options):
            option["muon"] = MUON if KINDS[k % len(KINDS)] == "weights" else 0.0
        return MuSGD(options, lr=hyp.lr0, momentum=hyp.momentum)
    kind = torch.optim.Adam if name == "Adam" else torch.optim.AdamW
    return kind(options, lr=hyp.lr0, betas=(hyp.momentum, 0.999), fused=True)


def parameter_groups(model: nn.Module, backbone: str = "") -> list[list[str]]:
    """Return the names of a model's biases, norm weights, and other weights: KINDS.

    With `backbone`, the prefix of its parameters' names, these three groups are the rest of the model's, and the
    backbone's follow.
    """
    norms = tuple(v for v in nn.__dict__.values() if isinstance(v, type) and "Norm" in v.__name__)
    groups: list[list[str]] = [[] for _ in range(2 * len(KINDS) if backbone else len(KINDS))]
    for path, module in model.named_modules():
        for key, _ in module.named_parameters(recurse=False):
            name = f"{path}.{key}" if path else key
            kind = KINDS.index(
                "biases" if key == "bias" else "scales" if isinstance(module, norms) else "weights"
            )
            groups[kind + len(KINDS) * (bool(backbone) and name.startswith(backbone))].append(name)
    return groups


def set_rates(optimizer: Optimizer, rates: Rates) -> None:
    """Set a step's learning rates and momentum in the groups of `parameter_groups`."""
    for k, group in enumerate(optimizer.param_groups):
        lr = rates.lr_bias if KINDS[k % len(KINDS)] == "biases" else rates.lr
        group["lr"] = lr * group.get("lr_factor", 1.0)
        if "momentum" in group:
            group["momentum"] = rates.momentum


def ema_copy(model: nn.Module) -> nn.Module:
    """Copy a model for its moving average, in evaluation mode and without gradients."""
    return copy.deepcopy(model).eval().requires_grad_(False)


class Ema:
    """Moving average of every float tensor of a model, including batch norm's running statistics.

    decay(u) = 0.9999 (1 - exp(-u / tau)) after u updates.
    """

    def __init__(self, model: nn.Module, tau: float, average: nn.Module | None = None) -> None:
        self.tau = tau
        self.model = ema_copy(model) if average is None else average
        self.updates = 0
        self._average = float_state(self.model)
        self._source = float_state(model)  # shares memory with the model, which optimizers update in place

    def decay(self, updates: int) -> float:
        """Return the weight of the old value at an update (from 1)."""
        return EMA_DECAY * (1 - math.exp(-updates / self.tau))

    @torch.no_grad()
    def update(self) -> None:
        """Update the average from the model's current weights."""
        self.updates += 1
        torch._foreach_lerp_(self._average, self._source, 1 - self.decay(self.updates))


def float_state(model: nn.Module) -> list[Tensor]:
    """Return the float tensors of a state dict; they share memory with the model. For DTensors, the local shard."""
    floats = (v.detach() for v in model.state_dict().values() if v.is_floating_point())
    return [v.to_local() if isinstance(v, DTensor) else v for v in floats]
