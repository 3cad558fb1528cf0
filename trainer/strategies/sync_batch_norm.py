"""Synchronized batch norm: statistics over the images of all ranks.

torch's SyncBatchNorm supports only GPUs; the class here is its CPU version.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.distributed import comm


def synchronise(model: nn.Module, device: torch.device, group: comm.Group | None = None) -> None:
    """Synchronize every batch norm of a model over the ranks (of a group), in place; the state dict stays."""
    if device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(model, group)  # type: ignore[no-untyped-call]
        return
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = SyncBatchNorm2d  # keeps the parameters and buffers
            module.group = group  # type: ignore[assignment]


class SyncBatchNorm2d(nn.BatchNorm2d):
    """Batch norm with the statistics of all ranks, whose batch sizes may differ."""

    group: comm.Group | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (b, c, h, w), with one collective here and one in the backward pass."""
        if not self.training or not comm.is_distributed():
            return super().forward(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        with torch.no_grad():
            var, mean = torch.var_mean(x.to(_wide(x)), (0, 2, 3), correction=0)
            number = x.numel() // x.shape[1]
            mean = mean.double()
            var = var.double()
            sums = torch.cat((mean * number, (var + mean**2) * number, mean.new_tensor([number])))
            comm.wait(comm.start_sum(sums, self.group))
            mean, var = (sums[:-1] / sums[-1]).chunk(2)
            var = (var - mean**2).clamp(min=0)  # float64 avoids cancellation
            unbiased = var * sums[-1] / (sums[-1] - 1)
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        normalized: Tensor = _Normalize.apply(
            x,
            self.weight,
            self.bias,
            mean.to(_wide(x)),
            var.to(_wide(x)),
            float(sums[-1]),
            self.eps,
            self.group,
        )
        return normalized


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype of the statistics, at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


class _Normalize(torch.autograd.Function):
    """Batch norm by given statistics, differentiated through them over all ranks (Ioffe and Szegedy 2015)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *statistics: Any) -> Tensor:
        mean, var, number, eps, group = statistics
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt())
        ctx.number = number
        ctx.group = group
        return F.batch_norm(x, mean, var, weight, bias, eps=eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        by_channel = (slice(None), None, None)
        normalized = (x.to(mean.dtype) - mean[by_channel]) * inverse[by_channel]
        gradient = gradients[0].to(mean.dtype)
        of_bias = gradient.sum((0, 2, 3))
        of_weight = (gradient * normalized).sum((0, 2, 3))
        sums = torch.cat((of_bias, of_weight)).double()
        comm.wait(comm.start_sum(sums, ctx.group))
        mean_gradient, mean_product = (sums / ctx.number).to(mean.dtype).chunk(2)
        centred = gradient - mean_gradient[by_channel] - normalized * mean_product[by_channel]
        of_x = (centred * (weight * inverse)[by_channel]).to(x.dtype)
        return of_x, of_weight, of_bias, None, None, None, None, None
