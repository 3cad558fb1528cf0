"""Which detections of one picture find which boxes: COCO's rule, YOLOv5's, and one for the confusion matrix."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


def areas(boxes: Floats) -> Floats:
    """Areas (n,) of boxes (n, 4), xyxy."""
    return np.asarray((boxes[:, 2:] - boxes[:, :2]).prod(1))


def box_iou(a: Floats, b: Floats, crowd: Bools | None = None) -> Floats:
    """IoU (n, m) of boxes a (n, 4) and b (m, 4), xyxy; 0 where both are empty.

    Where `crowd` (m,) is set, b is a region of many objects, and the share of a that lies in it counts instead.
    """
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(2)
    own = np.broadcast_to(areas(a)[:, None], shared.shape)
    whole = own + areas(b)[None] - shared
    if crowd is not None:
        whole = np.where(crowd[None], own, whole)
    return np.asarray(np.divide(shared, whole, out=np.zeros_like(shared), where=whole > 0))


def match_as_coco(iou: Floats, ignored: Bools, crowd: Bools) -> tuple[Bools, Bools]:
    """COCO's greedy rule: which detections find a box, and which count neither way, both (n, thresholds).

    `iou` (n, m) has the detections by falling score and 0 where classes differ. Each takes the free box of highest
    IoU that reaches the threshold, the later one of equals; a box that is `ignored` (m,) only where no other does,
    and it then does not count. A `crowd` (m,), always ignored, is never used up.
    """
    found = np.zeros((len(iou), len(IOU_THRESHOLDS)), np.bool_)
    left_out = np.zeros_like(found)
    if not iou.size:
        return found, left_out
    candidates = np.flatnonzero(iou.max(1) >= IOU_THRESHOLDS[0])
    free = np.ones((len(IOU_THRESHOLDS), iou.shape[1]), np.bool_)
    rows = np.arange(len(IOU_THRESHOLDS))
    last = iou.shape[1] - 1
    preference = np.where(ignored, 0.0, 2.0)  # more than any IoU: a counted box before an ignored one
    for k in candidates.tolist():
        eligible = np.where(free & (iou[k] >= IOU_THRESHOLDS[:, None]), iou[k] + preference, 0.0)
        best = last - eligible[:, ::-1].argmax(1)
        hit = eligible[rows, best] > 0
        left_out[k] = hit & ignored[best]
        found[k] = hit & ~ignored[best]
        used = hit & ~crowd[best]
        free[rows[used], best[used]] = False
    return found, left_out


def match_as_yolov5(iou: Floats) -> Bools:
    """YOLOv5's rule: which detections (n, thresholds) find a box; `iou` as for `match_as_coco`.

    A detection goes for its best box alone, and a box goes to the surest of the detections that came for it.
    """
    found = np.zeros((len(iou), len(IOU_THRESHOLDS)), np.bool_)
    if not iou.size:
        return found
    best, reached = iou.argmax(1), iou.max(1)
    for t, threshold in enumerate(IOU_THRESHOLDS):
        able = np.flatnonzero(reached >= threshold)
        _, first = np.unique(best[able], return_index=True)
        found[able[first], t] = True
    return found


def pair_up(iou: Floats, threshold: float) -> list[tuple[int, int]]:
    """Pairs (row, column) above `threshold`, best first, each row and column at most once."""
    rows, columns = np.nonzero(iou > threshold)
    order = np.argsort(-iou[rows, columns], kind="stable")
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    for row, column in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        if row not in pairs and column not in taken:
            pairs[row] = column
            taken.add(column)
    return list(pairs.items())
