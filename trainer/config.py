"""What a run can be told: the hyper-parameters, the settings of one run and the presets behind the defaults."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

import yaml

from trainer import imports
from trainer.errors import TrainerError


@dataclass(frozen=True)
class Hyp:
    """Hyper-parameters under the names of YOLOv5's hyp files; the defaults are its "low" set (sizes n and s)."""

    lr0: float = 0.01  # learning rate after the warm-up
    lrf: float = 0.01  # last learning rate as a share of lr0
    momentum: float = 0.937  # SGD momentum, Adam beta1
    weight_decay: float = 5e-4
    # Nominal batch: gradients of smaller batches are summed up to about this many pictures; 0: every batch counts.
    nbs: float = 64.0
    ema_tau: float = 2000.0  # updates until the averaged model's memory is long
    warmup_epochs: float = 3.0
    warmup_momentum: float = 0.8
    warmup_bias_lr: float = 0.1
    box: float = 0.05  # gain of the box loss
    cls: float = 0.5  # gain of the class loss
    cls_pw: float = 1.0  # weight of positives in the class BCE
    obj: float = 1.0  # gain of the objectness loss
    obj_pw: float = 1.0  # weight of positives in the objectness BCE
    # The anchor-free head's gains have names of their own: YOLOv5's files set box and cls for the anchor head.
    dfl_box: float = 7.5  # gain of its box loss
    dfl_cls: float = 0.5  # gain of its class loss
    dfl: float = 1.5  # gain of its distribution focal loss
    anchor_t: float = 4.0  # a box matches an anchor when no side differs by this factor
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
    cutmix: float = 0.0  # classification: a rectangle of another picture
    copy_paste: float = 0.0  # per object with an outline (polygon labels)
    # Last epochs without mosaic, mixup and copy-paste; None is 10 for an anchor-free head and 0 else.
    close_mosaic: float | None = None
    randaugment: float = 0.0  # classification: magnitude of RandAugment's two operations, 0 is off, 9 is usual
    # Classification: px of border that random crops may reach into; None is an eighth of the side up to 64 px, and for
    # larger sides crops of random size and shape instead.
    pad: float | None = None


def nominal_batch(hyp: Hyp, batch: int) -> float:
    """The pictures that an optimizer step is meant for."""
    return hyp.nbs or batch


def gathered(hyp: Hyp, batch: int) -> int:
    """Batches per optimizer step once the warm-up is over."""
    return max(round(nominal_batch(hyp, batch) / batch), 1)


TASKS = ("detect", "classify", "segment")
SCHEDULES = ("linear", "cosine", "one-cycle")
OPTIMIZERS = ("SGD", "Adam", "AdamW")
PRECISIONS = ("auto", "bf16", "fp16", "fp32")
HYP_SETS = ("low", "med", "high")
HYP_FOLDER = Path(__file__).with_name("hyp")
CACHES = ("ram", "disk")
BACKBONE = "backbone"
PARALLEL = ("ddp", "dp", "fsdp", "pipeline")
_SECONDS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}
# In YOLOv5's hyp files, but without effect in YOLOv5 itself.
WITHOUT_EFFECT = ("iou_t",)
IGNORED = 255  # in a mask: the pixel is neither learnt nor counted


@dataclass(frozen=True)
class Preset:
    """The defaults of a run, where the command line says nothing."""

    imgsz: int
    batch: int  # over all ranks
    epochs: int
    optimizer: str
    hyp: Hyp
    schedule: str = "linear"


# The one place that holds the defaults. `digits` is the demonstration: small pages, few epochs and a hyper-parameter
# set made for them, so that two CPU cores end within minutes. Everything else gets YOLOv5's own defaults.
DIGITS = "digits"
PRESETS = {
    DIGITS: Preset(
        imgsz=128,
        batch=32,
        epochs=7,
        optimizer="AdamW",
        hyp=Hyp(
            lr0=0.004,
            lrf=0.02,
            momentum=0.9,
            weight_decay=0.01,
            nbs=32.0,  # the batch: one optimizer step for each, as there are few of them
            ema_tau=150.0,  # there are 441 updates in all
            warmup_epochs=1.0,
            warmup_bias_lr=0.004,
            # YOLOv5's gains assume 640 px and 80 classes; scaled to this set, classes and objects would hardly count.
            box=0.1,
            cls=2.0,
            obj=2.0,
            mosaic=0.0,
            hsv_h=0.0,
            hsv_s=0.2,
            hsv_v=0.2,
            scale=0.2,
            fliplr=0.0,
        ),
    ),
}
STANDARD = Preset(imgsz=640, batch=16, epochs=100, optimizer="SGD", hyp=Hyp())

_PICTURES = Hyp(lr0=0.05, momentum=0.9, nbs=0.0, warmup_epochs=1.0, warmup_bias_lr=0.0, mosaic=0.0)
_SMALL = Preset(imgsz=32, batch=128, epochs=30, optimizer="SGD", hyp=_PICTURES, schedule="cosine")
CIFAR = ("cifar10", "cifar100")
CLASSIFY_PRESETS = {
    DIGITS: replace(_SMALL, batch=32, epochs=8, hyp=replace(_PICTURES, lr0=0.02, fliplr=0.0), schedule="one-cycle"),
    **dict.fromkeys(CIFAR, _SMALL),
}
CLASSIFY_STANDARD = Preset(imgsz=224, batch=64, epochs=30, optimizer="SGD", hyp=_PICTURES, schedule="cosine")

_MASKS = replace(_PICTURES, lr0=0.02, weight_decay=1e-4)
SEGMENT_PRESETS = {
    DIGITS: Preset(
        imgsz=128,
        batch=16,
        epochs=5,
        optimizer="AdamW",
        hyp=replace(_MASKS, lr0=0.004, weight_decay=0.01, ema_tau=150.0, scale=0.2, fliplr=0.0),
        schedule="one-cycle",
    ),
}
SEGMENT_STANDARD = Preset(imgsz=512, batch=16, epochs=50, optimizer="SGD", hyp=_MASKS, schedule="cosine")


def preset_for(data: str, task: str = "detect") -> Preset:
    """The defaults that go with a task and a data set's name or path."""
    if task == "classify":
        return CLASSIFY_PRESETS.get(data, CLASSIFY_STANDARD)
    if task == "segment":
        return SEGMENT_PRESETS.get(data, SEGMENT_STANDARD)
    return PRESETS.get(data, STANDARD)


@dataclass(frozen=True)
class Settings:
    """Everything that one run was told, checked as far as that needs no data and no device."""

    data: str
    cfg: str
    weights: str
    hyp: Hyp
    epochs: int
    batch: int  # over all ranks
    imgsz: int
    device: str
    optimizer: str
    workers: int | None  # per rank; None: the device's default (`dist.default_workers`)
    seed: int
    project: str
    name: str
    exist_ok: bool
    schedule: str  # of the learning rate
    precision: str
    val: bool
    task: str = "detect"
    multi_scale: bool = False
    sync_bn: bool = False
    autoanchor: bool = True  # other anchors where the model's fit too few of the boxes
    freeze: tuple[int, ...] = ()  # numbers of the layers that stay as they are; -1: all but the head
    unfreeze: int = 0  # epochs after which they are trained like the others; 0: never
    rect: bool = False
    image_weights: bool = False
    cache: str = ""
    single_cls: bool = False
    allow_bad_labels: bool = False
    callback: str = ""
    val_period: int = 1  # epochs from one validation to the next
    patience: int = 100  # epochs without a better score until the end; 0: never
    resume: str = ""  # a checkpoint or its folder, "last", or "" to begin
    save_every: tuple[float, int] = (0.0, 0)  # seconds, steps between checkpoints inside an epoch; 0: none
    save_period: int = 0  # epochs between checkpoints that are kept for good; 0: none
    on_nan: str = "stop"
    parallel: str = "ddp"
    stages: int = 0  # of a pipeline; 0: every rank is one
    micro_batches: int = 0  # of a pipeline's share of a step; 0: four, or what there is
    stall_s: float = 120.0  # without a step, until it is told what every rank is doing
    log_steps: bool = False
    compile: bool = False
    grad_compress: str = "none"

    def __post_init__(self) -> None:
        for option, value in (
            ("--epochs", self.epochs),
            ("--batch", self.batch),
            ("--val-period", self.val_period),
        ):
            if value < 1:
                raise TrainerError(f"{option} is {value}, it must be 1 or more")
        for option, number in (
            ("--patience", self.patience),
            ("--save-period", self.save_period),
            ("--unfreeze", self.unfreeze),
            ("--stages", self.stages),
            ("--micro-batches", self.micro_batches),
            ("--stall", self.stall_s),
        ):
            if number < 0:
                raise TrainerError(f"{option} is {number:g}, it must be 0 or more")
        if self.imgsz < 32 or self.imgsz % 32:
            near = max(32, round(self.imgsz / 32) * 32)
            raise TrainerError(f"--imgsz {self.imgsz} is not a multiple of 32", f"use --imgsz {near}")
        if self.workers is not None and self.workers < 0:
            raise TrainerError(f"--workers is {self.workers}, it must be 0 or more")
        if self.seed < 0:
            raise TrainerError(f"--seed is {self.seed}, it must be 0 or more")
        if (self.stages or self.micro_batches) and self.parallel != "pipeline":
            option = "--stages" if self.stages else "--micro-batches"
            raise TrainerError(f"{option}: --parallel {self.parallel} has none", "add --parallel pipeline")
        if self.unfreeze and not self.freeze:
            raise TrainerError(f"--unfreeze {self.unfreeze}: nothing is frozen", "name what is with --freeze")
        for option, text, known in (
            ("--task", self.task, TASKS),
            ("--schedule", self.schedule, SCHEDULES),
            ("--optimizer", self.optimizer, OPTIMIZERS),
            ("--precision", self.precision, PRECISIONS),
            ("--cache", self.cache, ("", *CACHES)),
            ("--parallel", self.parallel, PARALLEL),
            ("--on-nan", self.on_nan, ("stop", "skip")),
            ("--grad-compress", self.grad_compress, ("none", "bf16")),
        ):
            if text not in known:
                raise TrainerError(f"{option} {text}: unknown", f"use one of {', '.join(filter(None, known))}")
        if not self.name or Path(self.name).name != self.name:
            raise TrainerError(f"--name {self.name!r} is not a folder's name", "--project takes a path")


def interval(text: str) -> tuple[float, int]:
    """(seconds, steps) of `10min`, `30s`, `2h`, `500steps` or `500`; one of the two is 0, both for ''."""
    if not text:
        return 0.0, 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    number, unit = (float(found[1]), found[2]) if found else (0.0, "")
    if number > 0 and unit in _SECONDS:
        return number * _SECONDS[unit], 0
    if number >= 1 and unit in ("", "step", "steps") and number == int(number):
        return 0.0, int(number)
    raise TrainerError(f"--save-every {text}: no interval", "write it like 10min, 30s, 2h or 500steps")


def load_hyp(path: str, base: Hyp) -> Hyp:
    """`base` with the values of a YAML file; an unknown key or a value that is no number is an error.

    `low`, `med` and `high` name the files beside this module, which need no `base`.
    """
    source = Path(path)
    if path in HYP_SETS:
        source, base = HYP_FOLDER / f"{path}.yaml", Hyp()
    try:
        content = yaml.safe_load(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainerError(f"--hyp {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TrainerError(f"--hyp {path}: not a YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise TrainerError(f"--hyp {path}: it must hold `name: number` lines")
    known = [f.name for f in fields(Hyp)]
    values: dict[str, float] = {}
    for key, raw in content.items():
        if key in WITHOUT_EFFECT:
            continue
        if key not in known:
            raise TrainerError(f"--hyp {path}: unknown key {key!r}", f"the keys are {', '.join(known)}")
        try:
            # YAML reads 1e-3 (without a dot) as text.
            values[key] = float(raw) if not isinstance(raw, bool) else float("nan")
        except (TypeError, ValueError):
            values[key] = float("nan")
        if not math.isfinite(values[key]) or values[key] < 0:
            raise TrainerError(f"--hyp {path}: {key} is {raw!r}, it must be a number, 0 or more")
    hyp = replace(base, **values)
    for key in ("flipud", "fliplr", "mosaic", "mixup", "cutmix", "copy_paste", "label_smoothing"):
        if getattr(hyp, key) > 1:
            raise TrainerError(f"--hyp {path}: {key} is {getattr(hyp, key)}, a probability is at most 1")
    if hyp.ema_tau <= 0:
        raise TrainerError(f"--hyp {path}: ema_tau is {hyp.ema_tau}, it must be above 0")
    if 0 < hyp.nbs < 1:
        raise TrainerError(f"--hyp {path}: nbs is {hyp.nbs}, it must be 0 (every batch) or 1 or more")
    if hyp.anchor_t <= 1:
        raise TrainerError(f"--hyp {path}: anchor_t is {hyp.anchor_t}, it must be above 1")
    return hyp


def smoothed(hyp: Hyp, label_smoothing: float) -> Hyp:
    """The hyper-parameters with --label-smoothing."""
    if not 0 <= label_smoothing < 1:
        raise TrainerError(f"--label-smoothing is {label_smoothing}, it must be 0 or more and below 1")
    return replace(hyp, label_smoothing=label_smoothing)


def layers(text: str) -> tuple[int, ...]:
    """The layer numbers of --freeze: one number N means the first N, several these, `backbone` all but the head."""
    if text == BACKBONE:
        return (-1,)
    numbers = text.replace(",", " ").split()
    if not all(n.isdecimal() for n in numbers):
        raise TrainerError(
            f"--freeze {text}: not a layer's number",
            f"use --freeze 10 (the first ten), --freeze 0 1 2, or --freeze {BACKBONE} (all but the head)",
        )
    listed = tuple(int(n) for n in numbers)
    return tuple(range(listed[0])) if len(listed) == 1 else listed


def check_data_path(data: str) -> None:
    """An error for a data file that is not there; in a container the usual cause is a missing mount."""
    if data in PRESETS or Path(data).is_file() or imports.is_import_path(data):
        return
    if Path(data).is_dir():
        raise TrainerError(f"--data {data}: a folder", "give its data.yaml")
    raise TrainerError(
        f"--data {data}: no such file",
        f"give {DIGITS} or the path of a data.yaml; a container sees only the folders that are mounted into it",
    )
