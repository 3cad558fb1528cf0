"""Live display of a job: a table and a progress bar on a terminal, otherwise one line per change."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from cluster.agent.app.node_agent.events import Progress
from cluster.backends import script
from cluster.backends.awake_clock import AwakeClock
from cluster.cli.console import print_line, print_log_line
from cluster.spec.model import Plan
from cluster.spec.node_status import Phase
from cluster.store import Seen
from cluster.supervisor import progress, usage
from cluster.supervisor.display import Display
from cluster.supervisor.job_state import JobView
from cluster.supervisor.job_status import UNREACHABLE
from cluster.supervisor.report import seconds

_STYLES: dict[Phase, str] = {
    "pending": "dim",
    "starting": "yellow",
    "setup": "yellow",
    "joining": "cyan",
    "ready": "green",
    "exited": "dim",
    "lost": "bold red",
}
#: The options of a table without lines.
PLAIN: dict[str, Any] = {"box": None, "padding": (0, 3, 0, 0), "header_style": "dim", "pad_edge": False}
#: Nodes whose ranks print nothing for so long get a note.
_QUIET_S = 60.0
#: The values that a sparkline shows, and its characters.
_SPARKS = 30
_BARS = "▁▂▃▄▅▆▇█"
#: The live display shows the use of nodes up to this number.
_MOST_NODES = 16


def header(plan: Plan) -> str:
    """Format the header: `digits-7f3a   2 nodes x 2 processes   compose   image trainer:0.1`."""
    image = plan.job.image and f"image {plan.job.image}"
    attempt = f"attempt {plan.attempt}" if plan.attempt > 1 else ""
    return "   ".join(filter(None, (plan.job_id, script.size(plan.job), plan.backend, image, attempt)))


def joined(view: JobView, plan: Plan) -> str:
    """Format the end of the rendezvous: `2/2 nodes ready   world size 4   gloo   9.8 s`."""
    world_size = (view.ready and view.ready.world_size) or plan.job.world_size
    backend = (view.ready and view.ready.backend) or "ready: the ranks started and the master is reachable"
    words = (f"{view.ready_count}/{len(view.nodes)} nodes ready", f"world size {world_size}", backend)
    return "   ".join([*words, seconds(view.joined_after_s or 0.0)])


def node_table(
    view: JobView, plan: Plan, now: float, *, joins: bool = False, last: Seen | None = None
) -> Table:
    """Return one row per node: phase, its duration, and a note, such as when its ranks have printed something last.

    While the job `joins`, the duration of a ready node is the time that it took to join. `last` is what was seen of a
    job of which this is the only poll, so that the phase of a node that does not answer is not known.
    """
    table = Table("  node", "phase", Column("for", justify="right"), Column("note", overflow="fold"), **PLAIN)
    for index, node in enumerate(view.nodes):
        note = node.shown_note
        is_master = index == 0 and plan.master_addr and node.phase in ("starting", "joining", "ready")
        if is_master and not node.status.silent and not note.startswith("cannot"):
            note = f"master {plan.master_addr}:{plan.master_port}"
        if node.phase == "ready" and node.status.quiet_s >= _QUIET_S:
            note = "; ".join(filter(None, (note, f"last output {seconds(node.status.quiet_s)} ago")))
        phase = Text(node.phase, _STYLES[node.phase])
        duration = node.since - view.started if joins and node.phase == "ready" else now - node.since
        if node.status.silent and not joins:
            phase = Text(UNREACHABLE, _STYLES["lost"])
            if last is not None and node.name in last.phases:
                note = f"{note}; {last.phases[node.name]} before"
                duration = now - last.at
        table.add_row(f"  {node.name}", phase, seconds(max(0.0, duration)), Text(note))
    return table


def progress_line(last: Progress, width: int) -> RenderableType:
    """Format the progress: `epoch 7/12  ━━━━━━  62 %   loss 1.830   214 images/s   epoch ends in 0:06`.

    There is no bar where the line would not fit into the columns of the terminal, `width`.
    """
    text = progress.describe(last)
    percent = "" if text.percent is None else f"{text.percent:3d} %"
    words = [*filter(None, (percent, text.loss, text.speed, text.time_left))]
    after_bar = "   ".join(words)
    length = max(10, min(40, width - 92))
    if len(text.epoch) + 2 + length + 2 + len(after_bar) > width:
        return Text("  ".join([text.epoch, *words]))
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(text.epoch, ProgressBar(total=100, completed=text.percent or 0, width=length), after_bar)
    return line


class UsageTable:
    """CPU, memory and GPU use of a job's ranks, with the values of the last polls."""

    def __init__(self) -> None:
        self._past: dict[object, deque[float]] = {}

    def add(self, view: JobView) -> None:
        """Add the newest sample of each node."""
        for node in view.nodes:
            for row in node.ranks:
                self._append(row.rank, row.use if row.use is not None else 100 * row.cpu)
            if node.ranks:
                self._append(node.name, sum(self._past[row.rank][-1] for row in node.ranks))
        if view.progress is not None:
            self._append("images_per_s", view.progress.images_per_s or 0.0)

    def _append(self, key: object, value: float) -> None:
        self._past.setdefault(key, deque(maxlen=_SPARKS)).append(value)

    def spark(self, key: object) -> str:
        """Return the last values as bars, the highest for the largest value."""
        past = self._past.get(key, ())
        most = max([*past, 1e-9])
        return "".join(_BARS[min(len(_BARS) - 1, int(len(_BARS) * value / most))] for value in past)

    def table(self, view: JobView, *, by_rank: bool = True) -> Table:
        """Return a table with a row per rank, or per node. `host` is the memory in use on the machine."""
        titles = ["rank"] if by_rank else []
        titles += ["CPU", "memory", "host memory"]
        titles += ["GPU", "GPU memory"] if view.has_gpus else []
        columns = [Column(title, justify="right", no_wrap=True) for title in titles]
        table = Table("  node", *columns, Column("last minute", no_wrap=True), **PLAIN)
        for node in view.nodes:
            if not node.ranks:
                table.add_row(f"  {node.name}", *[""] * len(titles), Text(node.phase, "dim"))
                continue
            host = node.status.usage.host if node.status.usage else None
            for ranks in [(rank,) for rank in node.ranks] if by_rank else [node.ranks]:
                text = usage.describe(ranks, host)
                cells = [str(ranks[0].rank)] if by_rank else []
                cells += [text.cpu, text.memory, text.host_memory]
                cells += [text.gpu, text.gpu_memory] if view.has_gpus else []
                table.add_row(f"  {node.name}", *cells, self.spark(ranks[0].rank if by_rank else node.name))
        return table


class LiveDisplay(Display):
    """Draws a job on the console. `is_attached` shows only the end of earlier output."""

    def __init__(self, console: Console, plan: Plan, *, all_nodes: bool, is_attached: bool = False) -> None:
        self._console = console
        self._all_nodes = all_nodes
        self._skips_history = is_attached
        self.begin(plan)
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=8, transient=True)

    def __enter__(self) -> LiveDisplay:
        """Reserve the last lines of a terminal."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Clear the reserved lines."""
        self._live.stop()

    def note(self, text: str) -> None:
        """Print a sentence."""
        print_line(self._console, text)

    def begin(self, plan: Plan) -> None:
        """Start an attempt, which may have other nodes than the one before."""
        self._plan = plan
        self._clock = AwakeClock()
        self._printed: dict[str, str] = {}
        self._has_joined = False
        self._usage = UsageTable()
        self._view: JobView | None = None
        self._width = max(len(node.name) for node in plan.nodes)

    def show(self, view: JobView, lines: Sequence[tuple[str, str]]) -> None:
        """Print the changes, and redraw."""
        self._view = view
        self._usage.add(view)
        if not self._live.is_started:
            self._print_changes(view)
        if view.joined_after_s is not None and not self._has_joined:
            self._has_joined = True
            if self._live.is_started:
                self._console.print(node_table(view, self._plan, self._clock(), joins=True))
            self.note(joined(view, self._plan) + "\n")
        if self._skips_history:  # `clusterctl logs` prints all of it
            self._skips_history = False
            lines = lines[-10:]
        for node, text in lines:
            if self._all_nodes:
                print_log_line(self._console, f"{node:<{self._width}} | {text}")
            elif node == self._plan.nodes[0].name:
                print_log_line(self._console, text)

    def _print_changes(self, view: JobView) -> None:
        for node in view.nodes:
            note = node.shown_note
            line = f"{node.name}: {node.phase}" + (f": {note}" if note else "")
            # The text of a silence has its growing duration.
            change = f"{node.phase}: {bool(node.status.silent) or note}"
            if self._printed.get(node.name) != change:
                self._printed[node.name] = change
                self.note(line)

    def _draw(self) -> RenderableType:
        if self._view is None:
            return Text("")
        if self._view.joined_after_s is None:
            ready = f"{self._view.ready_count}/{len(self._view.nodes)} nodes ready"
            return Group(
                node_table(self._view, self._plan, self._clock(), joins=True), Text(f"  {ready}", "dim")
            )
        unanswering = [node for node in self._view.nodes if node.status.silent]
        silent = [Text(f"{node.name}: {node.status.silent}", "yellow") for node in unanswering]
        if self._view.current_progress is None:
            return Group(*silent)
        has_table = len(self._view.nodes) <= _MOST_NODES
        tables = [self._usage.table(self._view, by_rank=False)] if has_table else []
        return Group(*silent, *tables, progress_line(self._view.current_progress, self._console.width))
