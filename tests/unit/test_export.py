"""Exported files run in ONNX Runtime and TorchScript and compute the model's outputs."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from tests.unit.trainer_process import TINY
from trainer.detectors.yolo import decode
from trainer.errors import TrainerError
from trainer.inference.export import Decoded, export
from trainer.models.yolo import build_yolo, load_cfg
from trainer.weights import checkpoint_file

NAMES = ["cat", "dog"]
DEFAULTS: dict[str, Any] = {"imgsz": None, "batch": 1, "dynamic": False, "image": "", "out": ""}


@pytest.fixture(scope="module")
def best(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("run") / "best.pt")


def write_checkpoint(path: Path, cfg_name: str = "yolov5n.yaml", spoil: float = 0.0) -> Path:
    torch.manual_seed(0)
    cfg = load_cfg(cfg_name)
    state = build_yolo(cfg, nc=len(NAMES)).state_dict()
    ends = "m.0.bias" if "anchors" in cfg else "cv3.0.2.bias"
    for bias in (name for name in state if name.endswith(ends)):
        state[bias] += 7 + spoil  # scores well above 0
    content = {
        "format": checkpoint_file.FORMAT,
        "model": {},
        "ema": state,
        "optimizer": {},
        "epoch": 1,
        "step": 1,
    }
    checkpoint_file.save(path, {**content, "hyp": {}, "cfg": cfg, "names": NAMES, "imgsz": 96})
    return path


def expected(best: Path, images: torch.Tensor) -> tuple[Any, Any]:
    """Return boxes and scores of the model before fusing."""
    content = checkpoint_file.load(str(best))
    model = build_yolo(content["cfg"], nc=len(NAMES))
    checkpoint_file.transfer(model, content["ema"], "")
    with torch.no_grad():
        boxes, scores = Decoded(model, decode).eval()(images)
    return boxes.numpy(), scores.numpy()


@pytest.mark.parametrize(
    ("cfg", "dynamic"),
    [(TINY, True), ("yolov8n.yaml", False), ("yolo11n.yaml", False), ("yolo26n.yaml", True)],
    ids=["tiny", "yolov8n", "yolo11n", "yolo26n"],
)
def test_onnx_computes_what_the_model_computes(cfg: str, dynamic: bool, tmp_path: Path) -> None:
    import onnx
    import onnxruntime

    best = write_checkpoint(tmp_path / "best.pt", cfg)
    done = export(str(best), "onnx", **{**DEFAULTS, "dynamic": dynamic})
    assert done.path == best.with_suffix(".onnx")
    assert sorted(p.name for p in best.parent.iterdir()) == ["best.onnx", "best.pt"]
    session = onnxruntime.InferenceSession(str(done.path), providers=["CPUExecutionProvider"])
    for shape in ((1, 3, 96, 96), (3, 3, 64, 160))[: 1 + dynamic]:
        images = torch.rand(shape)
        boxes, scores = session.run(["boxes", "scores"], {"images": images.numpy()})
        right = expected(best, images)
        assert right[1].max() > 0.2
        np.testing.assert_allclose(boxes, right[0], atol=1e-2)
        np.testing.assert_allclose(scores, right[1], atol=1e-4)
    about = {entry.key: entry.value for entry in onnx.load(done.path).metadata_props}
    assert json.loads(about["names"]) == NAMES


@pytest.mark.filterwarnings("ignore:.*torch.jit.load")
def test_torchscript_from_the_command_line_with_an_image(best: Path, tmp_path: Path, run_trainer) -> None:
    image = tmp_path / "mine.jpg"
    cv2.imwrite(str(image), np.random.default_rng(0).integers(0, 255, (50, 70, 3), np.uint8))
    file = tmp_path / "mine.torchscript"
    arguments = ["--weights", str(best), "--format", "torchscript", "--batch", "2", "--imgsz", "64"]
    arguments += ["--image", str(image), "--out", str(file), "--json"]
    code, out, err = run_trainer("export", *arguments)
    assert code == 0, err
    result = json.loads(out)
    assert result["path"] == str(file)
    assert result["shape"] == [2, 3, 64, 64]
    assert result["box_difference"] < 0.01
    extra = {"names": ""}
    loaded = torch.jit.load(str(file), _extra_files=extra)
    assert json.loads(extra["names"]) == NAMES
    images = torch.rand(2, 3, 64, 64)
    for mine, right in zip(loaded(images), expected(best, images), strict=True):
        np.testing.assert_allclose(mine.numpy(), right, atol=1e-2)


@pytest.mark.parametrize("name", ["other.pt", "link.pt", "image.png"])
def test_no_checkpoint_and_no_input_is_replaced(best: Path, tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path / "other.pt")
    (tmp_path / "link.pt").symlink_to(best)
    cv2.imwrite(str(tmp_path / "image.png"), np.zeros((64, 64, 3), np.uint8))
    before = (tmp_path / name).read_bytes()
    with pytest.raises(TrainerError, match="which the export would replace"):
        export(
            str(best),
            "torchscript",
            **{**DEFAULTS, "out": str(tmp_path / name), "image": str(tmp_path / "image.png")},
        )
    assert (tmp_path / name).read_bytes() == before


def test_an_earlier_export_is_replaced(best: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.pt"  # TorchScript may have this suffix
    for _ in range(2):
        assert export(str(best), "torchscript", **{**DEFAULTS, "out": str(out)}).path == out


def test_a_model_with_nan_outputs_leaves_no_file(tmp_path: Path) -> None:
    broken = write_checkpoint(tmp_path / "broken.pt", spoil=float("nan"))
    with pytest.raises(TrainerError, match="not written"):
        export(str(broken), "torchscript", **DEFAULTS)
    assert [p.name for p in tmp_path.iterdir()] == ["broken.pt"]


def test_bad_input_is_an_error_and_leaves_no_file(
    best: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, change, message in (
        ("tflite", {}, "--format tflite"),
        ("torchscript", {"imgsz": 100}, "not a multiple of 32"),
        ("torchscript", {"batch": 0}, "--batch must be"),
        ("torchscript", {"image": "none.jpg"}, "none.jpg"),
        ("torchscript", {"out": str(tmp_path / "no" / "folder.x")}, "cannot be written"),
        ("torchscript", {"out": str(best)}, "best.pt: it is a checkpoint, which the export would replace"),
        ("torchscript", {"imgsz": 0}, "--imgsz 0 is not a multiple of 32"),
    ):
        before = best.read_bytes()
        with pytest.raises(TrainerError, match=message):
            export(str(best), kind, **{**DEFAULTS, **change})
        assert best.read_bytes() == before
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "onnxruntime")
    with pytest.raises(TrainerError, match="package onnxruntime") as error:
        export(str(best), "onnx", **DEFAULTS)
    assert "pip install onnx onnxruntime onnxscript" in error.value.hint
    assert not list(tmp_path.iterdir())
