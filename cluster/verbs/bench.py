"""`clusterctl bench`: what more nodes bring, measured with jobs like any other."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.errors import ClusterError, UsageError
from cluster.verbs.follow import EXIT_INTERRUPTED, say
from cluster.verbs.options import AsJson, NodeOptions, RunOptions, SlurmOptions, option, takes_options

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.model import Inventory, Plan
    from cluster.rendezvous import JobView
    from cluster.scaling import Measured, Point, Row


@dataclass
class BenchOptions(RunOptions):
    """Options of the jobs of a benchmark, two of them with a meaning of their own."""

    nodes: Annotated[
        str,
        option(
            "--nodes",
            "-n",
            help="Numbers of nodes, with commas. By default 1, 2, 4, ... of the inventory, on this machine 1,2.",
        ),
    ] = ""
    name: Annotated[str, typer.Option("--name", help="What the jobs' names begin with.")] = "bench"


@takes_options
def bench(
    *,
    options: BenchOptions,
    batch: Annotated[
        str,
        option(
            "--batch",
            help="Pictures of a step on [b]one[/b] node, or several such numbers with commas: N nodes take N times as "
            "many. By default what --batch behind -- says, else 16.",
        ),
    ] = "",
    strong: Annotated[
        bool, typer.Option("--strong", help="--batch counts all nodes' pictures together, whatever their number.")
    ] = False,
    rounds: Annotated[
        int, typer.Option("--rounds", help="Measure every point so often, in turns: the speed of machines drifts.")
    ] = 1,
    inventory: NodeOptions,
    slurm: SlurmOptions,
    csv: Annotated[str, option("--csv", metavar="FILE", help="Write every figure to this file.")] = "",
    markdown: Annotated[str, option("--markdown", metavar="FILE", help="Write the tables to this file.")] = "",
    as_json: AsJson = False,
) -> None:
    """How many nodes should I use? Trains the same on 1, 2, 4, ... of them and compares.

    Each point is a job like those of launch, with your trainer's arguments; without --epochs it trains 2. The first
    epoch is left out where there are several. The trainer's --batch counts the pictures of all ranks together, so it
    grows with the nodes (weak scaling); with --strong it stays.

    A point that fails is a row with the reason. Ctrl-C stops the running job and shows what was measured.

    Exit codes: 0 all points were measured, 1 some failed, 2 wrong request; 3, 5 and 130 as those of launch.
    """
    from rich.console import Console

    from cluster import bench as runner
    from cluster import commands, scaling, secrets
    from cluster.records import Records

    if rounds < 1:
        raise UsageError(f"--rounds {rounds}: must be 1 or more")
    for flag, path in (("--csv", csv), ("--markdown", markdown)):
        if path and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise UsageError(f"{flag} {path}: no file in a folder that is there", f"for example: {flag} bench.txt")
    machines = inventory.load(backend=options.backend)
    chosen, why = commands.choose_backend(options.backend, machines)
    counts = scaling.numbers("--nodes", options.nodes) if options.nodes else _all(chosen, machines)
    sizes, left = scaling.batches(batch, options.arguments)
    points = [scaling.Point(count, size, strong) for size in sizes for count in counts]
    request = options.request(slurm, inventory=machines)
    jobs, notes = runner.jobs(request, points, left, chosen)
    largest = jobs[max(points, key=lambda point: point.nodes)]
    values = secrets.values(largest.secrets, {})
    errors = Console(stderr=True, highlight=False)
    for note in (why, *notes):
        if note:
            say(errors, note)
    found: dict[Point, list[Measured | str]] = {point: [] for point in points}
    ended: BaseException | None = None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _Bars(errors, len(points) * rounds) as bars:
            for nth in range(rounds):
                for point in points:
                    if any(isinstance(each, str) for each in found[point]):
                        bars.skip()
                        continue
                    bars.point(f"round {nth + 1}/{rounds}   " if rounds > 1 else "", point)
                    outcome = runner.run(jobs[point], chosen, Records(), bars, values)
                    found[point].append(outcome)
                    bars.done(outcome)
    except (KeyboardInterrupt, ClusterError) as error:
        ended = error
    rows = scaling.rows({point: each for point, each in found.items() if each})
    gpus = options.gpus
    what = f"{gpus} {largest.device} {'process' if gpus == 1 else 'processes'} per node, {chosen}, "
    what += f"{rounds} {'round' if rounds == 1 else 'rounds'}: {shlex.join(left) or 'train'}"
    if rows:
        ddp = scaling.said_to(left, "--parallel") in ("", "ddp")
        text = _text(rows, what, gpus, strong, ddp)
        lines = scaling.records(rows, gpus)
        print(json.dumps({"what": what, "rows": lines}, indent=1) if as_json else text)
        _write(csv, scaling.csv_text(lines))
        _write(markdown, text + "\n")
    if isinstance(ended, ClusterError):
        raise ended
    if ended:
        raise typer.Exit(EXIT_INTERRUPTED)
    raise typer.Exit(int(any(row.failure for row in rows)))


def _all(backend: str, machines: Inventory | None) -> list[int]:
    """The numbers of nodes to try where nobody says any."""
    from cluster import scaling

    if backend == "slurm":
        raise UsageError(
            "--nodes: of a Slurm cluster it must be said how many to ask for", "for example: --nodes 1,2,4"
        )
    return scaling.doubled(len(machines.nodes)) if machines is not None else [1, 2]


def _text(rows: Sequence[Row], what: str, procs_per_node: int, strong: bool, ddp: bool) -> str:
    from cluster import scaling

    counted = "all nodes together (--strong)" if strong else "one node: N nodes take N times as many"
    parts = [
        what,
        f"An epoch's training time; bs is the pictures of a step on {counted}.",
        scaling.thread_table(rows),
        scaling.detail_table(rows, procs_per_node),
        "" if ddp else "The ranks' wait is not timed with this --parallel: it counts as computing.",
        "\n".join(scaling.failures(rows)),
    ]
    return "\n\n".join(part for part in parts if part)


def _write(path: str, text: str) -> None:
    if not path:
        return
    partial = Path(f"{path}.tmp")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "name a file in a folder that is there") from error


class _Bars:
    """A Show: how far the benchmark is, as a bar on a terminal, a line per point elsewhere."""

    def __init__(self, out: Console, total: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._out = out
        columns = (BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn())
        self._progress = Progress(*columns, TextColumn("{task.description}"), console=out, disable=not out.is_terminal)
        self._task = self._progress.add_task("", total=total)
        self._point = ""
        self._ended = 0

    def __enter__(self) -> _Bars:
        """Take the terminal's last line."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self._progress.stop()

    def point(self, nth: str, point: Point) -> None:
        """A point begins."""
        self._point = f"{nth}{point.nodes} {'node' if point.nodes == 1 else 'nodes'}, batch {point.step_batch}"
        self._progress.update(self._task, description=self._point)

    def skip(self) -> None:
        """A point is left out."""
        self._end()

    def done(self, outcome: Measured | str) -> None:
        """The point has ended."""
        said = outcome if isinstance(outcome, str) else f"{outcome.images_per_s:.1f} img/s"
        say(self._out, f"{self._point}: {said}")
        self._end()

    def _end(self) -> None:
        self._ended += 1
        self._progress.update(self._task, completed=self._ended)

    def begin(self, plan: Plan) -> None:
        """Nothing: it is the point's job."""

    def show(self, view: JobView, lines: Sequence[tuple[str, str]]) -> None:
        """How far the job is."""
        from cluster.logs import number

        said = view.progress or {}
        epoch, epochs, steps = number(said, "epoch"), number(said, "epochs"), number(said, "steps")
        done = (epoch - 1 + number(said, "step") / steps) / epochs if epochs and steps else 0.0
        where = f"epoch {epoch:g}/{epochs:g}" if epochs else "starting"
        self._progress.update(self._task, completed=self._ended + done, description=f"{self._point}   {where}")

    def note(self, text: str) -> None:
        """One plain sentence."""
        say(self._out, text)
