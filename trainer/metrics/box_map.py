"""Mean average precision of boxes by COCO's rules (100 detections per image and class), or by YOLOv5's.

faster-coco-eval computes COCO's. It needs all images at once, so ranks exchange their detections and ground truth.
The result does not depend on the order of images or ranks. The library has neither YOLOv5's rules nor exact curves
over the confidence: its `extended_metrics` count a detection that matches at any IoU threshold from 0.5 up.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from faster_coco_eval import COCO, COCOeval_faster
from faster_coco_eval.core.mask import iou as coco_iou

from trainer.metrics.curves import (
    CONFIDENCES,
    IOU_THRESHOLDS,
    RECALLS,
    Bools,
    BoxCurves,
    Floats,
    Ints,
    area_under,
    f1_of,
    match_as_yolov5,
    over_confidence,
    peak,
    precision_as_yolov5,
)
from trainer.metrics.scores import Scores

MAX_DETECTIONS = 100  # per image and class
CONFUSION_IOU = 0.45
CONFUSION_CONFIDENCE = 0.25
AREAS = (
    "small",
    "medium",
    "large",
)  # up to 32² px, up to 96² px, above: the library's own ranges, in its order


class ClassScores(NamedTuple):
    """One class: AP at IoU 0.5 and over 0.50:0.05:0.95; precision, recall and F1 at IoU 0.5; its ground truth."""

    map50: float
    map: float
    precision: float
    recall: float
    f1: float
    images: int
    boxes: int


@dataclass(frozen=True)
class BoxScores(Scores):
    """Means over the classes with ground truth, and the scores of each.

    `precision`, `recall` and `f1` are at IoU 0.5 and at `confidence`, where the mean F1 is highest. `by_area` has the
    AP over all IoUs of small, medium and large boxes, where that was asked for; nan where there are none.
    """

    COLUMNS = ("precision", "recall", "map50", "map")
    MAIN = "map"
    TABLE = (
        ("images", "images", "images"),
        ("boxes", "boxes", "boxes"),
        ("P", "precision", "precision"),
        ("R", "recall", "recall"),
        ("F1", "f1", "f1"),
        ("mAP50", "map50", "map50"),
        ("mAP50-95", "map", "map"),
    )

    map50: float
    map: float
    per_class: dict[str, ClassScores]
    precision: float = 0.0
    recall: float = 0.0
    f1: float = 0.0
    confidence: float = 0.0
    images: int = 0
    boxes: int = 0
    by_area: dict[str, float] | None = None

    @property
    def fitness(self) -> float:
        """The score that selects the best checkpoint: 0.1 mAP50 + 0.9 mAP50-95, as in YOLOv5."""
        return 0.1 * self.map50 + 0.9 * self.map


class _Boxes(NamedTuple):
    """Detections by falling score, or ground truth. The columns are named as in COCO's annotations."""

    image: Ints  # (n,) the image's number
    box: Floats  # (n, 4) xywh px
    area: Floats  # (n,) px
    label: Ints  # (n,)
    score: Floats  # (n,) 1 for ground truth
    crowd: Bools  # (n,) a region of many objects; False for detections

    def where(self, rows: Ints | Bools) -> "_Boxes":
        """Pick rows by number or mask."""
        return _Boxes._make(column[rows] for column in self)


class _Matches(NamedTuple):
    """AP and precision of the classes with ground truth; each detection's match at IoU 0.5."""

    ap: Floats  # (classes, IOU_THRESHOLDS)
    precision_at: Floats  # (classes, RECALLS), at IoU 0.5
    hit: Bools  # (detections,) found an object
    counted: Bools  # (detections,) False in a crowd
    by_area: dict[str, float] | None = None


class BoxMAP:
    """Accumulator of detections and ground truth per image; `merge` adds another rank's."""

    def __init__(self, names: list[str], *, by_area: bool = False, yolov5: bool = False) -> None:
        """`by_area` adds COCO's three ranges of areas; `yolov5`, without these, matches and integrates as YOLOv5."""
        self.names = list(names)
        self._yolov5 = yolov5
        self._by_area = by_area
        self._confusion = np.zeros((len(names) + 1, len(names) + 1), np.int64)
        self._images: dict[int, tuple[_Boxes, _Boxes]] = {}  # detections and ground truth
        self._evaluated: tuple[BoxScores, BoxCurves] | None = None  # of all images so far

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
        """Add an image: detections (n, 4), (n,), (n,) and ground truth (m, 4), (m,), both in the same pixels.

        `gt_crowd` (m,) marks regions of many objects (COCO's iscrowd): what is found in them counts neither way.
        `gt_areas_px` (m,) are the objects' own areas where they are known, or else the areas of their boxes.
        """
        found = _boxes(image_id, boxes_xyxy_px, classes, scores)
        found = found.where(np.argsort(-found.score, kind="stable"))
        if not self._yolov5 and len(found.score) > MAX_DETECTIONS:
            first = [np.flatnonzero(found.label == c)[:MAX_DETECTIONS] for c in np.unique(found.label)]
            found = found.where(np.sort(np.concatenate(first)))
        truth = _boxes(image_id, gt_boxes_xyxy, gt_classes, crowd=gt_crowd, areas=gt_areas_px)
        self._images[image_id] = found, truth
        self._confuse(found.where(found.score > CONFUSION_CONFIDENCE), truth)
        self._evaluated = None

    def _confuse(self, found: _Boxes, truth: _Boxes) -> None:
        """Count one image's confident detections: pairs of highest IoU first; one in a crowd is no false alarm."""
        objects = truth.where(~truth.crowd)
        crowds = truth.where(truth.crowd)
        iou = _iou(found, objects)
        missed = np.ones(len(objects.label), np.bool_)
        alone = np.ones(len(found.label), np.bool_)
        rows, columns = np.nonzero(iou > CONFUSION_IOU)
        for k in np.argsort(-iou[rows, columns], kind="stable").tolist():
            row = rows[k]
            column = columns[k]
            if alone[row] and missed[column]:
                alone[row] = missed[column] = False
                self._confusion[found.label[row], objects.label[column]] += 1
        alone &= (_iou(found, crowds) <= CONFUSION_IOU).all(1)
        background = len(self.names)
        self._confusion[:-1, background] += np.bincount(found.label[alone], minlength=background)
        self._confusion[background, :-1] += np.bincount(objects.label[missed], minlength=background)

    @property
    def images(self) -> int:
        """Return the number of images."""
        return len(self._images)

    def merge(self, other: "BoxMAP") -> None:
        """Add another rank's images."""
        self._images.update(other._images)
        self._confusion = self._confusion + other._confusion
        self._evaluated = None

    def compute(self) -> BoxScores:
        """Return the scores over classes with ground truth; without any they are 0."""
        return self._evaluate()[0]

    def curves(self) -> BoxCurves:
        """Return precision, recall and F1 over recall and confidence, and the confusion matrix."""
        return self._evaluate()[1]

    def _evaluate(self) -> tuple[BoxScores, BoxCurves]:
        """Match all images, once."""
        if self._evaluated:
            return self._evaluated
        images = [self._images[k] for k in sorted(self._images)]
        found = _join(found for found, _ in images)
        truth = _join(truth for _, truth in images)
        objects = truth.where(~truth.crowd)
        boxes = np.bincount(objects.label, minlength=len(self.names))
        classes = np.flatnonzero(boxes)
        if self._yolov5:
            matches = _match_yolov5(images, found, boxes)
        else:
            matches = _match_coco(found, truth, classes, self._by_area)
        curves = self._curves(found, matches, boxes)
        label_and_image = np.unique(np.stack([objects.label, objects.image], 1), axis=0)
        with_class = np.bincount(label_and_image[:, 0], minlength=len(self.names))
        scores = BoxScores(0.0, 0.0, {}, images=len(images))
        if len(classes):
            scores = _scores(curves, with_class[classes], boxes[classes], len(images), matches.by_area)
        self._evaluated = scores, curves
        return self._evaluated

    def _curves(self, found: _Boxes, matches: _Matches, boxes: Ints) -> BoxCurves:
        """The curves of the classes that have `boxes` (nc,)."""
        names = [name for name, count in zip(self.names, boxes, strict=True) if count]
        precision, recall = np.zeros((2, len(names), len(CONFIDENCES)))
        for i, (count, rows) in enumerate(_by_class(found, boxes)):
            rows = rows[matches.counted[rows]]
            precision[i], recall[i] = over_confidence(found.score[rows], matches.hit[rows], count)
        f1 = f1_of(precision, recall)
        confidence = float(CONFIDENCES[peak(f1.mean(0))]) if names else 0.0
        return BoxCurves(
            names, matches.ap, matches.precision_at, precision, recall, f1, confidence, self._confusion
        )


def _scores(
    curves: BoxCurves, seen: Ints, boxes: Ints, images: int, by_area: dict[str, float] | None
) -> BoxScores:
    """The scores at the best confidence; (classes,) how many images and boxes each class has."""
    at = int(np.searchsorted(CONFIDENCES, curves.confidence))
    columns = (
        curves.ap[:, 0],
        curves.ap.mean(1),
        curves.precision[:, at],
        curves.recall[:, at],
        curves.f1[:, at],
    )
    rows = zip(*(column.tolist() for column in (*columns, seen, boxes)), strict=True)
    map50, mean, precision, recall, f1 = (float(column.mean()) for column in columns)
    return BoxScores(
        map50=map50,
        map=mean,
        per_class={name: ClassScores(*row) for name, row in zip(curves.names, rows, strict=True)},
        precision=precision,
        recall=recall,
        f1=f1,
        confidence=curves.confidence,
        images=images,
        boxes=int(boxes.sum()),
        by_area=by_area,
    )


def _boxes(
    image_id: int,
    xyxy: npt.ArrayLike,
    labels: npt.ArrayLike,
    scores: npt.ArrayLike | None = None,
    crowd: npt.ArrayLike | None = None,
    areas: npt.ArrayLike | None = None,
) -> _Boxes:
    """One image's boxes, from corners."""
    box = np.asarray(xyxy).astype(np.float64).reshape(-1, 4)  # np.array of a tensor is deprecated
    box[:, 2:] -= box[:, :2]
    return _Boxes(
        np.full(len(box), image_id),
        box,
        box[:, 2:].prod(1) if areas is None else np.asarray(areas, np.float64),
        np.asarray(labels).astype(np.int64).reshape(-1),
        np.ones(len(box)) if scores is None else np.asarray(scores, np.float64).reshape(-1),
        np.zeros(len(box), np.bool_) if crowd is None else np.asarray(crowd).astype(np.bool_),
    )


def _join(parts: Iterable[_Boxes]) -> _Boxes:
    """The boxes of several images, in that order."""
    return _Boxes._make(map(np.concatenate, zip(_boxes(0, (), ()), *parts, strict=True)))


def _by_class(found: _Boxes, boxes: Ints) -> Iterator[tuple[int, Ints]]:
    """For each class with `boxes` (nc,) their number, and the rows of its detections by falling score, then image."""
    order = np.lexsort((-found.score, found.label))
    label = found.label[order]
    for k in np.flatnonzero(boxes):
        yield int(boxes[k]), order[slice(*np.searchsorted(label, [k, k + 1]))]


def _iou(a: _Boxes, b: _Boxes) -> Floats:
    """IoU (n, m); for a crowd b the share of a that is in it."""
    return np.reshape(coco_iou(a.box, b.box, b.crowd.tolist()), (len(a.box), len(b.box)))


def _match_coco(found: _Boxes, truth: _Boxes, classes: Ints, by_area: bool) -> _Matches:
    """Match by COCO's rules; the AP of a range of areas is nan where nothing has such an area."""
    images = np.union1d(found.image, truth.image).tolist()
    coco_found = _coco(found, images, classes)
    coco_truth = _coco(truth, images, classes)

    def evaluate(thresholds: Floats, areas: int) -> Any:
        evaluation = COCOeval_faster(coco_truth, coco_found, "bbox")
        parameters = evaluation.params
        parameters.iouThrs = thresholds
        parameters.maxDets = [MAX_DETECTIONS]
        parameters.areaRng = parameters.areaRng[:areas]
        parameters.areaRngLbl = parameters.areaRngLbl[:areas]
        evaluation.evaluate()
        evaluation.accumulate()
        return evaluation.eval

    # (IOU_THRESHOLDS, RECALLS, classes, areas: all and AREAS); -1 where a class has no ground truth of that area
    precision = evaluate(IOU_THRESHOLDS, 1 + len(AREAS) * by_area)["precision"][..., 0]
    # The library names the matches of all thresholds together: those at IoU 0.5 need an evaluation of their own.
    pairs = [key.split("_") for key in evaluate(IOU_THRESHOLDS[:1], 1)["matched"]]
    rows, columns = np.array(pairs, np.int64).reshape(-1, 2).T - 1
    hit = np.zeros(len(found.score), np.bool_)
    counted = np.ones(len(found.score), np.bool_)
    hit[rows] = ~truth.crowd[columns]
    counted[rows] = hit[rows]
    sizes = {}
    for name, values in zip(AREAS, np.moveaxis(precision, 3, 0)[1:], strict=by_area):
        sizes[name] = float(values[values >= 0].mean()) if (values >= 0).any() else float("nan")
    return _Matches(precision[..., 0].mean(1).T, precision[0, ..., 0].T, hit, counted, sizes or None)


def _coco(boxes: _Boxes, images: list[int], classes: Ints) -> COCO:
    """Convert boxes to COCO's annotations, numbered from 1."""
    keys = ("id", "image_id", "bbox", "area", "category_id", "score", "iscrowd")
    rows = zip(range(1, len(boxes.score) + 1), *(column.tolist() for column in boxes), strict=True)
    content = {"images": [{"id": k} for k in images], "categories": [{"id": k} for k in classes.tolist()]}
    return COCO({**content, "annotations": [dict(zip(keys, row, strict=True)) for row in rows]})


def _match_yolov5(images: Iterable[tuple[_Boxes, _Boxes]], found: _Boxes, boxes: Ints) -> _Matches:
    """Match by YOLOv5's rules, image by image; crowds do not count."""
    hits = [np.zeros((0, len(IOU_THRESHOLDS)), np.bool_)]
    for own, truth in images:
        objects = truth.where(~truth.crowd)
        hits.append(match_as_yolov5(np.where(own.label[:, None] == objects.label, _iou(own, objects), 0.0)))
    hit = np.concatenate(hits)
    curves = [precision_as_yolov5(hit[rows], count) for count, rows in _by_class(found, boxes)]
    precision = np.reshape(curves, (-1, len(IOU_THRESHOLDS), len(RECALLS)))
    return _Matches(area_under(precision), precision[:, 0], hit[:, 0], np.ones(len(hit), np.bool_))
