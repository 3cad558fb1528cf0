"""The anchor detector's loss: box, objectness and class terms, averaged over all ranks together.

YOLOv5 averages on each rank separately, so its update changes with the number of ranks wherever they hold
different numbers of positives. Here every rank divides by the positives of *all* ranks: the terms of the
ranks then add up to exactly the terms of one process with the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import Hyp
from trainer.losses import Loss, send

BALANCE = {3: (4.0, 1.0, 0.4)}  # weight of each level's objectness
BALANCE_ELSE = (4.0, 1.0, 0.25, 0.06, 0.02)
NEIGHBOUR = 0.5  # a box also belongs to the nearest cell on each axis
FOCAL_ALPHA = 0.25
EPS = 1e-7


class Positives(NamedTuple):
    """Positives, p of them.

    `image`, `anchor`, `row`, `column`, `cls` are int64 (p,); `box` (p, 4) is the target in grid units: the
    centre relative to the cell, then width and height; `anchor_wh` (p, 2) is in grid units.
    """

    image: Tensor
    anchor: Tensor
    row: Tensor
    column: Tensor
    cls: Tensor
    box: Tensor
    anchor_wh: Tensor


@dataclass(frozen=True)
class Assignment:
    """A batch's positives, level after level, and their `numbers` per level.

    `own` int64 (q,) are the positives that decide the objectness of their cells: the last on each; `slot` int64 (q,)
    are those cells, counted over levels, images, rows, columns and anchors. `counts` is float64 (1 + levels,):
    images, positives of each level.
    """

    positives: Positives
    numbers: list[int]
    own: Tensor
    slot: Tensor
    counts: Tensor


class DetectionLoss(Loss):
    """The loss of a batch for Detect: the positives depend on the targets alone."""

    terms = ("box", "obj", "cls")

    def __init__(self, anchors: Tensor, strides: Sequence[int], nc: int, hyp: Hyp, imgsz: int) -> None:
        levels = len(strides)
        self.strides, self.nc, self.hyp = strides, nc, hyp
        self._anchors, self._device = anchors, anchors.device
        self.anchors: Tensor | None = None  # on the CPU; read at the first step, because a resumed run loads others
        self.balance = BALANCE.get(levels, BALANCE_ELSE)[:levels]
        # YOLOv5's gains are for 3 levels, 80 classes and 640 px.
        gains = (hyp.box * 3 / levels, hyp.obj * (imgsz / 640) ** 2 * 3 / levels, hyp.cls * nc / 80 * 3 / levels)
        self.gains = torch.tensor(gains, device=anchors.device)

    def assign(self, targets: Tensor, images: int, height: int, width: int) -> Assignment:
        """Targets (n, 6) of `images` images of height x width px -> their positives and this rank's counts.

        On the CPU: the numbers of positives depend on the targets, and a GPU's host would have to wait for them.
        """
        if self.anchors is None:
            self.anchors = self._anchors.float().cpu()
        levels, slots, cells = list[Positives](), list[Tensor](), 0
        for anchors, stride in zip(self.anchors, self.strides, strict=True):
            ny, nx = height // stride, width // stride
            level = assign_level(targets.cpu(), anchors, ny, nx, self.hyp.anchor_t)
            levels.append(level)
            slots.append(cells + ((level.image * ny + level.row) * nx + level.column) * len(anchors) + level.anchor)
            cells += images * ny * nx * len(anchors)
        slot, numbers = torch.cat(slots), [len(each) for each in slots]
        own = _owners(slot).nonzero()[:, 0]
        *whole, box, anchor_wh = map(torch.cat, zip(*levels, strict=True))
        integers = (own, slot[own], *whole)
        own, slot, *whole = torch.split(send(torch.cat(integers), self._device), [len(each) for each in integers])
        box, anchor_wh = torch.split(send(torch.cat((box, anchor_wh), 1), self._device), [4, 2], 1)
        counts = send(torch.tensor([images, *numbers], dtype=torch.float64), self._device)
        return Assignment(Positives._make((*whole, box, anchor_wh)), numbers, own, slot, counts)

    def __call__(self, raw: Sequence[Tensor], assignment: Assignment, counts: Tensor) -> Tensor:
        """This rank's share of (box, obj, cls), gains included: (3,) float32 with gradients.

        `raw` are the network's outputs (b, a, ny, nx, nc + 5) per level, `counts` the sum of all ranks'
        `counts`. Summed over the ranks the shares are the batch's mean loss; every output
        takes part with at least a zero, so that no parameter is ever without a gradient.
        """
        positives, numbers = assignment.positives, assignment.numbers
        places = zip(*(torch.split(index, numbers) for index in positives[:4]), strict=True)
        picked = torch.cat([t[place] for t, place in zip(raw, places, strict=True)]).float()  # (p, nc + 5)
        centre, size = torch.split(picked[:, :4].sigmoid() * 2, 2, 1)
        quality = ciou(torch.cat((centre - 0.5, size**2 * positives.anchor_wh), 1), positives.box)
        shares = counts[1:].clamp(min=1).reciprocal().float()
        weight = torch.cat([share.expand(number) for share, number in zip(shares, numbers, strict=True)])
        box = ((1 - quality) * weight).sum()

        # The order of the cells in memory, so that only `cat` copies.
        cells = [t[..., 4].permute(0, 2, 3, 1) for t in raw]
        obj_logits = torch.cat([t.flatten() for t in cells]).float()
        wanted = torch.zeros_like(obj_logits)
        wanted[assignment.slot] = quality.detach().clamp(min=0)[assignment.own]
        losses = torch.split(bce(obj_logits, wanted, self.hyp.obj_pw, self.hyp.fl_gamma), [t.numel() for t in cells])
        per_level = zip(losses, cells, self.balance, strict=True)
        levels = torch.stack([loss.sum() * (balance / t.shape[1:].numel()) for loss, t, balance in per_level])
        objectness = levels.sum() / counts[0].float()
        logits = picked[:, 5:]
        if self.nc > 1:
            classes = (self._classes(logits, positives.cls) * weight).sum() / self.nc
        else:  # a single class has no class loss; the zero keeps the parameters in the graph
            classes = logits.sum() * 0
        return torch.stack((box, objectness, classes)) * self.gains

    def _classes(self, logits: Tensor, cls: Tensor) -> Tensor:
        """Summed class BCE of each positive: (p, nc), (p,) -> (p,)."""
        smooth = self.hyp.label_smoothing
        wanted = torch.full_like(logits, smooth / 2)
        wanted.scatter_(1, cls[:, None], 1 - smooth / 2)
        return bce(logits, wanted, self.hyp.cls_pw, self.hyp.fl_gamma).sum(1)


def assign_level(targets: Tensor, anchors: Tensor, ny: int, nx: int, anchor_t: float) -> Positives:
    """Match boxes to the anchors and cells of a level.

    `targets` (n, 6) is [image, class, cx, cy, w, h] normalised; `anchors` (a, 2) in grid units. A box matches an
    anchor when no side differs by `anchor_t` times or more; it then takes its own cell and the neighbours nearest
    to its centre, at most three cells.
    """
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

    image, cls = targets[box, :2].long().unbind(1)
    column, row = cell.unbind(1)
    return Positives(image, anchor, row, column, cls, torch.cat((centre - cell, wh[box]), 1), anchors[anchor])


def _owners(slot: Tensor) -> Tensor:
    """True (p,) where no later positive has the same slot: an indexed write with duplicates has no order."""
    order = torch.arange(len(slot), device=slot.device)
    if not len(slot):
        return order.bool()
    _, inverse = torch.unique(slot, return_inverse=True)
    last = torch.zeros_like(order).scatter_reduce_(0, inverse, order, "amax")
    return last[inverse] == order


def ciou(a: Tensor, b: Tensor) -> Tensor:
    """Complete IoU (Zheng et al. 2020) of boxes in pairs: (n, 4), (n, 4) as centre x, y, w, h -> (n,).

    CIoU = IoU - rho^2 / c^2 - alpha v: overlap, distance of the centres over the enclosing diagonal, and
    difference of the aspect ratios with its weight alpha held constant.
    """
    (a_centre, a_size), (b_centre, b_size) = torch.split(a, 2, 1), torch.split(b, 2, 1)
    (aw, ah), (bw, bh) = a_size.unbind(1), b_size.unbind(1)
    between, both = (a_centre - b_centre).abs(), a_size + b_size
    # Two intervals share what their half widths reach beyond their distance, at most the shorter one; below 0 is a gap.
    shared = torch.minimum(torch.minimum(a_size, b_size), both / 2 - between)
    overlap_w, overlap_h = shared.clamp(min=0).unbind(1)
    overlap = overlap_w * overlap_h
    iou = overlap / (aw * ah + bw * bh - overlap + EPS)
    diagonal = ((both - shared) ** 2).sum(1)  # squared, of the box around both
    v = (4 / math.pi**2) * (torch.atan(bw / (bh + EPS)) - torch.atan(aw / (ah + EPS))) ** 2
    with torch.no_grad():
        alpha = v / (v - iou + 1 + EPS)
    distance = (between**2).sum(1)  # squared
    return iou - distance / (diagonal + EPS) - alpha * v


def bce(logits: Tensor, wanted: Tensor, positive_weight: float = 1.0, gamma: float = 0.0) -> Tensor:
    """Element-wise binary cross entropy in float32, focal (Lin et al. 2017) when gamma is above 0."""
    logits = logits.float()
    weight = None if positive_weight == 1 else torch.full((), positive_weight, device=logits.device)
    loss = F.binary_cross_entropy_with_logits(logits, wanted, pos_weight=weight, reduction="none")
    if gamma > 0:
        p = logits.sigmoid()
        right = wanted * p + (1 - wanted) * (1 - p)
        alpha = wanted * FOCAL_ALPHA + (1 - wanted) * (1 - FOCAL_ALPHA)
        loss = loss * alpha * (1 - right) ** gamma
    return loss
