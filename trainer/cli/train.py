"""`trainer train`: its options, and the settings that they become."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from trainer import contract
from trainer.config import (
    CLASSIFY_PRESETS,
    CLASSIFY_STANDARD,
    DIGITS,
    PRESETS,
    SEGMENT_PRESETS,
    SEGMENT_STANDARD,
    STANDARD,
    TASKS,
    Settings,
    interval,
    layers,
    load_hyp,
    preset_for,
    smoothed,
)
from trainer.errors import TrainerError
from trainer.ranks import Line, ranks_of, run_ranks
from trainer.training.signals import SIGNALS

_DEFAULTS = (
    ("", STANDARD, PRESETS),
    ("to classify ", CLASSIFY_STANDARD, CLASSIFY_PRESETS),
    ("to segment ", SEGMENT_STANDARD, SEGMENT_PRESETS),
)


def _default(field: str) -> str:
    """What holds where an option is left out, for each task; data sets are named where theirs differs."""
    tasks = []
    for task, standard, presets in _DEFAULTS:
        usual = getattr(standard, field)
        named: dict[object, list[str]] = {}
        for data, preset in presets.items():
            if getattr(preset, field) != usual:
                named.setdefault(getattr(preset, field), []).append(data)
        tasks.append(task + ", ".join([str(usual), *(f"{' and '.join(sets)} {own}" for own, sets in named.items())]))
    return f"(default: {'; '.join(tasks)})"


Task = Annotated[
    str,
    typer.Option(
        help="detect: boxes, by a YOLO model; classify: one class for a picture, segment: one for each pixel, by "
        "torchvision's models."
    ),
]
Data = Annotated[
    str,
    typer.Option(
        help="`digits` (built in, nothing to download), the path of a data.yaml, or a set of your own: "
        "package.module:function. To classify: `digits`, `cifar10`, `cifar100`, or a folder with train/ and val/, "
        "which hold a folder of pictures for each class. To segment: `digits`, or a folder with images/train, "
        "images/val, masks/train and masks/val."
    ),
]
Cfg = Annotated[
    str,
    typer.Option(
        help="Model file: yolov5n.yaml, s, m, l, x, or your own: a file in the same syntax, or "
        "package.module:function. To classify or segment: a torchvision model's name, resnet50. "
        "(default: the checkpoint's with --weights, else yolov5n.yaml, resnet18 or lraspp_mobilenet_v3_large)"
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        help="Start from a best.pt or last.pt of this trainer or of YOLOv5, from a release by its name (yolov5s.pt: "
        "fetched where it is not there), or from an address (https://.../x.pt#sha256=...); '' starts from scratch. "
        "To classify or segment: `torchvision` for its own weights."
    ),
]
HypFile = Annotated[
    str,
    typer.Option(
        "--hyp",
        help="For a detector YOLOv5's sets `low` (its n and s), `med`, `high` (m, l, x); or your own YAML file: what "
        "that leaves out keeps the default of the task and the data set (trainer/config.py).",
        show_default=False,
    ),
]
Epochs = Annotated[
    int | None, typer.Option(help=f"Passes over the training pictures. {_default('epochs')}", show_default=False)
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        "--batch-size",
        help=f"Pictures per step on all ranks together; it need not divide evenly. {_default('batch')}",
        show_default=False,
    ),
]
ImgSz = Annotated[
    int | None,
    typer.Option(
        "--imgsz",
        "--img",
        help=f"Side of the square pictures in pixels, a multiple of 32. {_default('imgsz')}",
        show_default=False,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="cpu, cuda, a GPU number or numbers (0,1: one per rank); '' takes the first GPU where there is one (a "
        "launcher's ranks one each, --parallel dp all)."
    ),
]
OptimizerName = Annotated[
    str | None,
    typer.Option("--optimizer", help=f"SGD, Adam or AdamW. {_default('optimizer')}", show_default=False),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        help="Start so many ranks on this machine, as torchrun would. (default: one for each GPU that --device names)",
        show_default=False,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Loading processes per rank; `trainer bench workers` compares numbers. (default: 0 on the CPU; on a GPU "
        "the cores of the machine divided by its ranks, 8 at most)",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the weights, the order and the augmentation; same on all ranks.")]
Project = Annotated[
    str, typer.Option(help="Where the run's folder goes. Under clusterctl the job's own folder takes its place.")
]
Name = Annotated[str, typer.Option(help="The run's folder; if it exists, name2, name3, ...")]
ExistOk = Annotated[bool, typer.Option("--exist-ok", help="Write into the folder even if it exists.")]
CosLr = Annotated[bool, typer.Option("--cos-lr", help="YOLOv5's name for --schedule cosine.")]
ScheduleName = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help="The learning rate after the warm-up: linear, cosine, or one-cycle (up and down again over the run). "
        "(default: linear; to classify or segment cosine, for digits one-cycle)",
        show_default=False,
    ),
]
Precision = Annotated[
    str,
    typer.Option(
        help="bf16, fp16, fp32, or auto: bf16 where the processor or GPU computes in it natively, else fp16 on a GPU "
        "and fp32 on a CPU."
    ),
]
ValPeriod = Annotated[int, typer.Option(help="Validate every so many epochs, and after the last.")]
Patience = Annotated[int, typer.Option(help="End after so many epochs without a better score; 0: never.")]
Resume = Annotated[
    str,
    typer.Option(
        help="Go on exactly where a run was interrupted: its folder or last.pt; alone, the newest in --project. "
        "The other options are those of that run, but for where it computes and writes (--device, --ranks, "
        "--parallel, --workers, --cache, --project). Under clusterctl a restarted job does this by itself.",
        metavar="[PATH]",
        show_default=False,
    ),
]
SaveEvery = Annotated[
    str,
    typer.Option(
        help="A checkpoint inside the epochs too: 10min, 30s, 500steps. One after each epoch is always written.",
        show_default=False,
    ),
]
SavePeriod = Annotated[int, typer.Option(help="Keep epochN.pt every N epochs; 0: only last, previous and best.")]
OnNan = Annotated[
    str,
    typer.Option(
        help="A loss that is no number: `stop` names the batch; `skip` goes back to the last checkpoint and leaves "
        "that batch out, three times at most."
    ),
]
Stall = Annotated[
    float,
    typer.Option(
        help="Seconds without a step until every rank tells what it is doing, and which is late, and until those end "
        "that wait for one that gives no sign of life; 0: never."
    ),
]
LogSteps = Annotated[
    bool, typer.Option("--log-steps", help="Write every step's loss to steps.csv, with all its digits.")
]
Compile = Annotated[
    bool, typer.Option("--compile", help="torch.compile the network: minutes at the start, faster steps after.")
]
Parallel = Annotated[
    str,
    typer.Option(
        help="How ranks share the work. ddp: each has the whole model and a share of the pictures. fsdp: a shard of "
        "the model, too, for models that do not fit. pipeline: each has some of the layers. dp: one process for all "
        "GPUs, slower than ddp. docs/parallel.md says which is good for what.",
        metavar="[ddp|dp|fsdp|pipeline]",
    ),
]
Stages = Annotated[
    int,
    typer.Option(
        help="With --parallel pipeline: ranks that one pipeline has. With 2 on 4 ranks there are 2 pipelines, which "
        "share the pictures. (default: all ranks)",
        show_default=False,
    ),
]
MicroBatches = Annotated[
    int,
    typer.Option(
        help="With --parallel pipeline: parts of a pipeline's pictures that pass through it one after the other. "
        "(default: 4)",
        show_default=False,
    ),
]
GradCompress = Annotated[str, typer.Option(help="bf16: send gradients between ranks in half the bytes; none: exact.")]
MultiScale = Annotated[
    bool,
    typer.Option("--multi-scale", help="Another side for every step, from 0.5 to 1.5 x --imgsz, same on all ranks."),
]
Cache = Annotated[
    str,
    typer.Option(
        help="Decode the training pictures once: `ram` into memory, for as long as the run lasts, `disk` into a file "
        "beside the data, for later runs too. One copy for all ranks of a machine.",
        metavar="[ram|disk]",
    ),
]
Rect = Annotated[
    bool,
    typer.Option("--rect", help="Batches of pictures of similar aspect, padded little; without mosaics."),
]
ImageWeights = Annotated[
    bool,
    typer.Option(
        "--image-weights", help="Draw pictures with rare classes, and classes that validate badly, more often."
    ),
]
SingleCls = Annotated[bool, typer.Option("--single-cls", help="Take all classes of the data set for one, named item.")]
AllowBadLabels = Annotated[
    bool,
    typer.Option("--allow-bad-labels", help="Leave bad label rows and pictures out (they are listed) and go on."),
]
SyncBn = Annotated[
    bool, typer.Option("--sync-bn", help="Batch norm over the pictures of all ranks, not of each by itself.")
]
NoAutoAnchor = Annotated[
    bool,
    typer.Option("--noautoanchor", help="Keep the model file's anchors, even where they fit few of the data's boxes."),
]
Freeze = Annotated[
    str,
    typer.Option(
        help="Layers that stay as they are: `10` the first ten, `0 1 2` or `0,1,2` these, `backbone` all but the head.",
        metavar="N | N N ...",
        show_default=False,
    ),
]
Unfreeze = Annotated[
    int, typer.Option(help="With --freeze: after so many epochs train all layers; 0: never.", metavar="EPOCHS")
]
LabelSmoothing = Annotated[
    float | None,
    typer.Option(
        help="Class targets of 1 - x / 2 and x / 2 instead of 1 and 0; to classify or segment x is shared among all "
        "classes. Over --hyp's.",
        show_default=False,
    ),
]
CallbackPath = Annotated[
    str, typer.Option("--callback", help="package.module:Class of a trainer.Callback, which hears of epochs and ends.")
]
NoVal = Annotated[bool, typer.Option("--noval", help="Train without validating; best.pt is then the last epoch.")]


def train(
    context: typer.Context,
    task: Task = "detect",
    data: Data = DIGITS,
    cfg: Cfg = "",
    weights: Weights = "",
    hyp: HypFile = "",
    epochs: Epochs = None,
    batch: Batch = None,
    imgsz: ImgSz = None,
    device: Device = "",
    ranks: Ranks = None,
    optimizer: OptimizerName = None,
    workers: Workers = None,
    seed: Seed = 0,
    project: Project = "runs",
    name: Name = "train",
    exist_ok: ExistOk = False,
    cos_lr: CosLr = False,
    schedule: ScheduleName = None,
    precision: Precision = "auto",
    multi_scale: MultiScale = False,
    rect: Rect = False,
    cache: Cache = "",
    image_weights: ImageWeights = False,
    single_cls: SingleCls = False,
    allow_bad_labels: AllowBadLabels = False,
    noval: NoVal = False,
    sync_bn: SyncBn = False,
    noautoanchor: NoAutoAnchor = False,
    freeze: Freeze = "",
    unfreeze: Unfreeze = 0,
    label_smoothing: LabelSmoothing = None,
    callback: CallbackPath = "",
    val_period: ValPeriod = 1,
    patience: Patience = 100,
    resume: Resume = "",
    save_every: SaveEvery = "",
    save_period: SavePeriod = 0,
    on_nan: OnNan = "stop",
    stall: Stall = 120.0,
    log_steps: LogSteps = False,
    compile: Compile = False,
    grad_compress: GradCompress = "none",
    parallel: Parallel = "ddp",
    stages: Stages = 0,
    micro_batches: MicroBatches = 0,
) -> None:
    """Train a detector, a classifier or a segmentation.

    With no option at all: the demonstration, handwritten digits on small pages.

    Several GPUs: `--device 0,1`, or `torchrun --nproc-per-node 2 -m trainer train ...`; several machines:
    `clusterctl launch`.
    The run's folder gets results.csv, results.png, predictions.jpg, best.pt and last.pt.
    """
    if ranks is not None and ranks < 1:
        raise TrainerError(f"--ranks is {ranks}, it must be 1 or more")
    if ranks is not None and "RANK" in os.environ and os.environ.get("WORLD_SIZE", str(ranks)) != str(ranks):
        raise TrainerError(
            f"--ranks {ranks}: RANK is set, so this is already one of {os.environ['WORLD_SIZE']} ranks",
            "leave --ranks out where torchrun or a launcher starts the ranks",
        )
    count = ranks_of(device, parallel) if ranks is None else ranks
    if count > 1 and "RANK" not in os.environ:
        raise typer.Exit(run_here(sys.argv[1:], count))
    if task not in TASKS:
        raise TrainerError(f"--task {task}: unknown", f"use one of {', '.join(TASKS)}")
    if cos_lr and schedule not in (None, "cosine"):
        raise TrainerError(f"--cos-lr and --schedule {schedule} contradict each other", "give one of them")
    preset = preset_for(data, task)
    values = load_hyp(hyp, preset.hyp) if hyp else preset.hyp
    if label_smoothing is not None:
        values = smoothed(values, label_smoothing)
    settings = Settings(
        task=task,
        data=data,
        cfg=cfg,
        weights=weights,
        hyp=values,
        epochs=preset.epochs if epochs is None else epochs,
        batch=preset.batch if batch is None else batch,
        imgsz=preset.imgsz if imgsz is None else imgsz,
        device=device,
        optimizer=optimizer or preset.optimizer,
        workers=workers,
        seed=seed,
        project=project,
        name=name,
        exist_ok=exist_ok,
        schedule="cosine" if cos_lr else schedule or preset.schedule,
        precision=precision,
        multi_scale=multi_scale,
        rect=rect,
        cache=cache,
        image_weights=image_weights,
        single_cls=single_cls,
        allow_bad_labels=allow_bad_labels,
        val=not noval,
        sync_bn=sync_bn,
        autoanchor=not noautoanchor,
        freeze=layers(freeze),
        unfreeze=unfreeze,
        callback=callback,
        val_period=val_period,
        patience=patience,
        resume=resume,
        save_every=interval(save_every),
        save_period=save_period,
        on_nan=on_nan,
        stall_s=stall,
        log_steps=log_steps,
        compile=compile,
        grad_compress=grad_compress,
        parallel=parallel,
        stages=stages,
        micro_batches=micro_batches,
    )
    from trainer.training import resume as resuming
    from trainer.training.loop import train as run

    if resume:
        settings = resuming.settings_of(settings, typed_options(context))
    (context.obj or run)(settings)  # a benchmark takes the settings and does what it does with them


def run_here(arguments: Sequence[str], count: int) -> int:
    """Run the command line as several ranks of this machine; returns its exit code.

    What all ranks say alike, as when the input is refused, is shown once.
    """
    said: set[str] = set()

    def tell(line: Line) -> None:
        if not line.stderr:
            print(line.text if line.rank == 0 else f"rank {line.rank}: {line.text}", flush=True)
        elif line.text not in said:
            said.add(line.text)
            print(line.text, file=sys.stderr, flush=True)

    pass_on = [number for number in SIGNALS if number != signal.SIGINT]
    codes = sorted(run_ranks(arguments, count, os.environ, tell, pass_on).values())
    known = [code for code in codes if code in (contract.EXIT_BAD_INPUT, contract.EXIT_RUN_ME_AGAIN)]
    return known[0] if known else int(bool(codes))


def typed_options(context: typer.Context) -> frozenset[str]:
    """The names of the settings that the user has typed, as against those left at their default."""
    names = {
        "noval": "val",
        "stall": "stall_s",
        "noautoanchor": "autoanchor",
        "label_smoothing": "hyp",
        "cos_lr": "schedule",
    }
    typed = (k for k in context.params if (source := context.get_parameter_source(k)) and source.name == "COMMANDLINE")
    return frozenset(names.get(k, k) for k in typed)
