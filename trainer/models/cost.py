"""What a model costs before it has run: parameters, arithmetic, and the bytes that the ranks exchange."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.yolo import Yolo, fuse


@dataclass(frozen=True)
class Cost:
    """`parameters`, and `fused_parameters` with batch norm folded in; `flops` of one picture's forward pass.

    A multiplication and its addition are two operations; only convolutions are counted. `gradient_bytes` is what
    each rank sends and receives per step, in fp32.
    """

    parameters: int
    fused_parameters: int
    flops: int
    gradient_bytes: int


def cost(model: Yolo, imgsz: int) -> Cost:
    """The cost for square pictures of `imgsz` px; works on shapes alone (the meta device), without arithmetic."""
    model = copy.deepcopy(model).to("meta").eval()
    flops = 0

    def count(module: nn.Module, _: Any, out: Tensor) -> None:
        nonlocal flops
        assert isinstance(module, nn.Conv2d)
        flops += 2 * out.numel() * module.weight[0].numel()

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(count)
    model(torch.empty(1, 3, imgsz, imgsz, device="meta"))
    trained = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    return Cost(parameters(model), parameters(fuse(model)), flops, trained)


def parameters(model: nn.Module) -> int:
    """The number of a model's or a layer's parameters."""
    return sum(p.numel() for p in model.parameters())
