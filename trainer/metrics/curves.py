"""Precision, recall and F1 of matched detections over the confidence, and YOLOv5's average precision."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)
CONFIDENCES = np.linspace(0.0, 1.0, 1001)
_SMOOTH = (
    0.1  # width of the window, in confidence, over which the mean F1 is averaged before its peak is taken
)


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


def over_confidence(score: Floats, found: Bools, boxes: int) -> tuple[Floats, Floats]:
    """Precision and recall, each over CONFIDENCES, of detections (n,) by falling score.

    Where none is left, the precision stays at the surest one's; with none at all it is 0.
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
    """Index into CONFIDENCES where the mean F1, smoothed so that a few images do not decide, is highest."""
    half = round(len(CONFIDENCES) * _SMOOTH / 2)
    padded = np.pad(mean_f1, half, mode="edge")
    smooth = np.convolve(padded, np.full(2 * half + 1, 1 / (2 * half + 1)), mode="valid")
    return int(smooth.argmax())


def match_as_yolov5(iou: Floats) -> Bools:
    """Return whether each detection of one image finds a box (n, IOU_THRESHOLDS), by YOLOv5's rule.

    `iou` (n, boxes), by falling score, is 0 where the classes differ. A detection goes for its best box alone, and a
    box goes to the surest of the detections that came for it.
    """
    found = np.zeros((len(iou), len(IOU_THRESHOLDS)), np.bool_)
    if not iou.size:
        return found
    best = iou.argmax(1)
    reached = iou.max(1)
    for t, threshold in enumerate(IOU_THRESHOLDS):
        able = np.flatnonzero(reached >= threshold)
        _, first = np.unique(best[able], return_index=True)
        found[able[first], t] = True
    return found


def precision_as_yolov5(found: Bools, boxes: int) -> Floats:
    """YOLOv5's precision (thresholds, RECALLS): the envelope of detections by falling score, interpolated linearly."""
    hits = np.cumsum(found, 0, dtype=np.float64)
    recall = hits / boxes
    precision = hits / np.arange(1, len(found) + 1)[:, None]
    envelope = np.maximum.accumulate(precision[::-1], 0)[::-1]
    curves = [
        np.interp(RECALLS, np.concatenate([[0.0], r, [1.0]]), np.concatenate([[1.0], p, [0.0]]))
        for r, p in zip(recall.T, envelope.T, strict=True)
    ]
    return np.array(curves)


def area_under(precision: Floats) -> Floats:
    """The area under curves (..., RECALLS) by trapezoids."""
    return np.asarray(((precision[..., 1:] + precision[..., :-1]) / 2 * np.diff(RECALLS)).sum(-1))
