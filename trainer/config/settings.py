"""Settings of a training: one table of its options. Defaults that depend on the data are in presets.py."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.presets import DIGITS, PRESETS, TASKS, Hyp, Preset, load_hyp, preset_for
from trainer.errors import TrainerError

SCHEDULES = ("linear", "cosine", "one-cycle")
OPTIMIZERS = ("SGD", "Adam", "AdamW")
PRECISIONS = ("auto", "bf16", "fp16", "fp32")
PARALLEL = ("ddp", "dp", "fsdp", "pipeline")
PRESET: Any = None  # the default is the preset's
REQUIRED: Any = dataclasses.MISSING
PRESET_NAMES = tuple(each.name for each in dataclasses.fields(Preset) if each.name != "hyp")
BACKBONE = "backbone"
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
) -> Any:
    """Declare a setting with its option: the text of `--help`, names unlike the field's, and the valid values."""
    declared = {"help": help, "names": names, "least": least, "most": most, "known": known, "metavar": metavar}
    return field(default=default, metadata=declared)


def _defaults(name: str) -> str:
    """Return the defaults of a setting for each task, with the datasets whose presets differ."""
    tasks = []
    for task, presets in PRESETS.items():
        values = {data: getattr(preset, name) for data, preset in presets.items()}
        usual = values.pop("")
        named: dict[object, list[str]] = {}
        for data, value in values.items():
            if value != usual:
                named.setdefault(value, []).append(data)
        others = [f"{' and '.join(sets)} {own}" for own, sets in named.items()]
        tasks.append(f"{'' if task == 'detect' else f'{task}: '}{', '.join([str(usual), *others])}")
    return f" (default: {'; '.join(tasks)})"


@dataclass(frozen=True)
class Settings:
    """Settings of a training; the constructor completes them and checks all that needs no data and no device."""

    task: str = option(
        "detect",
        "detect: boxes, by a YOLO model. classify: one class per image; segment: one class per pixel; both by "
        "torchvision's models.",
        known=TASKS,
    )
    data: str = option(
        DIGITS,
        "`digits` (built in), the path of a data.yaml, or your own dataset as package.module:function. classify: "
        "`digits`, `cifar10`, `cifar100`, or a folder with train/ and val/ that hold one folder per class. segment: "
        "`digits`, or a folder with images/train, images/val, masks/train and masks/val.",
    )
    cfg: str = option(
        "",
        "Model file: yolov5n.yaml, s, m, l, x, a path to your own, or package.module:function. Detectors of other "
        "libraries: dfine-n, s, m, l, x; rtdetrv2-r18, r34, r50, r101; torchvision:MODEL. classify, segment: a "
        "torchvision model, for example resnet50. (default: the checkpoint's with --weights, else yolov5n.yaml, "
        "resnet18 or lraspp_mobilenet_v3_large)",
    )
    weights: str = option(
        "",
        "Initial weights: best.pt or last.pt of this trainer or of YOLOv5, a release's name (yolov5s.pt, downloaded "
        "if missing), or a URL (https://.../x.pt#sha256=...). D-FINE and RT-DETRv2: a snapshot of the Hugging Face "
        "hub, as its folder or hf://OWNER/NAME@COMMIT. classify, segment: `torchvision` for torchvision's "
        "weights. (default: random weights)",
    )
    hyp: Hyp = option(  # noqa: RUF009 (a field)
        "",
        "Hyper-parameters: `low`, `med` or `high` for a detector, or a YAML file. Missing keys keep the defaults of "
        "the task and the dataset.",
    )
    label_smoothing: float | None = option(
        None,
        "Smoothing x of the class targets: 1 - x / 2 and x / 2 in place of 1 and 0; classify and segment distribute "
        "x over all classes. (default: that of --hyp)",
    )
    epochs: int = option(PRESET, "Passes over the training images." + _defaults("epochs"), least=1)
    batch: int = option(
        PRESET,
        "Images per step on all ranks together; it need not be a multiple of the ranks." + _defaults("batch"),
        *("--batch", "--batch-size"),
        least=1,
    )
    imgsz: int = option(
        PRESET, "Side of the square images in pixels, a multiple of 32." + _defaults("imgsz"), *("--imgsz", "--img")
    )
    optimizer: str = option(PRESET, "SGD, Adam or AdamW." + _defaults("optimizer"), known=OPTIMIZERS)
    schedule: str = option(
        PRESET, "Learning rate after the warm-up: linear, cosine or one-cycle." + _defaults("schedule"), known=SCHEDULES
    )
    device: str = option(
        "",
        "cpu, cuda, or GPU numbers (0,1: one rank each). (default: the first GPU, else the CPU; under a launcher one "
        "GPU per rank; with --parallel dp all GPUs)",
    )
    workers: int | None = option(
        None,
        "Dataloader workers per rank; `trainer bench workers` compares counts. (default: 0 on a CPU; on a GPU the "
        "machine's cores divided by its ranks, at most 8)",
        least=0,
    )
    seed: int = option(
        0, "Seed of the weights, the order and the augmentation, same on all ranks.", least=0, most=MOST_SEED
    )
    precision: str = option(
        "auto",
        "bf16, fp16, fp32 or auto. auto: bf16 where the CPU or GPU supports it natively, else fp16 on a GPU and fp32 "
        "on a CPU.",
        known=PRECISIONS,
    )
    tf32: bool = option(False, "With --precision fp32 on a GPU: multiply in TF32, which has 10 of 23 mantissa bits.")
    deterministic: bool = option(
        False,
        "On a GPU: deterministic algorithms only, so that a resumed run equals an uninterrupted one. Slower. On a CPU "
        "every run is.",
    )
    compile: str = option(
        "auto",
        "Compile the network and its loss with torch.compile: a start of a minute or more, then faster steps. on: "
        "fused kernels. graphs: replay them as CUDA graphs too. auto: graphs on a GPU if the run is long enough.",
        known=("auto", "off", "on", "graphs"),
        metavar="[auto|off|on|graphs]",
    )
    parallel: str = option(
        "ddp",
        "Strategy. ddp: a replica of the model per rank. fsdp: a shard of the model per rank. pipeline: some of the "
        "layers per rank. dp: one process for all GPUs. See docs/how-to/scale.md.",
        known=PARALLEL,
        metavar="[ddp|dp|fsdp|pipeline]",
    )
    stages: int = option(
        0, "With --parallel pipeline: ranks per pipeline. Several pipelines share the images. 0: all ranks.", least=0
    )
    micro_batches: int = option(
        0,
        "With --parallel pipeline: micro-batches per step and pipeline. 0: four, or fewer if the share is smaller.",
        least=0,
    )
    grad_compress: str = option(
        "none", "Gradients between ranks: bf16 sends half the bytes, none sends them exactly.", known=("none", "bf16")
    )
    sync_bn: bool = option(False, "Compute batch norm over the images of all ranks, not of each rank.")
    noautoanchor: bool = option(False, "Keep the model file's anchors even if they fit few boxes.")
    freeze: str = option(
        "",
        "Layers to freeze: `10` the first ten, `0 1 2` or `0,1,2` these, `backbone` all but the head.",
        metavar="N | N N ...",
    )
    unfreeze: int = option(0, "With --freeze: epochs until all are trained; 0: never.", least=0, metavar="EPOCHS")
    multi_scale: bool = option(False, "Draw the side of each step from 0.5 to 1.5 times --imgsz, same on all ranks.")
    rect: bool = option(False, "Batch images of similar aspect ratio with little padding, without mosaics.")
    cache: str = option(
        "auto",
        "Where the decoded training images stay after their first use. auto: on the GPU if it has room, else in the "
        "machine's memory if that has room. `ram`: in memory. `disk`: in a file next to the data, also for later runs. "
        "none: every epoch decodes them. All ranks of a machine share one copy in memory or on disk.",
        known=("auto", "none", "ram", "disk"),
        metavar="[auto|none|ram|disk]",
    )
    augment_on: str = option(
        "auto",
        "Where a detector's training images are painted: `workers` (OpenCV), or `device` (Triton, on a GPU). auto: "
        "`device` on a GPU that Triton can use.",
        known=("auto", "workers", "device"),
        metavar="[auto|workers|device]",
    )
    image_weights: bool = option(False, "Sample images of rare classes, and of classes with low scores, more often.")
    single_cls: bool = option(False, "Treat all classes as one class, `item`.")
    allow_bad_labels: bool = option(False, "Omit and list faulty label rows and images, in place of an error.")
    noval: bool = option(False, "Train without validation; best.pt is then the last epoch.")
    val_period: int = option(1, "Epochs between validations; the last epoch is always validated.", least=1)
    patience: int = option(100, "Stop after this many epochs without a better score; 0: never.", least=0)
    resume: str = option(
        "",
        "Resume an interrupted run: its folder or last.pt; without a value the newest in --project. Only options that "
        "change no computed number may differ, such as --device, --ranks, --parallel, --workers, --cache, --patience "
        "and --save-every. clusterctl resumes restarted jobs itself.",
        metavar="[PATH]",
    )
    save_every: str = option(
        "", "Also write last.pt within an epoch: every 10min, 30s, 500steps. (default: at each validation)"
    )
    save_period: int = option(0, "Keep epochN.pt every N epochs; 0: only last, previous and best.", least=0)
    on_nan: str = option(
        "stop",
        "On a loss of NaN or infinity: `stop` with the batch in the error, or `skip`: return to the last checkpoint "
        "and omit the batch, at most three times.",
        known=("stop", "skip"),
    )
    stall_timeout: float = option(
        120.0,
        "Seconds without a step until each rank prints its stack traces and the late rank. Ranks that wait for a "
        "rank without a heartbeat then exit with 1. 0: never.",
        least=0,
    )
    log_steps: bool = option(False, "Write the loss of each step to steps.csv, with all digits.")
    track: str = option(
        "",
        "Log each epoch to mlflow, wandb or trackio; a resumed run is continued. TensorBoard's file is always written.",
        known=("", "mlflow", "wandb", "trackio"),
    )
    callback: str = option("", "Your subclass of trainer.Callback as package.module:Class.")
    project: str = option("runs", "Folder that holds the run's folder. Under clusterctl the job's folder replaces it.")
    name: str = option("train", "Name of the run's folder; if it exists, name2, name3, ...")
    exist_ok: bool = option(False, "Write into the folder even if it exists.")

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
        if (self.stages or self.micro_batches) and self.parallel != "pipeline":
            given = "--stages" if self.stages else "--micro-batches"
            raise TrainerError(f"{given}: --parallel {self.parallel} has none", "add --parallel pipeline")
        if self.unfreeze and not layers(self.freeze):
            raise TrainerError(f"--unfreeze {self.unfreeze}: nothing is frozen", "name the layers with --freeze")
        if not self.name or Path(self.name).name != self.name:
            raise TrainerError(f"--name {self.name!r} is not a folder's name", "--project takes a path")
        layers(self.freeze)
        interval(self.save_every)

    def _hyper_parameters(self, base: Hyp) -> Hyp:
        """Return the hyper-parameters of `hyp`: a file's path, "" for `base`, or values, which JSON holds as a dict."""
        given: Any = self.hyp
        if isinstance(given, str):
            given = load_hyp(given, base) if given else base
        values: Hyp = Hyp(**given) if isinstance(given, dict) else given
        if self.label_smoothing is None:
            return values
        if not 0 <= self.label_smoothing < 1:
            raise TrainerError(f"--label-smoothing is {self.label_smoothing}, it must be 0 or more and below 1")
        return dataclasses.replace(values, label_smoothing=self.label_smoothing)


def check_declared(settings: Any) -> None:
    """Raise TrainerError for the first setting that is not among its `known` texts, or between `least` and `most`."""
    for each in dataclasses.fields(settings):
        value, known = getattr(settings, each.name), each.metadata["known"]
        least, most = each.metadata["least"], each.metadata["most"]
        option = option_of(each.name)
        if known and value is not PRESET and value not in known:
            raise TrainerError(f"{option} {value}: unknown", f"use one of {', '.join(filter(None, known))}")
        if value is PRESET:
            continue
        if least is not None and value < least:
            raise TrainerError(f"{option} is {_number(value)}, it must be {least} or more")
        if most is not None and value > most:
            raise TrainerError(f"{option} is {_number(value)}, it must be {most} or less")


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
            f"--freeze {text}: not a number of a layer",
            f"use --freeze 10 (the first ten), --freeze 0 1 2, or --freeze {BACKBONE} (all but the head)",
        )
    listed = tuple(int(n) for n in numbers)
    return tuple(range(listed[0])) if len(listed) == 1 else listed
