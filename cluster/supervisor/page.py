"""A job as an HTML page, what most readers want first: outcome and scores, predictions, curves, nodes, attempts.

`write` makes report.html, which has the logs too.

HTML has the type `Markup`, which escapes every value that is formatted into it or joined to it, unless it is HTML, too.
So a name, a number or a log line is shown and never run. Images and logs are links to the files in the folder of the
page.
"""

from __future__ import annotations

import csv
import functools
import io
import math
import os
import secrets
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from cluster.agent.app.node_agent.events import number
from cluster.backends import script
from cluster.spec.model import JobRecord, PastAttempt, Plan
from cluster.spec.status import RankUsage
from cluster.supervisor import notes, progress, report, usage
from cluster.supervisor.job_state import JobView, NodeView, failing
from cluster.supervisor.progress import SCORES
from cluster.supervisor.report import seconds
from cluster.transport import inside

NAME = "report.html"
_NOTHING = Markup("")
_LINES = Markup("\n")
#: The last lines of each log, and the bytes of its end, that the page contains.
_LOG_LINES = 200
_LOG_BYTES = 1 << 16
#: Points of a curve; longer ones are reduced to the extremes of equal parts.
_MOST_POINTS = 400
_WIDTH, _HEIGHT = 360, 180  # about as wide as a chart is shown, so that its text is not scaled
#: Titles of charts, and the ends of the names of their columns in results.csv.
_CHARTS = (
    ("loss", ("_loss",)),
    ("validation", (*SCORES, "precision", "recall")),
    ("images/s", ("images_per_s",)),
    ("learning rate", ("lr",)),
)
#: Names of lines that differ from their columns. "" is the only line of a chart that says what it is.
_LABELS = {**SCORES, "images_per_s": "", "lr": ""}
#: The image that has its own section, and one that is not shown because the page draws the same curves.
_PREDICTIONS = "predictions.jpg"
_PLOTTED = "results.png"
_IMAGES = ("*.png", "*.jpg")
#: Classes of the phases' colours, and the number of ranks whose table is open at first and has lines over time.
_PHASES = {
    "ready": "running",
    "lost": "failed",
    "joining": "joining",
    "setup": "joining",
    "starting": "joining",
}
MOST_RANKS = 16
#: The samples of a job's ranks, by rank.
Ranks = Mapping[int, RankUsage]

STYLE = Markup("""
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --link: #0550ae;
 --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7 }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1100px; padding: 1rem;
 overflow-wrap: anywhere }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
a { color: var(--link) } table { border-collapse: collapse; width: 100% }
td, th { padding: .25rem .75rem .25rem 0; text-align: left; vertical-align: top }
tr { border-top: 1px solid var(--line) } th { font-weight: 600; min-width: 5rem; white-space: nowrap }
.scores { display: flex; flex-wrap: wrap; gap: .5rem 2.5rem; margin: .75rem 0 }
.scores div { display: flex; flex-direction: column-reverse }
dt { font-size: .9rem } dd { font-size: 1.5rem; margin: 0 }
.wide { overflow-x: auto } .wide td { white-space: nowrap }
.wide td:last-child { white-space: normal; min-width: 8rem } .wide th { min-width: 0 }
code, pre { font: 13px/1.45 ui-monospace, monospace } pre { overflow: auto; max-height: 30rem; margin: .5rem 0 }
.done, .running { color: #1a7f37 } .failed, .unreachable { color: #cf222e }
.stopped, .joining, .starting, .queued, .unreadable { color: #9a6700 }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)) }
figure { margin: 0 } figcaption { font-size: .9rem } img, figure svg { width: 100%; height: auto }
figcaption b, figcaption span { display: inline-block; margin-right: .75rem }
figcaption i { border-top: 3px solid; display: inline-block; margin-right: .3rem; vertical-align: middle; width: 1rem }
.large img { max-height: 32rem; max-width: 100%; width: auto }
.spark { border-bottom: 1px solid var(--line); display: block; width: 4rem; height: 1rem }
.bar { display: block; fill: #0072b2; width: 100%; height: .5rem; margin: .25rem 0 } summary { cursor: pointer }
svg text { fill: currentColor; font: 11px system-ui, sans-serif } polyline { fill: none; stroke-width: 1.5 }
polyline { stroke-linecap: round } .dot { stroke-width: 6 }
.s0 { stroke: var(--c0) } .s1 { stroke: var(--c1) } .s2 { stroke: var(--c2) } .s3 { stroke: var(--c3) }
.k0 { color: var(--c0) } .k1 { color: var(--c1) } .k2 { color: var(--c2) } .k3 { color: var(--c3) }
progress { width: 100%; max-width: 30rem; height: .75rem; accent-color: var(--c0) } nav, #link { font-size: .9rem }
[type=search] { font: inherit; width: 100%; max-width: 30rem; box-sizing: border-box } #log { max-height: 75vh }
@media (prefers-color-scheme: dark) {
 :root { --link: #79b8ff; --c0: #56b4e9; --c1: #ff9a52; --c2: #3ddba4; --c3: #e8a6c8 }
 .done, .running { color: #3fb950 } .failed, .unreachable { color: #ff7b72 }
 .stopped, .joining, .starting, .queued, .unreadable { color: #d29922 } }
@media (max-width: 700px) {
 .jobs, .jobs tbody { display: block } .jobs tr:first-child { display: none }
 .jobs tr { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 0 .75rem; padding: .5rem 0 }
 .jobs td { display: contents; white-space: normal } .jobs td:empty { display: none }
 .jobs td::before { content: attr(data-title); opacity: .75 }
 .jobs td > *, .jobs td { overflow-wrap: anywhere } }
""")


def write(record: JobRecord, view: JobView | None = None) -> Path:
    """Write the report of a finished job into its run directory. Raises OSError."""
    path = Path(record.plan.run_dir, NAME)
    # `stop` and the launcher may write it at the same time, and the job must not know the name before.
    partial = path.with_name(f".{NAME}.{secrets.token_hex(8)}.tmp")
    try:
        with inside.open_file(record.plan.run_dir, partial.name, "xb") as file:
            file.write(render(record, view).encode("utf-8", "replace"))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def render(record: JobRecord, view: JobView | None = None) -> str:
    """Return the page of a finished job, from its record, its last view and the files in its run directory."""
    plan = record.plan
    wanted = _failed_first(record, view)
    run_dir = Path(plan.run_dir)
    folder = f"attempt-{plan.attempt}"
    logs = _LINES.join(
        _log(run_dir, f"{folder}/{node.name}.log", is_open=node.name == wanted) for node in plan.nodes
    )
    body = sections(record, Shown(record.outcome, record.outcome), view, record.ended_at)
    if logs.strip():
        body += Markup("\n<h2>Logs</h2>\n{}").format(logs)
    head = Markup("<style>{}</style>").format(STYLE)
    return str(document(f"{plan.job_id}: {record.outcome}", head, body))


def _failed_first(record: JobRecord, view: JobView | None) -> str:
    """Return the node whose log says why a job has failed, "" if it has not. Without a view, the first node."""
    if record.outcome != "failed":
        return ""
    failed = failing(view) if view else []
    return failed[0].name if failed else record.plan.nodes[0].name


def document(title: str, head: Markup, body: Markup) -> Markup:
    """Return an HTML document."""
    meta = Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width">')
    text = Markup('<!doctype html>\n<html lang="en">{}<title>{}</title>{}\n{}\n</html>\n')
    return text.format(meta, title, head, body)


def sections(
    record: JobRecord,
    shown: Shown,
    view: JobView | None,
    now: float,
    *,
    is_live: bool = False,
    past: Sequence[Ranks] = (),
) -> Markup:
    """Return the sections of a job's page, all but its logs.

    Args:
        record: The job.
        shown: Its state.
        view: The view of the last poll, if any.
        now: A Unix time; for a finished job, its end.
        is_live: Link to the pages of `cluster.web.server`.
        past: The samples of the ranks over time.
    """
    plan = record.plan
    run_dir = Path(record.plan.run_dir)
    names = [node.name for node in plan.nodes]
    # Of a running job, the time since its last restart is not recorded.
    last = PastAttempt(plan.attempt, tuple(names), record.created_at, now, record.detail or shown.state)
    is_recorded = bool(record.history) and record.history[-1].attempt == plan.attempt
    attempts = [*record.history, *([] if is_recorded else [last])]
    begin = attempts[0].started_at
    took = seconds(max(0.0, now - begin))
    facts = [
        ("command", _code(shlex.join([plan.job.python, *plan.job.command]))),
        ("size", script.size(plan.job)),
        ("backend", plan.backend),
        ("container image", plan.job.image),
        ("commit", record.commit),
        ("started", _clock(begin)),
        ("ended", _clock(record.ended_at) if record.outcome else ""),
        ("run directory", _code(plan.run_dir)),
    ]
    if (run_dir / "job.yaml").exists():
        facts.append(("to run it again", _code(shlex.join(["clusterctl", "launch", f"{run_dir}/job.yaml"]))))
    curves, newest = _results(run_dir, "results.csv")
    if not curves and view:
        curves = _curves([{"epoch": metric.epoch, **metric.scores} for metric in view.metrics])
    images = [
        path
        for pattern in _IMAGES
        for path in sorted(run_dir.glob(pattern))
        if path.name != _PLOTTED and path.is_file() and inside.is_inside(path, run_dir)
    ]
    predictions = [_image(path, is_live) for path in images if path.name == _PREDICTIONS]
    reason = shown.reason or record.detail
    parts = [
        Markup('<h1>{}: <span class="{}">{}</span></h1>').format(plan.job_id, shown.state, shown.words)
        + (Markup("<p>{}</p>").format(reason) if reason else _NOTHING)
        + _scores(view, newest, took),
        _progress(view) if view and not record.outcome else _NOTHING,
        _failure(plan, view) if view and record.outcome == "failed" else _NOTHING,
        _section("Predictions", predictions, "large"),
        _section("Curves", curves),
        _nodes(plan, view, past, is_live=is_live, has_ended=bool(record.outcome))
        if view or is_live
        else _NOTHING,
        Markup("<h2>Attempts</h2>") + _attempts(attempts) if len(attempts) > 1 else _NOTHING,
        _section("Images", (_image(path, is_live) for path in images if path.name != _PREDICTIONS)),
        Markup("<h2>Job</h2>") + _table(facts),
        Markup("<h2>Supervisor</h2><pre>{}</pre>").format(kept) if (kept := notes.text(plan)) else _NOTHING,
    ]
    return _LINES.join(Markup("<section>{}</section>").format(part) for part in parts)


def _code(text: str) -> Markup:
    return Markup("<code>{}</code>").format(text)


def _scores(view: JobView | None, newest: Mapping[str, float], took: str) -> Markup:
    """Return the best epoch's scores or, while there is none, the newest; the epoch, and how long the job has run.

    `newest` are the newest values of results.csv, for a job without events.
    """
    metric = view.metric if view else None
    scored = (view.done if view else None) or metric
    cells = progress.named_scores(scored.scores if scored else newest)
    epoch = metric.epoch if metric else newest.get("epoch")
    if epoch:
        cells["epoch"] = progress.out_of(epoch, metric.epochs if metric else None)
    cells["duration"] = took
    terms = _NOTHING.join(Markup("<div><dt>{}<dd>{}</div>").format(*cell) for cell in cells.items())
    return Markup('<dl class="scores">{}</dl>').format(terms)


def _failure(plan: Plan, view: JobView) -> Markup:
    """Return the last log lines of the node that failed first, and the hint, as on the terminal."""
    if not (failed := failing(view)[:1]):
        return _NOTHING
    name = f"attempt-{plan.attempt}/{failed[0].name}.log"
    lines = report.last_lines(view, "failed", {failed[0].name: _end(plan.run_dir, name) or []})
    shown = [line for line in lines if not line.startswith("hint: ")]
    hints = _NOTHING.join(Markup("<p>{}</p>").format(line) for line in lines if line.startswith("hint: "))
    return hints + (Markup("<pre>{}</pre>").format("\n".join(shown)) if shown else _NOTHING)


def _progress(view: JobView) -> Markup:
    """Return a progress bar of the epoch."""
    if view.current_progress is None:
        return _NOTHING
    text = progress.describe(view.current_progress)
    words = ", ".join(filter(None, (text.epoch, text.step, text.loss, text.speed, text.time_left)))
    bar = Markup('<progress aria-label="progress of the epoch" max="100" value="{}"></progress>')
    return Markup("<p>{}<br>{}</p>").format(words, bar.format(text.percent or 0))


def _nodes(
    plan: Plan, view: JobView | None, past: Sequence[Ranks], *, is_live: bool, has_ended: bool
) -> Markup:
    """Return a table of the nodes and, while the job runs, one of its ranks."""
    rows = []
    for index, node in enumerate(plan.nodes):
        link = Markup('<a href="logs/{}">{}</a>').format(node.name, node.name) if is_live else node.name
        state = _node_cells(view.nodes[index], has_ended=has_ended) if view else []
        rows.append([link, *state])
    titles = ["node", "phase", "progress", "note"] if view else ["log"]
    text = Markup("<h2>Nodes</h2>") + wide_table(titles, rows)
    slowest = view.metric.slowest_rank if view and view.metric else None
    if slowest is not None:
        text += Markup("<p>slowest rank of the last epoch: {}</p>").format(slowest)
    if view and not has_ended:
        text += _ranks(view, past)
    return text


def _node_cells(node: NodeView, *, has_ended: bool) -> list[str]:
    """Return a node's phase, the last step of its first rank, and a note."""
    phase: str = node.phase
    note = node.shown_note
    if has_ended and phase == "ready":  # the launcher stops what still runs after a failure
        phase = "stopped"
        note = ""
    step = progress.describe(node.progress).position if node.progress else ""
    return [Markup('<span class="{}">{}</span>').format(_PHASES.get(phase, ""), phase), step, note]


def _ranks(view: JobView, past: Sequence[Ranks]) -> Markup:
    """Return a table of the ranks with the newest sample of their use, and lines over time."""
    rows = []
    for node in view.nodes:
        host = node.status.usage.host if node.status.usage else None
        for rank in node.ranks:
            text = usage.describe([rank], host)
            cells = [str(rank.rank), node.name, text.cpu, text.memory, text.host_memory]
            samples = [sample[rank.rank] for sample in past if rank.rank in sample]
            rows.append(cells + _gpu_cells(rank, text, samples))
    if not rows:
        return _NOTHING
    titles = ["rank", "node", "CPU", "memory", "host memory"]
    if view.has_gpus:
        titles += ["GPU", "GPU memory", "temperature"]
    table = wide_table(titles, [row[: len(titles)] for row in rows])
    count = f"{len(rows)} {'rank' if len(rows) == 1 else 'ranks'}"
    is_open = " open" if len(rows) <= MOST_RANKS else ""
    return Markup('<details id="ranks"{}><summary>{}</summary>{}</details>').format(is_open, count, table)


def _gpu_cells(rank: RankUsage, text: usage.UsageText, samples: Sequence[RankUsage]) -> list[str]:
    """Return the use, the memory and the temperature of a rank's GPU, each with a line over time; "" if unknown."""
    use = memory = temperature = _NOTHING
    if text.gpu:
        use = _NOTHING + text.gpu + _line(samples, "use", 100)
    if rank.memory_total is not None and text.gpu_memory:
        memory = _NOTHING + text.gpu_memory + _line(samples, "memory", rank.memory_total)
    if rank.temperature is not None:
        temperature = _NOTHING + f"{rank.temperature} °C" + _line(samples, "temperature", 100)
    return [use, memory, temperature]


def _line(samples: Sequence[RankUsage], key: str, most: float) -> Markup:
    """Return a small line of the samples' values, from 0 to `most`."""
    values = [value for sample in samples if (value := getattr(sample, key)) is not None]
    if len(values) < 2:
        return _NOTHING
    points = " ".join(f"{x},{15 - 14 * value / most:.1f}" for x, value in enumerate(values))
    return Markup(
        '<svg class="spark" viewBox="0 0 {} 16" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<polyline class="s0" vector-effect="non-scaling-stroke" points="{}"/></svg>'
    ).format(len(values) - 1, f"{key}: {min(values)} to {max(values)}", points)


@dataclass(frozen=True)
class Shown:
    """A job's state in one word, in `words` for people, and why it waits or does not answer ("": it does neither)."""

    state: str
    words: str
    reason: str = ""


@dataclass(frozen=True)
class JobRow:
    """A job's row in the list of jobs. `job` is text or HTML; `state` is one word, and `words` says more."""

    job: str
    state: str
    words: str
    duration: str = ""
    nodes: str = ""
    attempt: str = ""
    backend: str = ""
    cause: str = ""

    @property
    def runs(self) -> bool:
        """Whether the job has not ended."""
        return self.state not in ("done", "failed", "stopped")


def job_list(rows: Iterable[JobRow]) -> Markup:
    """Return the table of jobs. On a narrow screen each row becomes a card, with the titles beside the cells."""
    titles = ("job", "state", "duration", "nodes", "attempt", "backend", "cause")
    head = _NOTHING.join(Markup("<th>{}").format(title) for title in titles)
    body = _NOTHING
    for row in rows:
        state = Markup('<span class="{}">{}</span>').format(row.state, row.words)
        cells = (row.job, state, row.duration, row.nodes, row.attempt, row.backend, row.cause)
        body += Markup("<tr>") + _NOTHING.join(
            Markup('<td data-title="{}">{}').format(title, cell)
            for title, cell in zip(titles, cells, strict=True)
        )
    return Markup('<div class="wide" tabindex="0"><table class="jobs"><tr>{}{}</table></div>').format(
        head, body
    )


def wide_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """Return a table with a row of titles, which scrolls sideways on a narrow screen. Cells are text or HTML."""
    head = _NOTHING.join(Markup("<th>{}").format(title) for title in titles)
    # `+` escapes, too, and takes a tenth of the time of `format`: a job may have thousands of ranks.
    body = _NOTHING.join(
        Markup("<tr>") + _NOTHING.join(Markup("<td>") + cell for cell in row) for row in rows
    )
    return Markup('<div class="wide" tabindex="0"><table><tr>{}{}</table></div>').format(head, body)


def _table(rows: Iterable[tuple[str, str]]) -> Markup:
    shown = _NOTHING.join(Markup("<tr><th>{}<td>{}").format(name, text) for name, text in rows if text)
    return Markup("<table>{}</table>").format(shown)


def _section(title: str, figures: Iterable[Markup], kind: str = "grid") -> Markup:
    text = _NOTHING.join(figures)
    return Markup('<h2>{}</h2><div class="{}">{}</div>').format(title, kind, text) if text else _NOTHING


def _attempts(attempts: Sequence[PastAttempt]) -> Markup:
    """Return a time line with a bar for each attempt, and how it ended."""
    begin = attempts[0].started_at
    end = attempts[-1].ended_at
    total = max(end - begin, 1e-9)
    rows = []
    for attempt in attempts:
        took_s = max(0.0, attempt.ended_at - attempt.started_at)
        x = 100 * (attempt.started_at - begin) / total
        width = 100 * took_s / total
        bar = Markup(
            '<svg class="bar" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" '
            'aria-label="from {:.0f} % to {:.0f} % of the time"><rect x="{:.2f}" width="{:.2f}" height="6"/></svg>'
        ).format(x, x + width, x, max(width, 0.5))
        text = f"{', '.join(attempt.nodes)}, {seconds(took_s)}: {attempt.cause}"
        rows.append((f"attempt {attempt.attempt}", Markup("{}{}").format(text, bar)))
    return _table(rows)


def _results(run_dir: Path, name: str) -> tuple[Sequence[Markup], Mapping[str, float]]:
    """Return the charts of results.csv, and its newest values."""
    try:
        with inside.open_file(run_dir, name) as file:
            version = os.fstat(file.fileno())
        return _parsed_results(run_dir, name, version.st_ino, version.st_mtime_ns, version.st_size)
    except (OSError, csv.Error):
        return [], {}


@functools.lru_cache(maxsize=16)  # a live page is drawn once per second
def _parsed_results(run_dir: Path, name: str, *_version: int) -> tuple[Sequence[Markup], Mapping[str, float]]:
    opened = inside.open_file(run_dir, name)
    with io.TextIOWrapper(opened, encoding="utf-8", errors="replace", newline="") as file:
        rows = list(csv.DictReader(file))
    newest = {
        name: value for name in ("epoch", *SCORES) for row in rows if (value := _value(row, name)) is not None
    }
    return _curves(rows), newest


def _curves(rows: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """Return a chart for each group of columns that has values. The rows are those of results.csv, or of events."""
    charts = []
    for title, ends in _CHARTS:
        columns = [name for end in ends for name in (rows[0] if rows else ()) if name and name.endswith(end)]
        lines = {
            _LABELS.get(name, name.removesuffix("_loss")): line
            for name in columns
            if (line := _points(rows, name))
        }
        if lines:
            charts.append(_chart(title, lines))
    return charts


def _points(rows: Sequence[Mapping[str, Any]], column: str) -> list[tuple[float, float]]:
    """Return (epoch, value) pairs; of many, the extremes of equal parts."""
    pairs = ((_value(row, "epoch"), _value(row, column)) for row in rows)
    points = [(epoch, value) for epoch, value in pairs if epoch is not None and value is not None]
    if len(points) <= _MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    return [point for part in parts for point in sorted({min(part, key=_height), max(part, key=_height)})]


def _value(row: Mapping[str, Any], column: str) -> float | None:
    """Return a finite number of a row, or None."""
    try:
        return number(float(row[column]))
    except (KeyError, TypeError, ValueError):
        return None


def _height(point: tuple[float, float]) -> float:
    return point[1]


def _chart(title: str, lines: dict[str, list[tuple[float, float]]]) -> Markup:
    points = [point for line in lines.values() for point in line]
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*points, strict=True))
    low = min(low, 0.0)  # from 0, so that noise does not look like a change
    high = max(high, low + 1e-9 * max(1.0, -low))  # above `low` also where floats are far apart
    left_px = 54
    top = 6
    width = _WIDTH - 60
    height = _HEIGHT - 26

    def place(point: tuple[float, float]) -> str:
        x = (point[0] - left) / ((right - left) or 1.0)
        y = (point[1] - low) / (high - low)
        return f"{left_px + width * x:.1f},{top + height * (1 - y):.1f}"

    bottom = top + height
    drawn = _NOTHING
    for k, line in enumerate(lines.values()):
        kind, points = (f"s{k % 4}", line) if len(line) > 1 else (f"s{k % 4} dot", 2 * line)
        drawn += Markup('<polyline class="{}" points="{}"/>').format(kind, " ".join(map(place, points)))
    grid = f"M{left_px} {top}h{width}M{left_px} {top + height / 2}h{width}"
    shape = f"{grid}M{left_px} {top}V{bottom}H{left_px + width}"
    axes = Markup('<path d="{}" fill="none" stroke="var(--line)"/>').format(shape)

    def text(x: float, y: float, shown: str, *, ends_at_x: bool = True) -> Markup:
        anchor = Markup(' text-anchor="end"') if ends_at_x else _NOTHING
        return Markup('<text x="{}" y="{}"{}>{}</text>').format(x, y, anchor, shown)

    texts = text(left_px - 4, top + 8, f"{high:.3g}")
    texts += text(left_px - 4, top + height / 2 + 4, f"{(low + high) / 2:.3g}")
    texts += text(left_px - 4, bottom, f"{low:.3g}")
    texts += text(left_px, _HEIGHT - 4, f"epoch {left:.0f}", ends_at_x=False)
    if right > left:
        texts += text(left_px + width, _HEIGHT - 4, f"{right:.0f}")
    names = _NOTHING.join(
        Markup('<span><i class="{}"></i>{}</span>').format(f"k{k % 4}", f"{name} {line[-1][1]:.4g}".lstrip())
        for k, (name, line) in enumerate(lines.items())
    )
    head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">')
    head = head.format(_WIDTH, _HEIGHT, f"{title} over the epochs")
    figure = Markup("<figure>{}{}{}{}</svg><figcaption><b>{}</b>{}</figcaption></figure>")
    return figure.format(head, axes, drawn, texts, title, names)


def _image(path: Path, is_live: bool) -> Markup:
    name = path.name
    link = quote(name)
    # With the version, the browser loads an image again once it changes.
    source = f"{link}?{path.stat().st_mtime_ns}" if is_live else link
    image = Markup('<a href="{}"><img src="{}" alt="{}" loading="lazy"></a>').format(link, source, name)
    return Markup("<figure>{}<figcaption>{}</figcaption></figure>").format(image, name)


def _log(run_dir: Path, name: str, *, is_open: bool) -> Markup:
    """Return the last lines of a log, which a reader sees at once or opens, and a link to the whole."""
    lines = _end(run_dir, name)
    if lines is None:
        return _NOTHING
    shown = lines[-_LOG_LINES:]
    node = Path(name).stem
    link = quote(name)
    if not shown:
        return Markup('<p><a href="{}">{}</a> has printed nothing</p>').format(link, node)
    summary = f"{node}: the last {len(shown)} lines"
    text = Markup('<details{}><summary>{}</summary><pre>{}</pre><a href="{}">{}</a></details>')
    return text.format(" open" if is_open else "", summary, "\n".join(shown), link, name)


def _end(run_dir: str | Path, name: str) -> list[str] | None:
    """Return the last lines of a log without events, or that it leads out of the run directory; None: no log."""
    try:
        with inside.open_file(run_dir, name) as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        return [f"{name} is not read: it {error.strerror}"] if error.errno in inside.REFUSED else None
    return [line for line in lines if "::cluster {" not in line]


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
