"""How well two boxes agree, as a loss can use it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EPS = 1e-7


def ciou(a: Tensor, b: Tensor) -> Tensor:
    """Complete IoU (Zheng et al. 2020) of boxes in pairs: (n, 4), (n, 4) as centre x, y, w, h -> (n,).

    CIoU = IoU - rho^2 / c^2 - alpha v: overlap, distance of the centres over the enclosing diagonal, and
    difference of the aspect ratios with its weight alpha held constant.
    """
    ax, ay, aw, ah = a.unbind(1)
    bx, by, bw, bh = b.unbind(1)
    dx, dy = (ax - bx).abs(), (ay - by).abs()
    half_w, half_h = (aw + bw) / 2, (ah + bh) / 2
    # Two intervals overlap by what their half widths reach beyond their distance, at most by the shorter one.
    overlap = torch.minimum(torch.minimum(aw, bw), half_w - dx).clamp(min=0) * torch.minimum(
        torch.minimum(ah, bh), half_h - dy
    ).clamp(min=0)
    iou = overlap / (aw * ah + bw * bh - overlap + EPS)
    diagonal = (
        torch.maximum(torch.maximum(aw, bw), half_w + dx) ** 2 + torch.maximum(torch.maximum(ah, bh), half_h + dy) ** 2
    )
    v = (4 / math.pi**2) * (torch.atan(bw / (bh + EPS)) - torch.atan(aw / (ah + EPS))) ** 2
    with torch.no_grad():
        alpha = v / (v - iou + 1 + EPS)
    return iou - (dx**2 + dy**2) / (diagonal + EPS) - alpha * v
