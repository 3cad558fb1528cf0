from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from trainer.config import PRESETS, STANDARD, Hyp, Settings, check_data_path, load_hyp, preset_for
from trainer.errors import TrainerError

GOOD: dict[str, Any] = {
    "data": "digits",
    "cfg": "",
    "weights": "",
    "hyp": Hyp(),
    "epochs": 1,
    "batch": 8,
    "imgsz": 64,
    "device": "cpu",
    "optimizer": "SGD",
    "workers": 0,
    "seed": 0,
    "project": "runs",
    "name": "train",
    "exist_ok": False,
    "cos_lr": False,
    "precision": "auto",
    "val": True,
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epochs": 0}, "--epochs is 0"),
        ({"batch": 0}, "--batch is 0"),
        ({"imgsz": 100}, "--imgsz 100"),
        ({"imgsz": 0}, "--imgsz 0"),
        ({"workers": -1}, "--workers"),
        ({"seed": -1}, "--seed"),
        ({"optimizer": "Lion"}, "--optimizer Lion"),
        ({"precision": "int8"}, "--precision int8"),
        ({"name": "a/b"}, "--name"),
        ({"name": ""}, "--name"),
    ],
)
def test_bad_settings_name_their_option(change: dict[str, Any], said: str) -> None:
    Settings(**GOOD)
    with pytest.raises(TrainerError) as error:
        Settings(**{**GOOD, **change})
    assert said in error.value.message


def test_digits_have_a_preset_and_everything_else_yolov5s_defaults() -> None:
    assert preset_for("digits") is PRESETS["digits"]
    assert preset_for("mine/data.yaml") is STANDARD
    assert (STANDARD.imgsz, STANDARD.batch, STANDARD.epochs, STANDARD.optimizer) == (640, 16, 100, "SGD")
    low = asdict(STANDARD.hyp)
    assert (low["lr0"], low["lrf"], low["momentum"], low["weight_decay"]) == (0.01, 0.01, 0.937, 5e-4)
    assert (low["box"], low["cls"], low["obj"], low["anchor_t"]) == (0.05, 0.5, 1.0, 4.0)
    assert (low["mosaic"], low["scale"], low["translate"], low["fliplr"]) == (1.0, 0.5, 0.1, 0.5)
    assert PRESETS["digits"].hyp.fliplr == 0  # a mirrored digit is another sign


def test_a_hyp_file_changes_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "hyp.yaml"
    path.write_text("lr0: 1e-3  # text to YAML\nmosaic: 1\niou_t: 0.2\n")
    hyp = load_hyp(str(path), Hyp(box=0.07))
    assert hyp == Hyp(box=0.07, lr0=0.001, mosaic=1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr00: 0.1", "unknown key 'lr00'"),
        ("copy_paste: 1.1", "copy_paste is 1.1"),
        ("lr0: fast", "lr0 is 'fast'"),
        ("lr0: true", "lr0 is True"),
        ("lr0: .nan", "lr0 is nan"),
        ("lr0: -1", "lr0 is -1"),
        ("mosaic: 1.5", "mosaic is 1.5"),
        ("anchor_t: 1", "anchor_t"),
        ("- 1", "name: number"),
        ("a: [", "not a YAML file"),
        ("!!python/object/apply:os.system ['true']", "not a YAML file"),
    ],
)
def test_bad_hyp_files(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "hyp.yaml"
    path.write_text(text)
    with pytest.raises(TrainerError) as error:
        load_hyp(str(path), Hyp())
    assert said in error.value.message
    assert str(path) in error.value.message


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="No such file"):
        load_hyp(str(tmp_path / "none.yaml"), Hyp())
    with pytest.raises(TrainerError, match="no such file"):
        check_data_path(str(tmp_path / "data.yaml"))
    with pytest.raises(TrainerError, match="a folder"):
        check_data_path(str(tmp_path))
    check_data_path("digits")
