"""Faults of datasets: errors name the file, the line and the next step before training."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from tests.unit.yolo_folder import DATA_YAML, make_yolo_set, write_image
from trainer.config.faults import BadData
from trainer.data.formats.yolo import Yolo
from trainer.data.registry import open_dataset, open_datasets
from trainer.errors import TrainerError


def error_of(path: Path) -> TrainerError:
    with pytest.raises(TrainerError) as caught:
        open_dataset(str(path), "train", imgsz=64)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("2 0.5 0.5 0.1 0.1", "class out of range 0 to 1"),
        ("-1 0.5 0.5 0.1 0.1", "class out of range 0 to 1"),
        ("0.5 0.5 0.5 0.1 0.1", "class is not a whole number"),
        ("0 0.5 x 0.1 0.1", "not a number"),
        ("0 0.5 nan 0.1 0.1", "not a finite number"),
        ("cat 0.5 0.5 0.1 0.1", "not a number"),
        ("0 0.5 0.5 0.1", "4 columns instead of 5"),
        ("0 0.5 0.5 0.1 0.1 0.9", "6 columns instead of 5"),
        ("0 1.5 0.5 0.2 0.2", "box outside the image"),
        ("0 -0.1 0.5 0.1 0.2", "box outside the image"),
        ("0 1.1 0.5 0.2 0.2", "box outside the image"),  # its edge is the image's
        ("0 1.0005 0.5 0.0005 0.2", "box outside the image"),  # by less than a pixel
        ("0 1.1 0.2 1.3 0.2 1.3 0.4", "box outside the image"),
        ("0 320 240 100 80", "pixels instead of fractions"),
        ("0 0.5 0.5 0 0.1", "box without area"),
        ("0 0.5 0.5 0.1 -0.1", "box without area"),
        ("0 0.5 0.5 0.1 0.1 0.2 0.3 3.0 0.4", "box outside the image|pixels"),
    ],
)
def test_a_bad_label_names_file_line_and_text(tmp_path, line, what):
    path = make_yolo_set(tmp_path)
    label = tmp_path / "labels/train/001.txt"
    label.write_text(f"0 0.5 0.5 0.1 0.1\n\n{line}\n0 0.5 0.5 0.2 0.2\n")
    error = error_of(path)
    assert error.message.startswith(f"{label}:3: ")
    assert re.search(what, error.message)
    assert "class cx cy w h" in error.hint


def break_labels(root: Path) -> list[str]:
    """Write six faults into a set's train labels and images; how each is reported."""
    one = root / "labels/train/001.txt"
    two = root / "labels/train/002.txt"
    one.write_text("0 0.5 0.5 0.1 0.1\nx 0.5 0.5 0.1 0.1\n5 0.5 0.5 0.1 0.1\n")
    two.write_text("6 0.5 0.5 0.1\n\n1 0.3 0.5 0.2 0.4\n1 1.2 0.5 0.2 0.4\n0 0.5 0.5 0.5 0.5\n")
    (root / "images/train/003.jpg").write_bytes(b"")
    (root / "labels/train/lost.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    return [
        f"{root / 'labels/train/lost.txt'}: label without image in {root / 'images/train'}",
        f"{one}:2: not a number in `x 0.5 0.5 0.1 0.1`",
        f"{one}:3: class out of range 0 to 1: `5 0.5 0.5 0.1 0.1`",
        f"{two}:1: 4 columns instead of 5",
        f"{two}:4: box outside the image: `1 1.2 0.5 0.2 0.4`",
        f"{root / 'images/train/003.jpg'}: not a readable image: empty file",
    ]


def test_several_faults_are_counted_and_the_first_are_named(tmp_path):
    path = make_yolo_set(tmp_path)
    faults = break_labels(tmp_path)
    error = error_of(path)
    assert error.message == f"6 faults: {'; '.join(faults[:3])}; and 3 more"
    assert f"trainer data check --data {path}" in error.hint
    assert "--allow-bad-labels" in error.hint
    sent = pickle.loads(pickle.dumps(error))
    assert (str(sent), sent.message, sent.hint) == (str(error), error.message, error.hint)


def test_bad_labels_can_be_left_out_and_are_listed(tmp_path):
    path = make_yolo_set(tmp_path)
    faults = break_labels(tmp_path)
    data = Yolo(str(path), "train", allow_bad_labels=True)
    assert [str(fault) for fault in data.faults if not fault.warning] == faults
    assert [Path(data.name(k)).name for k in range(len(data))] == ["000.jpg", "001.jpg", "002.jpg"]
    assert [data.labels(k)[:, 0].tolist() for k in range(3)] == [[], [0], [1, 0]]
    assert [len(data.segments(k)) for k in range(3)] == [0, 1, 2]


def test_a_dataset_without_valid_boxes_is_refused(tmp_path):
    path = make_yolo_set(tmp_path)
    for label in (tmp_path / "labels/train").iterdir():
        label.write_text("9 0.5 0.5 0.1 0.1\n")
    with pytest.raises(TrainerError, match="none of the 4 train images has a labelled box"):
        Yolo(str(path), "train", allow_bad_labels=True)


def test_the_same_box_twice_is_left_out_with_a_warning(tmp_path):
    path = make_yolo_set(tmp_path)
    label = tmp_path / "labels/train/001.txt"
    label.write_text("0 0.5 0.5 0.1 0.1\n1 0.5 0.5 0.1 0.1\n0 0.5 0.5 0.1 0.1\n")
    data = Yolo(str(path), "train")
    assert data.labels(1)[:, 0].tolist() == [0, 1]
    assert f"{label}:3: the same box twice: `0 0.5 0.5 0.1 0.1`" in [str(f) for f in data.faults if f.warning]


@pytest.mark.parametrize("allow", [False, True])
def test_boxes_partly_outside_are_clipped_with_one_warning_that_counts(tmp_path, allow):
    path = make_yolo_set(tmp_path)
    first = tmp_path / "labels/train/001.txt"
    second = tmp_path / "labels/train/002.txt"
    first.write_text("0 0.5 0.5 0.1 0.1\n0 0.95 0.5 0.3 0.2\n1 0.5 0.02 0.2 0.2\n")
    second.write_text("1 1.05 0.5 0.3 1.8\n0 -0.1 0.1 0.4 0.1 0.2 0.3\n0 0.5 0.5 0.2 1.01\n")
    data = Yolo(str(path), "train", allow_bad_labels=allow)
    expected = [[0, 0.5, 0.5, 0.1, 0.1], [0, 0.9, 0.5, 0.2, 0.2], [1, 0.5, 0.06, 0.2, 0.12]]
    np.testing.assert_allclose(data.labels(1), expected, rtol=1e-5)
    expected = [[1, 0.95, 0.5, 0.1, 1], [0, 0.2, 0.2, 0.4, 0.2], [0, 0.5, 0.5, 0.2, 1]]
    np.testing.assert_allclose(data.labels(2), expected, rtol=1e-5)
    assert data.segments(2)[1].min() == 0
    outside = [str(fault) for fault in data.faults if "outside" in fault.what]
    assert outside == [
        f"{first}:2: box partly outside the image, clipped to it (the first of 4): `0 0.95 0.5 0.3 0.2`"
    ]


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        (
            {"labels/train/002.txt": b"\xff\xd8\xff\x00"},
            "labels/train/002.txt: cannot be read",
            "class cx cy w h",
        ),
        ({"images/train/003.jpg": b""}, "images/train/003.jpg: not a readable image", "replace"),
        ({"images/train/003.jpg": b"not an image"}, "images/train/003.jpg: not a readable image", "replace"),
        (
            {"images/train/003.jpg": b"\x89PNG\r\n\x1a\n"},
            "images/train/003.jpg: not a readable image",
            "replace",
        ),
        (
            {"images/train/001.jpg": None, "images/train/001.heic": b""},
            "labels/train/001.txt: label without image",
            ".jpg",
        ),
        (
            {"images/train/001.png": b""},
            "images/train/001.png: shares its label file .*001.txt with .*001.jpg",
            "rename",
        ),
        (
            {"labels/train/001.txt": None, "labels/train/002.txt": None},
            "none of the 4 train images has a labelled box",
            "labels/train",
        ),
    ],
)
def test_a_bad_file_is_named(tmp_path, files, message, hint):
    path = make_yolo_set(tmp_path)
    for name, content in files.items():
        if content is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(content)
    error = error_of(path)
    assert re.search(message, error.message)
    assert hint in error.hint


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ("nc: 2", "trian: x", "data.yaml:4: unknown key `trian`", "`train`"),
        ("nc: 2", "colour: x", "data.yaml:4: unknown key `colour`", "known keys"),
        ("nc: 2", "nc: 3", "data.yaml:4: nc is 3, but `names` has 2 names", "correct"),
        ("nc: 2", "train: y", "data.yaml:4: `train` is already set in line 2", "delete"),
        ("[cat, dog]", "[cat, dog", "data.yaml:6: not valid YAML", "correct"),
        ("[cat, dog]", "[cat, cat]", "data.yaml:5: class name `cat` is given twice", "unique name"),
        ("[cat, dog]", "{0: cat, 2: dog}", "data.yaml:5: the classes of `names` must be numbered", "0 to 1"),
        ("[cat, dog]", "2", "data.yaml:5: `names` must list the class names", "names: "),
        ("[cat, dog]", "{0: cat, 1: }", "data.yaml:5: a class of `names` has no name", "unique name"),
        ("path: .", "path: 2024-13-45", "data.yaml: cannot be read as YAML", "YAML file"),
        ("names: [cat, dog]", "", "data.yaml:1: `names` must list the class names", "names: "),
        ("train: images/train", "test: x", "data.yaml:1: no `train` images are named", "train: images/train"),
        ("images/train", "{a: 1}", "data.yaml:2: `train` must be a path or a list of paths", "indentation"),
        ("images/train", "images/tarin", "data.yaml:2: the train images are missing: .*images/tarin", "path"),
        ("path: .", "path: nowhere", "data.yaml:1: no such folder: .*nowhere", "path"),
        ("path: .", "path: !!python/object:os.x {}", "data.yaml:1: not valid YAML", "correct"),
        ("images/train", "data.yaml", "data.yaml: neither a folder nor a .txt list", "data.yaml"),
        ("images/train", "more", "data.yaml:2: no images in .*more$", ".jpg"),
        ("images/train", "[images/train, more]", "data.yaml:2: no images in .*more$", ".jpg"),
        ("images/train", "[images/val, images/val]", "^2 faults: (.*is listed twice){2}", ""),
        (
            "images/train",
            "some.txt",
            "^2 faults: .*some.txt:2: .*is listed twice; .*some.txt:3: no such image",
            "",
        ),
        (DATA_YAML, "", "not a mapping", ""),
        (DATA_YAML, "- a\n- b\n", "not a mapping", ""),
        (DATA_YAML, "just words", "not a mapping", ""),
    ],
)
def test_a_bad_data_yaml_names_the_line(tmp_path, old, new, message, hint):
    path = make_yolo_set(tmp_path)
    (tmp_path / "more").mkdir()
    (tmp_path / "some.txt").write_text(
        "images/train/001.jpg\n./images/train/001.jpg\nimages/train/nope.jpg\n"
    )
    path.write_text(DATA_YAML.replace(old, new, 1))
    error = error_of(path)
    assert re.search(message, error.message)
    assert hint in error.hint


def test_no_data_yaml(tmp_path):
    error = error_of(tmp_path / "no.yaml")
    assert "no.yaml: no such dataset" in error.message
    assert "digits" in error.hint


def test_all_faults_of_a_data_yaml_are_named(tmp_path):
    path = make_yolo_set(tmp_path)
    path.write_text("path: .\ntrian: x\ntrain: [images/train, gone]\nnc: 3\nnames: [cat, cat]\n")
    with pytest.raises(BadData) as caught:
        Yolo(str(path), "train")
    assert [fault.line for fault in caught.value.faults] == [2, 5, 4, 3]


@pytest.mark.parametrize(
    "script",
    ["open('MARKER', 'w')", "bash make MARKER", "|\n  from pathlib import Path\n  Path('MARKER').touch()"],
)
def test_a_download_that_is_a_script_is_never_run(tmp_path, script):
    path = make_yolo_set(tmp_path)
    marker = tmp_path / "ran"
    path.write_text(
        DATA_YAML.replace("images/train", "gone") + f"download: {script.replace('MARKER', str(marker))}\n"
    )
    error = error_of(path)
    assert (
        "data.yaml:6: `download` is neither an http address nor a file; scripts are never run"
        in error.message
    )
    assert ".zip" in error.hint
    assert not marker.exists()


def test_a_link_to_an_ancestor_is_not_followed(tmp_path):
    path = make_yolo_set(tmp_path)
    (tmp_path / "images/train/again").symlink_to(tmp_path / "images/train")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "images/train/000.jpg").rename(tmp_path / "elsewhere/004.jpg")
    (tmp_path / "images/train/more").symlink_to(tmp_path / "elsewhere")
    data = Yolo(str(path), "train")
    assert [Path(data.name(k)).name for k in range(len(data))] == ["001.jpg", "002.jpg", "003.jpg", "004.jpg"]


def test_numbered_class_names_are_read_as_strings(tmp_path):
    path = make_yolo_set(tmp_path)
    path.write_text(DATA_YAML.replace("[cat, dog]", "{0: no, 1: 010}"))
    assert Yolo(str(path), "train").names == ["no", "010"]


@pytest.mark.parametrize(("suffix", "share"), [(".jpg", 0.5), (".jpg", 0.95), (".png", 0.5), (".png", 0.95)])
def test_a_truncated_image_is_a_fault(tmp_path, suffix, share):
    path = make_yolo_set(tmp_path)
    (tmp_path / "images/train/003.jpg").unlink()
    image = tmp_path / f"images/train/003{suffix}"
    write_image(image, 300, 400)
    whole = image.read_bytes()
    image.write_bytes(whole[: int(share * len(whole))])
    assert error_of(path).message.startswith(f"{image}: not a readable image: ")


def test_bytes_after_the_end_of_an_image_are_no_fault(tmp_path):
    path = make_yolo_set(tmp_path)
    with (tmp_path / "images/train/003.jpg").open("ab") as file:
        file.write(b"appended by a camera")
    assert len(open_dataset(str(path), "train", imgsz=64)) == 4


def test_an_image_deleted_after_opening_is_an_error(tmp_path):
    data = open_dataset(str(make_yolo_set(tmp_path)), "train", imgsz=64)
    (tmp_path / "images/train/003.jpg").unlink()
    with pytest.raises(TrainerError, match=r"003\.jpg: "):
        data.image(3)


def test_a_list_of_missing_images_only_names_them(tmp_path):
    path = make_yolo_set(tmp_path)
    (tmp_path / "train.txt").write_text("/moved/1.jpg\n/moved/2.jpg\n")
    path.write_text(path.read_text().replace("images/train", "train.txt"))
    error = error_of(path)
    assert error.message.startswith(f"2 faults: {tmp_path}/train.txt:1: no such image: /moved/1.jpg; ")


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("kind", ["missing", "damaged"])
def test_if_no_image_is_left_their_faults_are_named(tmp_path, split, kind):
    path = make_yolo_set(tmp_path)
    if kind == "missing":
        (tmp_path / "list.txt").write_text("/moved/1.jpg\n/moved/2.jpg\n")
        path.write_text(path.read_text().replace(f"images/{split}", "list.txt"))
    else:
        for image in (tmp_path / "images" / split).iterdir():
            image.write_bytes(b"")
    count = 2 if kind == "missing" or split == "val" else 4
    with pytest.raises(BadData, match=f"^{count} faults: ") as caught:
        open_datasets(str(path), ["train", "val"], imgsz=64, allow_bad_labels=True)
    assert f"all {split} images are faulty" in caught.value.hint


def test_images_in_hidden_folders_are_ignored(tmp_path):
    path = make_yolo_set(tmp_path)
    before = len(open_dataset(str(path), "train", imgsz=64))
    write_image(tmp_path / "images/train/.ipynb_checkpoints/1-checkpoint.jpg", 60, 80, seed=1)
    assert len(open_dataset(str(path), "train", imgsz=64)) == before


def test_a_folder_instead_of_a_data_yaml_is_named(tmp_path):
    folder = tmp_path / "animals"
    folder.mkdir()
    with pytest.raises(TrainerError, match="it is a folder, but a detector needs") as error:
        open_dataset(str(folder), "train", imgsz=64)
    assert "--task classify" in error.value.hint
    (folder / "data.yaml").touch()
    with pytest.raises(TrainerError, match="it is a folder") as error:
        open_dataset(str(folder), "train", imgsz=64)
    assert error.value.hint == f"--data {folder}/data.yaml"
