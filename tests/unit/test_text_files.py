"""Text files as other programs write them: byte-order marks, quoted numbers, hidden files; and paths of containers."""

import codecs
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.unit.test_absent_data import checked, trained
from tests.unit.test_data_convert import coco_content, convert, thing, voc_file
from tests.unit.test_segmentation import folders
from tests.unit.yolo_folder import DATA_YAML, make_yolo_set, write_image
from trainer.config import Hyp, load_hyp
from trainer.config.faults import BadData
from trainer.config.text_file import read_text
from trainer.data.formats.segmentation import open_segmentation
from trainer.data.registry import open_dataset
from trainer.errors import TrainerError
from trainer.inference.formats import CocoTruth
from trainer.inference.sources import find_sources

MARKED: dict[str, Callable[[str], bytes]] = {
    "UTF-8": lambda text: text.encode("utf-8-sig"),
    "UTF-16": lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"),
    "UTF-16, big-endian": lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
    "UTF-32": lambda text: codecs.BOM_UTF32_LE + text.encode("utf-32-le"),
}


@pytest.fixture(params=MARKED)
def mark(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    """A function that gives a file a byte-order mark, and its encoding."""

    def add(path: Path) -> None:
        path.write_bytes(MARKED[request.param](path.read_text(encoding="utf-8")))

    return add


def test_text_without_a_mark_is_utf_8(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("größe\r\n".encode())
    assert read_text(tmp_path / "a").splitlines() == ["größe"]
    (tmp_path / "a").write_bytes("größe".encode("latin-1"))
    with pytest.raises(UnicodeDecodeError):
        read_text(tmp_path / "a")


def test_marks_in_all_files_of_a_dataset(tmp_path: Path, mark: Callable[[Path], None]) -> None:
    path = make_yolo_set(tmp_path)
    (tmp_path / "train.txt").write_text("images/train/001.jpg\nimages/train/002.jpg\n")
    path.write_text(
        path.read_text().replace("train: images/train", "train: train.txt").replace("cat", "größe")
    )
    (tmp_path / "labels/train/002.txt").write_text("0 0.5 0.5 0.1 0.1\n7 0.5 0.5 0.1 0.1\n")
    for name in ("data.yaml", "train.txt", "labels/train/001.txt", "labels/train/002.txt"):
        mark(tmp_path / name)
    data = open_dataset(str(path), "train", imgsz=64, allow_bad_labels=True)
    assert data.names == ["größe", "dog"]
    np.testing.assert_allclose(data.labels(0), [[0, 0.3, 0.5, 0.2, 0.4]], rtol=1e-6)
    faults, warnings = checked(tmp_path)
    assert faults == [f"{tmp_path}/labels/train/002.txt:2: class out of range 0 to 1: `7 0.5 0.5 0.1 0.1`"]
    assert trained(tmp_path) == (faults, warnings)


def test_marks_in_hyper_parameters(tmp_path: Path, mark: Callable[[Path], None]) -> None:
    (tmp_path / "hyp.yaml").write_text("lr0: 0.5\nmosaic: '0.25'\n")
    mark(tmp_path / "hyp.yaml")
    hyp = load_hyp(str(tmp_path / "hyp.yaml"), Hyp())
    assert (hyp.lr0, hyp.mosaic) == (0.5, 0.25)


def test_marks_in_the_classes_of_masks(tmp_path: Path, mark: Callable[[Path], None]) -> None:
    folders(tmp_path, train=2, val=1)
    (tmp_path / "classes.txt").write_text("ground\ngreen\nred\n")
    mark(tmp_path / "classes.txt")
    assert open_segmentation(str(tmp_path), 64)[0].names == ["ground", "green", "red"]


def test_marks_in_coco_annotations(tmp_path: Path, mark: Callable[[Path], None]) -> None:
    for k in (1, 2, 3):
        write_image(tmp_path / f"images/{k}.jpg", 80, 100, seed=k)
    content = coco_content()
    content["annotations"] = [{**entry, "area": 1} for entry in content["annotations"]]
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(content))
    mark(path)
    _, error = convert(tmp_path, "coco", path, "--images", tmp_path / "images", "--val", path)
    assert error is None
    assert CocoTruth(str(path), ["cat", "dog"]).categories == [3, 7]


def test_marks_in_the_lists_of_voc(tmp_path: Path, mark: Callable[[Path], None]) -> None:
    for stem in "ab":
        voc_file(tmp_path / "VOC", stem, thing("cat", 2, 3, 40, 60))
    lists = tmp_path / "VOC/ImageSets/Main"
    lists.mkdir(parents=True)
    for split, stem in (("train", "a"), ("val", "b")):
        (lists / f"{split}.txt").write_text(f"{stem}\n")
        mark(lists / f"{split}.txt")
    _, error = convert(tmp_path, "voc", tmp_path / "VOC")
    assert error is None
    assert (tmp_path / "set/images/val/b.jpg").exists()


def test_marks_in_a_list_of_images_to_predict(tmp_path: Path, mark: Callable[[Path], None]) -> None:
    write_image(tmp_path / "a.jpg")
    (tmp_path / "list.txt").write_text("a.jpg\n")
    mark(tmp_path / "list.txt")
    assert find_sources([str(tmp_path / "list.txt")]) == [tmp_path / "a.jpg"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("{'0': cat, '1': dog}", ["cat", "dog"]),
        ("{'1': dog, '0': cat}", ["cat", "dog"]),
        ("{1: dog, '0': cat}", ["cat", "dog"]),
        ("{01: dog, 00: cat}", ["cat", "dog"]),
        (
            "\n" + "".join(f"  '{k}': c{k}\n" for k in (10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)),
            [f"c{k}" for k in range(11)],
        ),
        (
            "\n" + "".join(f"  {k:02}: c{k}\n" for k in range(11)),
            [f"c{k}" for k in range(11)],
        ),  # 08 is no octal number
    ],
    ids=repr,
)
def test_quoted_numbers_of_classes(tmp_path: Path, names: str, expected: list[str]) -> None:
    path = make_yolo_set(tmp_path)
    path.write_text(f"train: images/train\nval: images/val\nnc: '{len(expected)}'\nnames: {names}\n")
    assert open_dataset(str(path), "train", imgsz=64).names == expected


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("nc: 2", "nc: '3'", "data.yaml:4: nc is 3, but `names` has 2 names"),
        ("nc: 2", "nc: two", "data.yaml:4: nc is two, but `names` has 2 names"),
        ("[cat, dog]", "{0: cat, '0': dog}", "data.yaml:5: `0` is already set in line 5"),
        ("[cat, dog]", "{0: cat, 00: dog}", "data.yaml:5: the classes of `names` must be numbered"),
        ("[cat, dog]", "{cat: 0, dog: 1}", "data.yaml:5: the classes of `names` must be numbered"),
        ("[cat, dog]", "{-1: cat, 0: dog}", "data.yaml:5: the classes of `names` must be numbered"),
    ],
)
def test_other_numbers_of_classes_are_refused(tmp_path: Path, old: str, new: str, what: str) -> None:
    path = make_yolo_set(tmp_path)
    path.write_text(DATA_YAML.replace(old, new))
    with pytest.raises(BadData, match=what):
        open_dataset(str(path), "train", imgsz=64)


def test_hidden_files_of_macos_are_ignored(tmp_path: Path) -> None:
    make_yolo_set(tmp_path)
    before = checked(tmp_path)
    for name in (
        "labels/train/._001.txt",
        "labels/train/._x.txt",
        "labels/._x.txt",
        "images/train/._001.jpg",
    ):
        (tmp_path / name).write_bytes(b"\x00\x05\x16\x07")
    assert checked(tmp_path) == trained(tmp_path) == before == ([], before[1])


def test_hidden_files_of_macos_are_no_annotations(tmp_path: Path) -> None:
    for stem in "ab":
        voc_file(tmp_path / "VOC", stem, thing("cat", 2, 3, 40, 60))
        (tmp_path / f"VOC/Annotations/._{stem}.xml").write_bytes(b"\x00\x05\x16\x07")
        (tmp_path / f"VOC/JPEGImages/._{stem}.jpg").write_bytes(b"\x00\x05\x16\x07")
    _, error = convert(tmp_path, "voc", tmp_path / "VOC")
    assert error is None


@pytest.mark.parametrize(
    ("old", "new", "folder"),
    [
        ("path: .", "path: /data/pets", "/data/pets"),
        ("path: .", "path: ../pets", "{above}/pets"),
        ("images/train", "/data/pets/train", "/data/pets/train"),
        ("images/train", "../elsewhere/train", "{above}/elsewhere/train"),
    ],
)
def test_a_path_that_leads_out_of_the_folder_names_mount(
    tmp_path: Path, old: str, new: str, folder: str
) -> None:
    path = make_yolo_set(tmp_path / "set")
    path.write_text(DATA_YAML.replace(old, new))
    with pytest.raises(BadData) as caught:
        open_dataset(str(path), "train", imgsz=64)
    assert f"--mount {folder.format(above=tmp_path)}" in caught.value.hint


def test_a_missing_folder_beside_the_data_yaml_does_not(tmp_path: Path) -> None:
    path = make_yolo_set(tmp_path)
    path.write_text(DATA_YAML.replace("images/train", "images/tarin"))
    with pytest.raises(TrainerError) as caught:
        open_dataset(str(path), "train", imgsz=64)
    assert "--mount" not in caught.value.hint


def test_a_list_of_images_elsewhere_names_mount(tmp_path: Path) -> None:
    path = make_yolo_set(tmp_path)
    (tmp_path / "list.txt").write_text("/data/pets/1.jpg\n/data/pets/2.jpg\nimages/train/001.jpg\n")
    path.write_text(DATA_YAML.replace("images/train", "list.txt"))
    with pytest.raises(BadData) as caught:
        open_dataset(str(path), "train", imgsz=64)
    hints = {fault.hint for fault in caught.value.faults}
    mount = "correct or delete the line; in a container, mount it: clusterctl launch --mount /data/pets"
    assert hints == {f"{mount}; no image below {tmp_path}, or more than one, has a path that ends like it"}
