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
    truth, found = [], []
    for k, (boxes, scores, classes, gt, gt_classes) in enumerate(pictures):
        for box, c in zip(gt, gt_classes, strict=True):
            x, y, w, h = *box[:2], *(box[2:] - box[:2])
            truth.append(
                {"id": len(truth) + 1, "image_id": k, "category_id": int(c), "bbox": [x, y, w, h],
                 "area": w * h, "iscrowd": 0}
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
    return evaluation.stats[1], evaluation.stats[0]


def score(pictures) -> BoxScores:
    metric = BoxMAP(NAMES)
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


def test_a_picture_counts_once():
    rng = np.random.default_rng(4)
    metric, other = BoxMAP(NAMES), BoxMAP(NAMES)
    metric.update(7, *random_picture(rng, 3, 5))
    other.update(7, *random_picture(rng, 3, 5))
    with pytest.raises(ValueError, match="picture 7"):
        metric.update(7, *random_picture(rng, 3, 5))
    with pytest.raises(ValueError, match="picture 7"):
        metric.merge(other.state())
