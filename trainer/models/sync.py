"""Batch norm over the pictures of all ranks: mean and variance as one process with the whole batch has them.

torch's own SyncBatchNorm runs on GPUs only; the one here is for the CPU, so that what it promises can be checked there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer import dist


def synchronise(model: nn.Module, device: torch.device, group: dist.Group | None = None) -> None:
    """Let every batch norm of a model count all ranks' (or a group's) pictures, in place; names and tensors stay."""
    if device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(model, group)  # type: ignore[no-untyped-call]
        return
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SyncBatchNorm2d  # the same tensors, another forward
            module.group = group  # type: ignore[assignment]


class SyncBatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose training statistics are those of all ranks together; their shares may differ."""

    group: dist.Group | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(b, c, h, w) -> the same shape; one collective here and one in the backward pass."""
        if not self.training or not dist.together():
            return super().forward(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        with torch.no_grad():
            var, mean = torch.var_mean(x.to(_wide(x)), (0, 2, 3), correction=0)
            number = x.numel() // x.shape[1]
            mean, var = mean.double(), var.double()
            sums = torch.cat((mean * number, (var + mean**2) * number, mean.new_tensor([number])))
            dist.wait(dist.start_sum(sums, self.group))
            mean, var = (sums[:-1] / sums[-1]).chunk(2)
            var = (var - mean**2).clamp(min=0)  # in float64: nothing is lost in the difference
            unbiased = var * sums[-1] / (sums[-1] - 1)
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        normalised: Tensor = _Normalise.apply(
            x, self.weight, self.bias, mean.to(_wide(x)), var.to(_wide(x)), float(sums[-1]), self.eps, self.group
        )
        return normalised


def _wide(x: Tensor) -> torch.dtype:
    """The type that statistics are computed in: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


class _Normalise(torch.autograd.Function):
    """Batch norm by given statistics, with the gradient of statistics over all ranks (Ioffe and Szegedy 2015)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        var: Tensor,
        number: float,
        eps: float,
        group: dist.Group | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt())
        ctx.number, ctx.group = number, group
        return F.batch_norm(x, mean, var, weight, bias, eps=eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        by_channel = (slice(None), None, None)
        normalised = (x.to(mean.dtype) - mean[by_channel]) * inverse[by_channel]
        gradient = gradients[0].to(mean.dtype)
        of_bias, of_weight = gradient.sum((0, 2, 3)), (gradient * normalised).sum((0, 2, 3))
        sums = torch.cat((of_bias, of_weight)).double()
        dist.wait(dist.start_sum(sums, ctx.group))
        mean_gradient, mean_product = (sums / ctx.number).to(mean.dtype).chunk(2)
        centred = gradient - mean_gradient[by_channel] - normalised * mean_product[by_channel]
        of_x = (centred * (weight * inverse)[by_channel]).to(x.dtype)
        return of_x, of_weight, of_bias, None, None, None, None, None
