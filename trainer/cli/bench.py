"""`trainer bench`: measures ranks, batch sizes, workers and strategies on your data and model."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from trainer.cli.options import takes
from trainer.config import DEFAULT_STRATEGY, PARALLEL, STRATEGIES, Settings, traits_of
from trainer.config.settings import check_declared, option
from trainer.errors import TrainerError

if TYPE_CHECKING:
    from trainer.bench.measure import Effort, Measurement
    from trainer.bench.processes import Job
    from trainer.bench.scaling import Point

bench = typer.Typer(no_args_is_help=True)
# Further options are those of `train`.
TRAIN_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
MOST_DEFAULT_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Settings of all benchmarks."""

    device: str = option("", "cpu, or GPU numbers: 0,1,2,3. [default: all GPUs, or the CPU]")
    steps: int | None = option(
        None, "Timed steps per point, and validation batches. [default: as many as take 5 s]", least=1
    )
    warmup: int = option(3, "Untimed steps before each point.", least=1)
    rounds: int = option(3, "Measurements per point, each in a round over all points.", least=1)
    threads: int | None = option(
        None,
        "CPU threads per rank, the same at each point. [default: 1 on a GPU, or cores divided by the maximum of --ranks]",
        least=1,
    )
    json: bool = option(False, "Print one JSON object instead of the tables.")

    def effort(self, most_ranks: int, job: Job | None) -> Effort:
        """Return how to measure each point."""
        from trainer.bench.measure import Effort, threads_of

        on_machine = job.most_on_a_node() if job else most_ranks
        return Effort(self.warmup, self.steps or 0, self.threads or threads_of(self.device, on_machine))

    def __post_init__(self) -> None:
        check_declared(self)


@dataclass(frozen=True, kw_only=True)
class ScalingSettings(BenchSettings):
    """Settings of `trainer bench scaling`."""

    batch: str = option(
        "16",
        "Comma-separated batch sizes, in images per step of one rank (weak scaling); with --strong, of all "
        "ranks together.",
        *("--batch", "--batch-size"),
    )
    ranks: str = option(
        "", "Comma-separated numbers of ranks. [default: 1,2,4,8, up to the number of GPUs, or of cores]"
    )
    precision: str = option("auto", "Comma-separated precisions: fp32, bf16, fp16 or auto.")
    parallel: str = option(DEFAULT_STRATEGY, f"Comma-separated strategies: {', '.join(PARALLEL)}.")
    strong: bool = option(False, "Strong scaling: --batch counts the images of all ranks together.")
    csv: Path | None = option(None, "Write all measurements to this CSV file.")  # noqa: RUF009 (a field)
    markdown: Path | None = option(None, "Write the tables to this Markdown file.")  # noqa: RUF009 (a field)
    plot: Path | None = option(None, "Plot speed-up by ranks and gain by batch size to this PNG file.")  # noqa: RUF009 (a field)


@dataclass(frozen=True, kw_only=True)
class WorkersSettings(BenchSettings):
    """Settings of `trainer bench workers`."""

    ranks: int = option(1, "Ranks on this machine.", least=1)
    workers: str = option(
        "", "Comma-separated numbers of workers per rank. [default: 0,1,2,4,... up to its cores]"
    )
    rounds: int = option(2, "Measurements per point, each in a round over all points.", least=1)


@bench.callback()
def join_job(context: typer.Context) -> None:
    """Measure speed-up by GPUs, batch sizes, workers and strategies.

    It uses your data, model and machines.
    Under clusterctl launch or torchrun, it measures on the job's ranks: --ranks 2,4,8.
    """
    from trainer import contract
    from trainer.distributed import comm
    from trainer.engine.events import Events

    world = comm.world_of(os.environ)
    if not world.launched or context.invoked_subcommand == rank.__name__:
        context.obj = None
        return
    from trainer.bench.processes import Job

    device = "cuda" if comm.gpu_numbers("") else "cpu"
    job = Job(world)
    ready = {"world_size": world.size, "backend": "nccl" if device == "cuda" else "gloo", "device": device}
    Events(os.environ).emit(contract.READY, rank=world.rank, **ready)
    if world.rank:
        job.follow()
        raise typer.Exit
    signal.signal(signal.SIGTERM, job.stop)
    context.obj = job
    context.call_on_close(job.end)


@bench.command(hidden=True)
def rank(request: Path, answer: Path) -> None:
    """Run one rank of a request, and write rank 0's answer."""
    import torch

    from trainer.bench import measure, profile, verify
    from trainer.distributed import comm
    from trainer.engine.memory import HINT, OUT_OF_MEMORY, is_out_of_memory

    content = json.loads(request.read_text(encoding="utf-8"))
    records: dict[str, Any] = {"measure": measure.record, "profile": profile.record, "verify": verify.record}
    record = records[content.pop("record")]
    try:
        found = record(Settings(**content.pop("settings")), **content)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainerError(OUT_OF_MEMORY, HINT) from None
    if comm.is_rank_zero():
        torch.save(found, answer)
    comm.leave()


@bench.command(context_settings=TRAIN_OPTIONS)
@takes(ScalingSettings)
def scaling(context: typer.Context, **options: Any) -> None:
    """Time training and validation on 1, 2, 4, ... ranks, to choose the number of GPUs.

    It also takes the options of trainer train: --data, --cfg, --imgsz, --cache, --workers, --noval, ... For example:

    trainer bench scaling --data my/data.yaml --imgsz 640 --batch 8,16,32 --ranks 1,2,4 --markdown scaling.md

    It prints the time per epoch and the memory by ranks, the gain by batch size, and the parts of a step. A point that
    runs out of memory is a row of the table. Ctrl-C stops the benchmark and prints the points measured so far. Only
    the files that you name and the dataset's cache are written.
    """
    from trainer.bench import tables
    from trainer.bench.measure import measure
    from trainer.bench.processes import run_here
    from trainer.bench.scaling import measure_rounds, points_of, rows_of, settings_at
    from trainer.weights.checkpoint_file import write_bytes

    s = ScalingSettings(**options)
    job = cast("Job | None", context.obj)
    settings = settings_of(context.args, s.device, s.parallel)
    counts = numbers("--ranks", s.ranks) if s.ranks else default_ranks(settings.device, job)
    points = points_of(
        numbers("--batch", s.batch), counts, s.precision.split(","), s.strong, s.parallel.split(",")
    )
    effort = s.effort(max(counts), job)
    csv, markdown, plot = map(output_file, (s.csv, s.markdown, s.plot))
    run = job.run if job else run_here

    def measure_point(point: Point) -> Measurement:
        ranks = 1 if traits_of(point.parallel).one_process else point.ranks
        return measure(settings_at(settings, point), ranks, effort, run)

    outcomes, complete = measure_rounds(points, s.rounds, measure_point)
    if rows := rows_of(outcomes):
        text = tables.scaling_text(rows, settings, effort.threads, s.rounds)
        records = [tables.values_of(row) for row in rows]
        typer.echo(json.dumps({**tables.machine(rows), "rows": records}) if s.json else text)
        if csv:
            write_bytes(csv, tables.csv_text(records).encode())
        if markdown:
            write_bytes(markdown, f"{text}\n".encode())
        if plot:
            tables.plot_scaling(rows, plot)
    if not complete:
        raise KeyboardInterrupt


@bench.command(context_settings=TRAIN_OPTIONS)
@takes(WorkersSettings)
def workers(context: typer.Context, **options: Any) -> None:
    """Time the dataloader alone and the training with 0, 1, 2, 4, ... workers.

    It also takes the options of trainer train: --data, --batch, --imgsz, --cfg, --cache, ... On a CPU, workers and
    training share the cores, so compare the training's rates, not the dataloader's.
    """
    from trainer.bench.measure import Measurement, measure
    from trainer.bench.processes import run_here
    from trainer.bench.scaling import measure_rounds
    from trainer.bench.tables import workers_table
    from trainer.distributed.comm import usable_cores

    s = WorkersSettings(**options)
    job = cast("Job | None", context.obj)
    cores = max(1, usable_cores() // s.ranks)
    ranks = s.ranks
    tried = (
        numbers("--workers", s.workers) if s.workers else [0, *(1 << k for k in range(cores.bit_length()))]
    )
    settings = settings_of(context.args, s.device, ranks=ranks)
    effort = dataclasses.replace(s.effort(ranks, job), loader=True)
    run = job.run if job else run_here

    def with_workers(count: int) -> Measurement:
        return measure(dataclasses.replace(settings, workers=count, noval=True), ranks, effort, run)

    outcomes, complete = measure_rounds(tried, s.rounds, with_workers, " workers")
    failed = {
        count: each for count, found in outcomes.items() for each in found if isinstance(each, TrainerError)
    }
    failures = [f"{count} workers: {error.message}" for count, error in failed.items()]
    rates = {
        k: [m for m in found if isinstance(m, Measurement)]
        for k, found in outcomes.items()
        if k not in failed
    }
    if rates and s.json:
        rows = {str(k): [dataclasses.asdict(m) for m in found] for k, found in rates.items()}
        typer.echo(json.dumps({"rounds": rows, "failures": failures}))
    elif rates:
        first = next(iter(rates.values()))[0]
        header = (
            f"{first.device}; {settings.data}, {settings.imgsz} px, batch {settings.batch}, ranks: {ranks}"
        )
        typer.echo("\n".join([header, "", workers_table(rates), *failures]))
    if not complete:
        raise KeyboardInterrupt


def settings_of(
    arguments: Sequence[str], device: str, strategies: str = "", ranks: int | None = None
) -> Settings:
    """Return the settings of `trainer train ARGUMENTS`, with the devices of `ranks` ranks.

    If one of the comma-separated `strategies` has options, --parallel names it: else `train` refuses them.
    """
    from trainer.cli import app
    from trainer.distributed.comm import devices_of

    taken: list[Settings] = []
    command: Any = typer.main.get_command(app)
    with_options = [name for name in strategies.split(",") if name in STRATEGIES and STRATEGIES[name].options]
    words = [*arguments, *(["--parallel", with_options[0]] if with_options else [])]
    words += ["--device", device] if "," not in device and device else []
    command.commands["train"].main(words, prog_name="trainer train", standalone_mode=False, obj=taken.append)
    if not taken:
        raise typer.Exit(0)  # after --help
    if ranks and not traits_of(taken[0].parallel).one_process:
        device = devices_of(device, ranks)
    return dataclasses.replace(taken[0], device=device, resume="")


def numbers(option: str, text: str) -> list[int]:
    """Return comma-separated numbers as a list."""
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise TrainerError(
            f"{option} {text}: expected comma-separated numbers", f"for example {option} 1,2,4"
        )
    return [int(word) for word in words]


def default_ranks(device: str, job: Job | None) -> list[int]:
    """Return 1, 2, 4, ... up to the ranks of the job, else to the GPUs of --device or the cores, at most 8."""
    from trainer.distributed import comm

    most = (
        job.world.size
        if job
        else min(len(comm.gpu_numbers(device)) or comm.usable_cores(), MOST_DEFAULT_RANKS)
    )
    return sorted({most, *(1 << k for k in range(most.bit_length()))})


def output_file(path: Path | None) -> Path | None:
    """Return the path, under a launcher within the job's folder. Raise TrainerError if it cannot be written."""
    from trainer import contract

    if path is None:
        return None
    path = Path(os.environ.get(contract.RUN_DIR, "")) / path
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise TrainerError(f"{path}: cannot be written", "use the path of a file in an existing folder")
    return path
