"""Settings of a training: one table of its options. Defaults that depend on the data are in presets.py."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.presets import DIGITS, TASKS, Hyp, Preset, load_hyp, preset_for
from trainer.config.strategies import DEFAULT_STRATEGY, PARALLEL, STRATEGIES, traits_of
from trainer.errors import TrainerError

SCHEDULES = ("linear", "cosine", "one-cycle")
OPTIMIZERS = ("SGD", "Adam", "AdamW", "MuSGD")
PRECISIONS = ("auto", "bf16", "fp16", "fp32")
PRESET: Any = None  # the default is the preset's
REQUIRED: Any = dataclasses.MISSING
PRESET_NAMES = tuple(each.name for each in dataclasses.fields(Preset) if each.name != "hyp")
BACKBONE = "backbone"
# Headings of `train --help-all`. Options without one are the common ones, which `train --help` shows too.
OPTIMIZATION = "Optimization"
IMAGES = "Images and labels"
SPEED = "Speed and precision"
RANKS = "Several GPUs"
CHECKPOINTS = "Validation and checkpoints"
FAILURES = "Failures"
LOGGING = "Results and logging"
MOST_SEED = 2**64 - 1  # of torch's generators
_SECONDS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}


def option(
    default: Any,
    help: str,
    *names: str,
    least: float | None = None,
    most: float | None = None,
    known: Sequence[str] = (),
    metavar: Any = None,
    heading: str | None = None,
) -> Any:
    """Declare a setting with its option: the text of `--help`, names unlike the field's, and the valid values.

    An option with a `heading` is described under it by `--help-all`, the others by `--help` too.
    """
    declared = {
        "help": help,
        "names": names,
        "least": least,
        "most": most,
        "known": known,
        "metavar": metavar,
    }
    return field(default=default, metadata={**declared, "heading": heading})


@dataclass(frozen=True)
class Settings:
    """Settings of a training; the constructor completes them and checks all that needs no data and no device."""

    task: str = option("detect", "detect, classify or segment.", known=TASKS, metavar="TASK")
    data: str = option(
        DIGITS,
        "data.yaml, or for classify and segment a folder; digits is built in.\n\n"
        "detect: the path of a data.yaml. classify: cifar10, cifar100, or a folder with train/ and val/, which hold "
        "one folder per class. segment: a folder with images/train, images/val, masks/train and masks/val. All tasks: "
        "digits, or your own dataset as package.module:function.",
        metavar="DATA",
    )
    cfg: str = option(
        "",
        "Model: yolo26n.yaml, dfine-n, rtdetrv2-r18, torchvision:MODEL, ...\n\n"
        "YOLO26, YOLO11, YOLOv8 and YOLOv5: yolo26n.yaml, yolo11n.yaml, yolov8n.yaml or yolov5n.yaml, or s, m, l, x; "
        "or a model file of your own. D-FINE: dfine-n, s, m, l, x. RT-DETRv2: rtdetrv2-r18, r34, r50, r101. DETR: "
        "detr-r50, r101. torchvision's detectors: torchvision:MODEL. Your own: package.module:function. classify and "
        "segment: a torchvision model, such as resnet50. With --weights, their model is the default.  [default: "
        "yolov5n.yaml, resnet18 or lraspp_mobilenet_v3_large]",
        metavar="MODEL",
    )
    weights: str = option(
        "",
        "Initial weights: best.pt, last.pt, yolo26n.pt or a URL.\n\n"
        "best.pt and last.pt may be of this trainer, YOLOv5 or ultralytics. A release's name (yolo26n.pt, yolov5s.pt) "
        "is downloaded if it is missing; a URL may end in #sha256=... D-FINE and RT-DETRv2: a snapshot of the Hugging "
        "Face hub, as its folder or hf://OWNER/NAME@COMMIT. classify and segment: torchvision for torchvision's "
        "weights.  [default: random]",
        metavar="WEIGHTS",
    )
    hyp: Hyp = option(  # noqa: RUF009 (a field)
        "",
        "Hyperparameters: low, med or high for a detector, or a YAML file; `trainer hyp` prints one. Keys that the "
        "file omits keep the task's and the dataset's defaults.",
        metavar="FILE",
        heading=OPTIMIZATION,
    )
    label_smoothing: float | None = option(
        None,
        "Smooth class targets by X: 1 and 0 become 1 - X / 2 and X / 2. classify and segment spread X over all "
        "classes.  [default: the value in --hyp]",
        metavar="X",
        heading=OPTIMIZATION,
    )
    epochs: int = option(PRESET, "Passes over the training images.", least=1, metavar="N")
    batch: int = option(
        PRESET,
        "Images per step, on all ranks together.\n\nNeed not be a multiple of the number of ranks.",
        *("--batch", "--batch-size"),
        least=1,
        metavar="N",
    )
    imgsz: int = option(
        PRESET, "Side of the square images in pixels, a multiple of 32.", *("--imgsz", "--img"), metavar="N"
    )
    optimizer: str = option(
        PRESET,
        "SGD, Adam, AdamW or MuSGD (YOLO26's).",
        known=OPTIMIZERS,
        metavar="NAME",
        heading=OPTIMIZATION,
    )
    schedule: str = option(
        PRESET,
        "Learning rate after the warm-up: linear, cosine or one-cycle.",
        known=SCHEDULES,
        metavar="NAME",
        heading=OPTIMIZATION,
    )
    device: str = option(
        "",
        "cpu, cuda, or GPU numbers: 0,1 starts one rank on each.\n\n"
        "By default the first GPU, or the CPU if there is none; under torchrun or clusterctl one GPU per rank; with "
        "--parallel dp all GPUs.",
        metavar="DEVICE",
    )
    workers: int | None = option(
        None,
        "Dataloader workers per rank.\n\n"
        "`trainer bench workers` compares counts.  [default: 0 on a CPU, up to 8 on a GPU]",
        least=0,
        metavar="N",
    )
    seed: int = option(
        0,
        "Seed of the weights, the order of the images and the augmentation, the same on all ranks.",
        least=0,
        most=MOST_SEED,
        metavar="N",
        heading=OPTIMIZATION,
    )
    precision: str = option(
        "auto",
        "bf16, fp16, fp32 or auto.\n\nauto: bf16 where the hardware has it, otherwise fp16 on a GPU and fp32 on a CPU.",
        known=PRECISIONS,
        metavar="NAME",
    )
    tf32: bool = option(
        False,
        "With --precision fp32 on a GPU: multiply in TF32, which keeps 10 of 23 mantissa bits.",
        heading=SPEED,
    )
    deterministic: bool = option(
        False,
        "Use only deterministic GPU algorithms, so that a resumed run equals an uninterrupted one. Slower. CPU runs "
        "are always deterministic.",
        heading=SPEED,
    )
    compile: str = option(
        "auto",
        "Compile the network and its loss with torch.compile: auto, off, on or graphs. Training starts a minute or "
        "more later, then runs faster. on: fused kernels. graphs: CUDA graphs too. auto: graphs on a GPU if the run is "
        "long enough.",
        known=("auto", "off", "on", "graphs"),
        metavar="WHEN",
        heading=SPEED,
    )
    parallel: str = option(
        DEFAULT_STRATEGY,
        f"Strategy for several GPUs: {', '.join([*STRATEGIES][:-1])} or {[*STRATEGIES][-1]}.\n\n"
        f"{' '.join(f'{name}: {each.about}' for name, each in STRATEGIES.items())} See docs/how-to/scale.md.",
        known=PARALLEL,
        metavar="NAME",
    )
    stages: int = option(
        0,
        "With --parallel pipeline: ranks per pipeline; several pipelines share the images. 0 means all ranks.",
        least=0,
        metavar="N",
        heading=RANKS,
    )
    micro_batches: int = option(
        0,
        "With --parallel pipeline: micro-batches per step and pipeline. 0 means four, or fewer for small batches.",
        least=0,
        metavar="N",
        heading=RANKS,
    )
    grad_compress: str = option(
        "none",
        "Send gradients between ranks as bf16, in half the bytes, or exactly (none).",
        known=("none", "bf16"),
        metavar="NAME",
        heading=RANKS,
    )
    sync_bn: bool = option(False, "Compute batch norm over the images of all ranks.", heading=RANKS)
    noautoanchor: bool = option(
        False, "Keep the model file's anchors even if they fit few boxes.", heading=OPTIMIZATION
    )
    freeze: str = option(
        "",
        "Layers to freeze: 10 (the first ten), 0 1 2 or 0,1,2 (these), or backbone (all but the head).",
        metavar="N...",
        heading=OPTIMIZATION,
    )
    unfreeze: int = option(
        0,
        "With --freeze: train all layers after this many epochs; 0 means never.",
        least=0,
        metavar="EPOCHS",
        heading=OPTIMIZATION,
    )
    multi_scale: bool = option(
        False, "Vary the image size from step to step, from 0.5 to 1.5 times --imgsz.", heading=IMAGES
    )
    rect: bool = option(
        False, "Batch images of similar aspect ratio with little padding, without mosaics.", heading=IMAGES
    )
    cache: str = option(
        "auto",
        "Where to keep decoded training images: auto, none, ram or disk. ram: in memory. disk: in a file next to the "
        "data, which later runs use too. none: decode them in every epoch. auto: on the GPU if they fit, otherwise in "
        "memory if they fit there. All ranks of a machine share one copy in memory or on disk.",
        known=("auto", "none", "ram", "disk"),
        metavar="WHERE",
        heading=IMAGES,
    )
    augment_on: str = option(
        "auto",
        "Where to augment a detector's training images: workers (OpenCV) or device (Triton, on a GPU). auto: device "
        "if Triton can use the GPU.",
        known=("auto", "workers", "device"),
        metavar="WHERE",
        heading=IMAGES,
    )
    image_weights: bool = option(
        False, "Sample images of rare classes, and of classes with low scores, more often.", heading=IMAGES
    )
    single_cls: bool = option(False, "Treat all classes as one, named `item`.", heading=IMAGES)
    allow_bad_labels: bool = option(
        False,
        "Skip and list invalid label rows and images instead of stopping with an error.",
        heading=IMAGES,
    )
    noval: bool = option(
        False, "Do not validate; best.pt then has the last epoch's weights.", heading=CHECKPOINTS
    )
    val_period: int = option(
        1,
        "Epochs between validations; the last epoch is always validated.",
        least=1,
        metavar="N",
        heading=CHECKPOINTS,
    )
    patience: int = option(
        100,
        "Stop after this many epochs without a better score; 0 means never.",
        least=0,
        metavar="EPOCHS",
        heading=CHECKPOINTS,
    )
    resume: str = option(
        "",
        "Resume a run: its folder or last.pt; without a value the newest in --project.\n\n"
        "Only options that do not change the result may differ, such as "
        "--device, --ranks, --parallel, --workers, --cache, --patience and --save-every. clusterctl resumes restarted "
        "jobs itself.",
        metavar="[PATH]",
    )
    save_every: str = option(
        "",
        "Also write last.pt within an epoch: every 10min, 30s or 500steps. Each validation writes it anyway.",
        metavar="INTERVAL",
        heading=CHECKPOINTS,
    )
    save_period: int = option(
        0,
        "Keep a copy of last.pt as epochN.pt every N epochs; 0 keeps only last, previous and best.",
        least=0,
        metavar="N",
        heading=CHECKPOINTS,
    )
    on_nan: str = option(
        "stop",
        "When the loss is NaN or infinite: stop, and name the batch in the error, or skip: return to the last "
        "checkpoint and leave the batch out, at most three times.",
        known=("stop", "skip"),
        metavar="ACTION",
        heading=FAILURES,
    )
    stall_timeout: float = option(
        120,
        "Seconds without a step after which each rank prints its stack traces and names the late rank. Ranks that "
        "wait for a rank without a heartbeat then exit with 1. 0 means never.",
        least=0,
        metavar="SECONDS",
        heading=FAILURES,
    )
    log_steps: bool = option(
        False, "Write the loss of each step to steps.csv, at full precision.", heading=LOGGING
    )
    track: str = option(
        "",
        "Log each epoch to mlflow, wandb or trackio; a resumed run is continued there. TensorBoard's file is always "
        "written.",
        known=("", "mlflow", "wandb", "trackio"),
        metavar="NAME",
        heading=LOGGING,
    )
    callback: str = option(
        "", "Your subclass of trainer.Callback, as package.module:Class.", metavar="CLASS", heading=LOGGING
    )
    project: str = option(
        "runs", "Folder of all runs.\n\nUnder clusterctl the job's folder is used instead.", metavar="DIR"
    )
    name: str = option(
        "train",
        "Name of the run's folder. If it exists, a number is appended: NAME2, NAME3, ...",
        metavar="NAME",
    )
    exist_ok: bool = option(False, "Write into the run's folder even if it exists.", heading=LOGGING)

    def __post_init__(self) -> None:
        check_declared(self)
        preset = preset_for(self.data, self.task, self.cfg)
        for name in PRESET_NAMES:
            if getattr(self, name) is PRESET:
                object.__setattr__(self, name, getattr(preset, name))
        object.__setattr__(self, "hyp", self._hyper_parameters(preset.hyp))
        if self.imgsz < 32 or self.imgsz % 32:
            near = max(32, round(self.imgsz / 32) * 32)
            raise TrainerError(f"--imgsz {self.imgsz} is not a multiple of 32", f"use --imgsz {near}")
        self._check_strategy()
        if self.unfreeze and not layers(self.freeze):
            raise TrainerError(
                f"--unfreeze {self.unfreeze}: nothing is frozen", "name the layers with --freeze"
            )
        if not self.name or Path(self.name).name != self.name:
            raise TrainerError(
                f"--name {self.name}: expected a folder name, not a path",
                "choose the parent folder with --project",
            )
        layers(self.freeze)
        interval(self.save_every)

    def _check_strategy(self) -> None:
        """Raise TrainerError for options that have no meaning with --parallel."""
        for strategy, traits in STRATEGIES.items():
            given = [name for name in traits.options if getattr(self, name) != getattr(Settings, name)]
            if given and strategy != self.parallel:
                what = f"{option_of(given[0])} has no effect with --parallel {self.parallel}"
                raise TrainerError(what, f"add --parallel {strategy}")
        if self.optimizer == "MuSGD" and traits_of(self.parallel).shards_weights:
            raise TrainerError(
                "--optimizer MuSGD needs whole weights, not shards",
                f"use another one, or --parallel {DEFAULT_STRATEGY}",
            )

    def _hyper_parameters(self, base: Hyp) -> Hyp:
        """Return the hyper-parameters of `hyp`: a file's path, "" for `base`, or values, which JSON holds as a dict."""
        given: Any = self.hyp
        if isinstance(given, str):
            given = load_hyp(given, base) if given else base
        values: Hyp = Hyp(**given) if isinstance(given, dict) else given
        if self.label_smoothing is None:
            return values
        if not 0 <= self.label_smoothing < 1:
            raise TrainerError(f"--label-smoothing must be 0 or more and below 1, not {self.label_smoothing}")
        return dataclasses.replace(values, label_smoothing=self.label_smoothing)


def check_declared(settings: Any) -> None:
    """Raise TrainerError for the first setting that is not among its `known` texts, or between `least` and `most`."""
    for each in dataclasses.fields(settings):
        value = getattr(settings, each.name)
        known = each.metadata["known"]
        least = each.metadata["least"]
        most = each.metadata["most"]
        option = option_of(each.name)
        if known and value is not PRESET and value not in known:
            raise TrainerError(f"{option} {value}: unknown", f"use one of {', '.join(filter(None, known))}")
        if value is PRESET:
            continue
        if least is not None and value < least:
            raise TrainerError(f"{option} must be {least} or more, not {_number(value)}")
        if most is not None and value > most:
            raise TrainerError(f"{option} must be {most} or less, not {_number(value)}")


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def option_of(name: str) -> str:
    """Return the option of a setting."""
    return "--" + name.replace("_", "-")


def interval(text: str) -> tuple[float, int]:
    """Parse `10min`, `30s`, `2h`, `500steps` or `500` to (seconds, steps); one of them is 0, both for ''."""
    if not text:
        return 0.0, 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    number, unit = (float(found[1]), found[2]) if found else (0.0, "")
    if number > 0 and unit in _SECONDS:
        return number * _SECONDS[unit], 0
    if number >= 1 and unit in ("", "step", "steps") and number == int(number):
        return 0.0, int(number)
    raise TrainerError(f"--save-every {text}: not an interval", "use 10min, 30s, 2h or 500steps")


def layers(text: str) -> tuple[int, ...]:
    """Parse --freeze: one number N is the first N layers, several are these layers, `backbone` is (-1,)."""
    if text == BACKBONE:
        return (-1,)
    numbers = text.replace(",", " ").split()
    if not all(n.isdecimal() for n in numbers):
        raise TrainerError(
            f"--freeze {text}: expected layer numbers",
            f"use --freeze 10 (the first ten), --freeze 0 1 2, or --freeze {BACKBONE} (all but the head)",
        )
    listed = tuple(int(n) for n in numbers)
    return tuple(range(listed[0])) if len(listed) == 1 else listed
