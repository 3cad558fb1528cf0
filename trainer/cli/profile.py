"""`trainer profile`: traces training steps and lists the most expensive operators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer.cli.bench import Device, Threads, check_counts, settings_of
from trainer.errors import TrainerError


def profile(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Trace file to write; .json.gz compresses it.")] = Path("trace.json"),
    steps: Annotated[int, typer.Option(help="Steps to profile; the last one updates the weights.")] = 3,
    warmup: Annotated[int, typer.Option(help="Steps before the profiled ones.")] = 3,
    ranks: Annotated[int, typer.Option(help="Ranks on this machine; rank 0 writes the trace.")] = 1,
    device: Device = "",
    threads: Threads = None,
) -> None:
    """Trace training steps and list the ten most expensive operators.

    Open the trace at https://ui.perfetto.dev: each step is a span that contains the loading and the training. All other
    options are those of `trainer train`: `--data`, `--cfg`, `--batch`, `--imgsz`, ...
    """
    from trainer.bench import profile as profiling
    from trainer.distributed.comm import usable_cores

    check_counts({"--steps": steps, "--warmup": warmup, "--ranks": ranks, "--threads": threads})
    if out.is_dir():
        raise TrainerError(f"--out {out}: is a folder", "use the path of a file")
    settings = settings_of(context.args, device, ranks=ranks)
    table = profiling.profile(settings, ranks, threads or max(1, usable_cores() // ranks), steps, warmup, out)
    typer.echo(f"{table}\n{out}: {steps} steps; open it at https://ui.perfetto.dev")
