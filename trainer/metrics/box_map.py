"""Mean average precision of boxes by COCO's rules (100 detections per picture and class), or by YOLOv5's.

Each picture is matched when it is added, so what ranks exchange is small: 16 bytes per detection. The result does
not depend on the order of pictures or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.metrics.curves import (
    CONFIDENCES,
    BoxCurves,
    average_precision,
    average_precision_yolov5,
    f1_of,
    over_confidence,
    peak,
    precision_at_recalls,
)
from trainer.metrics.matching import (
    IOU_THRESHOLDS,
    Bools,
    Floats,
    Ints,
    areas,
    box_iou,
    match_as_coco,
    match_as_yolov5,
    pair_up,
)

MAX_DETECTIONS = 100  # per picture and class
CONFUSION_IOU, CONFUSION_CONFIDENCE = 0.45, 0.25
# Least and greatest area in square pixels, both included. COCO's own bounds.
AREAS = {"all": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
_BITS = 1 << np.arange(len(IOU_THRESHOLDS))

State = dict[str, Any]
_Rows = tuple[Floats, Bools, Bools, int]  # a class: scores (n,), found and counted (n, thresholds), number of boxes


class ClassScores(NamedTuple):
    """One class: AP at IoU 0.5 and over 0.50:0.05:0.95; precision, recall and F1 at IoU 0.5; its ground truth."""

    map50: float
    map: float
    precision: float
    recall: float
    f1: float
    pictures: int
    boxes: int


@dataclass(frozen=True)
class BoxScores:
    """Means over the classes that have ground truth, and those classes one by one.

    `precision`, `recall` and `f1` are at IoU 0.5 and at `confidence`, where the mean F1 is highest. `by_area` has the
    AP over all IoUs of small, medium and large boxes, where that was asked for; nan where there are none.
    """

    map50: float
    map: float
    per_class: dict[str, ClassScores]
    precision: float = 0.0
    recall: float = 0.0
    f1: float = 0.0
    confidence: float = 0.0
    pictures: int = 0
    boxes: int = 0
    by_area: dict[str, float] | None = None

    @property
    def fitness(self) -> float:
        """What the best checkpoint is chosen by: 0.1 mAP50 + 0.9 mAP50-95, as in YOLOv5."""
        return 0.1 * self.map50 + 0.9 * self.map

    def columns(self) -> dict[str, float]:
        """The columns of results.csv."""
        return {"precision": self.precision, "recall": self.recall, "map50": self.map50, "map": self.map}

    def by_class(self, names: Sequence[str]) -> list[float]:
        """The mAP of each class, nan where there was none of it."""
        found = (self.per_class.get(name) for name in names)
        return [score.map if score else float("nan") for score in found]


@dataclass(frozen=True)
class _Picture:
    """One picture's detections by falling score; a bit per IoU threshold, a column per range of areas."""

    scores: Floats
    classes: npt.NDArray[np.int32]
    found: npt.NDArray[np.uint16]
    left_out: npt.NDArray[np.uint16]


def _ranks_within(classes: Ints) -> Ints:
    """For each element its position among the elements of the same class, in the order given."""
    order = np.argsort(classes, kind="stable")
    sorted_classes = classes[order]
    starts = np.searchsorted(sorted_classes, sorted_classes)
    ranks = np.empty(len(classes), np.int64)
    ranks[order] = np.arange(len(classes)) - starts
    return ranks


def _unpack(bits: npt.NDArray[np.uint16]) -> Bools:
    """(n,) -> (n, thresholds)."""
    return np.asarray((bits[:, None] & _BITS) > 0)


class BoxMAP:
    """Collects detections and ground truth picture by picture; `merge` adds what another rank collected."""

    def __init__(self, names: list[str], *, by_area: bool = False, yolov5: bool = False) -> None:
        """`by_area` adds COCO's three ranges of areas; `yolov5` matches and integrates as YOLOv5 does."""
        self.names = list(names)
        self._yolov5 = yolov5
        self._ranges = list(AREAS) if by_area else ["all"]
        self._boxes = np.zeros((len(self._ranges), len(names)), np.int64)  # ground truth per range and class
        self._with = np.zeros(len(names), np.int64)  # pictures that have the class
        self._confusion = np.zeros((len(names) + 1, len(names) + 1), np.int64)
        self._pictures: dict[int, _Picture] = {}

    def update(
        self,
        image_id: int,
        boxes_xyxy_px: npt.ArrayLike,
        scores: npt.ArrayLike,
        classes: npt.ArrayLike,
        gt_boxes_xyxy: npt.ArrayLike,
        gt_classes: npt.ArrayLike,
        gt_crowd: npt.ArrayLike | None = None,
        gt_areas_px: npt.ArrayLike | None = None,
    ) -> None:
        """Add a picture: detections (n, 4), (n,), (n,) and ground truth (m, 4), (m,), both in the same pixels.

        `gt_crowd` (m,) marks regions of many objects (COCO's iscrowd): what is found in them counts neither way.
        `gt_areas_px` (m,) are the objects' own areas where they are known; else those of their boxes.
        """
        if image_id in self._pictures:
            raise ValueError(f"picture {image_id} is already counted")
        score = np.asarray(scores, np.float64).reshape(-1)
        label = np.asarray(classes).astype(np.int64).reshape(-1)
        boxes = np.asarray(boxes_xyxy_px, np.float64).reshape(-1, 4)
        truth = np.asarray(gt_boxes_xyxy, np.float64).reshape(-1, 4)
        truth_label = np.asarray(gt_classes).astype(np.int64).reshape(-1)
        crowd = np.zeros(len(truth), np.bool_) if gt_crowd is None else np.asarray(gt_crowd).astype(np.bool_)
        area = areas(truth) if gt_areas_px is None else np.asarray(gt_areas_px, np.float64)

        order = np.argsort(-score, kind="stable")
        if not self._yolov5:
            order = order[_ranks_within(label[order]) < MAX_DETECTIONS]
        score, label, boxes = score[order], label[order], boxes[order]
        any_class = box_iou(boxes, truth, crowd)
        iou = np.where(label[:, None] == truth_label[None], any_class, 0.0)
        found = np.zeros((len(score), len(self._ranges)), np.uint16)
        left_out = np.zeros_like(found)
        for k, name in enumerate(self._ranges):
            low, high = AREAS[name]
            ignored = crowd | (area < low) | (area > high)
            if self._yolov5:
                hit = match_as_yolov5(iou[:, ~ignored])
                out = np.zeros_like(hit)
            else:
                hit, out = match_as_coco(iou, ignored, crowd)
            own = areas(boxes)
            out |= ~hit & ((own < low) | (own > high))[:, None]
            found[:, k], left_out[:, k] = hit @ _BITS, out @ _BITS
            self._boxes[k] += np.bincount(truth_label[~ignored], minlength=len(self.names))
        self._pictures[image_id] = _Picture(score, label.astype(np.int32), found, left_out)
        self._with[np.unique(truth_label[~crowd])] += 1
        sure = score > CONFUSION_CONFIDENCE
        self._confuse(any_class[sure], label[sure], truth_label, crowd)

    def _confuse(self, iou: Floats, label: Ints, truth_label: Ints, crowd: Bools) -> None:
        """Count one picture's sure detections; what lies in a crowd is no false alarm."""
        there = truth_label[~crowd]
        pairs = pair_up(iou[:, ~crowd], CONFUSION_IOU)
        rows, columns = [row for row, _ in pairs], [column for _, column in pairs]
        alone = (iou[:, crowd] <= CONFUSION_IOU).all(1) & ~np.isin(np.arange(len(label)), rows)
        background = len(self.names)
        np.add.at(self._confusion, (label[rows], there[columns]), 1)
        self._confusion[:-1, background] += np.bincount(label[alone], minlength=background)
        self._confusion[background, :-1] += np.bincount(np.delete(there, columns), minlength=background)

    @property
    def pictures(self) -> int:
        """How many were added."""
        return len(self._pictures)

    def state(self) -> State:
        """All that was collected, picklable, for another rank's `merge`."""
        counts = {"boxes": self._boxes, "with": self._with, "confusion": self._confusion}
        return {**counts, "pictures": self._pictures}

    def merge(self, state: State) -> None:
        """Add another rank's pictures; one that is already here is an error, since it would count twice."""
        twice = self._pictures.keys() & state["pictures"].keys()
        if twice:
            raise ValueError(f"picture {min(twice)} is already counted")
        self._pictures.update(state["pictures"])
        self._boxes = self._boxes + state["boxes"]
        self._with = self._with + state["with"]
        self._confusion = self._confusion + state["confusion"]

    def compute(self) -> BoxScores:
        """The scores; classes without ground truth do not count, and with no ground truth at all they are 0."""
        curves = self.curves()
        present = np.flatnonzero(self._boxes[0])
        if not len(present):
            return BoxScores(0.0, 0.0, {}, pictures=len(self._pictures))
        ap = curves.ap
        at = int(np.searchsorted(CONFIDENCES, curves.confidence))
        at_peak: Floats = np.stack([curves.precision[:, at], curves.recall[:, at], curves.f1[:, at]], 1)
        per_class = {}
        for i, k in enumerate(present.tolist()):
            p, r, f1 = at_peak[i].tolist()
            counts = int(self._with[k]), int(self._boxes[0, k])
            per_class[self.names[k]] = ClassScores(float(ap[i, 0]), float(ap[i].mean()), p, r, f1, *counts)
        precision, recall, f1 = at_peak.mean(0).tolist()
        return BoxScores(
            float(ap[:, 0].mean()),
            float(ap.mean()),
            per_class,
            precision,
            recall,
            f1,
            curves.confidence,
            len(self._pictures),
            int(self._boxes[0].sum()),
            {name: self._mean_ap(name) for name in self._ranges[1:]} or None,
        )

    def curves(self) -> BoxCurves:
        """Precision, recall and F1 over recall and confidence, and the confusion matrix."""
        precision_at, precision, recall = [], [], []
        present = np.flatnonzero(self._boxes[0])
        rows = self._by_class("all")
        for score, found, counted, boxes in rows:
            hit, score = found[counted[:, 0], 0], score[counted[:, 0]]
            precision_at.append(precision_at_recalls(hit, boxes))
            over = over_confidence(score, hit, boxes)
            precision.append(over[0])
            recall.append(over[1])
        shape = (len(present), len(CONFIDENCES))
        p, r = np.reshape(precision, shape), np.reshape(recall, shape)
        f1 = f1_of(p, r)
        return BoxCurves(
            names=[self.names[k] for k in present],
            ap=self._ap(rows),
            precision_at=np.reshape(precision_at, (len(present), -1)) if len(present) else np.zeros((0, 101)),
            precision=p,
            recall=r,
            f1=f1,
            confidence=float(CONFIDENCES[peak(f1.mean(0))]) if len(present) else 0.0,
            confusion=self._confusion,
        )

    def _mean_ap(self, name: str) -> float:
        """Mean AP in one range of areas; nan if nothing there has such an area."""
        rows = self._by_class(name)
        return float(self._ap(rows).mean()) if rows else float("nan")

    def _ap(self, rows: list[_Rows]) -> Floats:
        """AP (classes, thresholds)."""
        ap = [
            average_precision_yolov5(found, boxes) if self._yolov5 else average_precision(found, counted, boxes)
            for _, found, counted, boxes in rows
        ]
        return np.reshape(ap, (len(ap), len(IOU_THRESHOLDS)))

    def _by_class(self, name: str) -> list[_Rows]:
        """For each class with ground truth in a range: by falling score, scores, found, counted; and its boxes."""
        k = self._ranges.index(name)
        pictures = [self._pictures[i] for i in sorted(self._pictures)]
        score = np.concatenate([np.zeros(0), *(p.scores for p in pictures)])
        label = np.concatenate([np.zeros(0, np.int32), *(p.classes for p in pictures)])
        found = np.concatenate([np.zeros(0, np.uint16), *(p.found[:, k] for p in pictures)])
        left_out = np.concatenate([np.zeros(0, np.uint16), *(p.left_out[:, k] for p in pictures)])
        # By class, then falling score, then picture.
        order = np.lexsort((-score, label))
        score, label = score[order], label[order]
        found, left_out = found[order], left_out[order]
        rows = []
        for c in np.flatnonzero(self._boxes[k]):
            part = slice(*np.searchsorted(label, [c, c + 1]))
            rows.append((score[part], _unpack(found[part]), ~_unpack(left_out[part]), int(self._boxes[k, c])))
        return rows
