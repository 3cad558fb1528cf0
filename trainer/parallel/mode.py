"""What a kind of parallelism does for a training: how the ranks share the work and the tensors of one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer import dist

Evaluate = Callable[[Any], Tensor]  # a network's outputs for this rank's pictures -> what to differentiate


class Clock(Protocol):
    """Tells where the time of a step goes."""

    def watch(self, model: DistributedDataParallel, *, compress: bool) -> None:
        """Sum the gradients over the ranks, in bf16 with `compress`, and note when the last one is ready."""
        ...

    def after_backward(self) -> None:
        """Note that backward has returned, and with it the summed gradients."""
        ...


@dataclass(frozen=True)
class Conditions:
    """What the steps of a run have in common."""

    autocast: Callable[[], AbstractContextManager[Any]]  # the precision that the network computes in
    clock: Clock
    least_side: int  # pixels of the smallest picture that the network takes
    stride: int  # pixels per cell of the coarsest grid
    always_moves: bool  # whether every step moves the weights
    least_share: int  # pictures of the smallest share of a step


class Mode(Protocol):
    """One kind of --parallel. Made before the ranks have met: an option that does not go with it is an error then.

    The gradients that a step leaves are the sums of the ranks' own, since each rank's loss is its share of the loss
    of the whole batch.
    """

    share: tuple[int, int]  # this rank takes the k-th of so many shares of each batch
    stages: int  # neighbouring ranks that take the same share
    sees_outputs: bool  # whether the loss of the share is computed on this rank
    seeing: dist.Group | None  # the ranks for which it is, where it is; None: all
    module: nn.Module  # the part of the model that this rank trains, under the model's own names; after `place`
    average: nn.Module  # the same part of the moving average
    said: str  # what `place` decided, for a person; "" if nothing
    rest: Mapping[str, Tensor]  # tensors of the model that are in no rank's part, as nothing computes with them

    def place(self, model: nn.Module, average: nn.Module, conditions: Conditions) -> None:
        """Take this rank's part of a model that is on the device, and of its average. A collective."""
        ...

    def refresh(self) -> None:
        """Go on where other parameters are trained from now on. A collective."""
        ...

    def step(self, images: Tensor, evaluate: Evaluate, moves: bool) -> None:
        """Forward and backward; with `moves` the gradients are then those of all ranks, else they may be kept back."""
        ...

    def clip(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], most: float
    ) -> Tensor:
        """Undo the scaling of the gradients and bring their norm over all parameters to `most`; the norm before."""
        ...

    def average_(self, tensors: list[Tensor]) -> None:
        """Average tensors of this rank's part, in place, over the ranks that have the same part."""
        ...

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The named tensors of all parts, complete, on every rank. A collective."""
        ...

    def take(self, own: Tensor, whole: Tensor) -> None:
        """Copy into a tensor of this rank's part what it holds of the complete one."""
        ...

    def complete(self) -> nn.Module:
        """The whole averaged model on this rank's device, to look at pictures with. A collective."""
        ...


def tensors(value: Any) -> list[Tensor]:
    """All tensors of nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [t for part in parts for t in tensors(part)]
