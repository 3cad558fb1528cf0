"""Exponential moving average of the weights, which is validated and written to best.pt."""

import copy
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

EMA_DECAY = 0.9999


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
