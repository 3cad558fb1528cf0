"""Datasets in YOLO format."""

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.unit.yolo_folder import make_yolo_set, write_image
from trainer.data.registry import open_dataset
from trainer.errors import TrainerError


def test_images_and_boxes_are_read(tmp_path):
    data = open_dataset(str(make_yolo_set(tmp_path)), "train", imgsz=64)
    assert len(data) == 4
    assert data.names == ["cat", "dog"]
    assert data.flips
    assert data.labels(0).shape == (0, 5)  # an image without label file is background
    np.testing.assert_allclose(data.labels(2), [[0, 0.3, 0.5, 0.2, 0.4], [1, 0.4, 0.5, 0.2, 0.4]], rtol=1e-6)
    assert data.labels(2).dtype == np.float32
    image = data.image(2)
    assert image.shape == (48, 80, 3)
    assert data.size(2) == (48, 80)
    np.testing.assert_array_equal(image[..., ::-1], cv2.imread(str(tmp_path / "images/train/002.jpg")))


@pytest.mark.parametrize(
    "names", ["{0: cat, 1: dog}", "[cat, dog]", "\n  0: cat\n  1: dog", "\n- cat\n- dog"], ids=repr
)
def test_names_as_list_or_numbered(tmp_path, names):
    path = make_yolo_set(tmp_path)
    path.write_text(f"train: images/train\nnames: {names}\ndownload: https://example.com/a.zip\n")
    assert open_dataset(str(path), "train", imgsz=64).names == ["cat", "dog"]


BOTH = "nc: 2\nnames: [cat, dog]\n"


@pytest.mark.parametrize(
    ("files", "data_yaml", "boxes"),
    [
        ({}, f"train: ../images/train\nval: ../images/val\n{BOTH}", [0, 1, 2, 0]),  # as exported
        (
            {"lists/train.txt": "../images/train/002.jpg\n\n./../images/train/001.jpg\n"},
            f"train: [lists/train.txt, images/val]\n{BOTH}",
            [2, 1, 0, 1],
        ),
        (
            {"some.txt": "images/train/001.jpg\n"},
            f"train: some.txt\n{BOTH}",
            [1],
        ),  # the other labels are no orphans
        (
            {"some.txt": "\ufeffimages/train/001.jpg\n", "labels/train/001.txt": "\ufeff1 0.5 0.5 0.1 0.1\n"},
            f"\ufefftrain: some.txt\n{BOTH}",
            [1],
        ),
        (
            {"labels/train/classes.txt": "cat\ndog\n", "images/train/Thumbs.db": "x"},  # of annotation tools
            f"train: images/train\n{BOTH}",
            [0, 1, 2, 0],
        ),
        ({}, "train: images/train\nnames: [no, 010]\n", [0, 1, 2, 0]),
    ],
    ids=["parent paths", "lists", "shared folder", "byte-order mark", "annotation tools", "names"],
)
def test_layouts_of_data_sets(tmp_path, files, data_yaml, boxes):
    path = make_yolo_set(tmp_path)
    (tmp_path / "lists").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    path.write_text(data_yaml, encoding="utf-8")
    data = open_dataset(str(path), "train", imgsz=64)
    assert [len(data.labels(k)) for k in range(len(data))] == boxes
    assert data.names == (["no", "010"] if "010" in data_yaml else ["cat", "dog"])


def test_path_may_be_relative_to_the_working_directory(tmp_path, monkeypatch):
    make_yolo_set(tmp_path / "sets" / "pets")
    (tmp_path / "yaml").mkdir()
    path = tmp_path / "yaml" / "pets.yaml"
    path.write_text("path: sets/pets\ntrain: images/train\nnames: [cat, dog]\n")
    monkeypatch.chdir(tmp_path)
    data = open_dataset("yaml/pets.yaml", "train", imgsz=64)
    monkeypatch.chdir("/")
    assert data.image(0).shape == (48, 64, 3)


def test_polygons_become_boxes_and_keep_their_corners(tmp_path):
    path = make_yolo_set(tmp_path)
    (tmp_path / "labels/train/001.txt").write_text(
        "1 0.2 0.3 0.6 0.4 0.4 0.9\n0 0.5 0.5 0.2 0.2\n1 0.1 0.1 0.2 0.1 0.2 0.2 0.1 0.2\n"
    )
    data = open_dataset(str(path), "train", imgsz=64)
    boxes = [[1, 0.4, 0.6, 0.4, 0.6], [0, 0.5, 0.5, 0.2, 0.2], [1, 0.15, 0.15, 0.1, 0.1]]
    np.testing.assert_allclose(data.labels(1), boxes, rtol=1e-6)
    triangle, box, square = data.segments(1)
    np.testing.assert_allclose(triangle, [[0.2, 0.3], [0.6, 0.4], [0.4, 0.9]], rtol=1e-6)
    assert box.shape == (0, 2)
    np.testing.assert_allclose(square, [[0.1, 0.1], [0.2, 0.1], [0.2, 0.2], [0.1, 0.2]], rtol=1e-6)
    assert triangle.dtype == box.dtype == np.float32
    assert data.segments(0) == []
    assert [len(segment) for segment in data.segments(2)] == [0, 0]


def test_a_box_beyond_the_edge_by_rounding_is_cut_to_the_image(tmp_path):
    path = make_yolo_set(tmp_path)
    (tmp_path / "labels/train/001.txt").write_text("0 0.9 0.5 0.2000020 1\n")
    box = open_dataset(str(path), "train", imgsz=64).labels(1)[0]
    assert box[1] + box[3] / 2 <= 1
    np.testing.assert_allclose(box, [0, 0.9, 0.5, 0.2, 1], atol=1e-5)


def test_labels_next_to_images_without_a_folder_images(tmp_path):
    write_image(tmp_path / "pets" / "a.png")
    (tmp_path / "pets" / "a.txt").write_text("0 0.5 0.5 0.5 0.5")
    (tmp_path / "data.yaml").write_text("train: pets\nnames: [cat]\n")
    assert len(open_dataset(str(tmp_path / "data.yaml"), "train", imgsz=64).labels(0)) == 1


def test_only_the_last_folder_called_images_is_replaced(tmp_path):
    path = make_yolo_set(tmp_path / "images" / "pets")
    assert len(open_dataset(str(path), "train", imgsz=64).labels(2)) == 2


def test_the_size_includes_the_exif_rotation(tmp_path):
    path = make_yolo_set(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.new("RGB", (80, 40), "red").save(tmp_path / "images/train/000.jpg", exif=exif)
    data = open_dataset(str(path), "train", imgsz=64)
    assert data.size(0) == (80, 40)
    assert data.image(0).shape == (80, 40, 3)
    assert data.image(0, min_side=40).shape == (40, 20, 3)


@pytest.mark.parametrize("turn", [1, 6])
def test_a_rotated_tiff_is_rotated_once(tmp_path, turn):
    path = make_yolo_set(tmp_path)
    (tmp_path / "images/train/000.jpg").unlink()
    Image.new("RGB", (80, 40), "red").save(tmp_path / "images/train/000.tif", tiffinfo={0x0112: turn})
    data = open_dataset(str(path), "train", imgsz=64)
    assert data.size(0) == data.image(0).shape[:2] == ((80, 40) if turn == 6 else (40, 80))


def test_min_side_reduces_the_decoded_size(tmp_path):
    path = make_yolo_set(tmp_path)
    write_image(tmp_path / "images/train/000.jpg", 480, 640)
    data = open_dataset(str(path), "train", imgsz=64)
    sides = {want: max(data.image(0, want).shape) for want in (0, 641, 640, 321, 320, 161, 160, 80, 10)}
    assert sides == {0: 640, 641: 640, 640: 640, 321: 640, 320: 320, 161: 320, 160: 160, 80: 80, 10: 80}
    whole = cv2.resize(data.image(0), (160, 120), interpolation=cv2.INTER_AREA).astype(int)
    assert np.abs(whole - data.image(0, 160)).mean() < 2


def test_file_names_may_have_any_letters(tmp_path):
    path = make_yolo_set(tmp_path)
    (tmp_path / "images/train/001.jpg").rename(tmp_path / "images/train/größe 1.jpg")
    (tmp_path / "labels/train/001.txt").rename(tmp_path / "labels/train/größe 1.txt")
    data = open_dataset(str(path), "train", imgsz=64)
    assert sorted(len(data.labels(k)) for k in range(4)) == [0, 0, 1, 2]
    assert all(data.image(k).shape[:2] == data.size(k) for k in range(4))


def test_single_cls_merges_all_classes(tmp_path):
    data = open_dataset(str(make_yolo_set(tmp_path)), "train", imgsz=64, single_cls=True)
    assert data.names == ["item"]
    np.testing.assert_allclose(data.labels(2), [[0, 0.3, 0.5, 0.2, 0.4], [0, 0.4, 0.5, 0.2, 0.4]], rtol=1e-6)
    assert data.labels(2).dtype == np.float32


@pytest.mark.parametrize("source", ["digits", "tests.unit.test_data:anything"])
def test_single_cls_needs_a_data_yaml(source):
    with pytest.raises(TrainerError, match="--single-cls: the classes of"):
        open_dataset(source, "train", imgsz=64, single_cls=True)
