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
from trainer.losses import Loss, send
from trainer.losses.detection import bce, ciou

ALPHA, BETA = 0.5, 6.0  # alignment = score^ALPHA * overlap^BETA
TOP = 10  # points per box
HIGHEST = 2**31 - 1


@dataclass(frozen=True)
class Candidates:
    """The k pairs of a box and a point strictly inside it, sorted by box, then by point.

    `box`, `point` are int64 (k,): rows of `targets` and numbers of points, which count through the levels. `top` int64
    (m,) are the places of each box's first `TOP` pairs. `targets` (n, 4) is centre x, y, w, h in pixels, `cls` and
    `image` (n,) int64; `points` (p, 2) in pixels, `strides` (p,). `counts` float64 (1,) is the images.
    """

    box: Tensor
    point: Tensor
    top: Tensor
    targets: Tensor
    cls: Tensor
    image: Tensor
    points: Tensor
    strides: Tensor
    images: int
    counts: Tensor


@dataclass(frozen=True)
class Matched:
    """The m best pairs of a box and a point: `image`, `point`, `cls` int64 (m,), `target` (m, 4) in pixels.

    `weight` (m,) is the soft target in 0..1: the wanted class score, and the weight of the pair. It is 0 if the
    pair is not aligned, or another box got the point: m depends on the targets alone, so no host waits for it.
    """

    image: Tensor
    point: Tensor
    cls: Tensor
    target: Tensor
    weight: Tensor


class AlignedLoss(Loss):
    """The loss of a batch for DetectDFL: candidates from the targets, matches from the outputs, then the terms."""

    terms = ("box", "cls", "dfl")

    def __init__(self, strides: Sequence[int], bins: int, hyp: Hyp, device: torch.device) -> None:
        if hyp.label_smoothing:
            what = "label smoothing: the anchor-free head's class targets are soft already"
            raise TrainerError(what, "leave label_smoothing out, or use a model with anchors")
        self.strides, self.bins, self.hyp, self._device = strides, bins, hyp, device
        self.gains = torch.tensor((hyp.dfl_box, hyp.dfl_cls, hyp.dfl), device=device)
        self._numbers = torch.arange(bins, dtype=torch.float32, device=device)
        self._points: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # points and strides by height and width

    def assign(self, targets: Tensor, images: int, height: int, width: int) -> Candidates:
        """List the points inside each box, on the CPU. `targets` (n, 6) is [image, class, cx, cy, w, h] normalised."""
        targets = targets.cpu()
        grids = torch.tensor([[width // s, height // s] for s in self.strides])  # (levels, 2)
        stride = targets.new_tensor(self.strides)[:, None]
        boxes = targets[:, 2:] * targets.new_tensor([width, height, width, height])
        low_corner, high_corner = boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2
        # Points stand at (cell + 0.5) * stride: the first and the last cell with its point inside, (n, levels, 2).
        low = ((low_corner[:, None] / stride - 0.5).floor().long() + 1).clamp_(min=0)
        high = torch.minimum((high_corner[:, None] / stride - 0.5).ceil().long() - 1, grids - 1)
        span = (high - low + 1).clamp_(min=0).flatten(0, 1)
        number = span.prod(1)  # of each box on each level
        row = torch.repeat_interleave(number)
        offset = torch.arange(len(row)) - (number.cumsum(0) - number)[row]
        levels = len(self.strides)
        level = row % levels
        column = low.flatten(0, 1)[row, 0] + offset % span[row, 0]
        line = low.flatten(0, 1)[row, 1] + offset // span[row, 0]
        cells = grids.prod(1)
        per_box = number.view(-1, levels).sum(1)
        box, first = row // levels, per_box.cumsum(0) - per_box
        point = (cells.cumsum(0) - cells)[level] + line * grids[level, 0] + column
        top = (torch.arange(len(box)) - first[box] < TOP).nonzero()[:, 0]
        if (height, width) not in self._points:
            grid = [torch.cartesian_prod(torch.arange(height // s), torch.arange(width // s)) for s in self.strides]
            points = torch.cat([(each.flip(1) + 0.5) * s for each, s in zip(grid, self.strides, strict=True)])
            strides = stride[:, 0].repeat_interleave(cells)
            self._points[height, width] = send(points, self._device), send(strides, self._device)
        columns = (box, point, top, targets[:, 1].long(), targets[:, 0].long())
        sent = torch.split(send(torch.cat(columns), self._device), [len(column) for column in columns])
        box, point, top, cls, image = sent
        points, strides = self._points[height, width]
        counts = torch.full((1,), images, dtype=torch.float64, device=self._device)
        return Candidates(box, point, top, send(boxes, self._device), cls, image, points, strides, images, counts)

    @torch.no_grad()
    def match(self, raw: Sequence[Tensor], found: Candidates) -> tuple[tuple[Candidates, Matched], Tensor]:
        """The best pairs of a box and a point, and float64 (1,): the sum of this rank's soft targets."""
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
        share = counts[1].clamp(min=1).reciprocal().float()
        logits = flat[..., 4 * self.bins :].float()
        wanted = torch.zeros_like(logits)
        # Of the pairs of a point, one has a weight above 0.
        wanted.index_put_((matched.image, matched.point, matched.cls), matched.weight, accumulate=True)
        cls = bce(logits, wanted, self.hyp.cls_pw, self.hyp.fl_gamma).sum()

        picked = flat[matched.image, matched.point, : 4 * self.bins].float()
        point, stride = found.points[matched.point], found.strides[matched.point]
        quality = ciou(self._boxes(picked, point, stride), matched.target)
        box = ((1 - quality) * matched.weight).sum()
        half = matched.target[:, 2:] / 2
        sides = torch.cat((point - matched.target[:, :2] + half, matched.target[:, :2] + half - point), 1)
        dfl = (self._distribution(picked, sides / stride[:, None]) * matched.weight).sum()
        return torch.stack((box, cls, dfl)) * share * self.gains

    def _boxes(self, raw: Tensor, point: Tensor, stride: Tensor) -> Tensor:
        """Raw distances (m, 4 * bins) at points (m, 2) px -> centre x, y, w, h (m, 4) in pixels."""
        sides = raw.float().reshape(-1, 4, self.bins).softmax(2) @ self._numbers * stride[:, None]
        before, after = torch.split(sides, 2, 1)
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
        return -(near * torch.stack((1 - right, right), 2)).sum(2).mean(1)


def _flat(raw: Sequence[Tensor]) -> Tensor:
    """Outputs per level (b, ny, nx, v) -> (b, points, v)."""
    return torch.cat([t.flatten(1, 2) for t in raw], 1)


def match(found: Candidates, scores: Tensor, boxes: Tensor) -> Matched:
    """Choose among the candidates by what the network predicts there.

    `scores` (k,) is each pair's predicted probability of the box's class, `boxes` (k, 4) its predicted box in
    pixels. The best `TOP` points of a box are chosen; of the boxes that choose the same point, that with
    the largest overlap gets it. weight = alignment / the box's best alignment * the box's best overlap.
    """
    n = len(found.targets)
    overlap = ciou(boxes, found.targets[found.box]).clamp(min=0)
    aligned = scores**ALPHA * overlap**BETA
    # One sort for all boxes: the bits of floats that are not negative are ordered as they are. Ties go to the first.
    order = ((found.box << 32) - _bits(aligned)).argsort(stable=True)
    best = order[found.top]
    box, point, aligned, overlap = found.box[best], found.point[best], aligned[best], overlap[best]
    image = found.image[box]
    slot = image * len(found.points) + point
    is_aligned = aligned > 0
    claim = ((_bits(overlap) << 32) + (HIGHEST - box)) * is_aligned  # equal overlaps: the first box
    largest = claim.new_zeros(found.images * len(found.points)).scatter_reduce_(0, slot, claim, "amax")
    won = (largest[slot] == claim) & is_aligned
    aligned, overlap = aligned * won, overlap * won
    most_aligned = aligned.new_zeros(n).scatter_reduce_(0, box, aligned, "amax")
    most_overlap = overlap.new_zeros(n).scatter_reduce_(0, box, overlap, "amax")
    weight = torch.where(won, aligned / most_aligned[box] * most_overlap[box], 0)
    return Matched(image, point, found.cls[box], found.targets[box], weight)


def _bits(values: Tensor) -> Tensor:
    """Float32, not negative -> int64 with the same order."""
    return values.view(torch.int32).long()
