"""From matched detections to average precision and to precision, recall and F1 over the confidence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.metrics.matching import Bools, Floats, Ints

RECALLS = np.linspace(0.0, 1.0, 101)
CONFIDENCES = np.linspace(0.0, 1.0, 1001)
_SMOOTH = 0.1  # width of the window, in confidence, over which the mean F1 is averaged before its peak is taken


@dataclass(frozen=True)
class BoxCurves:
    """Curves (classes, points) at IoU 0.5 of the classes that have boxes, and the confusion matrix of all.

    `ap` (classes, IoU thresholds); `precision_at` is over RECALLS, the rest over CONFIDENCES. `confusion`
    (nc + 1, nc + 1) counts boxes by what was found (row) and what was there (column); the last is the background.
    """

    names: list[str]
    ap: Floats
    precision_at: Floats
    precision: Floats
    recall: Floats
    f1: Floats
    confidence: float
    confusion: Ints


def _curve(found: Bools, boxes: int) -> tuple[Floats, Floats]:
    """Recall and precision's envelope (n, thresholds) along detections (n, thresholds) by falling score."""
    hits = np.cumsum(found, 0, dtype=np.float64)
    precision = hits / np.arange(1, len(found) + 1)[:, None]
    return hits / boxes, np.maximum.accumulate(precision[::-1], 0)[::-1]


def precision_at_recalls(found: Bools, boxes: int) -> Floats:
    """COCO's precision at RECALLS (101,) of detections (n,) by falling score: the envelope, 0 beyond the last."""
    recall, envelope = _curve(found[:, None], boxes)
    at = np.searchsorted(recall[:, 0], RECALLS, side="left")
    return np.where(at < len(found), np.append(envelope[:, 0], 0.0)[at], 0.0)


def average_precision(found: Bools, counted: Bools, boxes: int) -> Floats:
    """COCO's AP (thresholds,) of detections (n, thresholds) by falling score, without those not `counted`."""
    return np.array(
        [precision_at_recalls(found[counted[:, t], t], boxes).mean() for t in range(found.shape[1])], np.float64
    )


def average_precision_yolov5(found: Bools, boxes: int) -> Floats:
    """YOLOv5's AP: the envelope interpolated linearly at RECALLS, and the area under that by trapezoids."""
    recall, envelope = _curve(found, boxes)
    scores = np.zeros(found.shape[1])
    for t in range(found.shape[1]):
        x = np.concatenate([[0.0], recall[:, t], [1.0]])
        at = np.interp(RECALLS, x, np.concatenate([[1.0], envelope[:, t], [0.0]]))
        scores[t] = ((at[1:] + at[:-1]) / 2 * np.diff(RECALLS)).sum()
    return scores


def over_confidence(score: Floats, found: Bools, boxes: int) -> tuple[Floats, Floats]:
    """Precision and recall, each over CONFIDENCES, of detections (n,) by falling score.

    Where none is left, the precision stays that of the surest one; with none at all it is 0.
    """
    kept = len(score) - np.searchsorted(score[::-1], CONFIDENCES, side="left")
    hits = np.concatenate([[0], np.cumsum(found)])
    precision = hits / np.maximum(1, np.arange(len(hits)))
    if len(score):
        precision[0] = precision[1]
    return precision[kept], hits[kept] / boxes


def f1_of(precision: Floats, recall: Floats) -> Floats:
    """The harmonic mean of precision and recall, 0 where both are."""
    total = precision + recall
    return np.asarray(np.divide(2 * precision * recall, total, out=np.zeros_like(total), where=total > 0))


def peak(mean_f1: Floats) -> int:
    """Index into CONFIDENCES where the mean F1, smoothed so that a few pictures do not decide, is highest."""
    half = round(len(CONFIDENCES) * _SMOOTH / 2)
    padded = np.pad(mean_f1, half, mode="edge")
    smooth = np.convolve(padded, np.full(2 * half + 1, 1 / (2 * half + 1)), mode="valid")
    return int(smooth.argmax())
