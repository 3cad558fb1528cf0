"""Decides which cells of which anchors answer for a box: YOLOv5's rule, for a whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NEIGHBOUR = 0.5  # a box also belongs to the nearest cell on each axis


@dataclass(frozen=True)
class Level:
    """The positives of one level, p of them.

    `image`, `anchor`, `row`, `column`, `cls` are int64 (p,); `box` (p, 4) is the target in grid units: the
    centre relative to the cell, then width and height; `anchor_wh` (p, 2) is in grid units; `owner` (p,) is
    False where a later positive stands on the same cell and decides its objectness.
    """

    image: Tensor
    anchor: Tensor
    row: Tensor
    column: Tensor
    cls: Tensor
    box: Tensor
    anchor_wh: Tensor
    owner: Tensor


def assign(targets: Tensor, anchors: Tensor, grids: Sequence[tuple[int, int]], anchor_t: float) -> list[Level]:
    """Match boxes to anchors and cells.

    `targets` (n, 6) is [image, class, cx, cy, w, h] normalised; `anchors` (levels, a, 2) in grid units;
    `grids` the (ny, nx) of each level. A box matches an anchor when no side differs by `anchor_t` times
    or more; it then takes its own cell and the neighbours nearest to its centre, at most three cells.
    """
    return [_assign_level(targets, anchors[i], ny, nx, anchor_t) for i, (ny, nx) in enumerate(grids)]


def _assign_level(targets: Tensor, anchors: Tensor, ny: int, nx: int, anchor_t: float) -> Level:
    size = targets.new_tensor([nx, ny])
    wh = targets[:, 4:6] * size
    ratio = wh[None] / anchors[:, None]  # (a, n, 2)
    matches = torch.maximum(ratio, 1 / ratio).amax(2) < anchor_t
    anchor, box = matches.nonzero(as_tuple=True)  # sorted by anchor, then by box
    centre = targets[box, 2:4] * size

    # The neighbour is one cell to the left or up when the centre lies in that half of its cell, and exists.
    low = (centre % 1 < NEIGHBOUR) & (centre > 1)
    rest = size - centre
    high = (rest % 1 < NEIGHBOUR) & (rest > 1)
    own = torch.ones_like(low[:, :1])
    wanted = torch.cat((own, low, high), 1).T  # (5, matches): own, left, up, right, down
    offsets = NEIGHBOUR * targets.new_tensor([[0, 0], [1, 0], [0, 1], [-1, 0], [0, -1]])
    which, match = wanted.nonzero(as_tuple=True)
    anchor, box, centre = anchor[match], box[match], centre[match]
    cell = torch.minimum((centre - offsets[which]).long().clamp_(min=0), size.long() - 1)

    image = targets[box, 0].long()
    column, row = cell.unbind(1)
    return Level(
        image=image,
        anchor=anchor,
        row=row,
        column=column,
        cls=targets[box, 1].long(),
        box=torch.cat((centre - cell, wh[box]), 1),
        anchor_wh=anchors[anchor],
        owner=_owners(((image * len(anchors) + anchor) * ny + row) * nx + column),
    )


def _owners(slot: Tensor) -> Tensor:
    """True (p,) where no later positive has the same slot: an indexed write with duplicates has no order."""
    order = torch.arange(len(slot), device=slot.device)
    if not len(slot):
        return order.bool()
    _, inverse = torch.unique(slot, return_inverse=True)
    last = torch.zeros_like(order).scatter_reduce_(0, inverse, order, "amax")
    return last[inverse] == order
