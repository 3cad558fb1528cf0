"""How a running job looks: a live table and a progress bar on a terminal, one plain line per change elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cluster.logs import number
from cluster.looks import Clock
from cluster.model import Phase, Plan
from cluster.rendezvous import JobView
from cluster.report import seconds

_STYLES: dict[Phase, str] = {
    "pending": "dim",
    "starting": "yellow",
    "joining": "cyan",
    "ready": "green",
    "exited": "dim",
    "lost": "bold red",
}


def header(plan: Plan, image_id: str) -> str:
    """`digits-7f3a   2 nodes x 2 processes   compose   image trainer:0.1 (3f2c9a1)`."""
    nodes = len(plan.nodes)
    each = plan.world_size // nodes
    words = [
        plan.job_id,
        f"{nodes} {'node' if nodes == 1 else 'nodes'} x {each} {'process' if each == 1 else 'processes'}",
        plan.backend,
    ]
    if plan.image:
        words.append(f"image {plan.image}" + (f" ({image_id})" if image_id else ""))
    if plan.attempt > 1:
        words.append(f"attempt {plan.attempt}")
    return "   ".join(words)


def met(view: JobView, plan: Plan) -> str:
    """`2/2 nodes ready   world size 4   gloo   9.8 s`."""
    words = [f"{view.ready_count}/{len(view.nodes)} nodes ready"]
    if view.ready is not None:
        words += [f"world size {view.ready.get('world_size')}", str(view.ready.get("backend"))]
    else:
        words += [f"world size {plan.world_size}", "counted when the master's port was connected"]
    return "   ".join([*words, seconds(view.met_after_s or 0.0)])


def node_table(view: JobView, plan: Plan, now: float) -> Table:
    """One row per node: its phase, for how long (ready: how long that took), and why it is late."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("  node")
    table.add_column("phase")
    table.add_column("for", justify="right")
    table.add_column("note", overflow="fold")
    for index, node in enumerate(view.nodes):
        note = node.silent or node.note
        if (
            not node.silent
            and index == 0
            and plan.master_addr
            and node.phase in ("starting", "joining", "ready")
            and not note.startswith("cannot")
        ):
            note = f"master {plan.master_addr}:{plan.master_port}"
        lasted = node.since - view.started if node.phase == "ready" else now - node.since
        phase = Text(node.phase, _STYLES[node.phase])
        table.add_row(f"  {node.name}", phase, seconds(max(0.0, lasted)), Text(note))
    return table


def progress_line(progress: dict[str, Any], width: int) -> RenderableType:
    """`epoch 7/12  ━━━━━━  62 %   loss 1.83   214 img/s   epoch ends in 0:06`."""
    steps, step = max(1, round(number(progress, "steps"))), round(number(progress, "step"))
    eta_s = round(number(progress, "eta_s"))
    words = f"{100 * step // steps:3d} %   loss {number(progress, 'loss'):.2f}"
    words += f"   {number(progress, 'images_per_s'):.0f} img/s   epoch ends in {eta_s // 60}:{eta_s % 60:02d}"
    bar = ProgressBar(total=steps, completed=step, width=max(10, min(40, width - 75)))
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(f"epoch {progress.get('epoch')}/{progress.get('epochs')}", bar, words)
    return line


class Screen:
    """Draws a job on the console; `all_nodes` shows every node's lines, each with its name."""

    def __init__(self, console: Console, plan: Plan, *, all_nodes: bool, skips_past: bool = False) -> None:
        self._console = console
        self._plan = plan
        self._clock = Clock()
        self._all_nodes = all_nodes
        self._said: dict[str, str] = {}
        self._met = False
        self._first = skips_past
        self._width = max(len(node.name) for node in plan.nodes)
        self._live: Live | None = None
        self._view: JobView | None = None

    def __enter__(self) -> Screen:
        """Take the last lines of the terminal, where there is one."""
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._draw, refresh_per_second=8, transient=True
            ).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was, the lines above untouched."""
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self._live = None

    def note(self, text: str) -> None:
        """One plain sentence."""
        self._print(text)

    def begin(self, plan: Plan) -> None:
        """Another attempt: other nodes, perhaps another master, and they have to meet anew."""
        self._plan, self._clock = plan, Clock()
        self._said, self._met, self._view = {}, False, None
        self._width = max(len(node.name) for node in plan.nodes)

    def show(self, view: JobView, lines: Sequence[tuple[str, str]]) -> None:
        """Print what is new, and redraw."""
        self._view = view
        if self._live is None:
            self._changes(view)
        if view.met_after_s is not None and not self._met:
            self._met = True
            if self._live is not None:
                self._console.print(node_table(view, self._plan, self._clock()))
            self._print(met(view, self._plan) + "\n")
        if self._first:  # attached to a job that has run for a while: its past is in `clusterctl logs`
            self._first, lines = False, lines[-10:]
        master = self._plan.nodes[0].name
        for node, text in lines:
            if self._all_nodes:
                self._print(f"{node:<{self._width}} | {text}")
            elif node == master:
                self._print(text)

    def _changes(self, view: JobView) -> None:
        for node in view.nodes:
            note = node.silent or node.note
            said = f"{node.name}: {node.phase}" + (f": {note}" if note else "")
            if self._said.get(node.name) != said:
                self._said[node.name] = said
                self._print(said)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _draw(self) -> RenderableType:
        if self._view is None:
            return Text("")
        if self._view.met_after_s is None:
            ready = f"{self._view.ready_count}/{len(self._view.nodes)} nodes ready"
            return Group(node_table(self._view, self._plan, self._clock()), Text(f"  {ready}", "dim"))
        silent = [Text(f"{node.name}: {node.silent}", "yellow") for node in self._view.nodes if node.silent]
        if self._view.progress is None or self._view.done is not None:
            return Group(*silent)
        return Group(*silent, progress_line(self._view.progress, self._console.width))
