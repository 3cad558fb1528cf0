"""The anchor detector's loss: box, objectness and class terms, averaged over all ranks together.

YOLOv5 averages on each rank by itself, so its update changes with the number of ranks wherever they hold
different numbers of positives. Here every rank divides by the positives of *all* ranks: the terms of the
ranks then add up to exactly the terms of one process with the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import Hyp
from trainer.losses.assignment import Level, assign
from trainer.losses.boxes import ciou
from trainer.losses.classes import bce

BALANCE = {3: (4.0, 1.0, 0.4)}  # weight of each level's objectness
BALANCE_ELSE = (4.0, 1.0, 0.25, 0.06, 0.02)


@dataclass(frozen=True)
class Assignment:
    """A batch's positives per level, and `counts` float64 (1 + levels,): pictures, positives of each level."""

    levels: list[Level]
    counts: Tensor


class DetectionLoss:
    """The loss of a batch for Detect: positives from the targets alone, so that nothing is left to match."""

    terms: tuple[str, ...] = ("box", "obj", "cls")

    def __init__(self, anchors: Tensor, strides: Sequence[int], nc: int, hyp: Hyp, imgsz: int) -> None:
        levels = len(strides)
        self.anchors, self.strides, self.nc, self.hyp = anchors.float(), strides, nc, hyp
        self.balance = BALANCE.get(levels, BALANCE_ELSE)[:levels]
        # YOLOv5's gains are for 3 levels, 80 classes and 640 px.
        self.gains = (
            hyp.box * 3 / levels,
            hyp.obj * (imgsz / 640) ** 2 * 3 / levels,
            hyp.cls * nc / 80 * 3 / levels,
        )

    def assign(self, targets: Tensor, images: int, height: int, width: int) -> Assignment:
        """Targets (n, 6) of `images` pictures of height x width px -> their positives and this rank's counts."""
        grids = [(height // s, width // s) for s in self.strides]
        levels = assign(targets, self.anchors, grids, self.hyp.anchor_t)
        counts = [images, *(len(level.image) for level in levels)]
        return Assignment(levels, torch.tensor(counts, dtype=torch.float64, device=targets.device))

    def match(self, raw: Sequence[Tensor], assignment: Assignment) -> tuple[Assignment, Tensor]:
        """The assignment as it is: all counts are known from the targets."""
        return assignment, assignment.counts[:0]

    def __call__(self, raw: Sequence[Tensor], assignment: Assignment, counts: Tensor) -> Tensor:
        """This rank's share of (box, obj, cls), gains included: (3,) float32 with gradients.

        `raw` are the network's outputs (b, a, ny, nx, nc + 5) per level, `counts` the sum of all ranks'
        `assignment.counts`. Summed over the ranks the shares are the batch's mean loss; every output
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
            wanted[level.image[own], level.anchor[own], level.row[own], level.column[own]] = quality.detach()[
                own
            ].clamp(min=0)
            cells = t.shape[1] * t.shape[2] * t.shape[3] * images
            objectness = objectness + bce(t[..., 4], wanted, self.hyp.obj_pw, self.hyp.fl_gamma).sum() * (
                self.balance[i] / cells
            )
        weight = torch.cat(weights)
        box = ((1 - torch.cat(boxes)) * weight).sum()
        logits, cls = torch.cat([s for s, _ in scores]), torch.cat([c for _, c in scores])
        if self.nc > 1:
            classes = (self._classes(logits, cls) * weight).sum() / self.nc
        else:  # one class needs no telling apart; the zero keeps the parameters in the graph
            classes = logits.sum() * 0
        terms = torch.stack((box, objectness, classes))
        return terms * terms.new_tensor(self.gains)

    def _classes(self, logits: Tensor, cls: Tensor) -> Tensor:
        """Summed class BCE of each positive: (p, nc), (p,) -> (p,)."""
        smooth = self.hyp.label_smoothing
        wanted = torch.full_like(logits, smooth / 2)
        wanted.scatter_(1, cls[:, None], 1 - smooth / 2)
        return bce(logits, wanted, self.hyp.cls_pw, self.hyp.fl_gamma).sum(1)
