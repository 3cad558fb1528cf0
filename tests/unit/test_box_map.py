"""mAP on random images, compared with pycocotools; curves, confusion matrix and merging."""

import contextlib
import io
import pickle

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from trainer.metrics import BoxMAP, BoxScores

NAMES = ["a", "b", "c", "d"]


def random_image(rng, boxes, detections, classes=4, ties=False):
    xy = rng.uniform(0, 500, (boxes, 2))
    truth = np.concatenate([xy, xy + rng.uniform(4, 120, (boxes, 2))], 1)
    truth_class = rng.integers(classes, size=boxes)
    if boxes:
        source = rng.integers(boxes, size=detections)
        found = truth[source] + rng.normal(0, 1, (detections, 4)) * rng.uniform(0, 12, (detections, 1))
        found[:, 2:] = np.maximum(found[:, 2:], found[:, :2] + 1)
        found_class = np.where(
            rng.random(detections) < 0.8, truth_class[source], rng.integers(len(NAMES), size=detections)
        )
    else:
        xy = rng.uniform(0, 500, (detections, 2))
        found = np.concatenate([xy, xy + rng.uniform(4, 120, (detections, 2))], 1)
        found_class = rng.integers(len(NAMES), size=detections)
    score = rng.random(detections)
    if ties:
        score = np.round(score, 1)
    return found, score, found_class, truth, truth_class


def all_stats(images):
    """Return COCO's twelve figures; an image may have a mask of crowds."""
    truth = []
    found = []
    for k, (boxes, scores, classes, gt, gt_classes, *crowd) in enumerate(images):
        for box, c, iscrowd in zip(gt, gt_classes, crowd[0] if crowd else np.zeros(len(gt)), strict=True):
            x, y, w, h = *box[:2], *(box[2:] - box[:2])
            row = {
                "image_id": k,
                "category_id": int(c),
                "bbox": [x, y, w, h],
                "area": w * h,
                "iscrowd": int(iscrowd),
            }
            truth.append({"id": len(truth) + 1, **row})
        for box, s, c in zip(boxes, scores, classes, strict=True):
            found.append(
                {"image_id": k, "category_id": int(c), "score": s, "bbox": [*box[:2], *(box[2:] - box[:2])]}
            )
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {"info": {}, "images": [{"id": k} for k in range(len(images))], "annotations": truth}
        coco.dataset["categories"] = [{"id": k, "name": name} for k, name in enumerate(NAMES)]
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(found), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats


def score(images, **options) -> BoxScores:
    metric = BoxMAP(NAMES, **options)
    for k, image in enumerate(images):
        metric.update(k, *image)
    return metric.compute()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ties", [False, True])
def test_equals_pycocotools(seed, ties):
    rng = np.random.default_rng(seed)
    # Some detections are of class d, which no image has.
    images = [random_image(rng, *rng.integers(0, (12, 60)), classes=3, ties=ties) for _ in range(30)]
    images.append(random_image(rng, 0, 0))
    images.append(random_image(rng, 0, 25))  # only false alarms
    images.append(random_image(rng, 9, 0, classes=3))  # all missed
    ours = score(images)
    assert (ours.map, ours.map50) == pytest.approx(all_stats(images)[:2], abs=1e-6)
    assert 0.05 < ours.map < ours.map50 < 0.95
    assert set(ours.per_class) == {"a", "b", "c"}


def test_limit_of_100_detections_is_per_class():
    rng = np.random.default_rng(6)
    images = [random_image(rng, 9, 500, classes=3) for _ in range(4)]
    for _, scores, classes, _, _ in images:
        classes[:] = np.arange(500) % 3  # 166 and more of each
        scores[:] = 0.95 + scores / 20  # the best F1 includes all of them
    ours = score(images)
    assert (ours.map, ours.map50) == pytest.approx(all_stats(images)[:2], abs=1e-6)
    first = [tuple(part[np.argsort(-p[1])[:100]] for part in p[:3]) + p[3:] for p in images]
    assert ours.map50 > score(first).map50 > 0
    by_score = [tuple(part[np.argsort(-p[1])] for part in p[:3]) for p in images]
    kept = [np.concatenate([np.flatnonzero(p[2] == c)[:100] for c in range(3)]) for p in by_score]
    cut = [(*(part[rows] for part in p), *q[3:]) for p, rows, q in zip(by_score, kept, images, strict=True)]
    assert ours == score(cut)  # precision, recall and F1 as well


def crowded_images(seed, count=30):
    """Images in which large boxes are crowds, with many small detections inside; some have over 100 of a class."""
    rng = np.random.default_rng(seed)
    images = []
    for k in range(count):
        found, scores, classes, truth, truth_class = random_image(
            rng, 14, 400 if k % 7 == 0 else 50, ties=k % 2 == 0
        )
        crowd = rng.random(14) < 0.3
        truth[crowd, 2:] += 150
        inside = rng.integers(14, size=30)
        low = truth[inside, :2] + rng.uniform(0, 60, (30, 2))
        found = np.concatenate([found, np.concatenate([low, low + rng.uniform(5, 120, (30, 2))], 1)])
        scores = np.concatenate([scores, rng.random(30)])
        classes = np.concatenate([classes, truth_class[inside]])
        images.append((found, scores, classes, truth, truth_class, crowd))
    return images


@pytest.mark.parametrize("seed", range(3))
def test_crowds_and_ranges_of_areas_equal_pycocotools(seed):
    images = crowded_images(seed)
    assert max(np.bincount(p[2]).max() for p in images) > 100
    ours = score(images, by_area=True)
    stats = all_stats(images)
    assert (ours.map, ours.map50) == pytest.approx(stats[:2], abs=1e-6)
    assert list(ours.by_area) == ["small", "medium", "large"]
    assert list(ours.by_area.values()) == pytest.approx(list(stats[3:6]), abs=1e-6)
    assert len({*ours.by_area.values(), ours.map, 0.0}) == 5
    without = score([p[:5] for p in images])
    assert abs(without.map - ours.map) > 0.01  # crowds change the score
    assert ours.boxes == sum((~p[5]).sum() for p in images) < without.boxes


def test_empty_area_range_is_nan_and_crowds_alone_score_zero():
    box = np.array([[0.0, 0, 10, 10]])
    assert np.isnan(score([(box, [0.9], [0], box, [0])], by_area=True).by_area["large"])
    assert score([(box, [0.9], [0], box, [0], [True])]).per_class == {}


def yolov5_by_hand(images):
    """Return (map50, map) by the description of YOLOv5's validation, in plain loops."""
    thresholds = np.linspace(0.5, 0.95, 10)
    aps = []
    for c in range(len(NAMES)):
        boxes = sum(int((p[4] == c).sum()) for p in images)
        if not boxes:
            continue
        hits = []
        scores = []
        for found, score, classes, truth, truth_class in images:
            order = [k for k in np.argsort(-score, kind="stable") if classes[k] == c]
            targets = truth[truth_class == c]
            row = np.zeros((len(order), 10), bool)
            for t, threshold in enumerate(thresholds):
                pairs = []
                for d, k in enumerate(order):
                    for g, box in enumerate(targets):
                        side = np.clip(
                            np.minimum(found[k, 2:], box[2:]) - np.maximum(found[k, :2], box[:2]), 0, None
                        )
                        both = np.prod(found[k, 2:] - found[k, :2]) + np.prod(box[2:] - box[:2])
                        if (iou := side.prod() / (both - side.prod())) >= threshold:
                            pairs.append((iou, d, g))
                pairs.sort(reverse=True)
                of_detection = {}
                for _, d, g in pairs:
                    of_detection.setdefault(d, g)
                of_label = {}
                for d in sorted(of_detection):
                    of_label.setdefault(of_detection[d], d)
                row[list(of_label.values()), t] = True
            hits.extend(row)
            scores.extend(score[order])
        by_score = np.array(hits)[np.argsort(-np.array(scores), kind="stable")]
        ap = []
        for t in range(10):
            true = by_score[:, t].cumsum()
            recall = [0, *(true / boxes), 1]
            precision = [1, *(true / np.arange(1, len(true) + 1)), 0]
            envelope = [max(precision[k:]) for k in range(len(precision))]
            at = np.interp(np.linspace(0, 1, 101), recall, envelope)
            ap.append((at[0] / 2 + at[1:-1].sum() + at[-1] / 2) / 100)
        aps.append(ap)
    return np.mean(aps, 0)[0], np.mean(aps)


def test_yolov5_mode_follows_its_rules_and_differs_from_coco():
    rng = np.random.default_rng(11)
    images = [random_image(rng, 8, 60) for _ in range(12)]
    images.append(random_image(rng, 5, 280, classes=1))  # not cut at 100
    # Two boxes overlap. The second detection prefers the box of the first and matches no other.
    truth = np.array([[0.0, 0, 100, 100], [0, 30, 100, 130]])
    found = np.array([[0.0, 0, 100, 100], [0, 10, 100, 110]])
    images.append((found, np.array([0.99, 0.98]), np.zeros(2, int), truth, np.zeros(2, int)))
    assert score(images[-1:], yolov5=True).recall == pytest.approx(0.5)
    assert score(images[-1:]).recall == 1
    ours = score(images, yolov5=True)
    assert (ours.map50, ours.map) == pytest.approx(yolov5_by_hand(images), abs=1e-9)
    assert abs(ours.map - score(images).map) > 1e-4
    assert ours.map == pytest.approx(score(images).map, rel=0.5)


def test_precision_recall_and_f1_use_detections_above_the_confidence():
    rng = np.random.default_rng(12)
    images = [random_image(rng, 10, 40) for _ in range(40)]
    ours = score(images)
    assert 0 < ours.confidence < 1
    kept = [(p[0][p[1] >= ours.confidence], p[1][p[1] >= ours.confidence], p[2][p[1] >= ours.confidence], *p[3:])
            for p in images]  # fmt: skip
    for c, name in enumerate(NAMES):
        metric = BoxMAP([name])
        for k, (found, scores, classes, truth, truth_class) in enumerate(kept):
            mine = classes == c
            there = truth_class == c
            metric.update(k, found[mine], scores[mine], np.zeros(mine.sum()), truth[there], there[there] * 0)
        only = metric.curves()  # at confidence 0: of all that was kept
        assert ours.per_class[name].precision == pytest.approx(only.precision[0, 0])
        assert ours.per_class[name].recall == pytest.approx(only.recall[0, 0])
        assert ours.per_class[name].boxes == sum((p[4] == c).sum() for p in images)
        assert ours.per_class[name].images == sum((p[4] == c).any() for p in images)
    by_class = np.array([s[2:5] for s in ours.per_class.values()])
    assert (ours.precision, ours.recall, ours.f1) == pytest.approx(by_class.mean(0))
    p = by_class[:, 0]
    r = by_class[:, 1]
    assert by_class[:, 2] == pytest.approx(2 * p * r / (p + r))


def test_best_confidence_is_the_peak_of_mean_f1():
    """Detections at 0.6 are correct and those at 0.3 are not: the best confidence is in between."""
    boxes = np.array([[0.0, 0, 10, 10], [20, 0, 30, 10]])
    wrong = boxes + 100
    image = (np.concatenate([boxes, wrong]), [0.6, 0.6, 0.3, 0.3], [0, 0, 0, 0], boxes, [0, 0])
    ours = score([image])
    assert 0.3 < ours.confidence <= 0.6
    assert (ours.precision, ours.recall, ours.f1) == (1.0, 1.0, 1.0)
    metric = BoxMAP(NAMES)
    metric.update(0, *image)
    curves = metric.curves()
    at = lambda confidence: round(confidence * 1000)  # noqa: E731
    assert curves.names == ["a"]
    assert curves.precision[0, at(0.2)] == 0.5
    assert curves.recall[0, at(0.2)] == 1.0
    assert (curves.precision[0, at(0.7)], curves.recall[0, at(0.7)]) == (1.0, 0.0)
    assert curves.f1[0, at(0.2)] == pytest.approx(2 / 3)


def test_precision_is_at_iou_half_without_crowds():
    truth = np.array([[0.0, 0, 100, 100], [200, 0, 400, 200]])  # the second is a crowd
    found = np.array(
        [[250.0, 50, 300, 100], [0, 0, 100, 60], [0, 0, 100, 90]]
    )  # in the crowd; IoU 0.6 and 0.9
    metric = BoxMAP(NAMES)
    metric.update(0, found, [0.9, 0.8, 0.7], [0, 0, 0], truth, [0, 0], [False, True])
    curves = metric.curves()
    assert (curves.precision[0, 750], curves.recall[0, 750]) == (1, 1)
    assert (curves.precision[0, 0], curves.recall[0, 0]) == (
        0.5,
        1,
    )  # the third finds it only at thresholds above 0.6


def test_class_without_detections_has_zero_precision():
    box = np.array([[0.0, 0, 10, 10]])
    metric = BoxMAP(NAMES)
    metric.update(0, np.concatenate([box, box + 50]), [0.6, 0.5], [0, 1], np.repeat(box, 3, 0), [0, 1, 2])
    curves = metric.curves()
    assert curves.names == ["a", "b", "c"]
    assert curves.precision[:, 1000].tolist() == [1, 0, 0]  # highest score: correct, wrong, none
    assert {name: (s.precision, s.recall) for name, s in metric.compute().per_class.items()} == {
        "a": (1, 1), "b": (0, 0), "c": (0, 0)
    }  # fmt: skip


def test_mean_of_precision_over_recall_is_the_ap():
    rng = np.random.default_rng(13)
    metric = BoxMAP(NAMES)
    for k in range(20):
        metric.update(k, *random_image(rng, 8, 40))
    curves = metric.curves()
    assert curves.precision_at.shape == (4, 101)
    expected = [s.map50 for s in metric.compute().per_class.values()]
    assert curves.precision_at.mean(1) == pytest.approx(expected)
    assert (np.diff(curves.precision_at, axis=1) <= 0).all()


def test_confusion_matrix_counts_hits_confusions_misses_and_false_alarms():
    there = np.array([[0.0, 0, 10, 10], [20, 0, 30, 10], [40, 0, 50, 10], [60, 0, 160, 100]])
    found = np.array([
        [0.0, 0, 10, 10],  # class 0, correct
        [1.0, 0, 11, 10],  # class 0 again: the box is already matched
        [20.0, 0, 30, 10],  # class 1 where class 0 is
        [40.0, 0, 50, 10],  # below the confidence: box missed
        [300.0, 0, 310, 10],  # false positive
        [70.0, 10, 80, 20],  # in the crowd
    ])  # fmt: skip
    metric = BoxMAP(NAMES)
    metric.update(
        0, found, [0.9, 0.8, 0.9, 0.2, 0.9, 0.9], [0, 0, 1, 2, 3, 2], there, [0, 0, 2, 1], [0, 0, 0, 1]
    )
    expected = np.zeros((5, 5), int)  # predicted, true; the last is the background
    expected[0, 0] = expected[1, 0] = expected[4, 2] = expected[0, 4] = expected[3, 4] = 1
    assert metric.curves().confusion.tolist() == expected.tolist()


def test_perfect_detections_score_one_and_none_score_zero():
    rng = np.random.default_rng(2)
    truths = [random_image(rng, 7, 0)[3:] for _ in range(5)]
    perfect = [(boxes, np.ones(7), classes, boxes, classes) for boxes, classes in truths]
    assert score(perfect).map == pytest.approx(1.0)
    nothing = [(np.zeros((0, 4)), [], [], boxes, classes) for boxes, classes in truths]
    assert score(nothing).map == 0.0
    assert score([]) == BoxScores(0.0, 0.0, {})


def test_merge_of_ranks_in_any_order_equals_one_rank():
    rng = np.random.default_rng(3)
    images = [random_image(rng, 6, 40, ties=True) for _ in range(24)]
    whole = score(images)
    one = BoxMAP(NAMES)
    for k, image in enumerate(images):
        one.update(k, *image)
    parts = []
    for rank in range(4):  # the last rank has nothing
        metric = BoxMAP(NAMES)
        for k in range(rank, 24, 3) if rank < 3 else ():
            metric.update(k, *images[k])
        parts.append(pickle.loads(pickle.dumps(metric)))
    for order in ([0, 1, 2, 3], [3, 2, 0, 1]):
        merged = BoxMAP(NAMES)
        for rank in order:
            merged.merge(parts[rank])
        assert merged.compute() == whole
        for mine, other in zip(vars(one.curves()).values(), vars(merged.curves()).values(), strict=True):
            assert np.array_equal(mine, other)
