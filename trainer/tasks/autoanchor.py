"""Looks whether a model's anchors fit the data's boxes, and gives it others where they do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trainer import dist
from trainer.data import Dataset
from trainer.models.anchors import ENOUGH, SMALLEST_PX, Sizes, fit, recall
from trainer.models.heads import Detect
from trainer.models.yolo import Yolo

PICTURES = 20_000  # at most, drawn from the whole set: the share of a larger one is known well enough


def box_sizes(dataset: Dataset, imgsz: int, seed: int) -> Sizes:
    """Widths and heights (n, 2) of a set's boxes, in pixels once the longer side of their picture is `imgsz`."""
    numbers = np.arange(len(dataset))
    if len(numbers) > PICTURES:
        numbers = np.sort(np.random.default_rng(seed).choice(numbers, PICTURES, replace=False))
    sizes = [np.zeros((0, 2))]
    for index in numbers.tolist():
        height, width = dataset.size(index)
        sizes.append(dataset.labels(index)[:, 3:5] * np.array([width, height]) * (imgsz / max(height, width)))
    return np.concatenate(sizes).astype(np.float64)


def fit_anchors(
    model: Yolo, cfg: dict[str, Any], dataset: Dataset, *, imgsz: int, anchor_t: float, seed: int
) -> tuple[dict[str, Any], str]:
    """Put anchors into the model that fit the set, where its own fit too few boxes.

    Rank 0 chooses, so that all ranks have the same. Returns `cfg` with the anchors that the model has now, in
    pixels, and what to tell the user ("" for a model without anchors).
    """
    head = model.detect
    if not isinstance(head, Detect):
        return cfg, ""
    strides = torch.tensor(head.strides, dtype=torch.float64).view(-1, 1, 1)
    own = (head.anchors.double().cpu() * strides).view(-1, 2).numpy()
    chosen, said = dist.broadcast(_choose(dataset, own, imgsz, anchor_t, seed) if dist.first() else None)
    if chosen is not None:
        pixels = torch.from_numpy(chosen).view(len(head.strides), -1, 2)
        head.anchors.copy_(pixels / strides)
        cfg = {**cfg, "anchors": pixels.flatten(1).tolist()}
    return cfg, said


def _choose(dataset: Dataset, own: Sizes, imgsz: int, anchor_t: float, seed: int) -> tuple[Sizes | None, str]:
    """Other anchors or None, and what to say about it."""
    sizes = box_sizes(dataset, imgsz, seed)
    sizes = sizes[(sizes > 0).all(1)]
    if (sizes >= SMALLEST_PX).all(1).sum() < len(own):
        return None, f"anchors: {len(sizes)} boxes at {imgsz} px are too few or too small: they stay as they are"
    before = recall(sizes, own, anchor_t)
    found = f"anchors fit {before:.1%} of {len(sizes):,} boxes at {imgsz} px"
    if before > ENOUGH:
        return None, found
    other = fit(sizes, len(own), anchor_t, seed).round(1)
    after = recall(sizes, other, anchor_t)
    if after <= before:
        return None, f"{found}; no better ones were found"
    listed = "  ".join(f"{w:g}x{h:g}" for w, h in other)
    return other, f"{found}: replaced by others that fit {after:.1%} (--noautoanchor keeps them): {listed}"
