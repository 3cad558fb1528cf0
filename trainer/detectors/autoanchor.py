"""AutoAnchor: replaces anchors that fit the boxes of the data badly, by k-means and then random mutations."""

import numpy as np
import numpy.typing as npt
import torch

from trainer.config import ModelCfg
from trainer.data.dataset import Dataset
from trainer.distributed import comm
from trainer.models.heads import Detect
from trainer.models.yolo import Yolo

Sizes = npt.NDArray[np.float64]  # (n, 2): width, height in pixels

ENOUGH = 0.98  # share of boxes that some anchor fits, above which anchors stay as they are
SMALLEST_PX = 2.0
ITERATIONS = 30
GENERATIONS = 1000
CHANGED = 0.9  # share of the values that a generation changes
SIGMA = 0.1  # standard deviation of the factor of a change
LIMITS = (0.3, 3.0)  # of that factor
FITTED_ON = 5000  # boxes at most; more only take longer
IMAGES = 20_000  # sample size: enough to estimate the recall on a larger set


def box_sizes(dataset: Dataset, imgsz: int, seed: int) -> Sizes:
    """Return widths and heights (n, 2) of boxes in pixels, with the longer image side scaled to `imgsz`."""
    numbers = np.arange(len(dataset))
    if len(numbers) > IMAGES:
        numbers = np.sort(np.random.default_rng(seed).choice(numbers, IMAGES, replace=False))
    sizes = [np.zeros((0, 2))]
    for index in numbers.tolist():
        height, width = dataset.size(index)
        scale = imgsz / max(height, width)
        fractions = dataset.labels(index)[:, 3:5]
        sizes.append(fractions * np.array([width, height]) * scale)
    return np.concatenate(sizes).astype(np.float64)


def fit_anchors(
    model: Yolo, cfg: ModelCfg, dataset: Dataset, *, imgsz: int, anchor_t: float, seed: int
) -> tuple[ModelCfg, str]:
    """Replace the model's anchors if they fit too few boxes of the dataset.

    Rank 0 chooses for all ranks. Return `cfg` with the current anchors in pixels, and a message for the user ("" for a
    model without anchors).
    """
    head = model.detect
    if not isinstance(head, Detect):
        return cfg, ""
    strides = torch.tensor(head.strides, dtype=torch.float64).view(-1, 1, 1)
    own = (head.anchors.double().cpu() * strides).view(-1, 2).numpy()
    choice = _choose(dataset, own, imgsz, anchor_t, seed) if comm.is_rank_zero() else None
    chosen, message = comm.broadcast(choice)
    if chosen is not None:
        pixels = torch.from_numpy(chosen).view(len(head.strides), -1, 2)
        head.anchors.copy_(pixels / strides)
        cfg = {**cfg, "anchors": pixels.flatten(1).tolist()}
    return cfg, message


def _choose(dataset: Dataset, own: Sizes, imgsz: int, anchor_t: float, seed: int) -> tuple[Sizes | None, str]:
    """Return new anchors or None, and a message."""
    sizes = box_sizes(dataset, imgsz, seed)
    sizes = sizes[(sizes > 0).all(1)]
    large_enough = (sizes >= SMALLEST_PX).all(1).sum()
    if large_enough < len(own):
        return None, f"anchors: {len(sizes)} boxes at {imgsz} px are too few or too small: anchors kept"
    before = recall(sizes, own, anchor_t)
    fit_before = f"anchors fit {before:.1%} of {len(sizes):,} boxes at {imgsz} px"
    if before > ENOUGH:
        return None, fit_before
    fitted = fit(sizes, len(own), anchor_t, seed).round(1)
    after = recall(sizes, fitted, anchor_t)
    if after <= before:
        return None, f"{fit_before}; no better ones were found"
    listed = "  ".join(f"{w:g}x{h:g}" for w, h in fitted)
    replaced = f"replaced by others that fit {after:.1%} (--noautoanchor keeps them): {listed}"
    return fitted, f"{fit_before}: {replaced}"


def recall(sizes: Sizes, anchors: Sizes, anchor_t: float) -> float:
    """Return the best possible recall: the share of boxes within a factor `anchor_t` of some anchor per side."""
    return float((_closeness(sizes, anchors) > 1 / anchor_t).mean())


def fit(sizes: Sizes, count: int, anchor_t: float, seed: int) -> Sizes:
    """Fit `count` anchors to the boxes: (count, 2) by ascending area; the same for the same boxes and seed.

    Fitness is the mean of the boxes' closeness to their best anchor, 0 where it does not fit.
    """
    rng = np.random.default_rng(seed)
    sizes = sizes[(sizes >= SMALLEST_PX).all(1)]
    if len(sizes) > FITTED_ON:
        sample = np.sort(rng.choice(len(sizes), FITTED_ON, replace=False))
        sizes = sizes[sample]
    best = _k_means(sizes, count, rng)
    fitness = _fitness(sizes, best, anchor_t)
    for _ in range(GENERATIONS):
        is_changed = rng.random(best.shape) < CHANGED
        factors = np.where(is_changed, 1 + SIGMA * rng.standard_normal(best.shape), 1.0)
        changed = np.maximum(best * factors.clip(*LIMITS), SMALLEST_PX)
        changed_fitness = _fitness(sizes, changed, anchor_t)
        if changed_fitness > fitness:
            best = changed
            fitness = changed_fitness
    ordered: Sizes = best[best.prod(1).argsort()]
    return ordered


def _closeness(sizes: Sizes, anchors: Sizes) -> npt.NDArray[np.float64]:
    """(n,): 1 where a box has an anchor's size, else the ratio of the side that differs most, for the best anchor."""
    log_width, log_height = np.log(sizes).T
    anchor_logs = np.log(anchors)
    width_apart = np.abs(anchor_logs[:, :1] - log_width)  # (anchors, n)
    height_apart = np.abs(anchor_logs[:, 1:] - log_height)
    apart = np.maximum(width_apart, height_apart).min(0)
    closeness: npt.NDArray[np.float64] = np.exp(-apart)
    return closeness


def _fitness(sizes: Sizes, anchors: Sizes, anchor_t: float) -> float:
    closeness = _closeness(sizes, anchors)
    fits = closeness > 1 / anchor_t
    return float((closeness * fits).mean())


def _k_means(sizes: Sizes, count: int, rng: np.random.Generator) -> Sizes:
    """The centres (count, 2) of sizes in units of their spread; the first ones are drawn as in k-means++."""
    spread = np.maximum(sizes.std(0), 1e-9)
    points = sizes / spread
    centres = points[rng.integers(len(points))][None]
    while len(centres) < count:
        distance = ((points[:, None] - centres[None]) ** 2).sum(2).min(1) + 1e-12
        drawn = rng.choice(len(points), p=distance / distance.sum())
        centres = np.vstack((centres, points[drawn]))
    for _ in range(ITERATIONS):
        nearest = ((points[:, None] - centres[None]) ** 2).sum(2).argmin(1)
        number = np.bincount(nearest, minlength=count)[:, None]  # of points
        sums = np.stack([np.bincount(nearest, points[:, k], minlength=count) for k in (0, 1)], 1)
        centres = np.where(number > 0, sums / np.maximum(number, 1), centres)
    fitted: Sizes = centres * spread
    return fitted
