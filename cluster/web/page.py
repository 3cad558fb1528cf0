"""report.html in a job's run directory: outcome, attempts, curves, images and logs, without scripts or other hosts.

All text of the job is escaped, so a name or a log line is shown and never run. Images and logs are links to the files
beside the page.
"""

from __future__ import annotations

import csv
import math
import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from urllib.parse import quote

from cluster.spec.model import JobRecord, PastAttempt

NAME = "report.html"
#: The last lines of each log, and the bytes of its end, that the page contains.
_LOG_LINES, _LOG_BYTES = 200, 1 << 16
#: Points of a curve; longer ones are reduced to the extremes of equal parts.
_MOST_POINTS = 400
_WIDTH, _HEIGHT = 480, 200
#: Titles of charts, and the ends of the names of their columns in results.csv.
_CHARTS = (
    ("loss", ("_loss",)),
    ("score", ("map50", "map", "precision", "recall", "top1", "top5", "miou", "accuracy")),
    ("images/s", ("images_per_s",)),
    ("learning rate", ("lr",)),
)
_IMAGES = ("*.png", "*.jpg")

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7 }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1100px; padding: 1rem }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
table { border-collapse: collapse; width: 100% }
td, th { padding: .25rem .75rem .25rem 0; text-align: left; vertical-align: top }
tr { border-top: 1px solid var(--line) } th { font-weight: 600; width: 6rem } td { overflow-wrap: anywhere }
code, pre { font: 13px/1.45 ui-monospace, monospace } pre { overflow: auto; max-height: 30rem; margin: .5rem 0 }
.done { color: #1a7f37 } .failed { color: #cf222e } .stopped { color: #9a6700 }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)) }
figure { margin: 0 } figcaption { font-size: .9rem } img, svg { width: 100%; height: auto }
.bar { display: block; fill: #0072b2; height: .5rem; margin: .25rem 0 } summary { cursor: pointer }
svg text { fill: currentColor; font: 11px system-ui, sans-serif } polyline { fill: none; stroke-width: 1.5 }
.s0 { stroke: var(--c0) } .s1 { stroke: var(--c1) } .s2 { stroke: var(--c2) } .s3 { stroke: var(--c3) }
.k0 { color: var(--c0) } .k1 { color: var(--c1) } .k2 { color: var(--c2) } .k3 { color: var(--c3) }
@media (prefers-color-scheme: dark) { :root { --c0: #56b4e9; --c1: #ff9a52; --c2: #3ddba4; --c3: #e8a6c8 }
 .done { color: #3fb950 } .failed { color: #ff7b72 } .stopped { color: #d29922 } }
"""


def write(record: JobRecord) -> Path:
    """Write the report of a job that has ended into its run directory. Raises OSError."""
    path = Path(record.plan.run_dir, NAME)
    partial = path.with_suffix(".tmp")
    try:
        partial.write_text(render(record), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def render(record: JobRecord) -> str:
    """Return the page of a job that has ended, from its record and the files in its run directory."""
    plan, run_dir = record.plan, Path(record.plan.run_dir)
    names, ended_at = [node.name for node in plan.nodes], record.ended_at
    last = PastAttempt(plan.attempt, tuple(names), record.created_at, ended_at, record.detail or record.outcome)
    attempts = [*record.history, last]
    facts = [
        ("command", f"<code>{escape(shlex.join(plan.command))}</code>"),
        ("nodes", f"{len(names)} x {plan.world_size // len(names)} processes, {escape(plan.backend)}"),
        ("image", escape(plan.image)),
        (
            "duration",
            f"{_clock(attempts[0].started_at)} to {_clock(ended_at)} ({_span(ended_at - attempts[0].started_at)})",
        ),
        ("commit", escape(record.commit)),
        ("files", f"<code>{escape(plan.run_dir)}</code>"),
    ]
    if (run_dir / "job.yaml").exists():
        facts.append(("repeat", f"<code>{escape(shlex.join(['clusterctl', 'launch', f'{run_dir}/job.yaml']))}</code>"))
    parts = [
        f'<h1>{escape(plan.job_id)}: <span class="{record.outcome}">{record.outcome}</span></h1>',
        f"<p>{escape(record.detail)}</p>" if record.detail else "",
        _table(facts),
        "<h2>Attempts</h2>" + _attempts(attempts),
        _section("Curves", _curves(run_dir / "results.csv")),
        _section("Images", (_image(path.name) for pattern in _IMAGES for path in sorted(run_dir.glob(pattern)))),
        "<h2>Logs</h2>",
        *(_log(run_dir, f"attempt-{plan.attempt}/{name}.log") for name in names),
    ]
    title = escape(f"{plan.job_id}: {record.outcome}")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    body = "\n".join(part for part in parts if part)
    return f'<!doctype html>\n<html lang="en">{head}<title>{title}</title><style>{_STYLE}</style>\n{body}\n</html>\n'


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><th>{name}<td>{text}" for name, text in rows if text) + "</table>"


def _section(title: str, figures: Iterable[str]) -> str:
    text = "".join(figures)
    return f'<h2>{title}</h2><div class="grid">{text}</div>' if text else ""


def _attempts(attempts: Sequence[PastAttempt]) -> str:
    """Return a time line with a bar for each attempt, and how it ended."""
    begin, end = attempts[0].started_at, attempts[-1].ended_at
    total = max(end - begin, 1e-9)
    rows = []
    for each in attempts:
        x, width = 100 * (each.started_at - begin) / total, 100 * max(each.ended_at - each.started_at, 0) / total
        bar = (
            '<svg class="bar" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" '
            f'aria-label="from {x:.0f} % to {x + width:.0f} % of the time">'
            f'<rect x="{x:.2f}" width="{max(width, 0.5):.2f}" height="6"/></svg>'
        )
        nodes = escape(", ".join(each.nodes))
        text = f"{nodes}, {_span(each.ended_at - each.started_at)}: {escape(each.cause)}{bar}"
        rows.append((f"attempt {each.attempt}", text))
    return _table(rows)


def _curves(path: Path) -> list[str]:
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, csv.Error):
        return []
    charts = []
    for title, ends in _CHARTS:
        columns = [name for name in (rows[0] if rows else ()) if name and name.endswith(ends)]
        lines = {name: line for name in columns if (line := _points(rows, name))}
        if lines:
            charts.append(_chart(title, lines))
    return charts


def _points(rows: Sequence[dict[str, str]], column: str) -> list[tuple[float, float]]:
    """Return (epoch, value) pairs; of many, the extremes of equal parts."""
    found = []
    for row in rows:
        try:
            point = (float(row["epoch"]), float(row[column]))
        except (KeyError, TypeError, ValueError):
            continue
        if all(map(math.isfinite, point)):
            found.append(point)
    if len(found) <= _MOST_POINTS:
        return found
    size = math.ceil(2 * len(found) / _MOST_POINTS)
    parts = [found[at : at + size] for at in range(0, len(found), size)]
    return [point for part in parts for point in sorted({min(part, key=_value), max(part, key=_value)})]


def _value(point: tuple[float, float]) -> float:
    return point[1]


def _chart(title: str, lines: dict[str, list[tuple[float, float]]]) -> str:
    points = [point for line in lines.values() for point in line]
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*points, strict=True))
    right, high = max(right, left + 1e-9), max(high, low + 1e-9)
    left_px, top, width, height = 60, 6, _WIDTH - 66, _HEIGHT - 26

    def place(point: tuple[float, float]) -> str:
        x, y = (point[0] - left) / (right - left), (point[1] - low) / (high - low)
        return f"{left_px + width * x:.1f},{top + height * (1 - y):.1f}"

    bottom = top + height
    drawn = "".join(
        f'<polyline class="s{k % 4}" points="{" ".join(map(place, line))}"/>' for k, line in enumerate(lines.values())
    )
    axes = f'<path d="M{left_px} {top}V{bottom}H{left_px + width}" fill="none" stroke="var(--line)"/>'
    texts = (
        f'<text x="{left_px - 4}" y="{top + 8}" text-anchor="end">{high:.3g}</text>'
        f'<text x="{left_px - 4}" y="{bottom}" text-anchor="end">{low:.3g}</text>'
        f'<text x="{left_px}" y="{_HEIGHT - 4}">epoch {left:.0f}</text>'
        f'<text x="{left_px + width}" y="{_HEIGHT - 4}" text-anchor="end">{right:.0f}</text>'
    )
    names = ", ".join(
        f'<span class="k{k % 4}">{escape(name)} {line[-1][1]:.4g}</span>'
        for k, (name, line) in enumerate(lines.items())
    )
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title} over the epochs">'
    return f"<figure>{head}{axes}{drawn}{texts}</svg><figcaption>{title}: {names}</figcaption></figure>"


def _image(name: str) -> str:
    link, text = quote(name), escape(name)
    image = f'<a href="{link}"><img src="{link}" alt="{text}" loading="lazy"></a>'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"


def _log(run_dir: Path, name: str) -> str:
    """Return the last lines of a log, and a link to the whole."""
    try:
        with (run_dir / name).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    shown = [line for line in lines if "::cluster {" not in line][-_LOG_LINES:]
    node, link = escape(Path(name).stem), quote(name)
    return (
        f"<details><summary>{node}: the last {len(shown)} lines</summary><pre>{escape(chr(10).join(shown))}</pre>"
        f'<a href="{link}">{escape(name)}</a></details>'
    )


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
