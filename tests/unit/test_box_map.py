"""mAP against pycocotools, the judge, on random pictures."""

import contextlib
import io
import pickle

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from trainer.metrics import BoxMAP, BoxScores

NAMES = ["a", "b", "c", "d"]


def random_picture(rng, boxes, detections, classes=4, ties=False):
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


def judge(pictures):
    """(map50, map) as pycocotools sees the same pictures."""
    stats = all_stats(pictures)
    return stats[1], stats[0]


def all_stats(pictures):
    """COCO's twelve figures; a picture may also say which boxes are crowds."""
    truth, found = [], []
    for k, (boxes, scores, classes, gt, gt_classes, *crowd) in enumerate(pictures):
        for box, c, iscrowd in zip(gt, gt_classes, crowd[0] if crowd else np.zeros(len(gt)), strict=True):
            x, y, w, h = *box[:2], *(box[2:] - box[:2])
            truth.append(
                {"id": len(truth) + 1, "image_id": k, "category_id": int(c), "bbox": [x, y, w, h],
                 "area": w * h, "iscrowd": int(iscrowd)}
            )  # fmt: skip
        for box, s, c in zip(boxes, scores, classes, strict=True):
            found.append({"image_id": k, "category_id": int(c), "score": s, "bbox": [*box[:2], *(box[2:] - box[:2])]})
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "info": {},
            "images": [{"id": k} for k in range(len(pictures))],
            "categories": [{"id": k, "name": name} for k, name in enumerate(NAMES)],
            "annotations": truth,
        }
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(found), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats


def score(pictures, **options) -> BoxScores:
    metric = BoxMAP(NAMES, **options)
    for k, picture in enumerate(pictures):
        metric.update(k, *picture)
    return metric.compute()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ties", [False, True])
def test_equals_pycocotools(seed, ties):
    rng = np.random.default_rng(seed)
    pictures = [random_picture(rng, *rng.integers(0, (12, 60)), ties=ties) for _ in range(30)]
    pictures.append(random_picture(rng, 0, 0))
    pictures.append(random_picture(rng, 0, 25))  # only false alarms
    pictures.append(random_picture(rng, 9, 0))  # all missed
    ours = score(pictures)
    assert (ours.map50, ours.map) == pytest.approx(judge(pictures), abs=1e-6)
    assert 0.05 < ours.map < ours.map50 < 0.95


def test_more_than_100_detections_per_class_are_cut_as_in_coco():
    rng = np.random.default_rng(5)
    pictures = [random_picture(rng, 6, 500, classes=1) for _ in range(4)]
    for found, scores, classes, _, _ in pictures:
        classes[:] = 0
        far = rng.random(len(found)) < 0.4
        found[far] += 5000
        scores[far] += 0.3  # so that the cut at 100 removes true ones
    ours = score(pictures)
    assert (ours.map50, ours.map) == pytest.approx(judge(pictures), abs=1e-6)
    kept = [tuple(part[np.argsort(-p[1])[:100]] for part in p[:3]) + p[3:] for p in pictures]
    assert ours == score(kept)
    assert ours.map50 > 0


def test_the_limit_of_100_is_each_classs_own():
    rng = np.random.default_rng(6)
    pictures = [random_picture(rng, 9, 500, classes=3) for _ in range(4)]
    for _, _, classes, _, _ in pictures:
        classes[:] = np.arange(500) % 3  # 166 and more of each
    ours = score(pictures)
    assert (ours.map50, ours.map) == pytest.approx(judge(pictures), abs=1e-6)
    first = [tuple(part[np.argsort(-p[1])[:100]] for part in p[:3]) + p[3:] for p in pictures]
    assert ours.map50 > score(first).map50 > 0


def crowded_pictures(seed, count=30):
    """Pictures in which large boxes are crowds, with many small detections inside; some have over 100 of a class."""
    rng = np.random.default_rng(seed)
    pictures = []
    for k in range(count):
        found, scores, classes, truth, truth_class = random_picture(rng, 14, 400 if k % 7 == 0 else 50, ties=k % 2 == 0)
        crowd = rng.random(14) < 0.3
        truth[crowd, 2:] += 150
        inside = rng.integers(14, size=30)
        low = truth[inside, :2] + rng.uniform(0, 60, (30, 2))
        found = np.concatenate([found, np.concatenate([low, low + rng.uniform(5, 120, (30, 2))], 1)])
        scores = np.concatenate([scores, rng.random(30)])
        classes = np.concatenate([classes, truth_class[inside]])
        pictures.append((found, scores, classes, truth, truth_class, crowd))
    return pictures


@pytest.mark.parametrize("seed", range(3))
def test_crowds_and_ranges_of_areas_equal_pycocotools(seed):
    pictures = crowded_pictures(seed)
    assert max(np.bincount(p[2]).max() for p in pictures) > 100
    ours = score(pictures, by_area=True)
    stats = all_stats(pictures)
    assert (ours.map50, ours.map) == pytest.approx((stats[1], stats[0]), abs=1e-6)
    assert list(ours.by_area) == ["small", "medium", "large"]
    assert list(ours.by_area.values()) == pytest.approx(list(stats[3:6]), abs=1e-6)
    assert len({*ours.by_area.values(), ours.map, 0.0}) == 5
    without = score([p[:5] for p in pictures])
    assert abs(without.map - ours.map) > 0.01  # so that the crowds are seen to matter
    assert ours.boxes == sum((~p[5]).sum() for p in pictures) < without.boxes


def test_an_area_that_no_box_has_is_nan_and_a_set_of_crowds_scores_nothing():
    box = np.array([[0.0, 0, 10, 10]])
    assert np.isnan(score([(box, [0.9], [0], box, [0])], by_area=True).by_area["large"])
    assert score([(box, [0.9], [0], box, [0], [True])]).per_class == {}


def yolov5_by_hand(pictures):
    """(map50, map) from the description of YOLOv5's own validation, one pair after the other."""
    thresholds = np.linspace(0.5, 0.95, 10)
    aps = []
    for c in range(len(NAMES)):
        boxes = sum(int((p[4] == c).sum()) for p in pictures)
        if not boxes:
            continue
        hits, scores = [], []
        for found, score, classes, truth, truth_class in pictures:
            order = [k for k in np.argsort(-score, kind="stable") if classes[k] == c]
            targets = truth[truth_class == c]
            row = np.zeros((len(order), 10), bool)
            for t, threshold in enumerate(thresholds):
                pairs = []
                for d, k in enumerate(order):
                    for g, box in enumerate(targets):
                        side = np.clip(np.minimum(found[k, 2:], box[2:]) - np.maximum(found[k, :2], box[:2]), 0, None)
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
            recall, precision = [0, *(true / boxes), 1], [1, *(true / np.arange(1, len(true) + 1)), 0]
            envelope = [max(precision[k:]) for k in range(len(precision))]
            at = np.interp(np.linspace(0, 1, 101), recall, envelope)
            ap.append((at[0] / 2 + at[1:-1].sum() + at[-1] / 2) / 100)
        aps.append(ap)
    return np.mean(aps, 0)[0], np.mean(aps)


def test_yolov5_mode_follows_its_rules_and_differs_from_coco():
    rng = np.random.default_rng(11)
    pictures = [random_picture(rng, 8, 60) for _ in range(12)]
    pictures.append(random_picture(rng, 5, 280, classes=1))  # not cut at 100
    # Two boxes overlap; the second detection prefers the one that the first has, and goes for no other.
    truth = np.array([[0.0, 0, 100, 100], [0, 30, 100, 130]])
    found = np.array([[0.0, 0, 100, 100], [0, 10, 100, 110]])
    pictures.append((found, np.array([0.99, 0.98]), np.zeros(2, int), truth, np.zeros(2, int)))
    assert score(pictures[-1:], yolov5=True).recall == pytest.approx(0.5)
    assert score(pictures[-1:]).recall == 1
    ours = score(pictures, yolov5=True)
    assert (ours.map50, ours.map) == pytest.approx(yolov5_by_hand(pictures), abs=1e-9)
    assert abs(ours.map - score(pictures).map) > 1e-4
    assert ours.map == pytest.approx(score(pictures).map, rel=0.5)


def test_precision_recall_and_f1_are_those_of_the_detections_above_the_confidence():
    rng = np.random.default_rng(12)
    pictures = [random_picture(rng, 10, 40) for _ in range(40)]
    ours = score(pictures)
    assert 0 < ours.confidence < 1
    kept = [(p[0][p[1] >= ours.confidence], p[1][p[1] >= ours.confidence], p[2][p[1] >= ours.confidence], *p[3:])
            for p in pictures]  # fmt: skip
    for c, name in enumerate(NAMES):
        metric = BoxMAP([name])
        for k, (found, scores, classes, truth, truth_class) in enumerate(kept):
            mine, there = classes == c, truth_class == c
            metric.update(k, found[mine], scores[mine], np.zeros(mine.sum()), truth[there], there[there] * 0)
        only = metric.curves()  # at confidence 0: of all that was kept
        assert ours.per_class[name].precision == pytest.approx(only.precision[0, 0])
        assert ours.per_class[name].recall == pytest.approx(only.recall[0, 0])
        assert ours.per_class[name].boxes == sum((p[4] == c).sum() for p in pictures)
        assert ours.per_class[name].pictures == sum((p[4] == c).any() for p in pictures)
    by_class = np.array([s[2:5] for s in ours.per_class.values()])
    assert (ours.precision, ours.recall, ours.f1) == pytest.approx(by_class.mean(0))
    p, r = by_class[:, 0], by_class[:, 1]
    assert by_class[:, 2] == pytest.approx(2 * p * r / (p + r))


def test_the_confidence_is_where_the_mean_f1_peaks():
    """Detections at 0.6 are right and those at 0.3 wrong: anything between the two is best."""
    boxes = np.array([[0.0, 0, 10, 10], [20, 0, 30, 10]])
    wrong = boxes + 100
    picture = (np.concatenate([boxes, wrong]), [0.6, 0.6, 0.3, 0.3], [0, 0, 0, 0], boxes, [0, 0])
    ours = score([picture])
    assert 0.3 < ours.confidence <= 0.6
    assert (ours.precision, ours.recall, ours.f1) == (1.0, 1.0, 1.0)
    metric = BoxMAP(NAMES)
    metric.update(0, *picture)
    curves = metric.curves()
    at = lambda confidence: round(confidence * 1000)  # noqa: E731
    assert curves.names == ["a"]
    assert curves.precision[0, at(0.2)] == 0.5
    assert curves.recall[0, at(0.2)] == 1.0
    assert (curves.precision[0, at(0.7)], curves.recall[0, at(0.7)]) == (1.0, 0.0)
    assert curves.f1[0, at(0.2)] == pytest.approx(2 / 3)


def test_a_class_that_is_never_found_has_no_precision():
    box = np.array([[0.0, 0, 10, 10]])
    metric = BoxMAP(NAMES)
    metric.update(0, np.concatenate([box, box + 50]), [0.6, 0.5], [0, 1], np.repeat(box, 3, 0), [0, 1, 2])
    curves = metric.curves()
    assert curves.names == ["a", "b", "c"]
    assert curves.precision[:, 1000].tolist() == [1, 0, 0]  # the surest: right, wrong, none
    assert {name: (s.precision, s.recall) for name, s in metric.compute().per_class.items()} == {
        "a": (1, 1), "b": (0, 0), "c": (0, 0)
    }  # fmt: skip


def test_the_curve_of_precision_over_recall_has_the_ap_as_its_mean():
    rng = np.random.default_rng(13)
    metric = BoxMAP(NAMES)
    for k in range(20):
        metric.update(k, *random_picture(rng, 8, 40))
    curves = metric.curves()
    assert curves.precision_at.shape == (4, 101)
    expected = [s.map50 for s in metric.compute().per_class.values()]
    assert curves.precision_at.mean(1) == pytest.approx(expected)
    assert (np.diff(curves.precision_at, axis=1) <= 0).all()


def test_confusion_matrix_counts_hits_confusions_misses_and_false_alarms():
    there = np.array([[0.0, 0, 10, 10], [20, 0, 30, 10], [40, 0, 50, 10], [60, 0, 160, 100]])
    found = np.array([
        [0.0, 0, 10, 10],  # class 0, right
        [1.0, 0, 11, 10],  # class 0 again: the box is taken
        [20.0, 0, 30, 10],  # class 1 where class 0 is
        [40.0, 0, 50, 10],  # not sure enough: box missed
        [300.0, 0, 310, 10],  # nothing there
        [70.0, 10, 80, 20],  # in the crowd
    ])  # fmt: skip
    metric = BoxMAP(NAMES)
    metric.update(0, found, [0.9, 0.8, 0.9, 0.2, 0.9, 0.9], [0, 0, 1, 2, 3, 2], there, [0, 0, 2, 1], [0, 0, 0, 1])
    expected = np.zeros((5, 5), int)  # found, there; the last is the background
    expected[0, 0] = expected[1, 0] = expected[4, 2] = expected[0, 4] = expected[3, 4] = 1
    assert metric.curves().confusion.tolist() == expected.tolist()


def test_equal_ious_and_overlapping_truth_are_matched_as_in_coco():
    rng = np.random.default_rng(6)
    pictures = []
    for _ in range(40):
        truth = np.repeat(rng.integers(0, 8, (3, 2)), 4, 0) * 1.0
        truth = np.concatenate([truth, truth + rng.integers(6, 12, (12, 2))], 1)
        found = truth[rng.integers(12, size=30)] + rng.integers(-1, 2, (30, 4))
        pictures.append((found, np.round(rng.random(30), 1), rng.integers(2, size=30), truth, rng.integers(2, size=12)))
    ours = score(pictures)
    assert (ours.map50, ours.map) == pytest.approx(judge(pictures), abs=1e-6)


def test_a_class_without_ground_truth_does_not_count():
    rng = np.random.default_rng(1)
    pictures = [random_picture(rng, 5, 20, classes=2) for _ in range(10)]
    assert any((p[2] == 3).any() for p in pictures)
    ours = score(pictures)
    assert set(ours.per_class) == {"a", "b"}
    assert (ours.map50, ours.map) == pytest.approx(judge(pictures), abs=1e-6)
    assert ours.map == pytest.approx(np.mean([v[1] for v in ours.per_class.values()]))


def test_perfect_detections_score_one_and_none_score_zero():
    rng = np.random.default_rng(2)
    truths = [random_picture(rng, 7, 0)[3:] for _ in range(5)]
    perfect = [(boxes, np.ones(7), classes, boxes, classes) for boxes, classes in truths]
    assert score(perfect).map == pytest.approx(1.0)
    nothing = [(np.zeros((0, 4)), [], [], boxes, classes) for boxes, classes in truths]
    assert score(nothing).map == 0.0
    assert score([]) == BoxScores(0.0, 0.0, {})


def test_merge_of_ranks_in_any_order_equals_one_rank():
    rng = np.random.default_rng(3)
    pictures = [random_picture(rng, 6, 40, ties=True) for _ in range(24)]
    whole = score(pictures)
    one = BoxMAP(NAMES)
    for k, picture in enumerate(pictures):
        one.update(k, *picture)
    states = []
    for rank in range(4):  # the last rank has nothing
        metric = BoxMAP(NAMES)
        for k in range(rank, 24, 3) if rank < 3 else ():
            metric.update(k, *pictures[k])
        states.append(pickle.loads(pickle.dumps(metric.state())))
    for order in ([0, 1, 2, 3], [3, 2, 0, 1]):
        merged = BoxMAP(NAMES)
        for rank in order:
            merged.merge(states[rank])
        assert merged.compute() == whole
        for mine, other in zip(vars(one.curves()).values(), vars(merged.curves()).values(), strict=True):
            assert np.array_equal(mine, other)


def test_a_picture_counts_once():
    rng = np.random.default_rng(4)
    metric, other = BoxMAP(NAMES), BoxMAP(NAMES)
    metric.update(7, *random_picture(rng, 3, 5))
    other.update(7, *random_picture(rng, 3, 5))
    with pytest.raises(ValueError, match="picture 7"):
        metric.update(7, *random_picture(rng, 3, 5))
    with pytest.raises(ValueError, match="picture 7"):
        metric.merge(other.state())
