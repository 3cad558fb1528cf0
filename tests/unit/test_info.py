"""`trainer info`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainer.cli import app
from trainer.errors import TrainerError


def info(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["info", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


# GFLOPs of the convolutions at 640 px, a multiply-add as 2
GFLOPS = {
    "yolov5n": 4.47,
    "yolov5s": 16.43,
    "yolov5m": 48.87,
    "yolov5l": 108.99,
    "yolov5x": 205.45,
    "yolov5nu": 7.7,  # this and the next: published, rounded
    "yolov5s6": 16.8,
    "yolov8n": 8.7,
    "yolo11n": 6.5,
}


@pytest.mark.parametrize("name", GFLOPS)
def test_gflops_equal_the_published_ones(name: str) -> None:
    content = json.loads(info("--cfg", f"{name}.yaml", "--json"))
    digits = len(str(GFLOPS[name]).split(".")[1])
    assert round(content["flops"] / 1e9, digits) == GFLOPS[name]
    assert content["gradient_bytes"] == 4 * content["parameters"]
    assert content["parameters"] == sum(layer["parameters"] for layer in content["layers"])


def test_gflops_grow_with_the_image() -> None:
    small, large = (json.loads(info("--imgsz", str(side), "--json"))["flops"] for side in (320, 640))
    assert large == 4 * small


def test_table_of_layers_and_totals() -> None:
    lines = info().splitlines()
    assert lines[0].split() == ["0", "from", "-1", "Conv", "1,760"]
    assert lines[-2].startswith("25 layers, 1,872,157 parameters (1,867,405 fused for inference), 80 classes")
    assert lines[-1] == "4.47 GFLOPs for an image of 640 px, 7.5 MB of gradients per step between ranks"


def test_a_model_of_python_code_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_to_list.py").write_text("def net(nc):\n    raise NotImplementedError\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TrainerError, match="--cfg mine_to_list:net: a model of Python code") as error:
        info("--cfg", "mine_to_list:net")
    assert "yolov5n.yaml" in error.value.hint


def test_a_side_that_is_no_multiple_of_the_stride_is_an_error() -> None:
    with pytest.raises(TrainerError, match="--imgsz 96 is not a multiple of 64") as error:
        info("--cfg", "yolov5s6.yaml", "--imgsz", "96")
    assert error.value.hint == "use --imgsz 128"
