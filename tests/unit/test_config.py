import dataclasses
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainer.cli import app
from trainer.config import Hyp, Settings, family_of, load_hyp, preset_for
from trainer.config.settings import layers
from trainer.errors import TrainerError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "--epochs must be"),
        ({"batch": 0}, "--batch must be"),
        ({"imgsz": 100}, "--imgsz 100"),
        ({"imgsz": 0}, "--imgsz 0"),
        ({"workers": -1}, "--workers"),
        ({"seed": -1}, "--seed"),
        ({"seed": 2**64}, "--seed must be 18446744073709551615 or less, not 18446744073709551616"),
        ({"seed": -(10**400)}, "--seed must be"),
        ({"optimizer": "Lion"}, "--optimizer Lion"),
        ({"precision": "int8"}, "--precision int8"),
        ({"cache": "tape"}, "--cache tape"),
        ({"name": "a/b"}, "--name"),
        ({"name": ""}, "--name"),
        ({"freeze": "head"}, "--freeze head"),
        ({"label_smoothing": 1.5}, "--label-smoothing must be"),
        ({"save_every": "soon"}, "--save-every soon"),
        ({"data": "none/data.yaml", "hyp": "none.yaml"}, "none.yaml: No such file"),
    ],
)
def test_bad_settings_name_their_option(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainerError) as error:
        Settings(**change)
    assert message in error.value.message


def test_digits_have_a_preset_and_everything_else_yolov5s_defaults() -> None:
    made = Settings(data="mine/data.yaml")
    assert (made.imgsz, made.batch, made.epochs, made.optimizer, made.schedule) == (
        640,
        16,
        100,
        "SGD",
        "linear",
    )
    low = asdict(made.hyp)
    assert (low["lr0"], low["lrf"], low["momentum"], low["weight_decay"]) == (0.01, 0.01, 0.937, 5e-4)
    assert (low["box"], low["cls"], low["obj"], low["anchor_t"]) == (0.05, 0.5, 1.0, 4.0)
    assert (low["mosaic"], low["scale"], low["translate"], low["fliplr"]) == (1.0, 0.5, 0.1, 0.5)
    digits = Settings(epochs=3)
    assert (digits.imgsz, digits.epochs) == (128, 3)
    assert digits.hyp.fliplr == 0  # a mirrored digit is another sign


def test_json_keeps_the_settings() -> None:
    """They are sent to ranks, and stored in checkpoints."""
    made = Settings(task="classify", freeze="0 1", label_smoothing=0.1, save_every="10min")
    assert made.hyp.label_smoothing == 0.1
    assert Settings(**json.loads(json.dumps(asdict(made)))) == made


LOW = {
    "lr0": 0.01,
    "lrf": 0.01,
    "momentum": 0.937,
    "weight_decay": 5e-4,
    "warmup_epochs": 3,
    "warmup_momentum": 0.8,
}
LOW |= {"warmup_bias_lr": 0.1, "box": 0.05, "cls": 0.5, "cls_pw": 1, "obj": 1.0, "obj_pw": 1, "anchor_t": 4.0}
LOW |= {
    "hsv_h": 0.015,
    "hsv_s": 0.7,
    "hsv_v": 0.4,
    "translate": 0.1,
    "scale": 0.5,
    "fliplr": 0.5,
    "mosaic": 1.0,
}
LOW |= dict.fromkeys(("fl_gamma", "degrees", "shear", "perspective", "flipud", "mixup", "copy_paste"), 0)
MED = {**LOW, "lrf": 0.1, "cls": 0.3, "obj": 0.7, "scale": 0.9, "mixup": 0.1}


@pytest.mark.parametrize(
    ("name", "values"), [("low", LOW), ("med", MED), ("high", {**MED, "copy_paste": 0.1})]
)
def test_low_med_and_high_have_yolov5s_values_for_any_data(
    name: str, values: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # they belong to the package, not to a folder
    hyp = load_hyp(name, preset_for("digits").hyp)
    assert {key: getattr(hyp, key) for key in values} == values
    assert hyp == Hyp(**values)
    Path(name).write_text("lr0: 0.5")
    assert load_hyp(f"./{name}", Hyp()).lr0 == 0.5


def test_a_hyp_file_changes_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "hyp.yaml"
    path.write_text("lr0: 1e-3  # text to YAML\nmosaic: 1\niou_t: 0.2\nclose_mosaic: 5\n")
    hyp = load_hyp(str(path), Hyp(box=0.07))
    assert hyp == Hyp(box=0.07, lr0=0.001, mosaic=1.0, close_mosaic=5)


@pytest.mark.parametrize(
    ("task", "cfg"), [("detect", ""), ("detect", "dfine-n"), ("classify", ""), ("segment", "")]
)
def test_the_printed_hyper_parameters_are_a_file_with_the_defaults(
    task: str, cfg: str, tmp_path: Path
) -> None:
    path = tmp_path / "hyp.yaml"
    path.write_text(CliRunner().invoke(app, ["hyp", "--task", task, "--cfg", cfg]).stdout)
    assert load_hyp(str(path), preset_for("", task, cfg).hyp) == preset_for("", task, cfg).hyp
    path.write_text(
        path.read_text().replace("# close_mosaic:", "close_mosaic: 3").replace("# pad:", "pad: 2")
    )
    changed = load_hyp(str(path), Hyp())
    assert {changed.close_mosaic, changed.pad} - {None} == {
        "detect": {3.0},
        "classify": {2.0},
        "segment": set(),
    }[task]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr00: 0.1", "yaml:1: unknown key `lr00`"),
        ("copy_paste: 1.1", "copy_paste must be"),
        ("dropout: 2", "dropout must be a probability"),
        ("lr0: fast", "lr0 must be"),
        ("lr0: true", "lr0 must be"),
        ("lr0: .nan", "lr0 must be"),
        ("lr0: -1", "lr0 must be"),
        ("lr0: 1\n\nlr0: 2", "yaml:3: `lr0` is already set in line 1"),
        ("mosaic: 1.5\nlr0: -1", "yaml:1: mosaic must be"),
        ("anchor_t: 1", "anchor_t"),
        ("- 1", "not a mapping of keys"),
        ("a: [", "not valid YAML"),
        ("!!python/object/apply:os.system ['true']", "not a mapping of keys"),
    ],
)
def test_bad_hyp_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hyp.yaml"
    path.write_text(text)
    with pytest.raises(TrainerError) as error:
        load_hyp(str(path), Hyp())
    assert message in error.value.message
    assert str(path) in error.value.message


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", ()), ("0", ()), ("3", (0, 1, 2)), ("0 2 5", (0, 2, 5)), ("0,2,5", (0, 2, 5)), ("4,", (0, 1, 2, 3))],
)
def test_one_number_freezes_the_first_layers_and_several_freeze_these(
    text: str, expected: tuple[int, ...]
) -> None:
    assert layers(text) == expected


@pytest.mark.parametrize("name", ["detr-mine.yaml", "dfine-n.yml", "torchvision:mine.yaml"])
def test_a_model_file_may_be_named_after_a_family(name: str) -> None:
    assert family_of(name) == ("", name)
    assert Settings(cfg=name).hyp == Settings().hyp


def test_a_family_has_its_own_preset_also_for_the_digits() -> None:
    own = Settings(cfg="torchvision:retinanet_resnet18_fpn")
    assert (own.hyp.lr0, own.hyp.warmup_epochs, own.batch, own.epochs) == (0.0005, 0.5, 16, 8)
    assert Settings(cfg="torchvision:retinanet_resnet18_fpn", data="x.yaml").optimizer == "AdamW"
    assert Settings(cfg="yolov5n.yaml") == dataclasses.replace(Settings(), cfg="yolov5n.yaml")
    assert Settings(cfg="torchvision:x", task="classify").hyp == Settings(task="classify").hyp
