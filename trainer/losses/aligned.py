"""The anchor-free detector's loss: box, class and distribution terms, averaged over all ranks together.

The averages' divisor is the sum of the soft targets, which depend on what the network predicts: it is known only
after the forward pass, and summed over the ranks then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.config import Hyp
from trainer.errors import TrainerError
from trainer.losses.alignment import Candidates, Matched, candidates, match
from trainer.losses.boxes import ciou
from trainer.losses.classes import bce


class AlignedLoss:
    """The loss of a batch for DetectDFL: candidates from the targets, matches from the outputs, then the terms."""

    terms: tuple[str, ...] = ("box", "cls", "dfl")

    def __init__(self, strides: Sequence[int], bins: int, hyp: Hyp) -> None:
        if hyp.label_smoothing:
            raise TrainerError(
                "label smoothing: the anchor-free head's class targets are soft already",
                "leave label_smoothing out, or use a model with anchors",
            )
        self.strides, self.bins, self.hyp = strides, bins, hyp
        self.gains = (hyp.dfl_box, hyp.dfl_cls, hyp.dfl)

    def assign(self, targets: Tensor, images: int, height: int, width: int) -> Candidates:
        """Targets (n, 6) of `images` pictures of height x width px -> the points inside each box."""
        return candidates(targets, self.strides, images, height, width)

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

        `raw` are the network's outputs (b, ny, nx, 4 * bins + nc) per level, `counts` (2,) the pictures and the
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
