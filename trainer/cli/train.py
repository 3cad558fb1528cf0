"""`trainer train`: trains a model. Its options are the fields of Settings."""

import gc
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from trainer import contract
from trainer.cli.options import takes, typed_options
from trainer.config import Settings
from trainer.config.settings import OPTIMIZATION, RANKS
from trainer.distributed.spawn import Line, local_ranks, ranks_of, run_ranks
from trainer.engine.signals import SIGNALS
from trainer.errors import TrainerError

# Options that are no settings.
Ranks = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Processes to start on this machine, as torchrun does.\n\n[default: one per GPU of --device]",
        show_default=False,
        rich_help_panel=RANKS,
    ),
]
CosLr = Annotated[
    bool,
    typer.Option("--cos-lr", help="Same as --schedule cosine, as in YOLOv5.", rich_help_panel=OPTIMIZATION),
]


@takes(Settings, ranks=(Ranks, None), cos_lr=(CosLr, False))
def train(context: typer.Context, *, ranks: int | None, cos_lr: bool, **options: Any) -> None:
    """Train a detector, a classifier or a segmentation model. Without options, train on handwritten digits.

    For several GPUs, use --device 0,1 or torchrun --nproc-per-node 2 -m trainer train ...; for several machines, use
    clusterctl launch.

    The run's folder contains results.csv, results.png, predictions.jpg, best.pt and last.pt.
    """
    if ranks is not None and ranks < 1:
        raise TrainerError(f"--ranks must be 1 or more, not {ranks}")
    if ranks is not None and "RANK" in os.environ and os.environ.get("WORLD_SIZE", str(ranks)) != str(ranks):
        raise TrainerError(
            f"--ranks {ranks}: RANK is set, so this is already one of {os.environ['WORLD_SIZE']} ranks",
            "omit --ranks under torchrun or a launcher",
        )
    count = ranks_of(options["device"], options["parallel"]) if ranks is None else ranks
    if count > 1 and "RANK" not in os.environ:
        raise typer.Exit(run_ranks_here(sys.argv[1:], count))
    if cos_lr and options["schedule"] not in (None, "cosine"):
        raise TrainerError(
            f"--cos-lr and --schedule {options['schedule']} contradict each other", "give one of them"
        )
    settings = Settings(**{**options, "schedule": "cosine" if cos_lr else options["schedule"]})
    gc.disable()  # an import creates many objects and frees few: collections take a fifth of torch's import
    from trainer.engine import checkpoints
    from trainer.engine.loop import train as run

    gc.freeze()  # later collections skip what was imported
    gc.enable()
    if settings.resume:
        settings = checkpoints.settings_of(settings, typed_options(context))
    (context.obj or run)(settings)  # `trainer bench` passes a function that takes the settings


def run_ranks_here(arguments: Sequence[str], count: int) -> int:
    """Run the command line as several ranks; print equal lines of their stderr once, and return the exit code."""
    printed: set[str] = set()

    def show(line: Line) -> None:
        if not line.stderr:
            print(line.text if line.rank == 0 else f"rank {line.rank}: {line.text}", flush=True)
        elif line.text not in printed:
            printed.add(line.text)
            print(line.text, file=sys.stderr, flush=True)

    forwarded = [number for number in SIGNALS if number != signal.SIGINT]
    codes = sorted(run_ranks(arguments, local_ranks(count), os.environ, show, forwarded).values())
    known = [code for code in codes if code in (contract.EXIT_BAD_INPUT, contract.EXIT_RUN_ME_AGAIN)]
    return known[0] if known else int(bool(codes))
