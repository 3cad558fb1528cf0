"""`trainer data convert`: labels equal the annotations, and a failure writes nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.unit.yolo_folder import write_image
from trainer.cli import app
from trainer.data.formats.yolo import Yolo
from trainer.errors import TrainerError


def convert(folder: Path, *words: str | Path) -> tuple[str, TrainerError | None]:
    """(what is printed, the error) of a conversion to the folder `set` in a folder."""
    done = CliRunner().invoke(app, ["data", "convert", *map(str, words), "--out", str(folder / "set")])
    if done.exception and not isinstance(done.exception, TrainerError):
        raise done.exception
    return done.stdout, done.exception


def corners(data: Yolo, index: int) -> np.ndarray:
    """class, x1, y1, x2, y2 in pixels of one image's boxes."""
    height, width = data.size(index)
    rows = data.labels(index)
    low = rows[:, 1:3] - rows[:, 3:] / 2
    high = rows[:, 1:3] + rows[:, 3:] / 2
    return np.concatenate([rows[:, :1], low * (width, height), high * (width, height)], 1)


def image_names(data: Yolo) -> list[str]:
    return [Path(data.name(k)).name for k in range(len(data))]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


SQUARE = [10, 10, 30, 10, 30, 20, 10, 20]
PART = [40, 10, 50, 10, 50, 30, 40, 30]


def coco_content() -> dict[str, list[dict[str, object]]]:
    """Three images of 100 x 80 px; categories 7 and 3; a polygon, an object of two parts, a crowd, a mask, a box."""
    images = [{"id": k, "file_name": f"{k}.jpg", "width": 100, "height": 80} for k in (1, 2, 3)]
    mask = {"counts": [0, 8000], "size": [80, 100]}
    rows = [
        (1, 7, [10, 10, 20, 10], [SQUARE], 0),
        (1, 3, [10, 10, 40, 20], [SQUARE, PART], 0),
        (1, 3, [0, 0, 100, 80], mask, 1),
        (2, 3, [0, 0, 100, 80], mask, 0),
        (2, 7, [99.5, 0, 1, 10], [], 0),
    ]
    annotations = [
        {"id": 90 + k, "image_id": i, "category_id": c, "bbox": box, "segmentation": s, "iscrowd": crowd}
        for k, (i, c, box, s, crowd) in enumerate(rows)
    ]
    categories = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}]
    return {"images": images, "annotations": annotations, "categories": categories}


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    for k in (1, 2, 3):
        write_image(tmp_path / f"images/{k}.jpg", 80, 100, seed=k)
    return save(tmp_path, coco_content())


def save(folder: Path, content: object) -> Path:
    path = folder / "instances.json"
    path.write_text(json.dumps(content))
    return path


def test_coco(coco, tmp_path):
    out, error = convert(tmp_path, "coco", coco, "--images", tmp_path / "images", "--val", coco)
    assert error is None
    assert "crowd left out (iscrowd: 1; --crowd boxes keeps their boxes): 2" in out  # once in each split
    assert "mask kept as a box: 2" in out
    data = Yolo(str(tmp_path / "set/data.yaml"), "train")
    assert data.names == ["cat", "dog"]  # by their ids, 3 and 7
    assert image_names(data) == ["1.jpg", "2.jpg", "3.jpg"]
    np.testing.assert_allclose(corners(data, 0), [[1, 10, 10, 30, 20], [0, 10, 10, 50, 30]], atol=1e-4)
    np.testing.assert_allclose(corners(data, 1), [[0, 0, 0, 100, 80], [1, 99.5, 0, 100, 10]], atol=1e-4)
    assert len(data.labels(2)) == 0
    square, both = data.segments(0)
    np.testing.assert_allclose(square * (100, 80), np.reshape(SQUARE, (-1, 2)), atol=1e-4)
    # The parts' own area, 200 + 200 px: the bridge between them has none.
    x, y = (both * (100, 80)).T
    assert abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2 == pytest.approx(400, abs=1e-2)
    assert (tmp_path / "set/images/train/1.jpg").resolve() == (tmp_path / "images/1.jpg").resolve()


def roboflow(root_name: str) -> dict[str, list[dict[str, object]]]:
    """An export of Roboflow: category 0 is the root of all others, and no object has it."""
    content = coco_content()
    content["categories"] = [
        {"id": 0, "name": root_name, "supercategory": "none"},
        {"id": 3, "name": "cat", "supercategory": root_name},
        {"id": 7, "name": "dog", "supercategory": root_name},
    ]
    return content


@pytest.mark.parametrize("root_name", ["pets", "cat"])
def test_the_root_category_of_an_export_is_no_class(coco, tmp_path, root_name):
    path = save(tmp_path, roboflow(root_name))
    out, error = convert(
        tmp_path, "coco", path, "--images", tmp_path / "images", "--val", coco.with_name("v.json")
    )
    assert "v.json: cannot be read" in str(error)
    out, error = convert(tmp_path, "coco", path, "--images", tmp_path / "images", "--val", path)
    assert error is None
    assert f"category {root_name!r} left out, which has no boxes and is the parent of others: 1\n" in out
    data = Yolo(str(tmp_path / "set/data.yaml"), "train")
    assert data.names == ["cat", "dog"]
    assert corners(data, 0)[:, 0].tolist() == [1, 0]


def test_a_class_without_boxes_that_is_no_parent_stays(coco, tmp_path):
    content = coco_content()
    content["categories"] += [{"id": 9, "name": "person", "supercategory": "person"}]
    _, error = convert(tmp_path, "coco", save(tmp_path, content), "--images", tmp_path / "images")
    assert error is None
    assert Yolo(str(tmp_path / "set/data.yaml"), "train").names == ["cat", "dog", "person"]


def test_a_parent_with_boxes_stays(coco, tmp_path):
    content = roboflow("pets")
    content["annotations"].append({"image_id": 3, "category_id": 0, "bbox": [1, 1, 9, 9]})
    _, error = convert(tmp_path, "coco", save(tmp_path, content), "--images", tmp_path / "images")
    assert error is None
    assert Yolo(str(tmp_path / "set/data.yaml"), "train").names == ["pets", "cat", "dog"]


def test_two_categories_of_one_name_are_chosen_by_id(coco, tmp_path):
    content = coco_content()
    content["categories"] = [{"id": 3, "name": "pet"}, {"id": 7, "name": "pet"}]
    words = ["coco", save(tmp_path, content), "--images", tmp_path / "images"]
    _, error = convert(tmp_path, *words)
    assert "the categories 3, 7 have the same name, 'pet'" in error.message
    _, _, option = error.hint.partition("for example ")
    out, error = convert(tmp_path, *words, *option.split())
    assert error is None
    assert "object of another class left out: 2\n" in out
    assert Yolo(str(tmp_path / "set/data.yaml"), "train").names == ["pet"]


@pytest.mark.parametrize(("classes", "names"), [("dog", ["dog"]), ("7, cat", ["cat", "dog"])])
def test_classes_are_chosen_by_name_or_id(coco, tmp_path, classes, names):
    _, error = convert(
        tmp_path, "coco", coco, "--images", tmp_path / "images", "--val", coco, "--classes", classes
    )
    assert error is None
    data = Yolo(str(tmp_path / "set/data.yaml"), "train")
    assert data.names == names
    assert {int(number) for number in data.labels(0)[:, 0]} == set(range(len(names)))


def test_an_unknown_class_is_an_error_with_the_known_ones(coco, tmp_path):
    _, error = convert(tmp_path, "coco", coco, "--images", tmp_path / "images", "--classes", "cow")
    assert (error.message, error.hint) == (
        f"--classes cow: no such category in {coco}",
        "use names or ids of: cat (3), dog (7)",
    )


def test_images_whose_objects_are_all_crowds_are_counted(coco, tmp_path):
    content = coco_content()
    for entry in content["annotations"]:
        entry["iscrowd"] = int(entry["image_id"] == 1)
    words = [
        "coco",
        save(tmp_path, content),
        "--images",
        tmp_path / "images",
        "--val",
        tmp_path / "instances.json",
    ]
    out, error = convert(tmp_path, *words)
    assert error is None
    assert "crowd left out (iscrowd: 1; --crowd boxes keeps their boxes): 6\n" in out
    assert "image that is background, because all its objects are crowds: 2\n" in out


def test_crowds_alone_are_an_error_whose_hint_helps(coco, tmp_path):
    content = coco_content()
    for entry in content["annotations"]:
        entry["iscrowd"] = 1
    words = ["coco", save(tmp_path, content), "--images", tmp_path / "images"]
    _, error = convert(tmp_path, *words)
    assert "no image with a box to write; crowd left out" in error.message
    option, _, _ = error.hint.partition(":")
    _, error = convert(tmp_path, *words, *option.split(), "--val", tmp_path / "instances.json")
    assert error is None
    data = Yolo(str(tmp_path / "set/data.yaml"), "train")
    np.testing.assert_allclose(
        corners(data, 0), [[1, 10, 10, 30, 20], [0, 10, 10, 50, 30], [0, 0, 0, 100, 80]], atol=1e-4
    )


def test_coco_boxes_partly_outside_are_clipped_and_counted(coco, tmp_path):
    content = coco_content()
    for box in ([-5, 10, 30, 20], [90, 70, 40, 40], [-0.5, 0, 20, 80.5]):
        content["annotations"].append({"image_id": 3, "category_id": 7, "bbox": box})
    out, error = convert(
        tmp_path, "coco", save(tmp_path, content), "--images", tmp_path / "images", "--val", coco
    )
    assert error is None
    assert "box partly outside its image, clipped: 4\n" in out  # twice in each split
    expected = [[1, 0, 10, 25, 30], [1, 90, 70, 100, 80], [1, 0, 0, 19.5, 80]]
    np.testing.assert_allclose(
        corners(Yolo(str(tmp_path / "set/data.yaml"), "train"), 2), expected, atol=1e-4
    )


def test_voc_boxes_partly_outside_are_clipped_and_counted(voc, tmp_path):
    voc_file(voc, "b", thing("cat", 91, 71, 140, 120))
    out, error = convert(tmp_path, "voc", voc)
    assert error is None
    assert "box partly outside its image, clipped: 1\n" in out
    val = Yolo(str(tmp_path / "set/data.yaml"), "val")
    np.testing.assert_allclose(corners(val, 0), [[0, 90, 70, 100, 80]], atol=1e-4)


def test_images_are_copied_on_request(coco, tmp_path):
    convert(tmp_path, "coco", coco, "--images", tmp_path / "images", "--val", coco, "--copy")
    image = tmp_path / "set/images/train/1.jpg"
    assert not image.is_symlink()
    assert image.read_bytes() == (tmp_path / "images/1.jpg").read_bytes()


def test_the_split_depends_on_the_names_alone(tmp_path):
    content = coco_content()
    names = [f"{k:03}.jpg" for k in range(40)]
    for k, name in enumerate(names):
        write_image(tmp_path / "images" / name, 80, 100, seed=k)

    def val_of(chosen: list[str], out: str) -> set[str]:
        content["images"] = [{"id": k, "file_name": name} for k, name in enumerate(chosen)]
        images = tmp_path / "images"
        _, error = convert(
            tmp_path / out, "coco", save(tmp_path, content), "--images", images, "--val-share", "0.25"
        )
        assert error is None
        train, val = (names_in(tmp_path / out / "set/images" / split) for split in ("train", "val"))
        assert train | val == set(chosen)
        assert not train & val
        return val

    half = val_of(names[:20], "half")
    whole = val_of(names[::-1], "whole")
    assert 4 <= len(whole) <= 16
    assert half == {name for name in whole if name in names[:20]}


def test_every_fault_of_a_coco_file_is_named_and_nothing_is_written(coco, tmp_path):
    content = coco_content()
    content["images"] += [
        {"id": 4, "file_name": "gone.jpg"},
        {"id": 1, "file_name": "again.jpg"},
        {"id": 5, "file_name": "../../etc/passwd"},
        {"id": ["x"], "file_name": "x.jpg"},
    ]
    content["images"][2]["width"] = 101
    content["annotations"] += [
        {"id": 1, "image_id": 99, "category_id": 3, "bbox": [1, 1, 2, 2]},
        {"id": 2, "image_id": 1, "category_id": 8, "bbox": [1, 1, 2, 2]},
        {"id": 3, "image_id": 1, "category_id": 3, "bbox": [100, 1, 20, 2]},
        {"id": 4, "image_id": 1, "category_id": 3, "bbox": [1, 1, 0, 2]},
        {"id": 5, "image_id": 1, "category_id": 3, "bbox": [1, None, 0, 2]},
        {"id": 6, "image_id": [1], "category_id": {}, "bbox": "x"},
    ]
    save(tmp_path, content)
    words = (tmp_path, "coco", coco, "--images", tmp_path / "images")
    out, error = convert(*words)
    assert error
    assert error.message.startswith("11 faults: ")
    assert "--allow-bad-labels" in error.hint
    assert names_in(tmp_path) == {"images", "instances.json"}
    for part in (
        f"{tmp_path / 'images/gone.jpg'}: no such image",
        f"{coco}: images[4]: the id 1 occurs twice",
        "images[5]: '../../etc/passwd' is not below the images' folder",
        "images[6].id",
        "is 100 x 80 px, not 101 x 80",
        "annotations[5]: no image has the id 99",
        "annotations[6]: no category has the id 8",
        "annotations[7]: box without area or outside the image: [100.0, 1.0, 20.0, 2.0]",
        "annotations[8]: box without area",
        "annotations[9].bbox.1: ",
        "annotations[10].image_id",
    ):
        assert part in out
    out, error = convert(*words, "--allow-bad-labels")
    assert error is None
    assert out.count("left out: ") == 11
    data = [Yolo(str(tmp_path / "set/data.yaml"), split) for split in ("train", "val")]
    assert sorted(image_names(data[0]) + image_names(data[1])) == ["1.jpg", "2.jpg"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "not JSON"),
        ("[1]", "`images` must be a list"),
        ('{"images": [], "annotations": 3}', "`annotations` must be a list of objects"),
        ('{"images": [], "annotations": [], "categories": []}', "no categories"),
        (
            '{"images": [], "annotations": [], "categories": [{"id": 1}]}',
            "categories[0].name: Field required",
        ),
        ('{"images": [], "annotations": [], "categories": [{"id": 1, "name": "x"}]}', "no image with a box"),
    ],
)
def test_invalid_coco_files(tmp_path, text, what):
    (tmp_path / "a.json").write_text(text)
    _, error = convert(tmp_path, "coco", tmp_path / "a.json", "--images", tmp_path)
    assert error
    assert what in error.message
    assert error.hint


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["--val-images", "val"], "--val-images val: no annotations of these images"),
        (["--val", "b.json", "--val-share", "0.2"], "--val-share 0.2: --val b.json defines the images"),
    ],
)
def test_options_without_effect_are_refused(coco, tmp_path, more, what):
    _, error = convert(tmp_path, "coco", coco, "--images", tmp_path / "images", *more)
    assert error
    assert what in error.message
    assert not (tmp_path / "set").exists()


def test_nothing_is_overwritten(coco, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set/precious").write_text("x")
    _, error = convert(tmp_path, "coco", coco, "--images", tmp_path / "images")
    assert error
    assert "exists already" in error.message
    assert names_in(tmp_path / "set") == {"precious"}


def thing(name: str, *box: float, difficult: int = 0) -> str:
    keys = ("xmin", "ymin", "xmax", "ymax")
    inside = "".join(f"<{key}>{value}</{key}>" for key, value in zip(keys, box, strict=True))
    return f"<object>\n<name>{name}</name><difficult>{difficult}</difficult>\n<bndbox>{inside}</bndbox></object>\n"


def voc_file(folder: Path, stem: str, *things: str, size: tuple[int, int] = (100, 80)) -> Path:
    write_image(folder / "JPEGImages" / f"{stem}.jpg", 80, 100)
    path = folder / "Annotations" / f"{stem}.xml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f"<annotation>\n<filename>{stem}.jpg</filename>\n<size><width>{size[0]}</width><height>{size[1]}</height>"
        f"</size>\n{''.join(things)}</annotation>"
    )
    return path


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    folder = tmp_path / "VOC"
    voc_file(folder, "a", thing("dog", 1, 1, 100, 80), thing("cat", 11, 11, 30, 20, difficult=1))
    voc_file(folder, "b", thing("cat", 2, 3, 4, 6))
    voc_file(folder, "c")
    (folder / "ImageSets/Main").mkdir(parents=True)
    (folder / "ImageSets/Main/train.txt").write_text("a\nc\n")
    (folder / "ImageSets/Main/val.txt").write_text("b\n")
    return folder


def test_voc(voc, tmp_path):
    _, error = convert(tmp_path, "voc", voc)
    assert error is None
    train, val = (Yolo(str(tmp_path / "set/data.yaml"), split) for split in ("train", "val"))
    assert train.names == ["cat", "dog"]
    assert image_names(train) == ["a.jpg", "c.jpg"]
    assert image_names(val) == ["b.jpg"]
    np.testing.assert_allclose(corners(train, 0), [[1, 0, 0, 100, 80], [0, 10, 10, 30, 20]], atol=1e-4)
    np.testing.assert_allclose(corners(val, 0), [[0, 1, 2, 4, 6]], atol=1e-4)


def test_voc_without_difficult_objects(voc, tmp_path):
    out, _ = convert(tmp_path, "voc", voc, "--skip-difficult")
    assert "difficult object left out: 1" in out
    assert Yolo(str(tmp_path / "set/data.yaml"), "train").labels(0)[:, 0].tolist() == [1]


def test_voc_without_lists_of_its_splits(voc, tmp_path):
    for path in (voc / "ImageSets/Main").iterdir():
        path.unlink()
    _, error = convert(tmp_path, "voc", voc)
    assert error is None
    counts = [len(list((tmp_path / "set/images" / split).iterdir())) for split in ("train", "val")]
    assert counts == [2, 1]


def test_every_fault_of_voc_files_is_named(voc, tmp_path):
    bad = [
        voc_file(voc, "d", thing("cat", 101, 1, 120, 9), thing("", 1, 1, 9, 9), thing("cat", 9, 9, "x", 9)),
        voc_file(voc, "e", thing("cat", 1, 1, 9, 9), size=(80, 100)),
        voc_file(voc, "f", thing("cat", 1, 1, 9, 9)),
        voc_file(voc, "g"),
        voc_file(voc, "h"),
    ]
    bad[2].write_text(bad[2].read_text().replace("</name>", "</nome>"))
    bad[3].write_text('<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>\n<annotation>&x;</annotation>')
    (voc / "JPEGImages/h.jpg").unlink()
    (voc / "ImageSets/Main/train.txt").write_text("a\nc\nnowhere\n")
    out, error = convert(tmp_path, "voc", voc)
    assert error
    assert not (tmp_path / "set").exists()
    faults = [line for line in out.splitlines() if line.startswith(str(voc))]
    expected = {
        f"{bad[0]}: object 1: box without area or outside the image: cat 101 1 120 9",
        f"{bad[0]}: object 2: it has no name",
        f"{bad[0]}: object 3: `bndbox` needs the numbers xmin, ymin, xmax, ymax",
        f"{bad[1]}: the image is 100 x 80 px, not 80 x 100",
        f"{bad[2]}: not XML: mismatched tag: line 5, column 11",
        f"{bad[3]}: not XML: undefined entity &x;: line 2, column 12",
        f"{voc / 'JPEGImages/h.jpg'}: no such image",
        f"{voc}/ImageSets/Main/train.txt:3: no annotation of nowhere, or it is listed twice",
    }
    assert set(faults) == expected
    assert error.message.startswith("8 faults: ")


def test_no_voc_folder(tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        _, error = convert(tmp_path, "voc", folder)
        assert error
        assert str(folder) in error.message


def test_images_in_a_folder_called_images_keep_their_labels(coco: Path, tmp_path: Path) -> None:
    content = coco_content()
    for image in content["images"]:
        image["file_name"] = f"images/{image['file_name']}"
    said, error = convert(tmp_path, "coco", save(tmp_path, content), "--images", tmp_path)
    assert error is None, said
    data = Yolo(str(tmp_path / "set" / "data.yaml"), "train")
    assert sum(len(data.labels(k)) for k in range(len(data))) > 0


def test_an_outline_without_area_is_replaced_by_the_box(coco: Path, tmp_path: Path) -> None:
    content = coco_content()
    line = [10, 10, 20, 10, 30, 10]
    outside = [110, 10, 120, 10, 120, 20]
    for number, outline in enumerate((line, outside)):
        box = {"category_id": 7, "bbox": [10, 10, 20 + number, 10], "segmentation": [outline], "iscrowd": 0}
        content["annotations"].append({"id": 200 + number, "image_id": 3, **box})
    said, error = convert(tmp_path, "coco", save(tmp_path, content), "--images", tmp_path / "images")
    assert error is None, said
    data = Yolo(str(tmp_path / "set" / "data.yaml"), "train")
    third = image_names(data).index("3.jpg")
    assert corners(data, third)[:, 1:] == pytest.approx(
        np.array([[10, 10, 30, 20], [10, 10, 31, 20]]), abs=0.01
    )
