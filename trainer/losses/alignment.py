"""Decides which points answer for a box, and how strongly: task-aligned assignment, for a whole batch at once.

Feng et al. 2021 (TOOD). Only the points inside a box can answer for it, so that the pairs of a box and a point are
listed from the targets alone; of them those are chosen whose class score and overlap together are the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.losses.boxes import ciou

ALPHA, BETA = 0.5, 6.0  # alignment = score^ALPHA * overlap^BETA
TOP = 10  # points per box
HIGHEST = 2**31 - 1


@dataclass(frozen=True)
class Candidates:
    """The k pairs of a box and a point strictly inside it, sorted by box, then by point.

    `box`, `point` are int64 (k,): rows of `targets` and numbers of points, which count through the levels;
    `first` (n,) is where each box's pairs begin. `targets` (n, 4) is centre x, y, w, h in pixels, `cls` and
    `image` (n,) int64; `points` (p, 2) in pixels, `strides` (p,). `counts` float64 (1,) is the pictures.
    """

    box: Tensor
    point: Tensor
    first: Tensor
    targets: Tensor
    cls: Tensor
    image: Tensor
    points: Tensor
    strides: Tensor
    images: int
    counts: Tensor


@dataclass(frozen=True)
class Matched:
    """The m points that answer for a box: `image`, `point`, `cls` int64 (m,), `target` (m, 4) in pixels.

    `weight` (m,) is the soft target in 0..1: the class score that is wanted there, and the pair's weight.
    """

    image: Tensor
    point: Tensor
    cls: Tensor
    target: Tensor
    weight: Tensor


def candidates(targets: Tensor, strides: Sequence[int], images: int, height: int, width: int) -> Candidates:
    """List the points inside each box. `targets` (n, 6) is [image, class, cx, cy, w, h] normalised."""
    device = targets.device
    grids = torch.tensor([[width // s, height // s] for s in strides], device=device)  # (levels, 2)
    stride = targets.new_tensor(strides)[:, None]
    boxes = targets[:, 2:] * targets.new_tensor([width, height, width, height])
    low_corner, high_corner = boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2
    # Points stand at (cell + 0.5) * stride: the first and the last cell with its point inside, (n, levels, 2).
    low = ((low_corner[:, None] / stride - 0.5).floor().long() + 1).clamp_(min=0)
    high = torch.minimum((high_corner[:, None] / stride - 0.5).ceil().long() - 1, grids - 1)
    span = (high - low + 1).clamp_(min=0).flatten(0, 1)
    number = span.prod(1)  # of each box on each level
    row = torch.repeat_interleave(number)
    offset = torch.arange(len(row), device=device) - (number.cumsum(0) - number)[row]
    levels = len(strides)
    level = row % levels
    column = low.flatten(0, 1)[row, 0] + offset % span[row, 0]
    line = low.flatten(0, 1)[row, 1] + offset // span[row, 0]
    cells = grids.prod(1)
    per_box = number.view(-1, levels).sum(1)
    return Candidates(
        box=row // levels,
        point=(cells.cumsum(0) - cells)[level] + line * grids[level, 0] + column,
        first=per_box.cumsum(0) - per_box,
        targets=boxes,
        cls=targets[:, 1].long(),
        image=targets[:, 0].long(),
        points=torch.cat([_points(height // s, width // s, s, device) for s in strides]),
        strides=stride[:, 0].repeat_interleave(cells),
        images=images,
        counts=torch.tensor([images], dtype=torch.float64, device=device),
    )


def _points(ny: int, nx: int, stride: int, device: torch.device) -> Tensor:
    y, x = torch.meshgrid(torch.arange(ny, device=device), torch.arange(nx, device=device), indexing="ij")
    return (torch.stack((x, y), -1).view(-1, 2) + 0.5) * stride


def match(found: Candidates, scores: Tensor, boxes: Tensor) -> Matched:
    """Choose among the candidates by what the network predicts there.

    `scores` (k,) is each pair's predicted probability of the box's class, `boxes` (k, 4) its predicted box in
    pixels. The best `TOP` points of a box are chosen; of the boxes that choose the same point, that with
    the largest overlap gets it. weight = alignment / the box's best alignment * the box's best overlap.
    """
    k, n = len(found.box), len(found.targets)
    overlap = ciou(boxes, found.targets[found.box]).clamp(min=0)
    aligned = scores**ALPHA * overlap**BETA
    # One sort for all boxes: the bits of floats that are not negative are ordered as they are. Ties go to the first.
    order = ((found.box << 32) - _bits(aligned)).argsort(stable=True)
    rank = torch.arange(k, device=order.device) - found.first[found.box]
    best = order[rank < TOP]
    best = best[aligned[best] > 0]

    box, point, aligned, overlap = found.box[best], found.point[best], aligned[best], overlap[best]
    image = found.image[box]
    slot = image * len(found.points) + point
    claim = (_bits(overlap) << 32) + (HIGHEST - box)  # equal overlaps: the first box
    largest = claim.new_zeros(found.images * len(found.points)).scatter_reduce_(0, slot, claim, "amax")
    won = largest[slot] == claim
    box, point, image, aligned, overlap = (t[won] for t in (box, point, image, aligned, overlap))

    most_aligned = aligned.new_zeros(n).scatter_reduce_(0, box, aligned, "amax")
    most_overlap = overlap.new_zeros(n).scatter_reduce_(0, box, overlap, "amax")
    weight = aligned / most_aligned[box] * most_overlap[box]
    return Matched(image, point, found.cls[box], found.targets[box], weight)


def _bits(values: Tensor) -> Tensor:
    """Float32, not negative -> int64 with the same order."""
    return values.view(torch.int32).long()
