from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from trainer.config import PRESETS, STANDARD, Hyp, Settings, check_data_path, layers, load_hyp, preset_for, smoothed
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
    "schedule": "linear",
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
        ({"cache": "tape"}, "--cache tape"),
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


LOW = {
    "lr0": 0.01,
    "lrf": 0.01,
    "momentum": 0.937,
    "weight_decay": 5e-4,
    "warmup_epochs": 3,
    "warmup_momentum": 0.8,
    "warmup_bias_lr": 0.1,
    "box": 0.05,
    "cls": 0.5,
    "obj": 1.0,
    "cls_pw": 1,
    "obj_pw": 1,
    "anchor_t": 4.0,
    "fl_gamma": 0,
    "hsv_h": 0.015,
    "hsv_s": 0.7,
    "hsv_v": 0.4,
    "degrees": 0,
    "shear": 0,
    "perspective": 0,
    "flipud": 0,
    "translate": 0.1,
    "scale": 0.5,
    "fliplr": 0.5,
    "mosaic": 1.0,
    "mixup": 0,
    "copy_paste": 0,
}
MED = {**LOW, "lrf": 0.1, "cls": 0.3, "obj": 0.7, "scale": 0.9, "mixup": 0.1}


@pytest.mark.parametrize(("name", "values"), [("low", LOW), ("med", MED), ("high", {**MED, "copy_paste": 0.1})])
def test_the_sets_low_med_and_high_have_yolov5s_values_whatever_the_data(
    name: str, values: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # they belong to the package, not to a folder
    hyp = load_hyp(name, PRESETS["digits"].hyp)
    assert {key: getattr(hyp, key) for key in values} == values
    assert hyp == Hyp(**values)
    Path(name).write_text("lr0: 0.5")
    assert load_hyp(f"./{name}", Hyp()).lr0 == 0.5


def test_a_hyp_file_changes_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "hyp.yaml"
    path.write_text("lr0: 1e-3  # text to YAML\nmosaic: 1\niou_t: 0.2\nclose_mosaic: 5\n")
    hyp = load_hyp(str(path), Hyp(box=0.07))
    assert hyp == Hyp(box=0.07, lr0=0.001, mosaic=1.0, close_mosaic=5)


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", ()), ("0", ()), ("3", (0, 1, 2)), ("0 2 5", (0, 2, 5)), ("0,2,5", (0, 2, 5)), ("4,", (0, 1, 2, 3))],
)
def test_one_number_freezes_the_first_layers_and_several_freeze_these(text: str, expected: tuple[int, ...]) -> None:
    assert layers(text) == expected


def test_what_is_no_layer_and_no_share_is_an_error() -> None:
    with pytest.raises(TrainerError, match="--freeze head"):
        layers("head")
    with pytest.raises(TrainerError, match=r"--label-smoothing is 1.5"):
        smoothed(Hyp(), 1.5)
    assert smoothed(Hyp(), 0.1).label_smoothing == 0.1
