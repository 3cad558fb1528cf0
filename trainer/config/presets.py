"""Hyper-parameters, and the presets with the defaults of each task and dataset."""

import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from trainer.config import yaml_file
from trainer.config.faults import BadData


@dataclass(frozen=True)
class Hyp:
    """Hyper-parameters under the names of YOLOv5's hyp files; the defaults are its "low" set (sizes n and s)."""

    lr0: float = 0.01  # learning rate after the warm-up
    lrf: float = 0.01  # last learning rate as a share of lr0
    momentum: float = 0.937  # SGD momentum, Adam beta1
    weight_decay: float = 5e-4
    # Nominal batch: gradients of smaller batches accumulate up to about this many images; 0: no accumulation.
    nbs: float = 64.0
    ema_tau: float = 2000.0  # time constant of the ramp of the EMA decay, in updates
    warmup_epochs: float = 3.0
    warmup_momentum: float = 0.8
    warmup_bias_lr: float = 0.1
    backbone_lr: float = 1.0  # the backbone's learning rate as a share of the others', in families that have one
    clip_norm: float = 10.0  # largest norm of the gradients of a step
    box: float = 0.05  # gain of the box loss
    cls: float = 0.5  # gain of the class loss
    cls_pw: float = 1.0  # weight of positives in the class BCE
    obj: float = 1.0  # gain of the objectness loss
    obj_pw: float = 1.0  # weight of positives in the objectness BCE
    # The anchor-free head has separate gains: YOLOv5's files set box and cls for the anchor head.
    dfl_box: float = 7.5  # gain of its box loss
    dfl_cls: float = 0.5  # gain of its class loss
    dfl: float = 1.5  # gain of its distribution focal loss
    anchor_t: float = 4.0  # a box matches an anchor if no side differs by more than this factor
    fl_gamma: float = 0.0  # gamma of the focal loss, 0 is off
    label_smoothing: float = 0.0
    hsv_h: float = 0.015  # colour: hue, saturation, value, as fractions
    hsv_s: float = 0.7
    hsv_v: float = 0.4
    degrees: float = 0.0  # rotation, +- degrees
    translate: float = 0.1  # +- fraction of the side
    scale: float = 0.5  # +- gain
    shear: float = 0.0  # +- degrees
    perspective: float = 0.0  # +- fraction, 0 to 0.001
    flipud: float = 0.0  # probabilities from here on
    fliplr: float = 0.5
    mosaic: float = 1.0
    mixup: float = 0.0
    cutmix: float = 0.0  # classification: a rectangle of another image
    copy_paste: float = 0.0  # per object with an outline (polygon labels)
    # Last epochs without mosaic, mixup and copy-paste; None is 10 for an anchor-free head and 0 else.
    close_mosaic: float | None = None
    randaugment: float = 0.0  # classification: magnitude of RandAugment's two operations; 0: off, 9: usual
    # Classification: padding of random crops, px. None: an eighth of the side up to 64 px; for larger sides, crops
    # of random size and aspect ratio instead.
    pad: float | None = None


def nominal_batch(hyp: Hyp, batch: int) -> float:
    """Return the images per optimizer step that the hyper-parameters assume."""
    return hyp.nbs or batch


def gathered(hyp: Hyp, batch: int) -> int:
    """Return the batches per optimizer step after the warm-up."""
    return max(round(nominal_batch(hyp, batch) / batch), 1)


HYP_SETS = ("low", "med", "high")
HYP_FOLDER = Path(__file__).with_name("hyp")
WITHOUT_EFFECT = ("iou_t",)  # in YOLOv5's hyp files, but unused by YOLOv5
_PROBABILITIES = ("flipud", "fliplr", "mosaic", "mixup", "cutmix", "copy_paste", "label_smoothing")
IGNORED = 255  # mask value of pixels without a class, ignored by loss and metric


@dataclass(frozen=True)
class Preset:
    """Defaults of the command line's options."""

    imgsz: int
    batch: int  # over all ranks
    epochs: int
    optimizer: str
    hyp: Hyp
    schedule: str = "linear"


_DIGITS = Hyp(
    lr0=0.004,
    lrf=0.02,
    momentum=0.9,
    weight_decay=0.01,
    nbs=32.0,  # the batch: one optimizer step per batch
    ema_tau=150.0,  # of 441 updates
    warmup_epochs=1.0,
    warmup_bias_lr=0.004,
    # YOLOv5's gains assume 640 px and 80 classes.
    box=0.1,
    cls=2.0,
    obj=2.0,
    mosaic=0.0,
    hsv_h=0.0,
    hsv_s=0.2,
    hsv_v=0.2,
    scale=0.2,
    fliplr=0.0,
)
_IMAGES = Hyp(lr0=0.05, momentum=0.9, nbs=0.0, warmup_epochs=1.0, warmup_bias_lr=0.0, mosaic=0.0)
_CIFAR = Preset(imgsz=32, batch=128, epochs=30, optimizer="SGD", hyp=_IMAGES, schedule="cosine")
_MASKS = replace(_IMAGES, lr0=0.02, weight_decay=1e-4)
_DIGIT_MASKS = replace(_MASKS, lr0=0.004, weight_decay=0.01, ema_tau=150.0, scale=0.2, fliplr=0.0)

DIGITS = "digits"  # the demonstration: its presets train within minutes on two CPU cores
CIFAR = ("cifar10", "cifar100")
# By task and dataset; "" is any other dataset. Those of detection are YOLOv5's.
PRESETS: dict[str, dict[str, Preset]] = {
    "detect": {
        "": Preset(imgsz=640, batch=16, epochs=100, optimizer="SGD", hyp=Hyp()),
        DIGITS: Preset(imgsz=128, batch=32, epochs=7, optimizer="AdamW", hyp=_DIGITS),
    },
    "classify": {
        "": Preset(imgsz=224, batch=64, epochs=30, optimizer="SGD", hyp=_IMAGES, schedule="cosine"),
        DIGITS: replace(_CIFAR, batch=32, epochs=8, hyp=replace(_IMAGES, lr0=0.02, fliplr=0.0), schedule="one-cycle"),
        **dict.fromkeys(CIFAR, _CIFAR),
    },
    "segment": {
        "": Preset(imgsz=512, batch=16, epochs=50, optimizer="SGD", hyp=_MASKS, schedule="cosine"),
        DIGITS: Preset(imgsz=128, batch=16, epochs=5, optimizer="AdamW", hyp=_DIGIT_MASKS, schedule="one-cycle"),
    },
}
TASKS = tuple(PRESETS)

# As D-FINE and RT-DETRv2 train (Peng et al. 2024, Lv et al. 2024), at a constant rate. Their backbones are pretrained.
_QUERIES = Hyp(
    lr0=2e-4,
    lrf=1.0,
    momentum=0.9,
    weight_decay=1e-4,
    backbone_lr=0.1,
    clip_norm=0.1,
    nbs=0.0,
    ema_tau=1000.0,
    warmup_epochs=1.0,
    warmup_bias_lr=0.0,
    mosaic=0.0,
)
# From random weights: all layers learn at one rate.
_DIGIT_QUERIES = replace(
    _QUERIES, lr0=1e-3, backbone_lr=1.0, ema_tau=150.0, hsv_h=0.0, hsv_s=0.2, hsv_v=0.2, scale=0.2, fliplr=0.0
)
_TORCHVISION = Hyp(
    lr0=1e-4, momentum=0.9, weight_decay=0.05, nbs=0.0, warmup_epochs=1.0, warmup_bias_lr=0.0, mosaic=0.0
)
# Of families of detectors that do not train as YOLOv5 does, by data set.
FAMILY_PRESETS: dict[str, dict[str, Preset]] = {
    "dfine": {
        "": Preset(imgsz=640, batch=32, epochs=72, optimizer="AdamW", hyp=_QUERIES),
        DIGITS: Preset(imgsz=128, batch=16, epochs=10, optimizer="AdamW", hyp=_DIGIT_QUERIES),
    },
    "rtdetrv2": {
        "": Preset(imgsz=640, batch=16, epochs=72, optimizer="AdamW", hyp=replace(_QUERIES, lr0=1e-4, ema_tau=2000.0)),
        DIGITS: Preset(imgsz=128, batch=16, epochs=10, optimizer="AdamW", hyp=_DIGIT_QUERIES),
    },
    "torchvision": {
        "": Preset(imgsz=640, batch=16, epochs=50, optimizer="AdamW", hyp=_TORCHVISION, schedule="cosine"),
        DIGITS: Preset(
            imgsz=128,
            batch=16,
            epochs=8,
            optimizer="AdamW",
            hyp=replace(_DIGITS, lr0=5e-4, warmup_epochs=0.5),
        ),
    },
}


def family_of(cfg: str) -> tuple[str, str]:
    """Return the family and the model that --cfg names, such as ("dfine", "n"); ("", cfg) for a model file."""
    family, _, model = re.sub("[:-]", " ", cfg, count=1).partition(" ")
    return (family, model) if family in FAMILY_PRESETS else ("", cfg)


def preset_for(data: str, task: str = "detect", cfg: str = "") -> Preset:
    """Return the preset for a task, a data set's name or path, and --cfg."""
    presets = FAMILY_PRESETS.get(family_of(cfg)[0], PRESETS[task]) if task == "detect" else PRESETS[task]
    return presets.get(data, presets[""])


def load_hyp(path: str, base: Hyp) -> Hyp:
    """Return `base` with the values of a YAML file. Raises BadData with the line of each invalid value.

    `low`, `med` and `high` are files of this package, and do not use `base`.
    """
    source = Path(path)
    if path in HYP_SETS:
        source, base = HYP_FOLDER / f"{path}.yaml", Hyp()
    content = yaml_file.read(source)
    known = [field.name for field in fields(Hyp)]
    faults = content.unknown([*known, *WITHOUT_EFFECT])
    values = {key: _number(raw) for key, raw in content.values.items() if key in known}
    for key, value in values.items():
        if expected := _expected(key, value):
            faults.append(content.fault(key, f"{key} is {content.values[key]!r}, it must be {expected}", ""))
    if faults:
        raise BadData(faults)
    return replace(base, **values)


def _number(raw: Any) -> float:
    try:
        return float(str(raw))  # YAML reads 1e-3 as text, and true is not a number
    except ValueError:
        return math.nan


def _expected(key: str, value: float) -> str:
    """Return the range of the hyper-parameter `key`, or "" if `value` is in it."""
    if not 0 <= value < math.inf:
        return "a number, 0 or more"
    if key in _PROBABILITIES and value > 1:
        return "a probability, at most 1"
    if key == "nbs" and 0 < value < 1:
        return "0 (every batch), or 1 or more"
    lower = {"ema_tau": 0, "anchor_t": 1}.get(key, -1)
    return f"above {lower}" if value <= lower else ""
