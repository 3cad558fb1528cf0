"""Chooses anchors that fit a data set's boxes: k-means, then random changes of which those that help are kept."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Sizes = npt.NDArray[np.float64]  # (n, 2): width, height in pixels

ENOUGH = 0.98  # share of boxes that some anchor fits, above which anchors stay as they are
SMALLEST_PX = 2.0
ITERATIONS = 30
GENERATIONS = 1000
CHANGED, SIGMA, LIMITS = 0.9, 0.1, (0.3, 3.0)  # share of values that a generation changes, by which factor
FITTED_ON = 5000  # boxes at most: more change nothing but the time


def recall(sizes: Sizes, anchors: Sizes, anchor_t: float) -> float:
    """The best possible recall: the share of boxes that differ from some anchor by less than `anchor_t` per side."""
    return float((_closeness(sizes, anchors) > 1 / anchor_t).mean())


def fit(sizes: Sizes, count: int, anchor_t: float, seed: int) -> Sizes:
    """`count` anchors for the boxes, (count, 2) by ascending area; the same for the same boxes and seed.

    Fitness is the mean of the boxes' closeness to their best anchor, 0 where it does not fit.
    """
    rng = np.random.default_rng(seed)
    sizes = sizes[(sizes >= SMALLEST_PX).all(1)]
    if len(sizes) > FITTED_ON:
        sizes = sizes[np.sort(rng.choice(len(sizes), FITTED_ON, replace=False))]
    best = _k_means(sizes, count, rng)
    fitness = _fitness(sizes, best, anchor_t)
    for _ in range(GENERATIONS):
        change = np.where(rng.random(best.shape) < CHANGED, 1 + SIGMA * rng.standard_normal(best.shape), 1.0)
        changed = np.maximum(best * change.clip(*LIMITS), SMALLEST_PX)
        if (now := _fitness(sizes, changed, anchor_t)) > fitness:
            best, fitness = changed, now
    ordered: Sizes = best[best.prod(1).argsort()]
    return ordered


def _closeness(sizes: Sizes, anchors: Sizes) -> npt.NDArray[np.float64]:
    """(n,): 1 where a box has an anchor's size, else the ratio of the side that differs most, for the best anchor."""
    logs, others = np.log(sizes).T, np.log(anchors)
    apart = np.maximum(np.abs(others[:, :1] - logs[0]), np.abs(others[:, 1:] - logs[1])).min(0)
    closeness: npt.NDArray[np.float64] = np.exp(-apart)
    return closeness


def _fitness(sizes: Sizes, anchors: Sizes, anchor_t: float) -> float:
    closeness = _closeness(sizes, anchors)
    return float((closeness * (closeness > 1 / anchor_t)).mean())


def _k_means(sizes: Sizes, count: int, rng: np.random.Generator) -> Sizes:
    """The centres (count, 2) of sizes in units of their spread; the first ones are drawn as in k-means++."""
    spread = np.maximum(sizes.std(0), 1e-9)
    points = sizes / spread
    centres = points[rng.integers(len(points))][None]
    while len(centres) < count:
        distance = ((points[:, None] - centres[None]) ** 2).sum(2).min(1) + 1e-12
        centres = np.vstack((centres, points[rng.choice(len(points), p=distance / distance.sum())]))
    for _ in range(ITERATIONS):
        nearest = ((points[:, None] - centres[None]) ** 2).sum(2).argmin(1)
        number = np.bincount(nearest, minlength=count)
        sums = np.stack([np.bincount(nearest, points[:, k], minlength=count) for k in (0, 1)], 1)
        centres = np.where(number[:, None] > 0, sums / np.maximum(number, 1)[:, None], centres)
    fitted: Sizes = centres * spread
    return fitted
