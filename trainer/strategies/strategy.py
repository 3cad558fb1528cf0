"""Strategy: the interface of one kind of parallelism, and its data-parallel defaults."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from trainer.config import DEFAULT_STRATEGY, Settings, traits_of
from trainer.config.settings import option_of
from trainer.data.batch import Targets
from trainer.distributed import comm
from trainer.errors import TrainerError
from trainer.strategies.network_with_loss import NetworkWithLoss

# A criterion's sums and counts of this rank -> its share of the loss.
LossOf = Callable[[Tensor, Tensor], Tensor]
Names = Sequence[Sequence[str]]  # parameter names of each of the optimizer's groups
KERNELS = ("fused", "foreach")  # implementation of the optimizer; not part of its state


class BackwardTimer(Protocol):
    """Measures the part of a step's communication that the backward pass does not hide."""

    def before_last_bucket(self) -> None:
        """Mark the moment when the last gradients of a step are ready to be summed."""

    def after_backward(self) -> None:
        """Mark the end of backward, after which the gradients are summed."""


class Schedule(Protocol):
    """Runs the passes of a step where they are not one forward and one backward pass: a pipeline's."""

    def __call__(self, images: Tensor, targets: Targets, loss_of: LossOf, *, sync: bool) -> None:
        """Run all passes of a batch. `loss_of` makes the loss between them, on ranks with `computes_loss`."""


@dataclass(frozen=True)
class Conditions:
    """Properties that all steps of a training share."""

    timer: BackwardTimer
    min_side: int  # pixels of the smallest image that the network takes
    stride: int  # pixels per cell of the coarsest grid
    always_syncs: bool  # every step updates the weights
    min_share: int  # images of the smallest share of a step


class Strategy:
    """One kind of --parallel. The defaults are for ranks with the whole model and a share of each batch.

    The constructor runs before the ranks join, and rejects options that the strategy does not support.
    Gradients are summed over the ranks, not averaged: each rank's loss is its share of the batch's loss.
    """

    devices: Sequence[torch.device]  # those that this process drives
    share: tuple[int, int]  # (k, n): this rank takes the k-th of n shares of each batch
    stages = 1  # neighbouring ranks that process the same share
    computes_loss = True  # whether this rank computes the loss of its share
    schedule: Schedule | None = None  # runs the passes of a step, instead of `forward` and its backward pass
    replica_group: comm.Group | None = None  # the ranks with the same part of the model; None: all
    module: nn.Module  # this rank's part of the model, with the model's parameter names; set by `setup`
    average: nn.Module  # the same part of the averaged model
    # Full model on the CPU to gather into; None if every rank has the full model.
    host_model: nn.Module | None = None
    summary = ""  # a line for the log; set by `setup`
    unused: Mapping[str, Tensor] = {}  # tensors in no rank's part, because no operation uses them

    def __init__(self, settings: Settings, world: comm.World, device: torch.device) -> None:
        for name in traits_of(settings.parallel).unsupported:
            if getattr(settings, name) != getattr(Settings, name):
                option = option_of(name)
                what = f"--parallel {settings.parallel} does not support {option}"
                raise TrainerError(what, f"leave {option} out, or use {DEFAULT_STRATEGY}")
        self._settings = settings
        self._device = device
        self.devices = [device]
        self.share = world.rank, world.size

    def setup(self, whole: NetworkWithLoss, average: nn.Module, conditions: Conditions) -> None:
        """Take this rank's part of the network and of its average, both on the device. A collective."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Prepare for a change of the trainable parameters. A collective."""
        raise NotImplementedError

    def forward(self, images: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Return the criterion's sums and counts of this rank's share."""
        raise NotImplementedError

    def accumulating(self) -> AbstractContextManager[None]:
        """Return the context of the passes of a step after which the gradients are not summed over the ranks."""
        return contextlib.nullcontext()

    def end_backward(self) -> None:
        """Finish a step whose gradients are summed over the ranks."""
        return

    def clip(
        self, scaler: GradScaler, optimizer: Optimizer, parameters: Sequence[Tensor], most: float
    ) -> Tensor:
        """Unscale the gradients, clip their norm over all parameters to `most`, and return the norm before."""
        scaler.unscale_(optimizer)
        return nn.utils.clip_grad_norm_(parameters, most)

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the full tensors of all parts by name, on every rank. A collective."""
        return dict(tensors)

    def scatter_(self, own: Tensor, full: Tensor) -> None:
        """Copy this rank's part of the full tensor into `own`."""
        own.copy_(full)

    def gather_average(self) -> nn.Module:
        """Return the full averaged model on this rank's device, for validation. A collective."""
        if self.host_model is None:
            return self.average
        full = fill(self.host_model, self.model_state(self.average, list(self.host_model.state_dict())))
        return copy.deepcopy(full).to(self._device)

    def model_state(self, part: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the state dict of the full model, in the order of `names`. A collective."""
        found = {**self.unused, **self.gather(part.state_dict())}
        return {name: found[name] for name in names}

    def load_model(self, part: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Copy a full state dict into this rank's part of the model and into the unused tensors."""
        with torch.no_grad():
            for name, own in {**self.unused, **part.state_dict()}.items():
                if name in state:
                    self.scatter_(own, state[name])

    def optimizer_state(self, optimizer: Optimizer, own: Names, names: Names) -> dict[str, Any]:
        """Return the state dict of the full model's optimizer. A collective.

        `own` are the names of this rank's parameters, `names` those of the full model.
        """
        tensors = {}
        for group, listed in zip(optimizer.param_groups, own, strict=True):
            for parameter, name in zip(group["params"], listed, strict=True):
                for key, value in optimizer.state.get(parameter, {}).items():
                    tensors[f"{key}/{name}"] = value
        found = self.gather(tensors)
        number = _numbers(names)
        state: dict[int, dict[str, Tensor]] = {}
        for label, value in sorted(found.items(), key=lambda item: number[item[0].split("/", 1)[1]]):
            key, name = label.split("/", 1)
            state.setdefault(number[name], {})[key] = value
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [number[name] for name in listed]}
            for group, listed in zip(optimizer.param_groups, names, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def load_optimizer(
        self, optimizer: Optimizer, own: Names, names: Names, content: Mapping[str, Any]
    ) -> None:
        """Load this rank's part of a full state dict into its optimizer."""
        number = _numbers(names)
        for group, saved, listed in zip(optimizer.param_groups, content["param_groups"], own, strict=True):
            group.update({k: v for k, v in saved.items() if k != "params" and k not in KERNELS})
            for parameter, name in zip(group["params"], listed, strict=True):
                kept = content["state"].get(number[name])
                if not kept:  # saved before its first update: drop the state of later ones
                    optimizer.state.pop(parameter, None)
                    continue
                state = optimizer.state[parameter]
                for key, value in kept.items():
                    if key not in state:
                        # A step count is not sharded.
                        like = parameter if value.shape == parameter.shape else value
                        state[key] = torch.zeros_like(like, device=parameter.device, requires_grad=False)
                    self.scatter_(state[key], value)


def _numbers(names: Names) -> dict[str, int]:
    """Return the number of each parameter over all groups."""
    return {name: k for k, name in enumerate(itertools.chain.from_iterable(names))}


def fill(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Copy a full state dict into a full model, and return the model.

    load_state_dict does not work here: hooks of torchvision's models expect a version in the state dict.
    """
    for name, own in model.state_dict().items():
        own.copy_(state[name])
    return model
