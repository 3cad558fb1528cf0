"""`trainer train`: its options, and the settings that they become."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from trainer import contract
from trainer.config import DIGITS, PRESETS, STANDARD, Settings, interval, layers, load_hyp, preset_for, smoothed
from trainer.ranks import Line, run_ranks
from trainer.training.signals import SIGNALS

_D, _S = PRESETS[DIGITS], STANDARD


def _default(field: str) -> str:
    return f"(default: {getattr(_D, field)} for digits, else {getattr(_S, field)})"


Data = Annotated[
    str,
    typer.Option(
        help="`digits` (built in, nothing to download), the path of a data.yaml, or a set of your own: "
        "package.module:function."
    ),
]
Cfg = Annotated[
    str,
    typer.Option(
        help="Model file: yolov5n.yaml, s, m, l, x, or your own: a file in the same syntax, or "
        "package.module:function. (default: the checkpoint's with --weights, else yolov5n.yaml)"
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        help="Start from a best.pt or last.pt of this trainer or of YOLOv5, from a release by its name (yolov5s.pt: "
        "fetched where it is not there), or from an address (https://.../x.pt#sha256=...); '' starts from scratch."
    ),
]
HypFile = Annotated[
    str,
    typer.Option(
        "--hyp",
        help="YOLOv5's sets `low` (its n and s), `med`, `high` (m, l, x), or your own YAML file; what that leaves out "
        "keeps its default: that of low, for digits that of a set of its own (trainer/config.py).",
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
    str, typer.Option(help="cpu, cuda, a GPU number or numbers (0,1: one per rank); '' takes GPUs where there are any.")
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
        help="Loading processes per rank. (default: 0 on the CPU, where they would take the training's cores; "
        "up to 8 on a GPU)",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the weights, the order and the augmentation; same on all ranks.")]
Project = Annotated[
    str, typer.Option(help="Where the run's folder goes. Under clusterctl the job's own folder takes its place.")
]
Name = Annotated[str, typer.Option(help="The run's folder; if it exists, name2, name3, ...")]
ExistOk = Annotated[bool, typer.Option("--exist-ok", help="Write into the folder even if it exists.")]
CosLr = Annotated[bool, typer.Option("--cos-lr", help="Let the learning rate fall along a cosine, not a line.")]
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
        "The other options are those of that run. (Under clusterctl a restarted job does this by itself.)",
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
        help="Layers that stay as they are: `10` the first ten, `0 1 2` or `0,1,2` these.",
        metavar="N | N N ...",
        show_default=False,
    ),
]
LabelSmoothing = Annotated[
    float | None,
    typer.Option(help="Class targets of 1 - x / 2 and x / 2 instead of 1 and 0; over --hyp's.", show_default=False),
]
CallbackPath = Annotated[
    str, typer.Option("--callback", help="package.module:Class of a trainer.Callback, which hears of epochs and ends.")
]
NoVal = Annotated[bool, typer.Option("--noval", help="Train without validating; best.pt is then the last epoch.")]


def train(
    context: typer.Context,
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
) -> None:
    """Train a detector. With no option at all: the demonstration, handwritten digits on small pages.

    Several GPUs: `--device 0,1`, or `torchrun --nproc-per-node 2 -m trainer train ...`; several machines:
    `clusterctl launch`.
    The run's folder gets results.csv, results.png, predictions.jpg, best.pt and last.pt.
    """
    count = device.count(",") + 1 if ranks is None else ranks
    if count > 1 and "RANK" not in os.environ:
        raise typer.Exit(run_here(sys.argv[1:], count))
    preset = preset_for(data)
    values = load_hyp(hyp, preset.hyp) if hyp else preset.hyp
    if label_smoothing is not None:
        values = smoothed(values, label_smoothing)
    settings = Settings(
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
        cos_lr=cos_lr,
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
    )
    from trainer.training import resume as resuming
    from trainer.training.loop import train as run

    if resume:
        settings = resuming.settings_of(settings, typed_options(context))
    run(settings)


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
    names = {"noval": "val", "stall": "stall_s", "noautoanchor": "autoanchor", "label_smoothing": "hyp"}
    typed = (k for k in context.params if (source := context.get_parameter_source(k)) and source.name == "COMMANDLINE")
    return frozenset(names.get(k, k) for k in typed)
