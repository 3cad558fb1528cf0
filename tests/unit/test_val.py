"""`trainer val` in real processes, on a dataset of small images."""

import json

import cv2
import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from tests.unit.trainer_process import ranks, start, wait
from tests.unit.yolo_folder import squares, untrained
from trainer.errors import TrainerError
from trainer.inference.formats import CocoTruth, image_ids, unique_stems

COUNT = 37


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Images of different shapes. The order of their names is that of their numbers, which are COCO's ids."""
    widths = range(48, 104, 8)
    return squares(tmp_path_factory.mktemp("squares"), train=2, val=COUNT, test=3, widths=widths, first=100)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return untrained(tmp_path_factory.mktemp("weights") / "best.pt")


def run(folder, *arguments, count=1):
    """Run `count` ranks of `trainer val`; return the stdout of each."""
    arguments = ("val", "--device", "cpu", "--workers", "0", *map(str, arguments))
    return [each.stdout for each in wait(start(folder, ranks(count), *arguments, plots=True), code=0)]


def test_two_ranks_have_the_scores_of_one(data, weights, tmp_path):
    common = ("--weights", weights, "--data", data, "--batch", 4, "--no-plots", "--json")
    (alone,) = run(tmp_path, *common)
    first, second = run(tmp_path, *common, "--save-json", count=2)
    assert second == ""
    one = json.loads(alone)
    two = json.loads(first)
    assert (one["images"], one["boxes"]) == (COUNT, 2 * (COUNT - 1))
    assert one["map50"] > 0
    assert set(one["per_class"]) == {"green", "red"}
    assert all(ms > 0 for result in (one, two) for ms in result.pop("ms_per_image").values())
    assert one.pop("folder") is None
    results = tmp_path / two.pop("folder") / "predictions.json"
    assert one == two
    assert pycocotools_scores(data, results) == pytest.approx((one["map50"], one["map"]), abs=1e-4)


def test_yolov5_map_differs_from_coco_map(data, weights, tmp_path):
    common = ("--weights", weights, "--data", data, "--no-plots", "--json", "--imgsz", 128, "--iou", 0.95)
    (coco, yolov5) = (json.loads(run(tmp_path, *common, *more)[0]) for more in ((), ("--v5-map",)))
    assert min(yolov5["map"], coco["map"]) > 0  # test_box_map.py compares the values
    assert yolov5["map"] != pytest.approx(coco["map"], rel=1e-3)


def pycocotools_scores(data, results, crowds=()):
    """Return (map50, map) by pycocotools for a results file and the dataset's labels."""
    coco = COCO()
    coco.dataset = annotations(data, crowds)
    coco.createIndex()
    evaluation = COCOeval(coco, coco.loadRes(str(results)), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats[1], evaluation.stats[0]


def annotations(data, crowds):
    """Return the validation split in COCO's format, with the crowds `crowds` (x, y, w, h) of class 1 in each image."""
    truth = []
    for image in sorted((data.parent / "images" / "val").iterdir()):
        height, width = cv2.imread(str(image)).shape[:2]
        objects = [(1, list(box), 1) for box in crowds]
        for line in (data.parent / "labels" / "val" / f"{image.stem}.txt").read_text().splitlines():
            c, x, y, w, h = map(float, line.split())
            objects.append((int(c), [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height], 0))
        for c, box, crowd in objects:
            one = {"id": len(truth) + 1, "image_id": int(image.stem), "category_id": c, "bbox": box}
            truth.append({**one, "area": box[2] * box[3], "iscrowd": crowd})
    images = [{"id": int(p.stem), "file_name": p.name} for p in (data.parent / "images" / "val").iterdir()]
    categories = [{"id": 0, "name": "green"}, {"id": 1, "name": "red"}]
    return {"info": {}, "images": images, "categories": categories, "annotations": truth}


def test_annotations_with_crowds_score_as_in_pycocotools(data, weights, tmp_path):
    crowds = [(0, 0, 40, 40), (10, 10, 30, 50)]
    (tmp_path / "instances.json").write_text(json.dumps(annotations(data, crowds)))
    common = ("--weights", weights, "--data", data, "--no-plots", "--json", "--annotations", "instances.json")
    (text,) = run(tmp_path, *common, "--save-json", "--imgsz", 128, "--iou", 0.95)
    scores = json.loads(text)
    results = tmp_path / scores["folder"] / "predictions.json"
    found = np.array([[r["image_id"], r["category_id"]] for r in json.loads(results.read_text())])
    assert np.unique(found, axis=0, return_counts=True)[1].max() > 100
    assert pycocotools_scores(data, results, crowds) == pytest.approx(
        (scores["map50"], scores["map"]), abs=1e-6
    )
    assert abs(pycocotools_scores(data, results)[1] - scores["map"]) > 1e-5  # the crowds change the score
    assert scores["boxes"] == 2 * (COUNT - 1)


def test_table_and_output_files(data, weights, tmp_path):
    save = ("--save-txt", "--save-conf", "--split", "test", "--project", "out")
    (text,) = run(tmp_path, "--weights", weights, "--data", data, *save)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["all"][:2] == ["3", "4"]
    assert rows["green"][:2] == rows["red"][:2] == ["2", "2"]
    assert "per image at 64 px: load" in text
    folder = tmp_path / "out" / "val"
    for name in ("PR_curve.png", "F1_curve.png", "confusion_matrix.png", "predictions.jpg"):
        assert cv2.imread(str(folder / name)).shape[1] > 500
    labels = [line.split() for line in (folder / "labels" / "101.txt").read_text().splitlines()]
    assert 50 < len(labels) <= 300
    assert {row[0] for row in labels} <= {"0", "1"}
    numbers = np.array(labels, float)[:, 1:]
    assert (numbers >= 0).all()
    assert (numbers <= 1).all()
    assert (np.diff(numbers[:, 4]) <= 0).all()


def test_bad_input_is_an_error(data, weights, tmp_path, run_trainer):
    def error(*more, data=data, weights=weights):
        code, out, err = run_trainer("val", "--device", "cpu", "--weights", weights, "--data", data, *more)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert "Traceback" not in err
        return err

    other = tmp_path / "other.yaml"
    other.write_text(data.read_text().replace("green, red", "green, blue"))
    assert "class 1 is `blue`, but in" in (text := error(data=other))
    assert "it is `red`" in text
    other.write_text(data.read_text().replace("green, red", "green, red, blue"))
    assert "3 classes, but" in error(data=other)
    assert "--split validation: unknown" in error("--split", "validation")
    assert "digits has no such images" in error("--split", "test", data="digits")
    assert "use --imgsz 96" in error("--imgsz", "100")
    assert "--imgsz 0 is not a multiple of 32" in error("--imgsz", "0")
    assert "--imgsz -32 is not a multiple of 32" in error("--imgsz", "-32")
    assert "out of memory: " in (text := error("--imgsz", "320000"))
    assert "use a smaller --batch, --imgsz" in text
    assert "--conf must be 0 or more and below 1, not 1.5" in error("--conf", "1.5")
    assert "--max-det must be 1 or more, not 0" in error("--max-det", "0")
    assert "--save-conf: no labels are written" in error("--save-conf")
    assert "--half and --precision fp32 contradict each other: --half is bf16" in error(
        "--half", "--precision", "fp32"
    )
    assert "--precision fp8: unknown" in error("--precision", "fp8")
    (tmp_path / "coco.json").write_text(json.dumps({"images": [], "categories": [], "annotations": []}))
    assert "it has no category `green`" in error("--annotations", tmp_path / "coco.json")
    assert "not a COCO file of instances" in error("--annotations", data)
    assert "no such file" in error(weights=tmp_path / "no.pt")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("images", "ids"),
    [
        (["/x/001.jpg", "/x/b.jpg"], [1, "b"]),
        (["/x/a/1.jpg", "/x/b/1.jpg", "/x/b/2.jpg"], ["a/1.jpg", "b/1.jpg", 2]),
        (["/x/a/s.jpg", "/x/b/s.png", "/x/b/t.png"], ["a/s.jpg", "b/s.png", "t"]),
        (["/x/001.jpg", "/x/1.jpg"], ["001.jpg", "1.jpg"]),
        (["/x/a.jpg", "/x/a.png"], ["a.jpg", "a.png"]),
    ],
)
def test_every_image_has_its_own_id(images: list[str], ids: list[int | str]) -> None:
    assert image_ids(images) == ids


def test_images_of_equal_names_keep_their_own_results(weights, tmp_path):
    path = squares(tmp_path, train=2, val=4)
    for kind, suffix in (("images", ".png"), ("labels", ".txt")):
        for k, folder in enumerate("aabb"):
            (tmp_path / kind / "val" / folder).mkdir(exist_ok=True)
            file = tmp_path / kind / "val" / f"{k}{suffix}"
            file.rename(file.parent / folder / f"{k % 2}{suffix}")
    words = ("--weights", weights, "--data", path, "--no-plots", "--json", "--save-json", "--name")
    (text,) = run(tmp_path, *words, "alone")
    results = json.loads((tmp_path / json.loads(text)["folder"] / "predictions.json").read_text())
    assert {row["image_id"] for row in results} == {"a/0.png", "a/1.png", "b/0.png", "b/1.png"}
    categories = [{"id": k, "name": name} for k, name in enumerate(("green", "red"))]
    images = [{"id": 10 + k, "file_name": f"{folder}/{k % 2}.png"} for k, folder in enumerate("aabb")]
    content = {"images": images, "categories": categories, "annotations": []}
    (tmp_path / "coco.json").write_text(json.dumps(content))
    (text,) = run(tmp_path, *words, "coco", "--annotations", "coco.json")
    results = json.loads((tmp_path / json.loads(text)["folder"] / "predictions.json").read_text())
    assert {row["image_id"] for row in results} == {10, 11, 12, 13}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["a/1.jpg"], "/x/a/1.jpg and /x/b/1.jpg have the same id"),
        (["c/1.jpg", "d/1.jpg"], "no image 1.jpg for /x/a/1.jpg"),
        (["1.jpg", "1.jpg"], "more than one image 1.jpg for /x/a/1.jpg"),
        (["2.jpg"], "no image 1.jpg for /x/a/1.jpg"),
    ],
)
def test_annotations_that_do_not_tell_images_apart_are_refused(files, message, tmp_path):
    images = [{"id": k, "file_name": name} for k, name in enumerate(files)]
    (tmp_path / "coco.json").write_text(json.dumps({"images": images, "categories": [], "annotations": []}))
    with pytest.raises(TrainerError, match=message):
        CocoTruth(str(tmp_path / "coco.json"), []).check_images(["/x/a/1.jpg", "/x/b/1.jpg"])


def test_equal_names_get_numbers_that_no_other_name_has() -> None:
    assert unique_stems(["a.jpg", "a_2.jpg", "b/a.jpg", "c/a.jpg"]) == ["a", "a_2", "a_3", "a_4"]
    assert unique_stems(["a.jpg", "b/a.jpg", "a_2.jpg"]) == ["a", "a_2", "a_2_2"]
