"""The anchor detector's loss: box, objectness and class terms, averaged over all ranks together.

YOLOv5 averages on each rank separately, so its update changes with the number of ranks whenever they hold
different numbers of positives. Here every rank divides by the positives of *all* ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import Hyp
from trainer.data.batch import BoxLabels, Rows, Targets, exact
from trainer.losses.criterion import Criterion, ImageSize

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

BALANCE = {3: (4.0, 1.0, 0.4)}  # weight of each level's objectness
BALANCE_ELSE = (4.0, 1.0, 0.25, 0.06, 0.02)
NEIGHBOUR = 0.5  # a box also belongs to the nearest cell on each axis
_OFFSETS = NEIGHBOUR * np.array([[0, 0], [1, 0], [0, 1], [-1, 0], [0, -1]], np.float32)
FOCAL_ALPHA = 0.25
EPS = 1e-7


class Positives(NamedTuple):
    """The pairs of a box and an anchor in a cell that a level has to predict, p of them.

    `image`, `anchor`, `row`, `column`, `cls` are int64 (p,). `box` float32 (p, 4) is the target in grid units: the
    centre relative to the cell, then width and height. `anchor_wh` float32 (p, 2) is in grid units.
    """

    image: Ints
    anchor: Ints
    row: Ints
    column: Ints
    cls: Ints
    box: Floats
    anchor_wh: Floats


@dataclass(frozen=True)
class AnchorTargets:
    """Turns labels into the targets of `DetectionLoss`. They need no prediction, so dataloader workers make them.

    `anchors` float32 (levels, a, 2) are in grid units, `strides` in pixels. A box matches an anchor if no side differs
    by a factor of `anchor_t` or more.
    """

    anchors: Floats
    strides: tuple[int, ...]
    anchor_t: float

    def __call__(
        self, labels: BoxLabels, images: int, height: int, width: int, rows: Rows = exact
    ) -> dict[str, Tensor]:
        """Return the targets of `images` images of height x width px.

        `labels` float32 (n, 6) is [image, class, cx, cy, w, h], normalised. Each of the l levels gets `rows` rows p:

        `index` int64 (l, p, 3): the cell, counted over images, rows, columns and anchors of its level; the cell whose
        objectness the pair decides, counted over the levels too, or one beyond the last; the class.
        `value` float32 (l, p, 7): box and anchor_wh of `Positives`, then 1, or 0 for a row that pads.
        `counts` float64 (1 + l,): the images, and the pairs of each level.
        """
        levels = [
            assign_level(labels, anchors, height // stride, width // stride, self.anchor_t)
            for anchors, stride in zip(self.anchors, self.strides, strict=True)
        ]
        numbers = [len(level.cls) for level in levels]
        most = rows("positives", max(numbers))
        index = np.zeros((len(levels), most, 3), np.int64)
        value = np.zeros((len(levels), most, 7), np.float32)
        value[..., :6] = 1  # a box and an anchor that give finite gradients
        before = 0
        for k, (level, stride, number) in enumerate(zip(levels, self.strides, numbers, strict=True)):
            ny = height // stride
            nx = width // stride
            per_cell = self.anchors.shape[1]
            cell = ((level.image * ny + level.row) * nx + level.column) * per_cell + level.anchor
            index[k, :number, 0] = cell
            index[k, :number, 1] = np.where(_is_last(cell), before + cell, -1)
            index[k, number:, 1] = -1
            index[k, :number, 2] = level.cls
            value[k, :number, :4] = level.box
            value[k, :number, 4:6] = level.anchor_wh
            value[k, :number, 6] = 1
            before += images * ny * nx * per_cell
        index[..., 1][index[..., 1] < 0] = before
        counts = np.array([images, *numbers], np.float64)
        return {
            "index": torch.from_numpy(index),
            "value": torch.from_numpy(value),
            "counts": torch.from_numpy(counts),
        }


class DetectionLoss(Criterion):
    """The loss of a batch for Detect. The targets are those of `AnchorTargets`, with l levels and p rows each."""

    terms = ("box", "obj", "cls")
    validates = True

    def __init__(self, levels: int, strides: Sequence[int], nc: int, hyp: Hyp, imgsz: int) -> None:
        # YOLOv5's gains are for 3 levels, 80 classes and 640 px.
        obj = hyp.obj * (imgsz / 640) ** 2 * 3 / levels
        cls = hyp.cls * nc / 80 * 3 / levels
        super().__init__((hyp.box * 3 / levels, obj, cls))
        self.strides = tuple(strides)
        self.nc = nc
        self.hyp = hyp
        self.balance = BALANCE.get(levels, BALANCE_ELSE)[:levels]

    def assigner(self, model: Any, /) -> AnchorTargets:
        """Return what makes the targets, with the anchors that the model has now."""
        return AnchorTargets(model.detect.anchors.float().cpu().numpy(), self.strides, self.hyp.anchor_t)

    def weight(self, images: Tensor, /) -> Tensor:
        """Return `images`: YOLOv5's loss is the mean of the batch times its size."""
        return images

    def forward(
        self, outputs: Sequence[Tensor], targets: Targets, size: ImageSize, /
    ) -> tuple[Tensor, Tensor]:
        """Return the sums (3, 1 + l) and the counts; `outputs` are raw, (b, a, ny, nx, nc + 5) per level."""
        index = targets["index"]
        value = targets["value"]
        box, anchor_wh, weight = torch.split(value.flatten(0, 1), [4, 2, 1], 1)
        levels, rows = value.shape[:2]
        # The order of the cells in memory, so that nothing is copied.
        cells = [t.permute(0, 2, 3, 1, 4).flatten(0, 3) for t in outputs]
        picked_of_levels = [t.index_select(0, cell) for t, cell in zip(cells, index[..., 0], strict=True)]
        picked = torch.cat(picked_of_levels).float()
        centre, wh = torch.split(picked[:, :4].sigmoid() * 2, 2, 1)
        quality = ciou(torch.cat((centre - 0.5, wh**2 * anchor_wh), 1), box)
        of_boxes = ((1 - quality) * weight[:, 0]).view(levels, rows).sum(1)

        logits = torch.cat([t[:, 4] for t in cells]).float()
        wanted = logits.new_zeros(len(logits) + 1)  # the last takes what decides no cell's objectness
        wanted[index[..., 1].flatten()] = quality.detach().clamp(min=0)
        of_cells = bce(logits, wanted[:-1], self.hyp.obj_pw, self.hyp.fl_gamma)
        losses = torch.split(of_cells, [len(t) for t in cells])
        images = len(outputs[0])
        of_levels = []
        for loss, balance in zip(losses, self.balance, strict=True):
            cells_per_image = len(loss) // images
            of_levels.append(loss.sum() * (balance / cells_per_image))
        of_objectness = torch.stack(of_levels).sum()

        logits = picked[:, 5:]
        if self.nc > 1:
            of_classes = self._classes(logits, index[..., 2].flatten()) * weight[:, 0] / self.nc
        else:  # a single class has no class loss; the zero keeps the parameters in the graph
            of_classes = logits[:, 0] * 0
        of_classes = of_classes.view(levels, rows).sum(1)
        sums = (F.pad(of_boxes, (1, 0)), F.pad(of_objectness[None], (0, levels)), F.pad(of_classes, (1, 0)))
        return torch.stack(sums), targets["counts"].clone()

    def _classes(self, logits: Tensor, cls: Tensor) -> Tensor:
        """Return the summed class BCE of each pair: (p, nc), (p,) -> (p,)."""
        smooth = self.hyp.label_smoothing
        wanted = torch.full_like(logits, smooth / 2)
        wanted.scatter_(1, cls[:, None], 1 - smooth / 2)
        return bce(logits, wanted, self.hyp.cls_pw, self.hyp.fl_gamma).sum(1)


def assign_level(labels: Floats, anchors: Floats, ny: int, nx: int, anchor_t: float) -> Positives:
    """Match boxes to the anchors and cells of a level.

    `labels` float32 (n, 6) is [image, class, cx, cy, w, h], normalised; `anchors` float32 (a, 2) in grid units. A box
    matches an anchor if no side differs by a factor of `anchor_t` or more. It then takes its own cell and
    the neighbours nearest to its centre, at most three cells.
    """
    size = np.array([nx, ny], np.float32)
    wh = labels[:, 4:6] * size
    with np.errstate(divide="ignore"):  # a box without width matches nothing
        ratio = wh[None] / anchors[:, None]  # (a, n, 2)
        matches = np.maximum(ratio, 1 / ratio).max(2) < anchor_t
    anchor, box = matches.nonzero()  # sorted by anchor, then by box
    centre = labels[box, 2:4] * size

    # The neighbour is one cell to the left or up if the centre lies in that half of its cell, and exists.
    low = (centre % 1 < NEIGHBOUR) & (centre > 1)
    rest = size - centre
    high = (rest % 1 < NEIGHBOUR) & (rest > 1)
    own = np.ones_like(low[:, :1])
    which, match = np.concatenate((own, low, high), 1).T.nonzero()  # own, left, up, right, down
    anchor = anchor[match]
    box = box[match]
    centre = centre[match]
    cell = np.minimum((centre - _OFFSETS[which]).astype(np.int64).clip(0), size.astype(np.int64) - 1)

    image = labels[box, 0].astype(np.int64)
    cls = labels[box, 1].astype(np.int64)
    at = np.concatenate((centre - cell.astype(np.float32), wh[box]), 1)
    return Positives(image, anchor, cell[:, 1], cell[:, 0], cls, at, anchors[anchor])


def _is_last(cell: Ints) -> npt.NDArray[np.bool_]:
    """Return where no later entry is the same, (p,): of several pairs on a cell, the last decides its objectness."""
    _, first = np.unique(cell[::-1], return_index=True)
    last = np.zeros(len(cell), bool)
    last[len(cell) - 1 - first] = True
    return last


def ciou(a: Tensor, b: Tensor) -> Tensor:
    """Complete IoU (Zheng et al. 2020) of boxes in pairs: (n, 4), (n, 4) as centre x, y, w, h -> (n,).

    CIoU = IoU - rho^2 / c^2 - alpha v: overlap, distance of the centres over the enclosing diagonal, and
    difference of the aspect ratios with its weight alpha held constant.
    """
    a_centre, a_size = torch.split(a, 2, 1)
    b_centre, b_size = torch.split(b, 2, 1)
    aw, ah = a_size.unbind(1)
    bw, bh = b_size.unbind(1)
    between = (a_centre - b_centre).abs()
    both = a_size + b_size
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
