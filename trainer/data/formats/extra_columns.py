"""Rows of a label file with numbers after the box: how they differ from outlines.

`class x1 y1 x2 y2 x3 y3 ...` is an outline, and `class cx cy w h ...` a box with key points, a confidence or a track
ID. Both may have the same number of columns, so a row alone does not show which it is. A whole dataset does.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.dataset import Floats, Ints

#: The smallest share of the rows of one length, if there are other lengths, and their smallest number. An outline has
#: any number of corners, so a few of them may have equally many by chance.
_SHARE = 0.2
_ROWS = 20
#: The share of such rows whose second point, read as an outline, must lie apart from the other points.
_APART = 0.5
#: Fewer rows show too little: an outline near the image's centre may look like a box with key points.
_FEW = 5
_TOLERANCE = 1e-3  # of an image's side: labels are rounded
_VISIBILITY = (0.0, 1.0, 2.0)  # of a key point in COCO's format: not labelled, hidden, visible


@dataclass(frozen=True)
class Extras:
    """The rows of one length that are, or may be, boxes with further numbers: `rows` are their indices."""

    rows: Ints
    columns: int  # of each row, with the class
    what: str  # the numbers
    hint: str
    is_certain: bool


def find(outlines: Sequence[Floats]) -> list[Extras]:
    """Return the rows among `outlines` that are boxes with further numbers, by their number of columns.

    Args:
        outlines: for each row the numbers after the class as points, (c, 2); (0, 2) for a row with a box alone.
    """
    lengths = np.array([len(outline) for outline in outlines], np.int64)
    long_rows = np.flatnonzero(lengths)
    by_length: dict[int, list[int]] = defaultdict(list)
    for row in long_rows.tolist():
        by_length[int(lengths[row])].append(row)
    found = []
    for length, rows in sorted(by_length.items()):
        are_all = len(rows) == len(long_rows)
        are_many = len(rows) >= max(_ROWS, _SHARE * len(long_rows))
        if not (are_all or are_many):
            continue
        values = np.stack([outlines[row] for row in rows]).reshape(len(rows), 2 * length)
        if evidence := _evidence(values):
            what, hint, is_certain = evidence
            found.append(Extras(np.array(rows), 1 + 2 * length, what, hint, is_certain))
    return found


def _evidence(values: Floats) -> tuple[str, str, bool] | None:
    """Return what the numbers after the boxes of rows (n, 2c) are, what to do, and whether it is certain; else None."""
    box = values[:, :4]
    rest = values[:, 4:]
    if not _are_boxes(box).all():
        return None
    count = rest.shape[1]
    has_many = len(rest) >= _FEW
    if count % 3 == 0 and np.isin(rest[:, 2::3], _VISIBILITY).all():
        what = f"{count // 3} key points with their visibility"
        return what, f"add `kpt_shape: [{count // 3}, 3]` to data.yaml", True
    points = rest.reshape(len(rest), -1, 2)
    apart = _is_apart(values).mean()
    if count > 2 and _are_inside(points, box).all() and apart >= _APART:
        return f"{count // 2} key points", f"add `kpt_shape: [{count // 2}, 2]` to data.yaml", has_many
    has_whole_column = (rest == np.floor(rest)).all(0).any()  # such as track IDs; coordinates are fractions
    if has_whole_column and (has_many or count == 2):
        return "a confidence, an ID or other numbers", _hint(count), True
    if has_many and apart >= _APART:
        return "further numbers", _hint(count), True
    return None


def _hint(count: int) -> str:
    return f"add `extra_columns: {count}` to data.yaml, and they are left out"


def _are_boxes(box: Floats) -> npt.NDArray[np.bool_]:
    """Return (n,) whether `cx cy w h` (n, 4) are boxes within the image."""
    low = box[:, :2] - box[:, 2:] / 2
    high = box[:, :2] + box[:, 2:] / 2
    has_area = (box[:, 2:] > 0).all(1)
    is_within = ((low >= -_TOLERANCE) & (high <= 1 + _TOLERANCE)).all(1)
    return np.asarray(has_area & is_within)


def _are_inside(points: Floats, box: Floats) -> npt.NDArray[np.bool_]:
    """Return (n,) whether all `points` (n, k, 2) lie within the boxes (n, 4). (0, 0) is a key point without a label."""
    low = (box[:, :2] - box[:, 2:] / 2)[:, None] - _TOLERANCE
    high = (box[:, :2] + box[:, 2:] / 2)[:, None] + _TOLERANCE
    is_inside = ((points >= low) & (points <= high)).all(2)
    has_label = (points != 0).any(2)
    return np.asarray((is_inside | ~has_label).all(1))


def _is_apart(values: Floats) -> npt.NDArray[np.bool_]:
    """Return (n,) whether the second point of each row (n, 2c) is far from the bounds of its other points.

    In an outline, it is next to the first and third corner. A box's width and height are no point, nor is (0, 0), a key
    point without a label.
    """
    points = values.reshape(len(values), -1, 2)
    has_label = (points != 0).any(2, keepdims=True)
    points = np.where(has_label, points, points[:, :1])
    others = np.delete(points, 1, axis=1)
    low = others.min(1)
    high = others.max(1)
    margin = (high - low) / 2
    second = points[:, 1]
    return np.asarray(((second < low - margin) | (second > high + margin)).any(1))
