"""The anchor-free detectors' loss: task-aligned assignment, then box, class and distance terms over all ranks.

Assignment (Feng et al. 2021, TOOD): candidates are the points inside each box, from the targets alone. Those with the
best alignment of class score and overlap are matched. The divisor is the sum of the soft targets over all ranks. They
depend on the predictions, so it is known only after the forward pass.

A head with two sets of branches has two matchings: one with many points per box, one with a single point (Wang et al.
2024, YOLOv10). The weight of the first falls during the training, that of the second rises (YOLO26's ProgLoss).

Small targets (YOLO26's STAL): to find candidates, a side counts as at least the second stride, 16 px. Otherwise, a box
smaller than a cell of the finest level could have no candidate at all.
"""

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
from trainer.errors import TrainerError
from trainer.losses.anchored import bce, ciou
from trainer.losses.criterion import Criterion, ImageSize

Floats = npt.NDArray[np.float32]

ALPHA, BETA = 0.5, 6.0  # alignment = score^ALPHA * overlap^BETA
TOP = 10  # points per box
EPSILON = 1e-9  # added to a box's best alignment, so that a box counts less while it is hardly found
HIGHEST = 2**31 - 1


@dataclass(frozen=True)
class CandidateTargets:
    """Turns labels into the targets of `AlignedLoss`. They need no prediction, so dataloader workers make them."""

    strides: tuple[int, ...]

    def __call__(
        self, labels: BoxLabels, images: int, height: int, width: int, rows: Rows = exact
    ) -> dict[str, Tensor]:
        """List the points strictly inside each box, of `images` images of height x width px; small sides are widened.

        `labels` float32 (n, 6) is [image, class, cx, cy, w, h], normalised. The result is sorted by box, then by
        point. Its lists have `rows` rows; those that pad belong to a last box, which has no size and the weight 0:

        `pair` int64 (k, 2): a box and a point; points count through the levels.
        `at` float32 (k, 3): x, y of the point in pixels, and its stride.
        `top` int64 (m,): the places of each box's first `TOP` pairs in `pair`.
        `box` float32 (n, 5): centre x, y, w, h in pixels, then 1, or 0 for a row that pads.
        `owner` int64 (n, 2): image and class of a box.
        `counts` float64 (1,): the images.
        """
        grids = np.array([[width // s, height // s] for s in self.strides])  # (levels, 2)
        stride = np.array(self.strides, np.float32)[:, None]
        boxes = labels[:, 2:] * np.array([width, height, width, height], np.float32)
        half = np.maximum(boxes[:, 2:], np.float32(self.strides[:2][-1])) / 2
        low_corner = boxes[:, :2] - half
        high_corner = boxes[:, :2] + half
        # Points stand at (cell + 0.5) * stride: the first and the last cell with its point inside, (n, levels, 2).
        low = (np.floor(low_corner[:, None] / stride - np.float32(0.5)).astype(np.int64) + 1).clip(0)
        high = np.minimum(
            np.ceil(high_corner[:, None] / stride - np.float32(0.5)).astype(np.int64) - 1, grids - 1
        )
        span = (high - low + 1).clip(0).reshape(-1, 2)
        number = span.prod(1)  # of each box on each level
        row = np.repeat(np.arange(len(number)), number)
        offset = np.arange(len(row)) - (number.cumsum() - number)[row]
        levels = len(self.strides)
        corner = low.reshape(-1, 2)
        level = row % levels
        column = corner[row, 0] + offset % span[row, 0]
        line = corner[row, 1] + offset // span[row, 0]
        cells = grids.prod(1)
        per_box = number.reshape(-1, levels).sum(1)
        box = row // levels
        first = per_box.cumsum() - per_box
        point = (cells.cumsum() - cells)[level] + line * grids[level, 0] + column
        top = np.flatnonzero(np.arange(len(box)) - first[box] < TOP)

        # One more box than there are, for the rows of the other lists that pad.
        n = rows("boxes", len(boxes) + 1)
        k = rows("pairs", len(box) + 1)
        m = rows("top", len(top) + 1)
        pair = np.full((k, 2), (n - 1, 0), np.int64)
        at = np.ones((k, 3), np.float32)
        pair[: len(box), 0] = box
        pair[: len(box), 1] = point
        point_stride = np.array(self.strides, np.float32)[level]
        at[: len(box), 0] = (column + 0.5) * point_stride
        at[: len(box), 1] = (line + 0.5) * point_stride
        at[: len(box), 2] = point_stride
        padded = np.zeros((n, 5), np.float32)
        padded[: len(boxes), :4] = boxes
        padded[: len(boxes), 4] = 1
        owner = np.zeros((n, 2), np.int64)
        owner[: len(boxes)] = labels[:, :2]
        tops = np.full(m, k - 1)
        tops[: len(top)] = top
        lists = {"pair": pair, "at": at, "top": tops, "box": padded, "owner": owner}
        lists["counts"] = np.array([images], np.float64)
        return {name: torch.from_numpy(values) for name, values in lists.items()}


@dataclass(frozen=True)
class Matching:
    """The points that a box gets: the `points` best aligned ones (at most `TOP`), or of them only the best."""

    points: int
    once: bool = False


ONE_TO_MANY = Matching(TOP)
ONE_TO_ONE = Matching(7, once=True)
MANY_FIRST, MANY_LAST = 0.8, 0.1  # weight of the one-to-many loss in the first and in the last epoch


class Candidates(NamedTuple):
    """The targets of `CandidateTargets` as columns: k pairs of a box and a point, and n boxes."""

    box: Tensor  # int64 (k,)
    point: Tensor  # int64 (k,)
    at: Tensor  # float32 (k, 3): x, y in pixels, stride
    top: Tensor  # int64 (m,): the places of each box's first pairs
    targets: Tensor  # float32 (n, 4): centre x, y, w, h in pixels
    weight: Tensor  # float32 (n,): 0 for a row that pads
    image: Tensor  # int64 (n,)
    cls: Tensor  # int64 (n,)


class Matched(NamedTuple):
    """The m best pairs of a box and a point.

    `image`, `point`, `cls` are int64 (m,). `at` (m, 3) is the point and its stride, `target` (m, 4) in pixels.
    `weight` (m,) is the soft target in 0..1: the wanted class score, and the weight of the pair. It is 0 if the
    pair is not aligned, or another box got the point: m depends on the shape of the targets alone.
    """

    image: Tensor
    point: Tensor
    at: Tensor
    cls: Tensor
    target: Tensor
    weight: Tensor


class AlignedLoss(Criterion):
    """The loss of a batch for DetectDFL and DetectEndToEnd: matches from the outputs, then the terms."""

    shares: Tensor
    validates = True
    _numbers: Tensor

    def __init__(
        self, strides: Sequence[int], bins: int, hyp: Hyp, matchings: Sequence[Matching] = (ONE_TO_MANY,)
    ) -> None:
        """Start the loss of a head that has a set of branches for each of `matchings`, and 4 * bins distances."""
        if hyp.label_smoothing:
            what = "label smoothing: the anchor-free head's class targets are soft already"
            raise TrainerError(what, "leave label_smoothing out, or use a model with anchors")
        super().__init__((hyp.dfl_box, hyp.dfl_cls, hyp.dfl))
        self.terms = ("box", "cls", "dfl" if bins > 1 else "l1")
        self.strides = tuple(strides)
        self.bins = bins
        self.hyp = hyp
        self.matchings = tuple(matchings)
        self.register_buffer("_numbers", torch.arange(bins, dtype=torch.float32))
        self.register_buffer("shares", torch.ones(len(self.matchings)))
        self.begin_epoch(0, 1)

    def begin_epoch(self, epoch: int, epochs: int, /) -> None:
        """Set the weights of two matchings; that of the first changes linearly."""
        if len(self.matchings) == 2:
            done = min(epoch / max(epochs - 1, 1), 1.0)
            many = MANY_FIRST + (MANY_LAST - MANY_FIRST) * done
            self.shares.copy_(torch.tensor((many, 1 - many)))

    def assigner(self, model: Any, /) -> CandidateTargets:
        """Return what makes the targets."""
        return CandidateTargets(self.strides)

    def validation_outputs(self, network: Any, images: Tensor, /) -> Sequence[Tensor]:
        """Run the network in evaluation mode, with the branches of all matchings."""
        network.detect.returns_all = True
        outputs: Sequence[Tensor] = network(images)
        return outputs

    def weight(self, images: Tensor, /) -> Tensor:
        """Return `images`: YOLOv5's loss is the mean of the batch times its size."""
        return images

    def forward(
        self, outputs: Sequence[Tensor], targets: Targets, size: ImageSize, /
    ) -> tuple[Tensor, Tensor]:
        """Return the sums (3, 1 + matchings), and the counts: images, and the soft targets of each matching.

        `outputs` are the raw ones (b, ny, nx, 4 * bins + nc) per level, all levels for the first matching first.
        """
        pairs = candidates(targets)
        levels = len(self.strides)
        sums = []
        counts = [targets["counts"]]
        for k, matching in enumerate(self.matchings):
            flat = torch.cat([t.flatten(1, 2) for t in outputs[k * levels : (k + 1) * levels]], 1)
            matched = self.match(flat, pairs, matching)
            sums.append(self._sums(flat, matched, size))
            counts.append(matched.weight.double().sum()[None])
        return F.pad(torch.stack(sums, 1) * self.shares, (1, 0)), torch.cat(counts)

    def _sums(self, flat: Tensor, matched: Matched, size: ImageSize) -> Tensor:
        """Return the sums (3,) of a matching, from raw outputs (b, points, 4 * bins + nc)."""
        logits = flat[..., 4 * self.bins :].float()
        wanted = torch.zeros_like(logits)
        # Of the pairs of a point, one has a weight above 0.
        wanted.index_put_((matched.image, matched.point, matched.cls), matched.weight, accumulate=True)
        cls = bce(logits, wanted, self.hyp.cls_pw, self.hyp.fl_gamma).sum()

        picked = flat[matched.image, matched.point, : 4 * self.bins].float()
        point = matched.at[:, :2]
        stride = matched.at[:, 2:]
        quality = ciou(self._boxes(picked, matched.at), matched.target)
        box = ((1 - quality) * matched.weight).sum()
        centre = matched.target[:, :2]
        half = matched.target[:, 2:] / 2
        sides = torch.cat((point - centre + half, centre + half - point), 1)
        if self.bins > 1:
            distance = self._distribution(picked, sides / stride)
        else:  # as fractions of the image's sides
            height, width = size
            left, top, right, bottom = (picked * stride - sides).abs().unbind(1)
            distance = ((left + right) / width + (top + bottom) / height) / 4
        return torch.stack((box, cls, (distance * matched.weight).sum()))

    @torch.no_grad()
    def match(self, flat: Tensor, pairs: Candidates, matching: Matching = ONE_TO_MANY) -> Matched:
        """Return the best pairs of a box and a point, by the raw outputs (b, points, 4 * bins + nc)."""
        picked = flat[pairs.image[pairs.box], pairs.point]
        logit_column = 4 * self.bins + pairs.cls[pairs.box]
        scores = picked.gather(1, logit_column[:, None])[:, 0].float().sigmoid()
        boxes = self._boxes(picked[:, : 4 * self.bins], pairs.at)
        images, points = flat.shape[:2]
        return match(pairs, scores, boxes, images, points, matching)

    def _boxes(self, raw: Tensor, at: Tensor) -> Tensor:
        """Raw distances (m, 4 * bins) at points and strides (m, 3) px -> centre x, y, w, h (m, 4) in pixels."""
        raw = raw.float()
        mean = raw.reshape(-1, 4, self.bins).softmax(2) @ self._numbers if self.bins > 1 else raw
        sides = mean * at[:, 2:]
        before, after = torch.split(sides, 2, 1)
        return torch.cat((at[:, :2] + (after - before) / 2, before + after), 1)

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


def candidates(targets: Targets) -> Candidates:
    """Return the columns of the targets."""
    box = targets["box"]
    owner = targets["owner"]
    pair = targets["pair"]
    return Candidates(
        box=pair[:, 0],
        point=pair[:, 1],
        at=targets["at"],
        top=targets["top"],
        targets=box[:, :4],
        weight=box[:, 4],
        image=owner[:, 0],
        cls=owner[:, 1],
    )


def match(
    pairs: Candidates,
    scores: Tensor,
    boxes: Tensor,
    images: int,
    points: int,
    matching: Matching = ONE_TO_MANY,
) -> Matched:
    """Choose among the candidates in `images` images of `points` points, by what the network predicts there.

    `scores` (k,) is each pair's predicted probability of the box's class, `boxes` (k, 4) its predicted box in
    pixels. The best points of a box are chosen. A point that several boxes choose goes to the box with the largest
    overlap among all whose candidate it is. Of the points that a box then has, `matching` may leave it only the best.
    weight = alignment / (the box's best alignment + EPSILON) * the box's best overlap.
    """
    n = len(pairs.targets)
    k = len(pairs.box)
    m = len(pairs.top)
    overlap = ciou(boxes, pairs.targets[pairs.box]).clamp(min=0) * pairs.weight[pairs.box]
    aligned = scores**ALPHA * overlap**BETA
    # One sort for all boxes: the bits of floats that are not negative are ordered as they are. Ties go to the first.
    order = ((pairs.box << 32) - _bits(aligned)).argsort(stable=True)
    best = order[pairs.top]  # (m,) pairs
    is_chosen = aligned[best] > 0
    if matching.points < TOP:
        owner = pairs.box[best]
        begin = pairs.top.new_full((n,), k).scatter_reduce_(0, owner, pairs.top, "amin")
        is_chosen &= pairs.top - begin[owner] < matching.points

    # A point is claimed by its overlaps: the largest wins, and of equal ones the first pair.
    all_points = images * points
    point_of_pair = pairs.image[pairs.box] * points + pairs.point  # (k,)
    numbers = torch.arange(k, device=point_of_pair.device)
    claim = (_bits(overlap) << 32) + (HIGHEST - numbers)
    largest = claim.new_zeros(all_points).scatter_reduce_(0, point_of_pair, claim, "amax")
    chosen_point = point_of_pair[best]  # (m,)
    choosers = claim.new_zeros(all_points).scatter_add_(0, chosen_point, is_chosen.long())
    winner = HIGHEST - (largest[chosen_point] & 0xFFFFFFFF)
    pair = torch.where(choosers[chosen_point] > 1, winner, best)
    # The point is in a row of each box that chose it. It counts in the first.
    rows = torch.arange(m, device=pair.device)
    chosen_row = torch.where(is_chosen, rows, m)
    first_row = rows.new_full((all_points,), m).scatter_reduce_(0, chosen_point, chosen_row, "amin")
    won = is_chosen & (first_row[chosen_point] == rows)

    box = pairs.box[pair]
    point = pairs.point[pair]
    aligned = aligned[pair] * won
    overlap = overlap[pair] * won
    if matching.once:
        rank = ((_bits(aligned) << 32) + (HIGHEST - rows)) * won
        won = rank == rank.new_zeros(n).scatter_reduce_(0, box, rank, "amax")[box]
        aligned = aligned * won
        overlap = overlap * won
    most_aligned = aligned.new_zeros(n).scatter_reduce_(0, box, aligned, "amax")
    most_overlap = overlap.new_zeros(n).scatter_reduce_(0, box, overlap, "amax")
    weight = aligned / (most_aligned[box] + EPSILON) * most_overlap[box]
    return Matched(pairs.image[box], point, pairs.at[pair], pairs.cls[box], pairs.targets[box], weight)


def _bits(values: Tensor) -> Tensor:
    """Float32, not negative -> int64 with the same order."""
    return values.view(torch.int32).long()
