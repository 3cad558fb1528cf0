"""`trainer profile`: traces training steps and lists the most expensive operators."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from trainer.cli.bench import settings_of
from trainer.cli.options import takes
from trainer.config.settings import check_declared, option
from trainer.errors import TrainerError


@dataclass(frozen=True)
class ProfileSettings:
    """Settings of `trainer profile`."""

    out: Path = option(Path("trace.json"), "Trace file to write; .json.gz compresses it.")  # noqa: RUF009 (a field)
    steps: int = option(3, "Steps to profile; the last one updates the weights.", least=1)
    warmup: int = option(3, "Steps before the profiled ones.", least=1)
    ranks: int = option(1, "Ranks on this machine; rank 0 writes the trace.", least=1)
    device: str = option("", "cpu, or GPU numbers: 0,1,2,3. [default: all GPUs, or the CPU]")
    threads: int | None = option(
        None, "CPU threads per rank. [default: 1 on a GPU, or the cores divided by the ranks]", least=1
    )


@takes(ProfileSettings)
def profile(context: typer.Context, **options: Any) -> None:
    """Trace training steps and list the ten most expensive operators.

    Open the trace at https://ui.perfetto.dev: each step is a span that contains the loading and the training. It also
    takes the options of trainer train: --data, --cfg, --batch, --imgsz, ...
    """
    from trainer.bench import profile as profiling
    from trainer.bench.measure import threads_of

    s = ProfileSettings(**options)
    check_declared(s)
    if s.out.is_dir():
        raise TrainerError(f"--out {s.out}: is a folder", "use the path of a file")
    threads = s.threads or threads_of(s.device, s.ranks)
    settings = settings_of(context.args, s.device, ranks=s.ranks)
    table = profiling.profile(settings, s.ranks, threads, s.steps, s.warmup, s.out)
    typer.echo(f"{table}\n{s.out}: {s.steps} steps; open it at https://ui.perfetto.dev")
