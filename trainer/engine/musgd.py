"""MuSGD, YOLO26's optimizer: SGD and Muon in one step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

MUON = 0.2  # share of Muon's step; SGD's counts in full
ITERATIONS = 5  # of Newton and Schulz
# Of s, s^3 and s^5: they bring singular values from 0..1 to 0.7..1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class MuSGD(Optimizer):
    """SGD with Nesterov momentum, to whose step a group with `muon` above 0 adds that share of Muon's.

    Muon (Jordan et al. 2024) makes the singular values of a matrix's update about equal, so that no direction of the
    gradient outweighs the others. A convolution counts as a matrix with a row for each output channel. Other tensors,
    such as biases, get SGD's step alone. Weight decay is SGD's: it is added to the gradient.
    """

    def __init__(self, params: Any, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "muon": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            gradients: list[Tensor] = [p.grad for p in weights]
            rate, momentum, decay, muon = (group[key] for key in ("lr", "momentum", "weight_decay", "muon"))
            decayed = torch._foreach_add(gradients, weights, alpha=decay) if decay else gradients
            moving = self._averages("momentum_buffer", weights)
            torch._foreach_mul_(moving, momentum)
            torch._foreach_add_(moving, decayed)
            steps = torch._foreach_add(decayed, moving, alpha=momentum)
            chosen = [k for k, p in enumerate(weights) if muon and p.ndim in (2, 4)]
            if chosen:
                made = self._muon([weights[k] for k in chosen], [gradients[k] for k in chosen], momentum)
                torch._foreach_add_([steps[k] for k in chosen], made, alpha=muon)
            torch._foreach_add_(weights, steps, alpha=-rate)

    def _averages(self, key: str, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the moving averages of these parameters, zero at first."""
        for weight in weights:
            if key not in self.state[weight]:
                self.state[weight][key] = torch.zeros_like(weight)
        return [self.state[weight][key] for weight in weights]

    def _muon(self, weights: list[Tensor], gradients: list[Tensor], momentum: float) -> list[Tensor]:
        """Return Muon's steps, before the learning rate."""
        moving = self._averages("muon_buffer", weights)
        torch._foreach_lerp_(moving, gradients, 1 - momentum)
        return orthogonalized(torch._foreach_lerp(gradients, moving, momentum))


def orthogonalized(updates: Sequence[Tensor]) -> list[Tensor]:
    """Make the singular values of matrices (r, c) and convolutions (r, ...) about equal, by Newton and Schulz.

    A matrix with more rows than columns is multiplied by the root of r / c, as in Muon. Matrices of one shape are
    computed together; on a GPU in bf16, which is precise enough (Jordan et al. 2024).
    """
    found: dict[int, Tensor] = {}
    shapes: dict[tuple[int, ...], list[int]] = {}
    for k, update in enumerate(updates):
        shapes.setdefault(tuple(update.shape), []).append(k)
    a, b, c = COEFFICIENTS
    for shape, numbers in shapes.items():
        x = torch.stack([updates[k] for k in numbers]).flatten(2)
        dtype = x.dtype
        if x.is_cuda:
            x = x.bfloat16()
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
        is_tall = x.shape[1] > x.shape[2]
        x = x.mT if is_tall else x  # the smaller of the two products of the matrix with itself
        for _ in range(ITERATIONS):
            squares = x @ x.mT
            x = a * x + (b * squares + c * squares @ squares) @ x
        x = (x.mT if is_tall else x).to(dtype)
        if len(shape) == 2:
            x = x * max(1.0, shape[0] / shape[1]) ** 0.5
        found.update(zip(numbers, x.reshape(-1, *shape), strict=True))
    return [found[k] for k in range(len(updates))]
