"""`trainer predict` on generated images and videos."""

import functools
import json

import cv2
import numpy as np
import pytest

from tests.unit.yolo_folder import untrained
from trainer.inference.formats import mpeg4_rate
from trainer.plots import class_colour

CONF = "0.004"  # an untrained model has low scores


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return untrained(tmp_path_factory.mktemp("weights") / "best.pt")


def image(height=120, width=160, seed=0):
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    return cv2.resize(coarse, (width, height))


@pytest.fixture
def predict(weights, tmp_path, monkeypatch, run_trainer):
    """Return a function that runs the command in tmp_path and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    always = ("predict", "--weights", weights, "--device", "cpu", "--precision", "fp32")
    return functools.partial(run_trainer, *always)


def test_options_without_effect_are_errors(predict, tmp_path):
    cv2.imwrite(str(tmp_path / "a.png"), image())
    for more, message in (
        (["--save-conf"], "--save-conf: no labels are written"),
        (["--half"], "--half and --precision fp32 contradict each other"),
    ):
        code, _, err = predict("--source", "a.png", *more)
        assert (code, message in err) == (2, True), err
        assert not (tmp_path / "runs").exists()


def test_images_of_a_folder_are_drawn_and_saved(predict, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    cv2.imwrite(str(folder / "wide.png"), image(60, 200))
    cv2.imwrite(str(folder / "tall.jpg"), image(150, 90, seed=2))
    (folder / "notes.md").write_text("no image")
    code, out, err = predict(
        "--source", "in", "--conf", CONF, "--save-txt", "--save-conf", "--save-json", "--max-det", 5
    )
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("2 images: ")
    assert out.splitlines()[-1].endswith("-> runs/predict")
    result = tmp_path / "runs" / "predict"
    assert sorted(p.name for p in result.iterdir()) == ["labels", "predictions.json", "tall.jpg", "wide.png"]
    entries = json.loads((result / "predictions.json").read_text())
    assert [(e["source"], e["width"], e["height"]) for e in entries] == [
        ("in/tall.jpg", 90, 150),
        ("in/wide.png", 200, 60),
    ]
    wide = entries[1]
    assert 0 < len(wide["boxes"]) <= 5
    rows = [
        [float(v) for v in row.split()] for row in (result / "labels" / "wide.txt").read_text().splitlines()
    ]
    for row, box in zip(rows, wide["boxes"], strict=True):
        x1, y1, x2, y2 = box["xyxy"]
        assert 0 <= x1 < x2 <= 200
        assert 0 <= y1 < y2 <= 60
        assert box["name"] == ("green", "red")[box["class"]]
        expected = [
            box["class"],
            (x1 + x2) / 400,
            (y1 + y2) / 120,
            (x2 - x1) / 200,
            (y2 - y1) / 60,
            box["score"],
        ]
        assert row == pytest.approx(expected, abs=1e-3)
    drawn = cv2.imread(str(result / "wide.png"))
    before = cv2.imread(str(folder / "wide.png"))
    assert drawn.shape == before.shape
    highest = wide["boxes"][0]  # drawn last
    colour = np.array(class_colour(highest["class"]))
    assert (np.abs(drawn[..., ::-1].astype(int) - colour).max(2) < 12).sum() > 20
    assert (np.abs(before[..., ::-1].astype(int) - colour).max(2) < 12).sum() < 20


def test_only_the_wanted_classes_are_found(predict, tmp_path):
    cv2.imwrite("a.png", image())
    found = {}
    for classes in ("", "red", "0", "0 1"):
        code, out, _ = predict(
            "a.png", "--conf", CONF, "--json", "--nosave", "--classes", *classes.split(" ")
        )
        assert code == 0
        found[classes] = {box["name"] for box in json.loads(out)["boxes"]}
    assert found == {"": {"green", "red"}, "red": {"red"}, "0": {"green"}, "0 1": {"green", "red"}}
    assert not (tmp_path / "runs").exists()


def test_a_video_keeps_its_frames_size_and_rate(predict, tmp_path):
    writer = cv2.VideoWriter("in.avi", cv2.VideoWriter.fourcc(*"MJPG"), 12.5, (160, 120))
    for k in range(9):
        writer.write(image(seed=k))
    writer.release()
    code, out, _ = predict("--source", "in.avi", "--conf", CONF, "--save-txt", "--save-json")
    assert code == 0
    assert "in.avi: 9 frames, " in out
    result = tmp_path / "runs" / "predict"
    assert sorted(p.name for p in result.iterdir()) == ["in.mp4", "labels", "predictions.json"]
    assert len(list((result / "labels").iterdir())) == 9
    entries = json.loads((result / "predictions.json").read_text())
    assert [e["frame"] for e in entries] == list(range(1, 10))
    video = cv2.VideoCapture(str(result / "in.mp4"))
    assert video.get(cv2.CAP_PROP_FPS) == pytest.approx(12.5)
    frames = []
    while (read := video.read())[0]:
        frames.append(read[1])
    assert len(frames) == 9
    assert frames[0].shape == (120, 160, 3)
    colour = np.array(class_colour(entries[0]["boxes"][0]["class"]))
    assert (np.abs(frames[0][..., ::-1].astype(int) - colour).max(2) < 60).sum() > 50  # compressed


@pytest.mark.parametrize("rate", [211.222, 29.97, 143.1234, 0.5])
def test_a_rate_that_mp4_cannot_hold_is_rounded(predict, tmp_path, rate):
    writer = cv2.VideoWriter("in.avi", cv2.VideoWriter.fourcc(*"MJPG"), rate, (160, 120))
    for k in range(3):
        writer.write(image(seed=k))
    writer.release()
    cv2.imwrite("last.png", image())
    code, out, err = predict("--source", "in.avi", "last.png", "--conf", CONF)
    assert (code, "in.avi: 3 frames, " in out, "last.png: " in out) == (0, True, True), err
    video = cv2.VideoCapture(str(tmp_path / "runs/predict/in.mp4"))
    assert video.get(cv2.CAP_PROP_FPS) == pytest.approx(rate, rel=1e-4)


@pytest.mark.parametrize(
    ("rate", "held"), [(90000.0, 65535), (1e-5, 1), (25.0, 25), (1000 / 7, 142.86), (9000.05, 9000)]
)
def test_the_nearest_rate_has_a_time_base_of_16_bits(rate, held):
    assert mpeg4_rate(rate) == held


def test_a_video_that_cannot_be_written_does_not_end_the_others(predict, tmp_path):
    wide = (8200, 32)  # MPEG-4 part 2 has at most 8191 px
    writer = cv2.VideoWriter("wide.avi", cv2.VideoWriter.fourcc(*"MJPG"), 10, wide)
    writer.write(np.zeros((wide[1], wide[0], 3), np.uint8))
    writer.release()
    cv2.imwrite("last.png", image())
    code, out, err = predict("--source", "wide.avi", "last.png", "--conf", CONF)
    assert code == 1
    assert "error: wide.avi: OpenCV cannot write an MP4 video of 8200 x 32 px; use --nosave --save-txt" in err
    assert "last.png: " in out
    assert [path.name for path in (tmp_path / "runs/predict").iterdir()] == ["last.png"]


def test_an_unreadable_source_is_reported_and_the_others_are_processed(predict, tmp_path):
    cv2.imwrite("good.png", image())
    (tmp_path / "bad.jpg").write_bytes(b"\xff\xd8\xff no jpeg")
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    code, out, err = predict("--source", "bad.jpg", "bad.mp4", "good.png", "--conf", CONF)
    assert code == 1
    assert "error: bad.jpg: not an image that can be decoded" in err
    assert "error: bad.mp4: not a video that can be decoded" in err
    assert "error: 2 of the sources failed" in err
    assert "1 image: " in out
    assert [p.name for p in (tmp_path / "runs" / "predict").iterdir()] == ["good.png"]


def test_patterns_lists_and_equal_file_names(predict, tmp_path):
    for name in ("x/a.png", "y/a.png", "y/b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        cv2.imwrite(name, image())
    (tmp_path / "list.txt").write_text("x/a.png\n\ny/b.png\n")
    code, out, _ = predict("--source", "*/a.png", "--source", "list.txt", "--json", "--project", "out")
    assert code == 0
    assert [json.loads(line)["source"] for line in out.splitlines()] == ["x/a.png", "y/a.png", "y/b.png"]
    assert sorted(p.name for p in (tmp_path / "out" / "predict").iterdir()) == ["a.png", "a_2.png", "b.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--source is required"),
        (("no.jpg",), "--source no.jpg: no such file or folder"),
        (("no*.jpg",), "--source no*.jpg: no image or video"),
        (("empty",), "--source empty: no image or video"),
        (("data.csv",), "--source data.csv: no image or video"),
        (("list.txt",), "list.txt:2: no such file: gone.png"),
        (("0",), "--source 0: cameras and URLs are not supported"),
        (("a.png", "--classes", "blue"), "--classes blue: no such class"),
        (("a.png", "--imgsz", "70"), "--imgsz 70 is not a multiple of 32"),
        (("a.png", "--imgsz", "0"), "--imgsz 0 is not a multiple of 32"),
        (("a.png", "--iou", "2"), "--iou must be"),
    ],
)
def test_bad_input_is_an_error(predict, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "data.csv").touch()
    (tmp_path / "list.txt").write_text("a.png\ngone.png\n")
    cv2.imwrite("a.png", image())
    code, out, err = predict(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert not (tmp_path / "runs").exists()
