"""How the weights move: parameter groups, the learning-rate schedule with its warm-up, and the moving average."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.config import OPTIMIZERS, Hyp, gathered, nominal_batch

CLIP_NORM = 10.0
Model = TypeVar("Model", bound=nn.Module)
EMA_DECAY = 0.9999


@dataclass(frozen=True)
class Rates:
    """What holds for one step: batches to accumulate, learning rates, momentum."""

    accumulate: int
    lr_bias: float
    lr: float
    momentum: float


@dataclass(frozen=True)
class Schedule:
    """A schedule as a function of the step alone, so that a resumed run needs no state for it.

    `linear` and `cosine` are YOLOv5's, with its warm-up; `one-cycle` is Smith and Topin's (2017), which is its own.
    """

    hyp: Hyp
    epochs: int
    steps: int  # per epoch
    batch: int  # over all ranks
    kind: str = "linear"

    @property
    def warmup_steps(self) -> int:
        """At least 100 steps, unless the hyper-parameters switch the warm-up off."""
        if self.hyp.warmup_epochs <= 0:
            return 0
        return max(round(self.hyp.warmup_epochs * self.steps), 100)

    @property
    def accumulate(self) -> int:
        """Batches per optimizer step once the warm-up is over."""
        return gathered(self.hyp, self.batch)

    def factor(self, epoch: int) -> float:
        """The learning rate of an epoch (from 0) as a share of lr0, falling to lrf."""
        lrf = self.hyp.lrf
        if self.kind == "cosine":
            return (1 - math.cos(math.pi * epoch / self.epochs)) / 2 * (lrf - 1) + 1
        return (1 - epoch / self.epochs) * (1 - lrf) + lrf

    def at(self, step: int) -> Rates:
        """The rates at a step (from 0, over the whole run)."""
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
        """Up from lr0 / 25 to lr0 in three tenths of the run, then down to lr0 / 250 000, along cosines.

        The momentum goes the other way, between `momentum` and 0.1 less; the figures are OneCycleLR's in torch.
        """
        hyp, last = self.hyp, max(1, self.epochs * self.steps - 1)
        peak = max(0.3 * (last + 1) - 1, 1e-9)
        x = step / peak if step <= peak else (step - peak) / max(last - peak, 1e-9)
        start, end = (1 / 25, 1.0) if step <= peak else (1.0, 1 / 25e4)
        slow, fast = (0.0, 0.1) if step <= peak else (0.1, 0.0)
        turn = (1 + math.cos(math.pi * min(x, 1.0))) / 2
        lr = hyp.lr0 * (end + (start - end) * turn)
        return Rates(self.accumulate, lr, lr, hyp.momentum - (fast + (slow - fast) * turn))


def build_optimizer(
    model: nn.Module, name: str, hyp: Hyp, batch: int, groups: Sequence[Sequence[str]]
) -> torch.optim.Optimizer:
    """SGD (nesterov), Adam or AdamW over three groups of parameter names: biases, norm weights, all other weights.

    Only the third decays, by weight_decay scaled to the pictures per optimizer step over the nominal batch.
    """
    named = dict(model.named_parameters())
    biases, scales, weights = ([named[name] for name in group] for group in groups)
    decay = hyp.weight_decay * batch * gathered(hyp, batch) / nominal_batch(hyp, batch)
    options = [
        {"params": biases, "weight_decay": 0.0},
        {"params": scales, "weight_decay": 0.0},
        {"params": weights, "weight_decay": decay},
    ]
    # Fused: one kernel for all tensors instead of a Python loop over them. SGD has none for shards.
    shards = any(isinstance(p, DTensor) for p in named.values())
    if name == "SGD":
        optimizer = torch.optim.SGD(options, lr=hyp.lr0, momentum=hyp.momentum, nesterov=True, fused=not shards)
        # Left to itself, the fused kernel begins with whatever is in memory if fp16's scaler skips the first step.
        for moved in (*biases, *scales, *weights):
            optimizer.state[moved]["momentum_buffer"] = torch.zeros_like(moved)
        return optimizer
    if name not in OPTIMIZERS:
        raise ValueError(name)
    kind = torch.optim.Adam if name == "Adam" else torch.optim.AdamW
    return kind(options, lr=hyp.lr0, betas=(hyp.momentum, 0.999), fused=True)


def parameter_groups(model: nn.Module) -> tuple[list[str], list[str], list[str]]:
    """The names of a model's biases, norm weights, and all other weights."""
    norms = tuple(v for v in nn.__dict__.values() if isinstance(v, type) and "Norm" in v.__name__)
    biases: list[str] = []
    scales: list[str] = []
    weights: list[str] = []
    for path, module in model.named_modules():
        for key, _ in module.named_parameters(recurse=False):
            group = biases if key == "bias" else scales if isinstance(module, norms) else weights
            group.append(f"{path}.{key}" if path else key)
    return biases, scales, weights


def set_rates(optimizer: torch.optim.Optimizer, rates: Rates) -> None:
    """Write a step's learning rates and momentum into the three groups (the first holds the biases)."""
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = rates.lr_bias if i == 0 else rates.lr
        if "momentum" in group:
            group["momentum"] = rates.momentum


def averaged(model: Model) -> Model:
    """A copy of the model to keep its moving average in: it is not trained, and normalises by its statistics."""
    return copy.deepcopy(model).eval().requires_grad_(False)


class Ema(Generic[Model]):
    """A moving average of every float tensor of a model, batch norm's running statistics included.

    decay(u) = 0.9999 (1 - exp(-u / tau)) after u updates: quick at first, slow later.
    """

    def __init__(self, model: Model, tau: float, average: Model | None = None) -> None:
        self.tau = tau
        self.model = averaged(model) if average is None else average
        self.updates = 0
        self._own = float_state(self.model)
        self._followed = float_state(model)  # the same memory for good: optimizers work in place

    def decay(self, updates: int) -> float:
        """The share of the old value that stays at an update, counted from 1."""
        return EMA_DECAY * (1 - math.exp(-updates / self.tau))

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the model as it is now, all tensors in one call."""
        self.updates += 1
        torch._foreach_lerp_(self._own, self._followed, 1 - self.decay(self.updates))


def float_state(model: nn.Module) -> list[Tensor]:
    """The float tensors of a state dict, sharing memory with the model; of shards this rank's."""
    floats = (v.detach() for v in model.state_dict().values() if v.is_floating_point())
    return [v.to_local() if isinstance(v, DTensor) else v for v in floats]
