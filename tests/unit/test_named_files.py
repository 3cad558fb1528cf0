"""Paths of exports in another form: found where exactly one file fits, and said."""

import json
import unicodedata
from pathlib import Path

import pytest

from tests.unit.test_absent_data import checked, trained
from tests.unit.test_data_convert import convert
from tests.unit.yolo_folder import make_yolo_set, write_image
from trainer.config.faults import BadData
from trainer.data.formats.named_files import NamedFiles, normal
from trainer.data.formats.yolo import Yolo

NFC, NFD = (unicodedata.normalize(form, "café 1.jpg") for form in ("NFC", "NFD"))
#: What a list or an export says of the file `a/b/FILE`, and FILE.
FORMS = {
    r"a\b\1.jpg": "1.jpg",
    r"C:\set\a\b\1.jpg": "1.jpg",
    "data/a/b/1.jpg": "1.jpg",
    "/home/ann/a/b/1.jpg": "1.jpg",
    "a/b/caf%C3%A9%201.jpg": NFC,
    f"a/b/{NFC}": NFD,
    f"a/b/{NFD}": NFC,
    "/data/local-files/?d=set%2Fa%2Fb%2F1.jpg": "1.jpg",
    "https://x.example/set/a/b/1.jpg": "1.jpg",
}


@pytest.mark.parametrize("text", FORMS)
def test_the_only_file_that_fits_is_found(text: str) -> None:
    file = f"/set/a/b/{FORMS[text]}"
    assert NamedFiles("/set", [file, "/set/a/2.jpg"]).find(text) == file


def test_the_longest_common_end_decides() -> None:
    known = NamedFiles("/set", ["/set/train/1.jpg", "/set/val/1.jpg", "/set/val/2.jpg"])
    assert known.find(r"x\val\1.jpg") == "/set/val/1.jpg"
    assert known.find("other/1.jpg") is None  # both fit
    assert known.find("val/3.jpg") is None
    assert known.find("../../val/2.jpg") == "/set/val/2.jpg"


def test_normal() -> None:
    assert normal(r"C:\a\.\b//1.jpg") == "a/b/1.jpg"


def test_the_list_of_a_cvat_export(tmp_path: Path) -> None:
    names = ["1.jpg", NFD]
    for k, name in enumerate(names):
        write_image(tmp_path / "obj_train_data" / name, seed=k)
        (tmp_path / "obj_train_data" / name).with_suffix(".txt").write_text("0 0.5 0.5 0.2 0.2\n")
    (tmp_path / "train.txt").write_text("data/obj_train_data/1.jpg\n" + rf"data\obj_train_data\{NFC}")
    data = tmp_path / "data.yaml"
    data.write_text("train: train.txt\nval: train.txt\nnames: [cat]\n")
    read = Yolo(str(data), "train")
    assert sorted(Path(read.name(k)).name for k in range(len(read))) == sorted(names)
    assert all(len(read.labels(k)) == 1 for k in range(2))
    (warning,) = (str(fault) for fault in read.faults)
    folder = tmp_path / "obj_train_data"
    assert (
        warning
        == f"{tmp_path}/train.txt:1: {tmp_path}/data/obj_train_data/1.jpg: found as {folder}/1.jpg (the first of 2)"
    )


def test_a_path_that_two_files_fit_is_a_fault_that_says_so(tmp_path: Path) -> None:
    path = make_yolo_set(tmp_path)
    write_image(tmp_path / "more/001.jpg", seed=50)
    (tmp_path / "train.txt").write_text("gone/001.jpg\n")
    path.write_text(path.read_text().replace("train: images/train", "train: train.txt"))
    with pytest.raises(BadData, match=r"train.txt:1: no such image: .*/gone/001.jpg") as caught:
        Yolo(str(path), "train")
    assert f"no image below {tmp_path}, or more than one, has a path that ends like it" in caught.value.hint


def test_a_data_yaml_with_backslashes(tmp_path: Path) -> None:
    path = make_yolo_set(tmp_path)
    expected = len(Yolo(str(path), "train"))
    path.write_text(
        path.read_text().replace("images/train", r"images\train").replace("images/val", r"..\images\val")
    )
    assert len(Yolo(str(path), "train")) == expected
    found = checked(tmp_path)
    assert found[0] == []
    assert trained(tmp_path) == found


@pytest.mark.parametrize("text", [r"sub\1.jpg", "/data/upload/sub/1.jpg", "sub/1%2Ejpg", "../x/sub/1.jpg"])
def test_a_coco_file_name_in_another_form(tmp_path: Path, text: str) -> None:
    write_image(tmp_path / "images/sub/1.jpg", 80, 100)
    write_image(tmp_path / "images/sub/2.jpg", 80, 100, seed=1)
    images = [{"id": 1, "file_name": text}, {"id": 2, "file_name": "sub/2.jpg"}]
    boxes = [{"image_id": k, "category_id": 1, "bbox": [10, 10, 20, 10]} for k in (1, 2)]
    file = tmp_path / "instances.json"
    file.write_text(
        json.dumps({"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]})
    )
    out, error = convert(tmp_path, "coco", file, "--images", tmp_path / "images")
    assert error is None
    assert "image whose path is written in another form, found by its end: 1\n" in out
    assert len(list((tmp_path / "set/images").rglob("sub/*.jpg"))) == 2
