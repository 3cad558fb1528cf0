"""Predictions in Python, `trainer.load`, and of classifiers and segmentation models also by `trainer predict`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from tests.unit.test_checkpoint import CONTENT, Trap
from tests.unit.yolo_folder import untrained
from trainer import Model, TrainerError, load
from trainer.models.torchvision_nets import build_classifier, build_segmenter
from trainer.weights import checkpoint_file

CONF = 0.004  # an untrained detector has low scores
NAMES = ["cat", "dog", "10"]
LRASPP = "lraspp_mobilenet_v3_large"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained(tmp_path_factory.mktemp("weights") / "best.pt")


def write_torchvision(path: Path, task: str, cfg: str, net: Any) -> Path:
    content = dict.fromkeys(checkpoint_file.KEYS) | {
        "format": checkpoint_file.FORMAT,
        "task": task,
        "imgsz": 64,
    }
    checkpoint_file.save(
        path, content | {"ema": net.state_dict(), "names": NAMES, "cfg": {"torchvision": cfg}}
    )
    return path


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    net = build_classifier("resnet18", 3, 64)
    with torch.no_grad():
        net.net.fc.bias.copy_(torch.tensor([0.0, 3.0, 1.0]))
    return write_torchvision(tmp_path_factory.mktemp("weights") / "best.pt", "classify", "resnet18", net)


@pytest.fixture(scope="module")
def segmenter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    net = build_segmenter(LRASPP, 3)
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    net.train()(torch.rand(4, 3, 64, 64))  # without statistics, its outputs hardly depend on the image
    return write_torchvision(tmp_path_factory.mktemp("weights") / "best.pt", "segment", LRASPP, net)


def image(height: int = 120, width: int = 160, seed: int = 0) -> Any:
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    return cv2.resize(coarse, (width, height))


def of(weights: Path) -> Model:
    return load(weights, device="cpu", precision="fp32")


def test_python_and_the_command_find_the_same_boxes(
    detector: Path, folder: Path, run_trainer: Callable[..., tuple[int, str, str]]
) -> None:
    (folder / "images").mkdir()
    for k in range(2):
        cv2.imwrite(f"images/{k}.png", image(seed=k))
    model = of(detector)
    found = list(model.predict("images/", conf=CONF, max_det=9))
    assert [each.source for each in found] == ["images/0.png", "images/1.png"]
    options = ("--device", "cpu", "--precision", "fp32", "--conf", CONF, "--max-det", 9, "--json", "--nosave")
    code, out, _ = run_trainer("predict", "--weights", detector, "images", *options)
    assert code == 0
    for each, line in zip(found, out.splitlines(), strict=True):
        assert 0 < len(each.boxes) <= 9
        assert each.names == [model.names[c] for c in each.classes]
        boxes = json.loads(line)["boxes"]
        assert [box["name"] for box in boxes] == each.names
        np.testing.assert_allclose([box["xyxy"] for box in boxes], each.boxes, atol=0.01)
        np.testing.assert_allclose([box["score"] for box in boxes], each.scores, atol=1e-6)


def test_arrays_are_taken_as_opencv_reads_them(detector: Path) -> None:
    cv2.imwrite("a.png", image())
    bgr = cv2.imread("a.png")
    assert bgr is not None
    model = of(detector)
    path, array, *listed = (
        *model.predict(Path("a.png"), conf=CONF),
        *model.predict(bgr, conf=CONF),
        *model.predict([bgr, "a.png"], conf=CONF),
    )
    for each in (array, *listed):
        np.testing.assert_array_equal(each.boxes, path.boxes)
        np.testing.assert_array_equal(each.rgb, bgr[..., ::-1])
    assert (array.source, array.frame) == ("", None)
    assert not np.array_equal(path.rgb, bgr)


def test_the_options_limit_what_is_found(detector: Path) -> None:
    model = of(detector)
    array = image()

    def found(**options: Any) -> Any:
        return next(model.predict(array, **{"conf": CONF, **options}))

    every = found()
    assert set(every.names) == {"green", "red"}
    for classes in ("red", 1, [1], ["red"], "1"):
        assert set(found(classes=classes).names) == {"red"}
    assert len(found(max_det=3).boxes) == 3
    assert found(conf=float(every.scores[0]) + 0.01).boxes.shape == (0, 4)
    assert len(found(iou=0.05).boxes) < len(every.boxes)
    assert not np.array_equal(found(imgsz=128).boxes, every.boxes)


def test_a_video_is_predicted_frame_by_frame(detector: Path) -> None:
    writer = cv2.VideoWriter("in.avi", cv2.VideoWriter.fourcc(*"MJPG"), 12.5, (160, 120))
    for k in range(3):
        writer.write(image(seed=k))
    writer.release()
    found = of(detector).predict("in.avi")
    assert [(each.source, each.frame, each.rgb.shape) for each in found] == [
        ("in.avi", number, (120, 160, 3)) for number in (1, 2, 3)
    ]


def test_a_classifier_scores_all_classes(
    classifier: Path, folder: Path, run_trainer: Callable[..., tuple[int, str, str]]
) -> None:
    cv2.imwrite("a.png", image())
    (found,) = of(classifier).predict("a.png")
    assert (found.names, found.classes.tolist()) == (["dog", "10", "cat"], [1, 2, 0])
    assert list(found.scores) == sorted(found.scores, reverse=True)
    assert found.scores.sum() == pytest.approx(1)
    assert (found.boxes, found.mask) == (None, None)
    (small,) = of(classifier).predict("a.png", imgsz=32)
    assert not np.array_equal(small.scores, found.scores)
    command = ("predict", "--weights", classifier, "a.png", "--device", "cpu", "--precision", "fp32")
    code, out, _ = run_trainer(*command, "--json")
    assert code == 0
    classes = json.loads(out)["classes"]
    assert [each["name"] for each in classes] == found.names
    assert [each["score"] for each in classes] == pytest.approx(found.scores.tolist(), abs=1e-5)
    drawn = cv2.imread("runs/predict/a.png")
    assert drawn is not None
    assert not np.array_equal(drawn, image())
    code, out, _ = run_trainer(*command)
    assert out.splitlines()[0].startswith(f"a.png: dog {found.scores[0]:.2f} (")
    assert out.splitlines()[-1] == "1 image: 1 dog -> runs/predict2"


def test_a_segmentation_model_gives_every_pixel_a_class(
    segmenter: Path, folder: Path, run_trainer: Callable[..., tuple[int, str, str]]
) -> None:
    wide = image(32, 64)  # is not scaled: its longer side is that of the training
    cv2.imwrite("a.png", wide)
    (found,) = of(segmenter).predict("a.png")
    net = build_segmenter(LRASPP, 3)
    net.load_state_dict(torch.load(segmenter, weights_only=True)["ema"])
    padded = np.full((64, 64, 3), 114, np.uint8)
    padded[:32] = wide[..., ::-1]
    with torch.no_grad():
        logits = net.eval()(torch.from_numpy(padded).permute(2, 0, 1)[None].float() / 255)
    expected = logits[0].argmax(0)[:32].numpy()
    assert len(np.unique(expected)) > 1
    assert (found.mask == expected).mean() > 0.99  # sums may be rounded otherwise
    assert [found.mask.shape, found.mask.dtype] == [(32, 64), np.uint8]
    pixels = [int((found.mask == c).sum()) for c in found.classes]
    assert pixels == sorted(pixels, reverse=True)
    assert sum(pixels) == 32 * 64
    assert found.names == [NAMES[c] for c in found.classes]
    (large,) = of(segmenter).predict(cv2.resize(wide, (320, 160)))
    assert large.mask.shape == (160, 320)
    assert (cv2.resize(large.mask, (64, 32), interpolation=cv2.INTER_NEAREST) == found.mask).mean() > 0.8
    command = ("predict", "--weights", segmenter, "a.png", "--device", "cpu", "--precision", "fp32", "--json")
    code, out, _ = run_trainer(*command, "--save-masks")
    assert code == 0
    assert [each["pixels"] for each in json.loads(out)["classes"]] == pixels
    written = cv2.imread("runs/predict/masks/a.png", cv2.IMREAD_UNCHANGED)
    np.testing.assert_array_equal(written, found.mask)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sources": "gone.jpg"}, "--source gone.jpg: no such file or folder"),
        ({"sources": []}, "an empty list of sources"),
        ({"sources": 3}, "predict() got int"),
        ({"sources": np.zeros((8, 8, 3), np.float32)}, "shape (8, 8, 3) and type float32 is not an image"),
        ({"sources": np.zeros((8, 8), np.uint8)}, "shape (8, 8) and type uint8 is not an image"),
        ({"conf": 2}, "--conf must be"),
        ({"conf": "0.3"}, "--conf must be a number, not '0.3'"),
        ({"max_det": 1.5}, "--max-det must be a whole number, not 1.5"),
        ({"classes": ["blue"]}, "--classes blue: no such class"),
        ({"classes": 2}, "--classes 2: no such class"),
        ({"classes": []}, "--classes must be names or numbers, not []"),
        ({"imgsz": 100}, "--imgsz 100 is not a multiple of 32"),
    ],
)
def test_wrong_arguments_are_refused_at_once(detector: Path, options: dict[str, Any], said: str) -> None:
    model = of(detector)
    with pytest.raises(TrainerError) as error:
        model.predict(**{"sources": image(), **options})
    assert said in error.value.message


def test_options_of_another_task_are_refused(
    classifier: Path,
    segmenter: Path,
    detector: Path,
    folder: Path,
    run_trainer: Callable[..., tuple[int, str, str]],
) -> None:
    with pytest.raises(TrainerError, match="--iou has no effect on weights of --task classify"):
        of(classifier).predict(image(), iou=0.5)
    with pytest.raises(TrainerError, match="--cfg has no effect on weights of --task segment"):
        load(segmenter, device="cpu", cfg="own:Net")
    cv2.imwrite("a.png", image())
    for weights, option in ((segmenter, "--save-txt"), (detector, "--save-masks")):
        code, _, err = run_trainer("predict", "--weights", weights, "a.png", "--device", "cpu", option)
        assert (code, f"error: {option} has no effect on weights of --task" in err) == (2, True), err
    assert not (folder / "runs").exists()


def test_an_unreadable_image_raises_in_its_turn(detector: Path, folder: Path) -> None:
    cv2.imwrite("a.png", image())
    (folder / "b.jpg").write_bytes(b"\xff\xd8\xff no jpeg")
    found = of(detector).predict(["a.png", "b.jpg"])
    assert next(found).source == "a.png"
    with pytest.raises(TrainerError, match=r"^b\.jpg: not an image that can be decoded$"):
        next(found)


def test_loading_executes_nothing_of_the_file(folder: Path) -> None:
    torch.save({**CONTENT, "ema": Trap()}, "trap.pt")
    torch.save({**CONTENT, "task": "pose"}, "pose.pt")
    torch.save({**CONTENT, "task": "classify"}, "other.pt")
    for name, said in (
        ("trap.pt", "--weights trap.pt: "),
        ("pose.pt", "their task, pose, is unknown"),
        ("other.pt", "does not name a torchvision model"),
        ("gone.pt", "no such file"),
    ):
        with pytest.raises(TrainerError, match=said):
            load(name, device="cpu")
    assert not (folder / "sprung").exists()
