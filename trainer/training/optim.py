"""How the weights move: parameter groups, the learning-rate schedule with its warm-up, and the moving average."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from trainer.config import OPTIMIZERS, Hyp

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
    """YOLOv5's schedule as a function of the step alone, so that a resumed run needs no state for it."""

    hyp: Hyp
    epochs: int
    steps: int  # per epoch
    batch: int  # over all ranks
    cosine: bool = False

    @property
    def warmup_steps(self) -> int:
        """At least 100 steps, unless the hyper-parameters switch the warm-up off."""
        if self.hyp.warmup_epochs <= 0:
            return 0
        return max(round(self.hyp.warmup_epochs * self.steps), 100)

    @property
    def accumulate(self) -> int:
        """Batches per optimizer step once the warm-up is over."""
        return max(round(self.hyp.nbs / self.batch), 1)

    def factor(self, epoch: int) -> float:
        """The learning rate of an epoch (from 0) as a share of lr0, falling to lrf."""
        lrf = self.hyp.lrf
        if self.cosine:
            return (1 - math.cos(math.pi * epoch / self.epochs)) / 2 * (lrf - 1) + 1
        return (1 - epoch / self.epochs) * (1 - lrf) + lrf

    def at(self, step: int) -> Rates:
        """The rates at a step (from 0, over the whole run)."""
        hyp = self.hyp
        lr = hyp.lr0 * self.factor(step // self.steps)
        if step > self.warmup_steps or not self.warmup_steps:
            return Rates(self.accumulate, lr, lr, hyp.momentum)
        x = step / self.warmup_steps
        return Rates(
            accumulate=max(1, round(1 + x * (self.hyp.nbs / self.batch - 1))),
            lr_bias=hyp.warmup_bias_lr + x * (lr - hyp.warmup_bias_lr),
            lr=x * lr,
            momentum=hyp.warmup_momentum + x * (hyp.momentum - hyp.warmup_momentum),
        )


def build_optimizer(model: nn.Module, name: str, hyp: Hyp, batch: int) -> torch.optim.Optimizer:
    """SGD (nesterov), Adam or AdamW over three groups: biases, norm weights, all other weights.

    Only the third decays, by weight_decay scaled to the pictures per optimizer step over the nominal batch.
    """
    norms = tuple(v for v in nn.__dict__.values() if isinstance(v, type) and "Norm" in v.__name__)
    biases: list[Tensor] = []
    scales: list[Tensor] = []
    weights: list[Tensor] = []
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if key == "bias":
                biases.append(parameter)
            elif isinstance(module, norms):
                scales.append(parameter)
            else:
                weights.append(parameter)
    decay = hyp.weight_decay * batch * max(round(hyp.nbs / batch), 1) / hyp.nbs
    groups = [
        {"params": biases, "weight_decay": 0.0},
        {"params": scales, "weight_decay": 0.0},
        {"params": weights, "weight_decay": decay},
    ]
    # Fused: one kernel for all tensors instead of a Python loop over them.
    if name == "SGD":
        optimizer = torch.optim.SGD(groups, lr=hyp.lr0, momentum=hyp.momentum, nesterov=True, fused=True)
        # Left to itself, the fused kernel begins with whatever is in memory if fp16's scaler skips the first step.
        for moved in (*biases, *scales, *weights):
            optimizer.state[moved]["momentum_buffer"] = torch.zeros_like(moved)
        return optimizer
    if name not in OPTIMIZERS:
        raise ValueError(name)
    kind = torch.optim.Adam if name == "Adam" else torch.optim.AdamW
    return kind(groups, lr=hyp.lr0, betas=(hyp.momentum, 0.999), fused=True)


def set_rates(optimizer: torch.optim.Optimizer, rates: Rates) -> None:
    """Write a step's learning rates and momentum into the three groups (the first holds the biases)."""
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = rates.lr_bias if i == 0 else rates.lr
        if "momentum" in group:
            group["momentum"] = rates.momentum


def clip_gradients(parameters: Sequence[Tensor]) -> Tensor:
    """Scale the gradients, in place, to a joint norm of at most 10; returns the norm before, a scalar."""
    return nn.utils.clip_grad_norm_(parameters, CLIP_NORM)


class Ema(Generic[Model]):
    """A moving average of every float tensor of a model, batch norm's running statistics included.

    decay(u) = 0.9999 (1 - exp(-u / tau)) after u updates: quick at first, slow later.
    """

    def __init__(self, model: Model, tau: float) -> None:
        self.tau = tau
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
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
    """The float tensors of a state dict, sharing memory with the model."""
    return [v.detach() for v in model.state_dict().values() if v.is_floating_point()]
