"""`trainer yolo`: trains with Ultralytics' own package."""

import os
import sys
from typing import Annotated

import typer

from trainer.cli.train import run_ranks_here
from trainer.distributed.spawn import ranks_of

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TASK] train [NAME=VALUE]...",
        help="What you would type after `yolo`.",
        show_default=False,
    ),
]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="The device of a launcher's job.", hidden=True)]
#: Words such as --epochs=3 are the package's.
ANY_WORDS = {"ignore_unknown_options": True}


def yolo(words: Words = None, device: Device = "") -> None:
    """Train with Ultralytics' own package, which you install, on several machines.

    The tasks are detect, segment, classify, pose and obb, and the arguments are those of `yolo train`. For several
    GPUs, use device=0,1; for several machines, use clusterctl launch.

    In a job, the run's folder contains what the package writes: weights/best.pt, results.csv and its plots.
    """
    words = words or []
    given = [word.partition("=")[2] for word in words if word.removeprefix("--").startswith("device=")]
    count = ranks_of(given[-1]) if given else 1
    if count > 1 and "RANK" not in os.environ:
        raise typer.Exit(run_ranks_here(sys.argv[1:], count))
    from trainer.ultralytics.training import train  # imports torch

    train(words, device)
