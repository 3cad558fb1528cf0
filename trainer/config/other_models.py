"""Models of the field: what --cfg accepts, and well-known names that this trainer does not have."""

import re

from trainer.config.families import named_families
from trainer.errors import TrainerError

PAGE = "docs/how-to/from-ultralytics.md"
# Names as their authors write them, by a pattern of what users type, in lower case and without separators.
_OTHERS = {
    r"yolov?3": "YOLOv3",
    r"yolov?4": "YOLOv4",
    r"yolov?6": "YOLOv6",
    r"yolov?7": "YOLOv7",
    r"yolov?9|gelan": "YOLOv9",
    r"yolov?10": "YOLOv10",
    r"yolov?12": "YOLO12",
    r"yolov?13": "YOLOv13",
    r"yolonas": "YOLO-NAS",
    r"yolor": "YOLOR",
    r"yolox": "YOLOX",
    r"yoloe\d*": "YOLOE",
    r"yolo.*world": "YOLO-World",
    r"ppyolo": "PP-YOLO",
    r"damoyolo": "DAMO-YOLO",
    r"goldyolo": "Gold-YOLO",
    r"rtdetr(?!v2)": "RT-DETR",
    r"rfdetr": "RF-DETR",
    r"deim": "DEIM",
    r"efficientdet": "EfficientDet",
    r"nanodet": "NanoDet",
}


def known_models() -> str:
    """Return a text that lists what --cfg accepts for a detector."""
    *families, last = named_families()
    return (
        "yolov5n.yaml, yolov8n.yaml, yolo11n.yaml or yolo26n.yaml (n, s, m, l or x), your own file, or a model of "
        f"{', '.join(families)} or {last}, such as dfine-n"
    )


def other_model(option: str, value: str) -> TrainerError | None:
    """Return an error if `value` of --cfg or --weights names a model that this trainer does not have, else None.

    `value` is a name, a path or a URL, such as yolov10n.yaml or rtdetr-l.pt.
    """
    file = re.split(r"[?#]", value)[0].rstrip("/").rpartition("/")[2]
    typed = re.sub(r"[^a-z0-9]", "", file.lower())
    name = next((name for pattern, name in _OTHERS.items() if re.match(rf"({pattern})(?!\d)", typed)), "")
    if not name:
        return None
    return TrainerError(
        f"{option} {value}: this trainer does not have {name}",
        f"use {known_models()}; to run other trainers: {PAGE}",
    )
