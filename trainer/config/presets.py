"""Hyper-parameters, and the presets with the defaults of each task and dataset."""

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from trainer.config import yaml_file
from trainer.config.families import family_of
from trainer.config.faults import BadData

BOXES = "detect"
CLASSES = "classify"
MASKS = "segment"


def _number(default: float | None, meaning: str, *tasks: str) -> Any:
    """Declare a hyper-parameter: its meaning, and the tasks on which it has an effect (none: on all)."""
    return field(default=default, metadata={"meaning": meaning, "tasks": tasks or (BOXES, CLASSES, MASKS)})


@dataclass(frozen=True)
class Hyp:
    """Hyper-parameters under the names of YOLOv5's hyp files; the defaults are its "low" set (sizes n and s)."""

    lr0: float = _number(0.01, "learning rate after the warm-up")
    lrf: float = _number(0.01, "last learning rate as a share of lr0; no effect with one-cycle")
    momentum: float = _number(0.937, "momentum of SGD, beta1 of Adam and AdamW")
    weight_decay: float = _number(5e-4, "of weights, not of biases and norm layers")
    nbs: float = _number(64.0, "gradients accumulate up to about this many images; 0: never")
    ema_tau: float = _number(2000.0, "time constant of the averaged model's decay, in updates")
    warmup_epochs: float = _number(3.0, "at least 100 steps; 0: none; no effect with one-cycle")
    warmup_momentum: float = _number(0.8, "momentum at the start of the warm-up")
    warmup_bias_lr: float = _number(0.1, "learning rate of biases at the start of the warm-up")
    clip_norm: float = _number(10.0, "maximum norm of a step's gradients, over all parameters")
    label_smoothing: float = _number(
        0.0, "0 to 1; not for the anchor-free head; --label-smoothing takes precedence"
    )
    backbone_lr: float = _number(
        1.0, "the backbone's learning rate as a share of the others'; no effect on YOLO's networks", BOXES
    )
    dropout: float | None = _number(None, "probability, by default 0.1; only DETR has dropout", BOXES)
    box: float = _number(0.05, "anchor head: gain of the box loss", BOXES)
    cls: float = _number(0.5, "anchor head: gain of the class loss", BOXES)
    cls_pw: float = _number(1.0, "weight of positives in the class loss", BOXES)
    obj: float = _number(1.0, "anchor head: gain of the objectness loss", BOXES)
    obj_pw: float = _number(1.0, "anchor head: weight of positives in the objectness loss", BOXES)
    # The anchor-free head has separate gains: YOLOv5's files set box and cls for the anchor head.
    dfl_box: float = _number(7.5, "anchor-free head: gain of the box loss", BOXES)
    dfl_cls: float = _number(0.5, "anchor-free head: gain of the class loss", BOXES)
    dfl: float = _number(
        1.5, "anchor-free head: gain of the distribution focal loss, or of YOLO26's L1 loss", BOXES
    )
    anchor_t: float = _number(
        4.0, "a box matches an anchor if each side differs by less than this factor; above 1", BOXES
    )
    fl_gamma: float = _number(0.0, "gamma of the focal loss; 0: none", BOXES)
    hsv_h: float = _number(0.015, "range of the hue, as a fraction", BOXES)
    hsv_s: float = _number(0.7, "range of the saturation, as a fraction", BOXES)
    hsv_v: float = _number(0.4, "range of the value, as a fraction", BOXES)
    degrees: float = _number(0.0, "rotation by up to this many degrees", BOXES)
    translate: float = _number(0.1, "shift by up to this fraction of the side", BOXES)
    scale: float = _number(
        0.5, "resizing by 1 plus or minus this; for masks the longer side, and below 1", BOXES, MASKS
    )
    shear: float = _number(0.0, "shear by up to this many degrees", BOXES)
    perspective: float = _number(0.0, "perspective, 0 to 0.001", BOXES)
    flipud: float = _number(0.0, "probability of a vertical flip")
    fliplr: float = _number(0.5, "probability of a horizontal flip")
    mosaic: float = _number(1.0, "probability of a mosaic of four images", BOXES)
    mixup: float = _number(
        0.0, "probability; to classify: share of the steps with mixed images", BOXES, CLASSES
    )
    cutmix: float = _number(0.0, "share of the steps with pasted rectangles; with mixup at most 1", CLASSES)
    copy_paste: float = _number(0.0, "probability per object with an outline, within mosaics", BOXES)
    close_mosaic: float | None = _number(
        None,
        "last epochs without mosaic, mixup and copy_paste; by default 10 with an anchor-free head, else 0",
        BOXES,
    )
    randaugment: float = _number(
        0.0, "magnitude of RandAugment's two operations, a whole number up to 30, usually 9; 0: none", CLASSES
    )
    pad: float | None = _number(
        None,
        "border in px for random crops; by default an eighth of the side up to 64 px, and above crops of random size",
        CLASSES,
    )


def hyp_keys(task: str) -> dict[str, str]:
    """Return the hyper-parameters that have an effect on a task, with their meanings."""
    return {each.name: each.metadata["meaning"] for each in fields(Hyp) if task in each.metadata["tasks"]}


def nominal_batch(hyp: Hyp, batch: int) -> float:
    """Return the images per optimizer step that the hyper-parameters assume."""
    return hyp.nbs or batch


def gathered(hyp: Hyp, batch: int) -> int:
    """Return the batches per optimizer step after the warm-up."""
    return max(round(nominal_batch(hyp, batch) / batch), 1)


HYP_SETS = ("low", "med", "high")
HYP_FOLDER = Path(__file__).with_name("hyp")
WITHOUT_EFFECT = ("iou_t",)  # in YOLOv5's hyp files, but unused by YOLOv5
_PROBABILITIES = ("flipud", "fliplr", "mosaic", "mixup", "cutmix", "copy_paste", "label_smoothing", "dropout")
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
        DIGITS: replace(
            _CIFAR, batch=32, epochs=8, hyp=replace(_IMAGES, lr0=0.02, fliplr=0.0), schedule="one-cycle"
        ),
        **dict.fromkeys(CIFAR, _CIFAR),
    },
    "segment": {
        "": Preset(imgsz=512, batch=16, epochs=50, optimizer="SGD", hyp=_MASKS, schedule="cosine"),
        DIGITS: Preset(
            imgsz=128, batch=16, epochs=5, optimizer="AdamW", hyp=_DIGIT_MASKS, schedule="one-cycle"
        ),
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
# Of detector families with a name, by data set. Optional: see `family_presets`.
FAMILY_PRESETS: dict[str, dict[str, Preset]] = {
    "dfine": {
        "": Preset(imgsz=640, batch=32, epochs=72, optimizer="AdamW", hyp=_QUERIES),
        DIGITS: Preset(imgsz=128, batch=16, epochs=10, optimizer="AdamW", hyp=_DIGIT_QUERIES),
    },
    "rtdetrv2": {
        "": Preset(
            imgsz=640, batch=16, epochs=72, optimizer="AdamW", hyp=replace(_QUERIES, lr0=1e-4, ema_tau=2000.0)
        ),
        DIGITS: Preset(imgsz=128, batch=16, epochs=10, optimizer="AdamW", hyp=_DIGIT_QUERIES),
    },
    "detr": {  # the paper's backbone is pretrained, and its rate falls to a tenth in one step
        "": Preset(640, 64, 300, "AdamW", replace(_QUERIES, lr0=1e-4, lrf=0.1, backbone_lr=1.0), "cosine"),
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


def preset_for(data: str, task: str = "detect", cfg: str = "") -> Preset:
    """Return the preset for a task, a data set's name or path, and --cfg."""
    family, _ = family_of(cfg)
    presets = family_presets(family) if task == "detect" and family else PRESETS[task]
    return presets.get(data, presets[""])


def family_presets(family: str) -> dict[str, Preset]:
    """Return a detector family's presets by data set, or else those of torchvision's detectors."""
    return FAMILY_PRESETS.get(family, FAMILY_PRESETS["torchvision"])


def load_hyp(path: str, base: Hyp) -> Hyp:
    """Return `base` with the values of a YAML file. Raises BadData with the line of each invalid value.

    `low`, `med` and `high` are files of this package, and do not use `base`.
    """
    source = Path(path)
    if path in HYP_SETS:
        source = HYP_FOLDER / f"{path}.yaml"
        base = Hyp()
    content = yaml_file.read(source)
    known = [field.name for field in fields(Hyp)]
    faults = content.unknown([*known, *WITHOUT_EFFECT])
    values = {key: _parsed(raw) for key, raw in content.values.items() if key in known}
    for key, value in values.items():
        if expected := _expected(key, value):
            faults.append(content.fault(key, f"{key} must be {expected}, not {content.values[key]!r}", ""))
    if faults:
        raise BadData(faults)
    return replace(base, **values)


def _parsed(raw: Any) -> float:
    try:
        return float(str(raw))  # YAML reads 1e-3 as text, and true is not a number
    except ValueError:
        return math.nan


def _expected(key: str, value: float) -> str:
    """Return the range of the hyper-parameter `key`, or "" if `value` is in it."""
    if not 0 <= value < math.inf:
        return "a number, 0 or more"
    if key in _PROBABILITIES and value > 1:
        return "a probability (at most 1)"
    if key == "nbs" and 0 < value < 1:
        return "0 (every batch), or 1 or more"
    lower = {"ema_tau": 0, "anchor_t": 1}.get(key, -1)
    return f"above {lower}" if value <= lower else ""
