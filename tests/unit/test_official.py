import io
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.official_file import write_official
from trainer.errors import TrainerError
from trainer.inference.trained import load_trained
from trainer.models.yolo import build_yolo, check_cfg, load_cfg
from trainer.weights import checkpoint_file


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_official(tmp_path_factory.mktemp("release") / "yolov5n.pt")


def test_a_release_file_loads_without_its_classes(release: Path) -> None:
    with pytest.raises(pickle.UnpicklingError, match="DetectionModel"):  # it is what it claims to be
        torch.load(release, weights_only=True)
    content = checkpoint_file.load(str(release))
    assert "models" not in sys.modules
    assert content["names"][:2] == ["class 0", "class 1"]
    assert content["imgsz"] == 640
    assert content["cfg"]["anchors"] == load_cfg("yolov5n.yaml")["anchors"]
    assert {v.dtype for v in content["ema"].values()} == {torch.float32, torch.int64}
    assert (
        sum(v.numel() for k, v in content["ema"].items() if "running" not in k and "num_b" not in k)
        == 1_872_157 + 18
    )
    model = build_yolo(check_cfg(content["cfg"], str(release)), nc=80)
    assert checkpoint_file.transfer(model, content["ema"], str(release)) == (349, 349)

    # The tensors themselves: those that the file was written from, rounded to half precision.
    torch.manual_seed(0)
    origin = build_yolo(load_cfg("yolov5n.yaml"), nc=80)
    for key, value in origin.state_dict().items():
        if key.endswith("running_mean"):
            value.uniform_(-0.1, 0.1)
    origin.half().float()
    image = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        mine, his = (m.detect.decode(m.eval()(image)) for m in (model, origin))
    assert torch.equal(mine, his)


def test_a_running_jobs_file_gives_its_average_and_the_heads_anchors(tmp_path: Path) -> None:
    options = {"nc": 2, "ema_seed": 1, "anchor_gain": 1.5, "names_as_dict": True, "model_class": "Model"}
    content = checkpoint_file.load(str(write_official(tmp_path / "last.pt", **options)))
    torch.manual_seed(1)
    average = build_yolo(load_cfg("yolov5n.yaml"), nc=2).state_dict()["model.0.conv.weight"]
    assert torch.equal(content["ema"]["model.0.conv.weight"], average.half().float())
    assert content["names"] == ["class 0", "class 1"]
    assert content["cfg"]["anchors"][0] == [15, 19.5, 24, 45, 49.5, 34.5]
    assert content["cfg"]["nc"] == 2


@pytest.mark.parametrize("cfg", ["yolov5nu.yaml", "yolov8n.yaml", "yolo11n.yaml", "yolo26n.yaml"])
def test_a_network_of_ultralytics_is_described_by_its_layers(cfg: str, tmp_path: Path) -> None:
    file = write_official(tmp_path / "best.pt", cfg=cfg, nc=3, names_as_dict=True, imgsz=200)
    with pytest.raises(pickle.UnpicklingError, match="ultralytics"):  # it is what it claims to be
        torch.load(file, weights_only=True)
    trained = load_trained(str(file))  # every tensor fits
    assert "ultralytics" not in sys.modules
    assert trained.names == ["class 0", "class 1", "class 2"]
    assert trained.imgsz == 224
    torch.manual_seed(0)
    origin = build_yolo(load_cfg(cfg), nc=3)
    for key, value in origin.state_dict().items():
        if key.endswith("running_mean"):
            value.uniform_(-0.1, 0.1)
    origin.half().float()
    image = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        mine, his = (m.detect.decode(m.eval()(image)) for m in (trained.model, origin))
    assert torch.equal(mine, his)


def test_other_activations_are_refused(tmp_path: Path) -> None:
    file = write_official(tmp_path / "best.pt", cfg="yolov8n.yaml", nc=3, act="Identity")
    with pytest.raises(TrainerError, match="another activation than SiLU"):
        checkpoint_file.load(str(file))


class Call:
    """Calls a function when it is unpickled the careless way."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.function = function
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


class models_yolo_Surprise:
    pass


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (Call(os.system, "touch sprung"), f"{os.system.__module__}.system"),
        ({"model": Call(os.mkdir, "sprung")}, f"{os.mkdir.__module__}.mkdir"),
        ({"model": Call(eval, "open('sprung', 'w')")}, "builtins.eval"),
        ({"model": Call(getattr, torch.nn.Conv2d, "forward")}, "builtins.getattr"),
        ({"ema": torch.nn.Linear(1, 1)}, "torch.nn.modules.linear.Linear"),
        ({"ema": models_yolo_Surprise()}, "tests.unit.test_official.models_yolo_Surprise"),
    ],
)
def test_classes_not_on_the_list_are_named_and_never_run(
    content: Any, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, "trap.pt")
    with pytest.raises(TrainerError) as error:
        checkpoint_file.load("trap.pt")
    assert f"the file refers to {named}, " in error.value.message
    assert "nothing in it was run" in error.value.message
    assert [p.name for p in tmp_path.iterdir()] == ["trap.pt"]


def rewrite(source: Path, target: Path, change: Callable[[str, bytes], bytes], compression: int = 0) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))


def test_a_broken_file_is_one_line(release: Path, tmp_path: Path) -> None:
    whole = release.read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    (tmp_path / "flipped.pt").write_bytes(flipped)
    rewrite(release, tmp_path / "short.pt", lambda name, data: data[:-2] if "/data/7" in name else data)
    rewrite(release, tmp_path / "packed.pt", lambda _, data: data, zipfile.ZIP_DEFLATED)
    rewrite(
        release, tmp_path / "half.pt", lambda name, data: data[:999] if name.endswith("data.pkl") else data
    )
    (tmp_path / "page.pt").write_text("<html>Not found</html>")
    old = io.BytesIO()
    torch.save({"model": models_yolo_Surprise()}, old, _use_new_zipfile_serialization=False)
    (tmp_path / "old.pt").write_bytes(old.getvalue())
    torch.save(models_yolo_Surprise, tmp_path / "class.pt")
    torch.save({"model": torch.nn.Sequential()}, tmp_path / "empty.pt")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(TrainerError, match="--weights") as error:
            checkpoint_file.load(str(path))
        print(error.value.message)
        assert str(path) in error.value.message
        assert "\n" not in error.value.message
        assert error.value.hint


def test_a_tensor_cannot_be_larger_than_its_storage(tmp_path: Path) -> None:
    """A few bytes that describe a tensor of terabytes would end the process, not the reading."""
    model = torch.nn.Sequential()
    model.register_buffer("huge", torch.zeros(1).expand(1 << 40))
    torch.save({"date": torch.zeros(1).expand(1 << 40), "model": model}, tmp_path / "huge.pt")
    with pytest.raises(TrainerError, match="larger than its storage"):
        checkpoint_file.load(str(tmp_path / "huge.pt"))
