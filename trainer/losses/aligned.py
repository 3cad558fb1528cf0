"""The anchor-free detector's loss: task-aligned assignment, then box, class and distribution terms over all ranks.

Assignment (Feng et al. 2021, TOOD): candidates are the points inside each box, from the targets alone. Those with the
best alignment of class score and overlap are matched. The divisor is the sum of the soft targets over all ranks. They
depend on the predictions, so it is known only after the forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import Hyp
from trainer.errors import TrainerError
from trainer.losses import Loss
from trainer.losses.detection import bce, ciou

ALPHA, BETA = 0.5, 6.0  # alignment = score^ALPHA * overlap^BETA
TOP = 10  # points per box
HIGHEST = 2**31 - 1


@dataclass(frozen=True)
class Candidates:
    """The k pairs of a box and a point strictly inside it, sorted by box, then by point.

    `box`, `point` are int64 (k,): rows of `targets` and numbers of points, which count through the levels;
    `first` (n,) is where each box's pairs begin. `targets` (n, 4) is centre x, y, w, h in pixels, `cls` and
    `image` (n,) int64; `points` (p, 2) in pixels, `strides` (p,). `counts` float64 (1,) is the images.
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


class AlignedLoss(Loss):
    """The loss of a batch for DetectDFL: candidates from the targets, matches from the outputs, then the terms."""

    terms = ("box", "cls", "dfl")

    def __init__(self, strides: Sequence[int], bins: int, hyp: Hyp) -> None:
        if hyp.label_smoothing:
            raise TrainerError(
                "label smoothing: the anchor-free head's class targets are soft already",
                "leave label_smoothing out, or use a model with anchors",
            )
        self.strides, self.bins, self.hyp = strides, bins, hyp
        self.gains = (hyp.dfl_box, hyp.dfl_cls, hyp.dfl)

    def assign(self, targets: Tensor, images: int, height: int, width: int) -> Candidates:
        """List the points inside each box. `targets` (n, 6) is [image, class, cx, cy, w, h] normalised."""
        device = targets.device
        grids = torch.tensor([[width // s, height // s] for s in self.strides], device=device)  # (levels, 2)
        stride = targets.new_tensor(self.strides)[:, None]
        boxes = targets[:, 2:] * targets.new_tensor([width, height, width, height])
        low_corner, high_corner = boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2
        # Points stand at (cell + 0.5) * stride: the first and the last cell with its point inside, (n, levels, 2).
        low = ((low_corner[:, None] / stride - 0.5).floor().long() + 1).clamp_(min=0)
        high = torch.minimum((high_corner[:, None] / stride - 0.5).ceil().long() - 1, grids - 1)
        span = (high - low + 1).clamp_(min=0).flatten(0, 1)
        number = span.prod(1)  # of each box on each level
        row = torch.repeat_interleave(number)
        offset = torch.arange(len(row), device=device) - (number.cumsum(0) - number)[row]
        levels = len(self.strides)
        level = row % levels
        column = low.flatten(0, 1)[row, 0] + offset % span[row, 0]
        line = low.flatten(0, 1)[row, 1] + offset // span[row, 0]
        cells = grids.prod(1)
        per_box = number.view(-1, levels).sum(1)
        points = []
        for s in self.strides:
            y, x = torch.arange(height // s, device=device), torch.arange(width // s, device=device)
            points.append((torch.cartesian_prod(y, x).flip(1) + 0.5) * s)
        return Candidates(
            box=row // levels,
            point=(cells.cumsum(0) - cells)[level] + line * grids[level, 0] + column,
            first=per_box.cumsum(0) - per_box,
            targets=boxes,
            cls=targets[:, 1].long(),
            image=targets[:, 0].long(),
            points=torch.cat(points),
            strides=stride[:, 0].repeat_interleave(cells),
            images=images,
            counts=torch.tensor([images], dtype=torch.float64, device=device),
        )

    @torch.no_grad()
    def match(self, raw: Sequence[Tensor], found: Candidates) -> tuple[tuple[Candidates, Matched], Tensor]:
        """The points that answer for a box, and float64 (1,): the sum of this rank's soft targets."""
        flat, image = _flat(raw), found.image[found.box]
        picked = flat[image, found.point]
        scores = picked.gather(1, 4 * self.bins + found.cls[found.box][:, None])[:, 0].float().sigmoid()
        boxes = self._boxes(picked[:, : 4 * self.bins], found.points[found.point], found.strides[found.point])
        matched = match(found, scores, boxes)
        return (found, matched), matched.weight.double().sum()[None]

    def __call__(self, raw: Sequence[Tensor], assigned: tuple[Candidates, Matched], counts: Tensor) -> Tensor:
        """This rank's share of (box, cls, dfl), gains included: (3,) float32 with gradients.

        `raw` are the network's outputs (b, ny, nx, 4 * bins + nc) per level, `counts` (2,) the images and the
        soft targets of all ranks. Every output takes part, if only with a zero.
        """
        found, matched = assigned
        flat = _flat(raw)
        share = (1 / counts[1].clamp(min=1)).float()
        logits = flat[..., 4 * self.bins :].float()
        wanted = torch.zeros_like(logits)
        wanted[matched.image, matched.point, matched.cls] = matched.weight
        cls = bce(logits, wanted, self.hyp.cls_pw, self.hyp.fl_gamma).sum()

        picked = flat[matched.image, matched.point, : 4 * self.bins].float()
        point, stride = found.points[matched.point], found.strides[matched.point]
        quality = ciou(self._boxes(picked, point, stride), matched.target)
        box = ((1 - quality) * matched.weight).sum()
        half = matched.target[:, 2:] / 2
        sides = torch.cat((point - matched.target[:, :2] + half, matched.target[:, :2] + half - point), 1)
        dfl = (self._distribution(picked, sides / stride[:, None]) * matched.weight).sum()
        terms = torch.stack((box, cls, dfl)) * share
        return terms * terms.new_tensor(self.gains)

    def _boxes(self, raw: Tensor, point: Tensor, stride: Tensor) -> Tensor:
        """Raw distances (m, 4 * bins) at points (m, 2) px -> centre x, y, w, h (m, 4) in pixels."""
        numbers = torch.arange(self.bins, dtype=torch.float32, device=raw.device)
        sides = raw.float().reshape(-1, 4, self.bins).softmax(2) @ numbers * stride[:, None]
        before, after = sides[:, :2], sides[:, 2:]
        return torch.cat((point + (after - before) / 2, before + after), 1)

    def _distribution(self, raw: Tensor, sides: Tensor) -> Tensor:
        """Distribution focal loss (Li et al. 2020): (m, 4 * bins) and distances (m, 4) in strides -> (m,).

        The cross entropy of the two whole numbers around a distance, each weighed by how near it is.
        """
        sides = sides.clamp(0, self.bins - 1 - 0.01)
        left = sides.long()
        log_p = raw.reshape(-1, 4, self.bins).log_softmax(2)
        near = log_p.gather(2, torch.stack((left, left + 1), 2))  # (m, 4, 2)
        right = sides - left
        return -(near[..., 0] * (1 - right) + near[..., 1] * right).mean(1)


def _flat(raw: Sequence[Tensor]) -> Tensor:
    """Outputs per level (b, ny, nx, v) -> (b, points, v)."""
    return torch.cat([t.flatten(1, 2) for t in raw], 1)


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
