"""Embedded digits: reproducible pages, tight boxes, separate scans for validation."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from trainer.data.formats.digits import Digits, _glyphs, scans
from trainer.data.registry import open_dataset


def corners(labels, side):
    """(x1, y1, x2, y2) in whole pixels."""
    half = labels[:, 3:] / 2
    return np.rint(np.concatenate([labels[:, 1:3] - half, labels[:, 1:3] + half], 1) * side).astype(int)


def test_the_scans_equal_scikit_learns():
    bunch = load_digits()
    in_val = np.arange(1797) % 5 == 4
    for split, rows in (("train", ~in_val), ("val", in_val)):
        levels, digits = scans(split)
        np.testing.assert_array_equal(levels, bunch.images[rows])
        np.testing.assert_array_equal(digits, bunch.target[rows])


def test_training_and_validation_share_no_scan():
    (train, _), (val, digits) = _glyphs("train"), _glyphs("val")
    assert (len(train), len(val)) == (1438, 359)
    assert not {glyph.tobytes() for glyph in train} & {glyph.tobytes() for glyph in val}
    assert set(digits.tolist()) == set(range(10))


def test_a_page_depends_on_split_index_and_size_alone():
    some = Digits("train", 160)
    other = Digits("train", 160)
    late = some.image(700)
    for index in (3, 700):
        np.testing.assert_array_equal(some.image(index), other.image(index))
        np.testing.assert_array_equal(some.labels(index), other.labels(index))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(some)).image(700), late)
    assert not np.array_equal(some.image(3), some.image(4))
    assert not np.array_equal(some.image(3), Digits("val", 160).image(3))


@pytest.mark.parametrize("side", [64, 160, 320])
def test_pages_hold_several_digits_inside_the_page(side):
    data = open_dataset("digits", "train", imgsz=side)
    assert data.names == list("0123456789")
    assert not data.flips
    assert (len(data), len(open_dataset("digits", "val", imgsz=side))) == (2000, 256)
    counts = []
    heights = []
    for index in range(60):
        assert data.image(index).shape == (side, side, 3)
        assert data.size(index) == (side, side)
        boxes = corners(data.labels(index), side)
        assert [len(segment) for segment in data.segments(index)] == [0] * len(boxes)
        assert boxes.min() >= 0
        assert boxes.max() <= side
        counts.append(len(boxes))
        heights.extend((boxes[:, 3] - boxes[:, 1]) / side)
    assert 3 <= np.mean(counts) <= 8
    assert min(heights) < 0.2
    assert max(heights) > 0.35


def test_boxes_are_tight_around_the_ink():
    """Ink stands out from the paper at all four edges of a box, and nowhere outside the boxes."""
    data = Digits("val", 160)
    for index in range(40):
        page = data._page(index).ink.astype(int)  # 0 paper to 255 ink
        boxes = corners(data.labels(index), 160)
        paper = np.ones_like(page, bool)
        for x1, y1, x2, y2 in boxes:
            paper[y1:y2, x1:x2] = False
            digit = page[y1:y2, x1:x2]
            ink = digit.max()
            middle = (digit.max() + np.median(page)) / 2
            assert ink > 150
            edges = (digit[:3], digit[-3:], digit[:, :3], digit[:, -3:])
            assert all(edge.max() > middle - 15 for edge in edges)
        assert page[paper].max() < 80


def test_boxes_hardly_overlap():
    data = Digits("train", 160)
    for index in range(40):
        boxes = corners(data.labels(index), 160)
        for k, (x1, y1, x2, y2) in enumerate(boxes):
            for u1, v1, u2, v2 in boxes[:k]:
                shared = max(0, min(x2, u2) - max(x1, u1)) * max(0, min(y2, v2) - max(y1, v1))
                assert shared <= 0.05 * min((x2 - x1) * (y2 - y1), (u2 - u1) * (v2 - v1))


def test_opening_does_not_import_sklearn():
    code = "import sys; from trainer.data.formats.digits import Digits; Digits('val', 64).image(0)"
    code += "; assert 'sklearn' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
