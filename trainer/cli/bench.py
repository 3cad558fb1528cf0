"""`trainer bench`: what more ranks, workers and modes bring on the user's own data and model."""

from __future__ import annotations

import dataclasses
import json as json_format
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer.config import PARALLEL, Settings
from trainer.errors import TrainerError
from trainer.progress import bar

if TYPE_CHECKING:
    from trainer.bench.scaling import Point, Row

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure what more GPUs, larger batches and more workers bring: on your own data, model and machine.",
)
OTHERS = {"allow_extra_args": True, "ignore_unknown_options": True}  # what is not our option is one of `train`
MOST_RANKS = 8  # by default

Batches = Annotated[
    str,
    typer.Option(
        "--batch",
        "--batch-size",
        help="Batch sizes, with commas. Each counts the pictures of **one** rank, so that a step on N ranks has N "
        "times as many (weak scaling: what the published tables show); with `--strong`, those of all ranks together.",
    ),
]
RankCounts = Annotated[
    str,
    typer.Option(
        "--ranks", help="Numbers of ranks, with commas. (default: 1,2,4,8 as far as there are GPUs, or cores)"
    ),
]
PrecisionNames = Annotated[str, typer.Option("--precision", help="Precisions, with commas: fp32,bf16,fp16 or auto.")]
Modes = Annotated[str, typer.Option("--parallel", help=f"Modes, with commas: {', '.join(PARALLEL)}.")]
Device = Annotated[str, typer.Option(help="cpu, or the GPUs to use: 0,1,2,3. (default: all GPUs, else the CPU)")]
Steps = Annotated[
    int | None,
    typer.Option(
        help="Steps that are timed at each point, and batches of the validation. (default: as many as take 5 s)",
        show_default=False,
    ),
]
Warmup = Annotated[int, typer.Option(help="First steps of each point, which do not count.")]
Rounds = Annotated[
    int, typer.Option(help="Times that each point is measured, in turns: the speed of a machine drifts.")
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Threads of each rank, the same at every point, so that a rank stands for a device. (default: the cores "
        "shared among the most ranks; on GPUs, too)",
        show_default=False,
    ),
]
Strong = Annotated[bool, typer.Option("--strong", help="--batch counts the pictures of all ranks together.")]
Csv = Annotated[Path | None, typer.Option("--csv", help="Write every figure to this file.", show_default=False)]
Markdown = Annotated[Path | None, typer.Option(help="Write the tables to this file.", show_default=False)]
Plot = Annotated[
    Path | None,
    typer.Option(help="Draw speed-up by ranks and gain by batch size into this PNG.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the tables.")]
Recorded = Annotated[str, typer.Option("--record", hidden=True)]


@bench.command(context_settings=OTHERS)
def scaling(
    context: typer.Context,
    batch: Batches = "16",
    ranks: RankCounts = "",
    precision: PrecisionNames = "auto",
    parallel: Modes = "ddp",
    device: Device = "",
    steps: Steps = None,
    warmup: Warmup = 3,
    rounds: Rounds = 3,
    threads: Threads = None,
    strong: Strong = False,
    csv: Csv = None,
    markdown: Markdown = None,
    plot: Plot = None,
    json: Json = False,
    record: Recorded = "",
) -> None:
    """How many GPUs should I use? Times real steps and a real validation on 1, 2, 4, ... ranks.

    All other options are those of `trainer train`: `--data`, `--cfg`, `--imgsz`, `--cache`, `--workers`, `--noval`, ...
    No run folder and no checkpoint is written, only the files that you name (and the data set's cache). For example:

    `trainer bench scaling --data my/data.yaml --imgsz 640 --batch 8,16,32 --ranks 1,2,4 --markdown scaling.md`

    Prints an epoch's time by ranks with the memory that it takes (the table of YOLOv5's multi-GPU page), by batch size
    with the gain (the table of the fast.ai thread), and where the time goes. A point that runs out of memory is a row
    that says so. Ctrl-C ends it and shows what was measured.
    """
    from trainer.bench import measure, tables
    from trainer.bench.plot import plot_scaling
    from trainer.bench.scaling import points_of, rows_of, scale

    if record:  # a rank of another `trainer bench`
        measure.record(*map(Path, record.split(",")))
        return
    settings = settings_of(context.args, device, parallel)
    counts = numbers("--ranks", ranks) if ranks else default_ranks(settings.device)
    points = points_of(numbers("--batch", batch), counts, precision.split(","), strong, parallel.split(","))
    effort = effort_of(warmup, steps, threads, max(counts))
    if rounds < 1:
        raise TrainerError(f"--rounds is {rounds}, it must be 1 or more")
    for path in (csv, markdown, plot):
        check_file(path)  # before hours of measuring
    outcomes: dict[Any, list[Any]] = {}
    whole = watched(
        scale(settings, points, rounds, effort),
        len(points) * rounds,
        described,
        outcomes,
    )
    rows = rows_of(outcomes)
    if rows:
        text = scaling_text(rows, settings, effort, rounds)
        records = [tables.record_of(row) for row in rows]
        typer.echo(json_format.dumps({**machine(rows), "rows": records}) if json else text)
        write(csv, tables.csv_text(records))
        write(markdown, text + "\n")
        if plot:
            plot_scaling(rows, plot)
    if not whole:
        raise KeyboardInterrupt


@bench.command(context_settings=OTHERS)
def workers(
    context: typer.Context,
    ranks: Annotated[int, typer.Option(help="Ranks on this machine, each with its own workers.")] = 1,
    most: Annotated[
        int | None,
        typer.Option(help="Workers of each rank to try at most. (default: the cores that it has)", show_default=False),
    ] = None,
    device: Device = "",
    steps: Steps = None,
    warmup: Warmup = 3,
    rounds: Rounds = 2,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """How many loading processes pay? Times the loader alone and the training with 0, 1, 2, ... workers.

    All other options are those of `trainer train`: `--data`, `--batch`, `--imgsz`, `--cfg`, `--cache`, ... It stops
    where more workers gain nothing. On a CPU, workers take the training's cores: compare the training's rates, not the
    loader's.
    """
    from trainer.bench.workers import CLOSE, choose, rates_of, table_of, try_workers
    from trainer.dist import devices_of, usable_cores

    for option, value in (("--ranks", ranks), ("--rounds", rounds)):
        if value < 1:
            raise TrainerError(f"{option} is {value}, it must be 1 or more")
    if most is not None and most < 0:
        raise TrainerError(f"--most is {most}, it must be 0 or more")
    if any(word.partition("=")[0] == "--workers" for word in context.args):
        raise TrainerError("--workers: which number pays is what this finds out", "--most N is the most that it tries")
    settings = settings_of(context.args, device)
    if settings.parallel != "dp":  # one process for all GPUs
        settings = dataclasses.replace(settings, device=devices_of(device, ranks))
    effort = dataclasses.replace(
        effort_of(warmup, steps, threads or max(1, usable_cores() // ranks), ranks), loader=True
    )
    found: dict[Any, list[Any]] = {}
    limit = max(1, usable_cores() // ranks) if most is None else most
    whole = watched(try_workers(settings, ranks, rounds, effort, limit), None, lambda count: f"{count} workers", found)
    failures = [
        f"{count} workers: {each.message}"
        for count, rounds_ in found.items()
        for each in rounds_
        if isinstance(each, TrainerError)
    ]
    outcomes = {k: done for k, each in found.items() if (done := [m for m in each if not isinstance(m, TrainerError)])}
    if outcomes and json:
        rows = {str(k): [dataclasses.asdict(m) for m in ms] for k, ms in outcomes.items()}
        answer = {"workers": choose(rates_of(outcomes)), "rounds": rows, "failures": failures}
        typer.echo(json_format.dumps(answer))
    elif outcomes:
        what = f"{settings.data}, {settings.imgsz} px, batch {settings.batch}, ranks: {ranks}"
        typer.echo(f"{outcomes[0][0].device}; {what}")
        fewest = f"--workers {choose(rates_of(outcomes))}: the fewest within {CLOSE:.0%} of the best rate"
        typer.echo("\n" + "\n".join([table_of(outcomes), "", *failures, fewest]))
    if not whole:
        raise KeyboardInterrupt


@bench.command(context_settings=OTHERS)
def modes(
    context: typer.Context,
    batch: Batches = "16",
    ranks: Annotated[
        int | None, typer.Option(help="Ranks of each mode. (default: all GPUs, or cores)", show_default=False)
    ] = None,
    precision: Annotated[str, typer.Option(help="As for `train`.")] = "auto",
    parallel: Annotated[
        str,
        typer.Option(
            help=f"Modes, with commas: {', '.join(PARALLEL)}. (default: all; without GPUs not dp, which has nothing to "
            "share there)",
            show_default=False,
        ),
    ] = "",
    device: Device = "",
    steps: Steps = None,
    warmup: Warmup = 3,
    rounds: Rounds = 3,
    threads: Threads = None,
    strong: Strong = False,
    csv: Csv = None,
    json: Json = False,
) -> None:
    """Which way of sharing the work? Times every mode of --parallel on your model.

    All other options are those of `trainer train`. Prints the gain of each mode over one rank, its memory, and the
    shares of a step that loading and communication take.
    """
    from trainer.bench import tables
    from trainer.bench.scaling import points_of, rows_of, scale
    from trainer.dist import gpu_numbers

    settings = settings_of(context.args, device, parallel or "pipeline")
    several = len(gpu_numbers(settings.device)) > 1
    compared = parallel.split(",") if parallel else [mode for mode in PARALLEL if mode != "dp" or several]
    most = default_ranks(settings.device)[-1] if ranks is None else ranks
    counts = sorted({1, most})
    points = points_of(numbers("--batch", batch), counts, [precision], strong, compared)
    effort = effort_of(warmup, steps, threads, max(counts))
    if rounds < 1:
        raise TrainerError(f"--rounds is {rounds}, it must be 1 or more")
    check_file(csv)
    outcomes: dict[Any, list[Any]] = {}
    whole = watched(scale(settings, points, rounds, effort), len(points) * rounds, described, outcomes)
    rows = rows_of(outcomes)
    if rows:
        records = [tables.record_of(row) for row in rows]
        if json:
            typer.echo(json_format.dumps({**machine(rows), "rows": records}))
        else:
            what = f"{said_of(rows)}; {settings.data}, {settings.imgsz} px"
            typer.echo("\n".join([what, "", tables.detail_table(rows), "", *tables.notes_of(rows)]).strip())
        write(csv, tables.csv_text(records))
    if not whole:
        raise KeyboardInterrupt


def scaling_text(rows: Sequence[Row], settings: Settings, effort: Any, rounds: int) -> str:
    """The tables with what they are of."""
    from trainer.bench import tables

    many = "round" if rounds == 1 else "rounds"
    parts = [
        f"{said_of(rows)}; {settings.data}, {settings.imgsz} px, threads of a rank: {effort.threads}, {rounds} {many}"
    ]
    several = len({row.point.parallel for row in rows}) > 1
    for precision, mode in dict.fromkeys((row.point.precision, row.point.parallel) for row in rows):
        of_all = [row for row in rows if row.point.precision == precision]
        mine = [row for row in of_all if row.point.parallel == mode or row.point.ranks == 1]
        computed = next((row.measured.precision for row in mine if row.measured), precision)
        kind = f"{computed}, {mode}" if several else computed
        parts += [f"An epoch, {kind}:", tables.yolov5_table(mine)]
        if len({row.point.ranks for row in mine}) > 1:
            whose = "of all ranks together" if mine[0].point.strong else f"of each {tables.unit_of(mine)}"
            parts += [f"An epoch's training by batch size ({whose}), {kind}:", tables.thread_table(mine)]
    parts += ["Where it goes:", tables.detail_table(rows), *tables.notes_of(rows)]
    return "\n\n".join(parts)


def machine(rows: Sequence[Row]) -> dict[str, Any]:
    """What the figures are of: machine, versions, date."""
    import torch

    from trainer.dist import usable_cores

    device = next((row.measured.device for row in rows if row.measured), platform.machine())
    return {
        "device": device,
        "cores": usable_cores(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def said_of(rows: Sequence[Row]) -> str:
    """The same, for people."""
    about = machine(rows)
    return f"{about['device']}, {about['cores']} cores, torch {about['torch']}, {about['date']}"


def settings_of(arguments: Sequence[str], device: str, modes: str = "") -> Settings:
    """What `trainer train ARGUMENTS` would train; as a pipeline where it is a mode; that has options of its own."""
    from trainer.cli import app

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise TrainerError("a benchmark starts its own ranks, and this is already one", "start it without torchrun")
    taken: list[Settings] = []
    command: Any = typer.main.get_command(app)
    words = [*arguments, *(["--parallel", "pipeline"] if "pipeline" in modes.split(",") else [])]
    words += ["--device", device] if "," not in device and device else []
    command.commands["train"].main(words, prog_name="trainer train", standalone_mode=False, obj=taken.append)
    if not taken:
        raise typer.Exit(0)  # its --help
    return dataclasses.replace(taken[0], device=device, resume="")


def numbers(option: str, text: str) -> list[int]:
    """The numbers of a list with commas."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise TrainerError(
            f"{option} {text}: not numbers with commas between them", f"for example {option} 1,2,4"
        ) from None


def default_ranks(device: str) -> list[int]:
    """1, 2, 4, ... up to the number of GPUs that --device means, or of cores; at most MOST_RANKS."""
    from trainer import dist

    most = min(len(dist.gpu_numbers(device)) or dist.usable_cores(), MOST_RANKS)
    return sorted({count for count in (1, 2, 4, 8, most) if count <= most})


def effort_of(warmup: int, steps: int | None, threads: int | None, most_ranks: int) -> Any:
    """How each point is measured."""
    from trainer.bench.measure import Effort
    from trainer.dist import usable_cores

    for option, value in (("--warmup", warmup), ("--steps", steps), ("--threads", threads)):
        if value is not None and value < 1:
            raise TrainerError(f"{option} is {value}, it must be 1 or more")
    return Effort(warmup, steps or 0, threads or max(1, usable_cores() // most_ranks))


def described(point: Point) -> str:
    """A point while it is measured."""
    ranks = f"{point.ranks} rank{'s' if point.ranks > 1 else ''}"
    return f"{point.parallel}, {ranks}, batch {point.step_batch}, {point.precision}"


def watched(found: Any, total: int | None, name: Callable[[Any], str], outcomes: dict[Any, list[Any]]) -> bool:
    """Gather what is measured, with a bar where stderr is a terminal; False where Ctrl-C came in between."""
    with bar(total) as move:
        try:
            for point, outcome in found:
                if outcome is None:
                    move(description=name(point))
                else:
                    outcomes.setdefault(point, []).append(outcome)
                    move(advance=1)
        except KeyboardInterrupt:
            return False
    return True


def check_file(path: Path | None) -> None:
    """An error where a file could not be written."""
    if path and not path.absolute().parent.is_dir():
        raise TrainerError(f"{path}: {path.parent} is no folder", "make it, or name another file")
    if path and (path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK)):
        what = "is a folder" if path.is_dir() else "cannot be written"
        raise TrainerError(f"{path}: {what}", "name another file")


def write(path: Path | None, text: str) -> None:
    """Write a file whole, where one is asked for."""
    from trainer.weights.checkpoint import write_bytes

    if path:
        try:
            write_bytes(path, text.encode())
        except OSError as error:
            raise TrainerError(f"{path}: {error.strerror}") from None
