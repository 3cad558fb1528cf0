"""Mean average precision of boxes by COCO's rules (area "all", 100 detections per picture and class).

Each picture is matched when it is added, so what ranks exchange is small: a score, a class and ten bits per
detection. The result does not depend on the order of pictures or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_DETECTIONS = 100  # per picture and class
IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0.0, 1.0, 101)

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
State = dict[str, Any]


@dataclass(frozen=True)
class BoxScores:
    """Mean AP at IoU 0.5, mean AP over IoU 0.50:0.05:0.95, and both for every class that has ground truth."""

    map50: float
    map: float
    per_class: dict[str, tuple[float, float]]


def box_iou(a: Floats, b: Floats) -> Floats:
    """IoU (n, m) of boxes a (n, 4) and b (m, 4), xyxy; 0 where both are empty."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(2)
    areas = (a[:, 2:] - a[:, :2]).prod(1)[:, None] + (b[:, 2:] - b[:, :2]).prod(1)[None]
    union = areas - shared
    return np.asarray(np.divide(shared, union, out=np.zeros_like(shared), where=union > 0))


def _ranks_within(classes: Ints) -> Ints:
    """For each element its position among the elements of the same class, in the order given."""
    order = np.argsort(classes, kind="stable")
    sorted_classes = classes[order]
    starts = np.searchsorted(sorted_classes, sorted_classes)
    ranks = np.empty(len(classes), np.int64)
    ranks[order] = np.arange(len(classes)) - starts
    return ranks


def _match(iou: Floats) -> Bools:
    """Which detections (n, thresholds) find a box, by COCO's greedy rule.

    `iou` (n, m) has the detections by falling score and 0 where classes differ: each takes the free box of
    highest IoU, the later one of equals, if that reaches the threshold.
    """
    found = np.zeros((len(iou), len(IOU_THRESHOLDS)), np.bool_)
    if not iou.size:
        return found
    candidates = np.flatnonzero(iou.max(1) >= IOU_THRESHOLDS[0])
    free = np.ones((len(IOU_THRESHOLDS), iou.shape[1]), np.bool_)
    rows = np.arange(len(IOU_THRESHOLDS))
    last = iou.shape[1] - 1
    for k in candidates.tolist():
        eligible = np.where(free & (iou[k] >= IOU_THRESHOLDS[:, None]), iou[k], 0.0)
        best = last - eligible[:, ::-1].argmax(1)
        found[k] = eligible[rows, best] > 0
        free[rows[found[k]], best[found[k]]] = False
    return found


def _average_precision(found: Bools, boxes: int) -> Floats:
    """AP (thresholds,) of detections (n, thresholds) by falling score: precision's envelope at 101 recalls."""
    hits = np.cumsum(found, 0, dtype=np.float64)
    recall = hits / boxes
    precision = hits / np.arange(1, len(found) + 1)[:, None]
    envelope = np.maximum.accumulate(precision[::-1], 0)[::-1]
    scores = np.zeros(found.shape[1])
    for t in range(found.shape[1]):
        at = np.searchsorted(recall[:, t], _RECALLS, side="left")
        reached = at[at < len(found)]
        scores[t] = envelope[reached, t].sum() / len(_RECALLS)
    return scores


class BoxMAP:
    """Collects detections and ground truth picture by picture; `merge` adds what another rank collected."""

    def __init__(self, names: list[str]) -> None:
        self._names = list(names)
        self._boxes = np.zeros(len(names), np.int64)  # ground truth per class
        # image id -> (scores (n,), classes (n,), found (n, thresholds)), by falling score
        self._pictures: dict[int, tuple[Floats, Ints, Bools]] = {}

    def update(
        self,
        image_id: int,
        boxes_xyxy_px: npt.ArrayLike,
        scores: npt.ArrayLike,
        classes: npt.ArrayLike,
        gt_boxes_xyxy: npt.ArrayLike,
        gt_classes: npt.ArrayLike,
    ) -> None:
        """Add a picture: detections (n, 4), (n,), (n,) and ground truth (m, 4), (m,), both in the same pixels."""
        if image_id in self._pictures:
            raise ValueError(f"picture {image_id} is already counted")
        score = np.asarray(scores, np.float64).reshape(-1)
        label = np.asarray(classes).astype(np.int64).reshape(-1)
        boxes = np.asarray(boxes_xyxy_px, np.float64).reshape(-1, 4)
        truth = np.asarray(gt_boxes_xyxy, np.float64).reshape(-1, 4)
        truth_label = np.asarray(gt_classes).astype(np.int64).reshape(-1)

        order = np.argsort(-score, kind="stable")
        order = order[_ranks_within(label[order]) < MAX_DETECTIONS]
        score, label, boxes = score[order], label[order], boxes[order]
        iou = np.where(label[:, None] == truth_label[None], box_iou(boxes, truth), 0.0)
        self._pictures[image_id] = (score, label, _match(iou))
        self._boxes += np.bincount(truth_label, minlength=len(self._names))

    def state(self) -> State:
        """All that was collected, picklable, for another rank's `merge`."""
        return {"boxes": self._boxes, "pictures": self._pictures}

    def merge(self, state: State) -> None:
        """Add another rank's pictures; one that is already here is an error, since it would count twice."""
        twice = self._pictures.keys() & state["pictures"].keys()
        if twice:
            raise ValueError(f"picture {min(twice)} is already counted")
        self._pictures.update(state["pictures"])
        self._boxes = self._boxes + state["boxes"]

    def compute(self) -> BoxScores:
        """The scores; classes without ground truth do not count, and with no ground truth at all they are 0."""
        pictures = [self._pictures[k] for k in sorted(self._pictures)]
        score = np.concatenate([np.zeros(0), *(p[0] for p in pictures)])
        label = np.concatenate([np.zeros(0, np.int64), *(p[1] for p in pictures)])
        found = np.concatenate([np.zeros((0, len(IOU_THRESHOLDS)), np.bool_), *(p[2] for p in pictures)])
        order = np.argsort(-score, kind="stable")
        label, found = label[order], found[order]
        per_class = {}
        for k, name in enumerate(self._names):
            if self._boxes[k]:
                ap = _average_precision(found[label == k], int(self._boxes[k]))
                per_class[name] = (float(ap[0]), float(ap.mean()))
        if not per_class:
            return BoxScores(0.0, 0.0, {})
        map50, mean = np.mean(list(per_class.values()), axis=0)
        return BoxScores(float(map50), float(mean), per_class)
