"""Models of the field that this trainer does not have: --cfg and --weights say so, and what it has."""

from pathlib import Path

import pytest
import torch

from tests.unit.official_file import write_official
from trainer.config.other_models import PAGE, other_model
from trainer.detectors import load_weights, read_cfg
from trainer.errors import TrainerError


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("yolov3-tiny", "YOLOv3"),
        ("yolov7", "YOLOv7"),
        ("yolov9c", "YOLOv9"),
        ("yolov10n", "YOLOv10"),
        ("yolo12n", "YOLO12"),
        ("yolo_nas_s", "YOLO-NAS"),
        ("yolox-s", "YOLOX"),
        ("yoloe-11s", "YOLOE"),
        ("yolov8s-world", "YOLO-World"),
        ("rtdetr-l", "RT-DETR"),
        ("RF-DETR-base", "RF-DETR"),
    ],
)
def test_both_options_say_that_the_model_does_not_exist_here(typed: str, name: str) -> None:
    for option, read, values in (
        ("--cfg", read_cfg, (typed, f"{typed}.yaml", f"{typed}.pt")),
        ("--weights", load_weights, (typed, f"{typed}.pt", f"models/{typed}.pth")),
    ):
        for value in values:
            with pytest.raises(TrainerError) as error:
                read(value)
            assert error.value.message == f"{option} {value}: this trainer does not have {name}"
            assert "yolov5n.yaml" in error.value.hint
            assert PAGE in error.value.hint


def test_a_file_of_such_a_model_is_named_too(tmp_path: Path) -> None:
    pickled = write_official(tmp_path / "yolov10n.pt", model_class="AnotherModel")
    tensors = tmp_path / "yolox_s.pth"
    torch.save({"model": {"w": torch.ones(1)}}, tensors)
    for path, name in ((pickled, "YOLOv10"), (tensors, "YOLOX")):
        with pytest.raises(TrainerError, match=f"this trainer does not have {name}$"):
            load_weights(str(path))
    mine = write_official(tmp_path / "yolov9c.pt", nc=2)  # a network that it has, whatever the file is called
    assert len(load_weights(str(mine))["names"]) == 2


@pytest.mark.parametrize(
    "name", ["yolov5q.yaml", "yolov8n.yaml", "yolo11n", "yolo26x.pt", "rtdetrv2-r18", "yolov100"]
)
def test_names_near_those_of_this_trainer_are_no_other_models(name: str) -> None:
    assert other_model("--cfg", name) is None
