"""`trainer profile`: what a step's time goes to, operator by operator."""

from __future__ import annotations

import dataclasses
import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from trainer.cli.bench import Device, Threads, settings_of
from trainer.errors import TrainerError

SHOWN = 10


def profile(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="The trace; with .gz at its end it is packed.")] = Path("trace.json"),
    steps: Annotated[int, typer.Option(help="Steps that are profiled; the last of them moves the weights.")] = 3,
    warmup: Annotated[int, typer.Option(help="First steps, which are not.")] = 3,
    ranks: Annotated[int, typer.Option(help="Ranks on this machine; the trace is that of rank 0.")] = 1,
    device: Device = "",
    threads: Threads = None,
    json: Annotated[bool, typer.Option("--json", help="Print all operators as one JSON object.")] = False,
    record: Annotated[str, typer.Option("--record", hidden=True)] = "",
) -> None:
    """Trace a few steps of a real training, and list the ten operators that cost most.

    Open the trace at https://ui.perfetto.dev, which reads it in the browser: each step is a span with its loading and
    its training in it. All other options are those of `trainer train`: `--data`, `--cfg`, `--batch`, `--imgsz`, ...
    """
    from rich.console import Console

    from trainer.bench import profile as profiling
    from trainer.dist import devices_of, usable_cores

    if record:  # a rank of another `trainer profile`
        profiling.record(*map(Path, record.split(",")))
        return
    for option, value in (("--steps", steps), ("--warmup", warmup), ("--ranks", ranks), ("--threads", threads)):
        if value is not None and value < 1:
            raise TrainerError(f"{option} is {value}, it must be 1 or more")
    if out.is_dir():
        raise TrainerError(f"--out {out}: is a folder", "name a file in it")
    settings = settings_of(context.args, device)
    if settings.parallel != "dp":  # one process for all GPUs
        settings = dataclasses.replace(settings, device=devices_of(device, ranks))
    console = Console(stderr=True)
    with console.status("profiling") if console.is_terminal else Console(quiet=True).status(""):
        found = profiling.profile(settings, ranks, threads or max(1, usable_cores() // ranks), steps, warmup, out)
    if json:
        rows = [dataclasses.asdict(row) for row in found]
        typer.echo(json_format.dumps({"trace": str(out), "steps": steps, "operators": rows}))
        return
    typer.echo(profiling.table_of(found[:SHOWN]))
    typer.echo(f"\n{out}: {steps} steps; open it at https://ui.perfetto.dev")
