"""Labels of poses: their boxes are trained, their key points are not."""

from pathlib import Path

import numpy as np
import pytest

from tests.unit.test_absent_data import checked, trained
from tests.unit.yolo_folder import make_yolo_set
from trainer.config.faults import BadData
from trainer.data.formats.yolo import Yolo

BOX = "0 0.3 0.5 0.2 0.4"
ANSWER = "the key points of the labels are not used: a detector is trained on their boxes"


def pose_set(root: Path, shape: str, row: str) -> Path:
    path = make_yolo_set(root)
    path.write_text(f"{path.read_text()}kpt_shape: {shape}\nflip_idx: [1, 0]\n")
    (root / "labels/train/001.txt").write_text(f"{row}\n")
    return path


# Two points outside of the box, so that an outline around all numbers would be another box.
@pytest.mark.parametrize(
    ("shape", "points"), [("[2, 2]", "0.05 0.1 0.9 0.95"), ("[2, 3]", "0.05 0.1 2 0.9 0.95 1")]
)
def test_the_box_is_the_first_four_numbers(tmp_path: Path, shape: str, points: str) -> None:
    path = pose_set(tmp_path, shape, f"{BOX} {points}")
    data = Yolo(str(path), "train")
    np.testing.assert_allclose(data.labels(1), [[0, 0.3, 0.5, 0.2, 0.4]], rtol=1e-6)
    assert data.segments(1)[0].shape == (0, 2)
    assert len(data.labels(2)) == 2  # boxes without key points
    faults, warnings = checked(tmp_path)
    assert faults == []
    assert [text for text in warnings if "key points" in text] == [f"{path}:6: {ANSWER}"]
    assert trained(tmp_path) == (faults, warnings)


def test_without_kpt_shape_the_same_row_is_a_polygon(tmp_path: Path) -> None:
    path = make_yolo_set(tmp_path)
    (tmp_path / "labels/train/001.txt").write_text("0 0.2 0.3 0.4 0.3 0.4 0.7 0.2 0.7\n")
    assert Yolo(str(path), "train").segments(1)[0].shape == (4, 2)


def test_another_number_of_columns_is_a_fault(tmp_path: Path) -> None:
    pose_set(tmp_path, "[2, 3]", f"{BOX} 0.1 0.1 0.2 0.2")
    faults, warnings = checked(tmp_path)
    assert faults == [f"{tmp_path / 'labels/train/001.txt'}:1: 9 columns instead of 5 or 11"]
    assert trained(tmp_path) == (faults, warnings)


def test_kpt_shape_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = pose_set(tmp_path, "[2, 2]", f"{BOX} 0.05 0.1 0.9 0.95")
    assert Yolo(str(path), "train").labels(1)[0, 3] == pytest.approx(0.2)
    path.write_text(path.read_text().partition("kpt_shape")[0])
    assert Yolo(str(path), "train").labels(1)[0, 3] != pytest.approx(0.2)


@pytest.mark.parametrize("shape", ["17", "[17]", "[0, 3]", "[17, 4]", "[a, 3]", "{a: 3}"])
def test_an_invalid_kpt_shape_names_its_line(tmp_path: Path, shape: str) -> None:
    path = pose_set(tmp_path, shape, BOX)
    with pytest.raises(BadData, match=r"data.yaml:6: kpt_shape must be ") as caught:
        Yolo(str(path), "train")
    assert "kpt_shape: [17, 3]" in caught.value.hint


@pytest.mark.parametrize("key", ["kpt_sigmas", "colour"])
def test_no_key_is_advised_to_be_deleted(tmp_path: Path, key: str) -> None:
    path = make_yolo_set(tmp_path)
    path.write_text(f"{path.read_text()}{key}: 1\n")
    with pytest.raises(BadData, match=f"unknown key `{key}`") as caught:
        Yolo(str(path), "train")
    assert "delete" not in caught.value.hint
