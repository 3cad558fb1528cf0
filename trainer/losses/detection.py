"""The anchor detector's loss: box, objectness and class terms, averaged over all ranks together.

YOLOv5 averages on each rank separately, so its update changes with the number of ranks wherever they hold
different numbers of positives. Here every rank divides by the positives of *all* ranks: the terms of the
ranks then add up to exactly the terms of one process with the whole batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import Hyp
from trainer.losses import Loss

BALANCE = {3: (4.0, 1.0, 0.4)}  # weight of each level's objectness
BALANCE_ELSE = (4.0, 1.0, 0.25, 0.06, 0.02)
NEIGHBOUR = 0.5  # a box also belongs to the nearest cell on each axis
FOCAL_ALPHA = 0.25
EPS = 1e-7


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


@dataclass(frozen=True)
class Assignment:
    """A batch's positives per level, and `counts` float64 (1 + levels,): images, positives of each level."""

    levels: list[Level]
    counts: Tensor


class DetectionLoss(Loss):
    """The loss of a batch for Detect: the positives depend on the targets alone."""

    terms = ("box", "obj", "cls")

    def __init__(self, anchors: Tensor, strides: Sequence[int], nc: int, hyp: Hyp, imgsz: int) -> None:
        levels = len(strides)
        self.anchors, self.strides, self.nc, self.hyp = anchors.float(), strides, nc, hyp
        self.balance = BALANCE.get(levels, BALANCE_ELSE)[:levels]
        # YOLOv5's gains are for 3 levels, 80 classes and 640 px.
        self.gains = (hyp.box * 3 / levels, hyp.obj * (imgsz / 640) ** 2 * 3 / levels, hyp.cls * nc / 80 * 3 / levels)

    def assign(self, targets: Tensor, images: int, height: int, width: int) -> Assignment:
        """Targets (n, 6) of `images` images of height x width px -> their positives and this rank's counts."""
        pairs = zip(self.anchors, self.strides, strict=True)
        levels = [assign_level(targets, a, height // s, width // s, self.hyp.anchor_t) for a, s in pairs]
        counts = [images, *(len(level.image) for level in levels)]
        return Assignment(levels, torch.tensor(counts, dtype=torch.float64, device=targets.device))

    def __call__(self, raw: Sequence[Tensor], assignment: Assignment, counts: Tensor) -> Tensor:
        """This rank's share of (box, obj, cls), gains included: (3,) float32 with gradients.

        `raw` are the network's outputs (b, a, ny, nx, nc + 5) per level, `counts` the sum of all ranks'
        `counts`. Summed over the ranks the shares are the batch's mean loss; every output
        takes part with at least a zero, so that no parameter is ever without a gradient.
        """
        images = counts[0].float()
        objectness = raw[0].new_zeros((), dtype=torch.float32)
        scores, boxes, weights = [], [], []
        for i, (t, level) in enumerate(zip(raw, assignment.levels, strict=True)):
            picked = t[level.image, level.anchor, level.row, level.column].float()  # (p, nc + 5)
            centre = picked[:, :2].sigmoid() * 2 - 0.5
            size = (picked[:, 2:4].sigmoid() * 2) ** 2 * level.anchor_wh
            quality = ciou(torch.cat((centre, size), 1), level.box)
            weights.append((1 / counts[1 + i].clamp(min=1)).float().expand(len(picked)))
            scores.append((picked[:, 5:], level.cls))
            boxes.append(quality)

            wanted = torch.zeros(t.shape[:4], device=t.device)
            own = level.owner
            cell = level.image[own], level.anchor[own], level.row[own], level.column[own]
            wanted[cell] = quality.detach()[own].clamp(min=0)
            cells = t.shape[1] * t.shape[2] * t.shape[3] * images
            term = bce(t[..., 4], wanted, self.hyp.obj_pw, self.hyp.fl_gamma).sum()
            objectness = objectness + term * (self.balance[i] / cells)
        weight = torch.cat(weights)
        box = ((1 - torch.cat(boxes)) * weight).sum()
        logits, cls = torch.cat([s for s, _ in scores]), torch.cat([c for _, c in scores])
        if self.nc > 1:
            classes = (self._classes(logits, cls) * weight).sum() / self.nc
        else:  # a single class has no class loss; the zero keeps the parameters in the graph
            classes = logits.sum() * 0
        terms = torch.stack((box, objectness, classes))
        return terms * terms.new_tensor(self.gains)

    def _classes(self, logits: Tensor, cls: Tensor) -> Tensor:
        """Summed class BCE of each positive: (p, nc), (p,) -> (p,)."""
        smooth = self.hyp.label_smoothing
        wanted = torch.full_like(logits, smooth / 2)
        wanted.scatter_(1, cls[:, None], 1 - smooth / 2)
        return bce(logits, wanted, self.hyp.cls_pw, self.hyp.fl_gamma).sum(1)


def assign_level(targets: Tensor, anchors: Tensor, ny: int, nx: int, anchor_t: float) -> Level:
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


def bce(logits: Tensor, wanted: Tensor, positive_weight: float = 1.0, gamma: float = 0.0) -> Tensor:
    """Element-wise binary cross entropy in float32, focal (Lin et al. 2017) when gamma is above 0."""
    logits = logits.float()
    weight = None if positive_weight == 1 else logits.new_tensor(positive_weight)
    loss = F.binary_cross_entropy_with_logits(logits, wanted, pos_weight=weight, reduction="none")
    if gamma > 0:
        p = logits.sigmoid()
        right = wanted * p + (1 - wanted) * (1 - p)
        alpha = wanted * FOCAL_ALPHA + (1 - wanted) * (1 - FOCAL_ALPHA)
        loss = loss * alpha * (1 - right) ** gamma
    return loss
