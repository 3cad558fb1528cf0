"""Rows with more numbers than a box: outlines are trained, other numbers are refused until data.yaml declares them."""

from pathlib import Path

import numpy as np
import pytest

from tests.unit.test_absent_data import checked, trained
from tests.unit.yolo_folder import make_yolo_set
from trainer.config.faults import BadData
from trainer.data.formats import extra_columns
from trainer.data.formats.yolo import Yolo

RANDOM = np.random.default_rng(0)
BOX = "0 0.5 0.5 0.25 0.25"
#: The row, and how its numbers are called.
ROWS = {
    "a confidence and a track ID": (f"{BOX} 0.91 0", "a confidence, an ID or other numbers"),
    "a track ID and a confidence": (f"{BOX} 17 0.4", "a confidence, an ID or other numbers"),
    "2D key points": (f"{BOX} 0.4 0.4 0.6 0.4 0.6 0.6 0.45 0.62", "4 key points"),
    "2D key points, one without a label": (f"{BOX} 0.4 0.4 0 0 0.6 0.6 0.45 0.62", "4 key points"),
    "3D key points": (f"{BOX} 0.4 0.4 2 0.6 0.4 1 0 0 0 0.45 0.62 2", "4 key points with their visibility"),
}


def with_row(root: Path, row: str, more: str = "") -> Path:
    path = make_yolo_set(root)
    path.write_text(path.read_text() + more)
    (root / "labels/train/001.txt").write_text(f"{row}\n")
    return path


@pytest.mark.parametrize("name", ROWS)
def test_other_numbers_are_refused(tmp_path: Path, name: str) -> None:
    row, called = ROWS[name]
    with_row(tmp_path, "\n".join([row, *(moved(row, by) for by in (0.01, 0.02, 0.03, 0.04))]))
    faults, _ = found = checked(tmp_path)
    columns = len(row.split())
    file = tmp_path / "labels/train/001.txt"
    assert faults == [
        f"{file}:1: {columns} columns: a box with {called}, no outline (the first of 5): `{row}`"
    ]
    assert trained(tmp_path) == found


def moved(row: str, by: float) -> str:
    """Return a row whose box is somewhat wider."""
    words = row.split()
    return " ".join([*words[:3], f"{0.25 + by:.2f}", *words[4:]])


def test_a_few_rows_that_may_be_outlines_are_outlines_with_a_warning(tmp_path: Path) -> None:
    row, called = ROWS["2D key points"]
    path = with_row(tmp_path, row)
    faults, warnings = checked(tmp_path)
    assert faults == []
    assert (
        f"{tmp_path}/labels/train/001.txt:1: 13 columns: an outline, or a box with {called}?: `{row}`"
        in warnings
    )
    assert Yolo(str(path), "train").segments(1)[0].shape == (6, 2)
    path.write_text(f"{path.read_text()}extra_columns: 0\n")
    assert not any("key points" in text for text in checked(tmp_path)[1])


@pytest.mark.parametrize("name", ROWS)
def test_the_hint_helps(tmp_path: Path, name: str) -> None:
    row = ROWS[name][0]
    path = with_row(tmp_path, "\n".join([row, *(moved(row, by) for by in (0.01, 0.02, 0.03, 0.04))]))
    with pytest.raises(BadData) as caught:
        Yolo(str(path), "train")
    key = caught.value.hint.split("`")[1]
    path.write_text(f"{path.read_text()}{key}\n")
    data = Yolo(str(path), "train")
    np.testing.assert_allclose(data.labels(1)[0], [0, 0.5, 0.5, 0.25, 0.25], rtol=1e-6)
    assert data.segments(1)[0].shape == (0, 2)
    assert "if these rows are outlines: `extra_columns: 0`" in caught.value.hint
    path.write_text(path.read_text().replace(key, "extra_columns: 0"))
    outlines = Yolo(str(path), "train", allow_bad_labels=True).segments(1)
    assert "ID" in name or len(outlines[0]) == (len(ROWS[name][0].split()) - 1) / 2


def test_one_further_number_is_named(tmp_path: Path) -> None:
    path = with_row(tmp_path, f"{BOX} 0.91")
    with pytest.raises(BadData, match="6 columns instead of 5") as caught:
        Yolo(str(path), "train")
    assert "`extra_columns: 1`" in caught.value.hint
    path.write_text(f"{path.read_text()}extra_columns: 1\n")
    np.testing.assert_allclose(Yolo(str(path), "train").labels(1), [[0, 0.5, 0.5, 0.25, 0.25]], rtol=1e-6)


def test_the_number_of_rows_is_said(tmp_path: Path) -> None:
    rows = [f"0 0.{x} 0.5 0.2 0.25 0.9{x} {x}" for x in range(2, 8)]
    path = with_row(tmp_path, "\n".join(rows))
    with pytest.raises(BadData, match=r"no outline \(the first of 6\)"):
        Yolo(str(path), "train")


@pytest.mark.parametrize("value", ["-1", "2.5", "two", "[2]", "true"])
def test_an_invalid_number_names_its_line(tmp_path: Path, value: str) -> None:
    path = with_row(tmp_path, BOX, f"extra_columns: {value}\n")
    with pytest.raises(BadData, match=r"data.yaml:6: extra_columns must be "):
        Yolo(str(path), "train")


def test_two_declarations_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    path = with_row(tmp_path, BOX, "kpt_shape: [4, 2]\nextra_columns: 2\n")
    with pytest.raises(BadData, match="extra_columns is 2, but the key points of kpt_shape are 8 numbers"):
        Yolo(str(path), "train")


def polygons(count: int, corners: tuple[int, int], size: tuple[float, float]) -> list[np.ndarray]:
    """Return `count` star-shaped outlines with `corners` (from, to) corners, anywhere in the image."""
    made = []
    for _ in range(count):
        number = int(RANDOM.integers(corners[0], corners[1] + 1))
        radius = RANDOM.uniform(*size)
        angles = np.sort(RANDOM.uniform(0, 2 * np.pi, number)) + RANDOM.uniform(0, 2 * np.pi)
        radii = radius * RANDOM.uniform(0.5, 1, number)
        centre = RANDOM.uniform(radius, 1 - radius, 2)
        made.append(centre + np.column_stack([np.cos(angles), np.sin(angles)]) * radii[:, None])
    return made


def rotated_boxes(count: int) -> list[np.ndarray]:
    made = []
    for _ in range(count):
        angle = RANDOM.uniform(0, np.pi)
        half = RANDOM.uniform(0.02, 0.15, 2)
        corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * half
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        made.append(RANDOM.uniform(0.25, 0.75, 2) + corners @ turn.T)
    return made


@pytest.mark.parametrize("count", [1, 3, 300])
@pytest.mark.parametrize("size", [(0.01, 0.05), (0.05, 0.2), (0.2, 0.45)])
@pytest.mark.parametrize("corners", [(4, 4), (6, 6), (8, 8), (12, 12), (3, 9), (20, 60)])
def test_outlines_are_outlines(corners: tuple[int, int], size: tuple[float, float], count: int) -> None:
    for _ in range(20):
        assert not any(each.is_certain for each in extra_columns.find(polygons(count, corners, size)))
        assert not any(each.is_certain for each in extra_columns.find(rotated_boxes(count)))


@pytest.mark.parametrize("columns", [2, 4, 6, 8, 34])
def test_key_points_and_other_numbers_are_found_in_a_large_set(columns: int) -> None:
    boxes = []
    for _ in range(200):
        half = RANDOM.uniform(0.02, 0.3, 2)
        boxes.append(np.concatenate([RANDOM.uniform(half, 1 - half), 2 * half]))
    inside = [
        np.concatenate([b, (b[:2] + RANDOM.uniform(-0.5, 0.5, (columns // 2, 2)) * b[2:]).ravel()])
        for b in boxes
    ]
    anywhere = [np.concatenate([box, RANDOM.uniform(0, 1, columns)]) for box in boxes]
    ids = [np.concatenate([box, RANDOM.uniform(0, 1, columns - 1), [k]]) for k, box in enumerate(boxes)]
    for kind in (inside, ids, anywhere[:0] if columns > 2 else anywhere):
        rows = [row.reshape(-1, 2) for row in kind]
        mixed = [*rows, *[np.empty((0, 2))] * 50, *polygons(40, (20, 60), (0.05, 0.2))]
        assert [len(each.rows) for each in extra_columns.find(rows)] == [200] * bool(rows)
        assert [len(each.rows) for each in extra_columns.find(mixed)] == [200] * bool(rows)
