"""Tables of a benchmark as Markdown and CSV, and its charts."""

import csv
import dataclasses
import io
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.bench.measure import Measurement
from trainer.bench.scaling import UNTIMED, Row
from trainer.config import DEFAULT_STRATEGY, Settings
from trainer.distributed.comm import usable_cores
from trainer.engine.memory import OUT_OF_MEMORY
from trainer.plots.charts import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, figure, style_axes, write

Cells = Sequence[str]
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
Curves = dict[str, dict[int, float]]  # label -> x -> gain


def markdown(header: Cells, rows: Iterable[Cells], left: int = 0) -> str:
    """Return a table of right-aligned columns, except the first `left` ones."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
    rule = ["-" * (w + 2) if k < left else "-" * (w + 1) + ":" for k, w in enumerate(widths)]

    def padded(line: Cells) -> str:
        cells = [
            c.ljust(w) if k < left else c.rjust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True))
        ]
        return "| " + " | ".join(cells) + " |"

    return "\n".join([padded(lines[0]), "|" + "|".join(rule) + "|", *map(padded, lines[1:])])


def clock(seconds: float) -> str:
    """Format seconds as 20:39 or 1:02:03, with a tenth below a minute."""
    if seconds < 59.95:
        return f"0:{seconds:04.1f}"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _train_epoch(m: Measurement) -> str:
    """Format the time of an epoch's training, with ~ if it is extrapolated."""
    return "~" * (m.steps < m.epoch_steps) + clock(m.train_epoch_s)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g}"


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _short(failure: str) -> str:
    return OUT_OF_MEMORY if failure.startswith(OUT_OF_MEMORY) else "failed"


def unit_of(rows: Sequence[Row]) -> str:
    """Return the name of a rank: GPU, or rank on a CPU."""
    return "GPU" if any(row.measured and row.measured.device_bytes is not None for row in rows) else "rank"


def yolov5_table(rows: Sequence[Row]) -> str:
    """Return the table of YOLOv5's multi-GPU page: an epoch on 1x, 2x, 4x, 8x; batch-size is over all ranks."""
    unit = unit_of(rows)
    header = [f"{unit}s", "batch-size", "CUDA_mem (GB)" if unit == "GPU" else "host_mem (GB)", "train", "val"]
    lines = []
    for row in rows:
        m = row.measured
        cells = ["-", _short(row.failure), "-"]
        if m:
            memory = m.host_bytes if m.device_bytes is None else m.device_bytes
            val = (
                "-" if m.val_epoch_s is None else "~" * (m.val_counted < m.val_images) + clock(m.val_epoch_s)
            )
            cells = [_gigabytes(memory), _train_epoch(m), val]
        lines.append([f"{row.point.ranks}x", str(row.point.step_batch), *cells])
    return markdown(header, lines)


def thread_table(rows: Sequence[Row]) -> str:
    """Return the table of the fast.ai thread: an epoch's time by batch size per rank, and the gain."""
    unit = unit_of(rows)
    counts = sorted({row.point.ranks for row in rows})
    titles = [f"{count} {unit}{'s' if unit == 'rank' and count > 1 else ''}" for count in counts]
    header = ["bs", titles[0]]
    for title in titles[1:]:
        header += [title, "gain"]
    by_point = {(row.point.series, row.point.ranks): row for row in rows}
    lines = []
    for series in dict.fromkeys(row.point.series for row in rows):
        line = [str(series[0])]
        for count in counts:
            row = by_point.get((series, count))
            line.append(
                "-" if not row else _train_epoch(row.measured) if row.measured else _short(row.failure)
            )
            if count > counts[0]:
                line.append(_optional(row.gain if row else None, ".2f"))
        lines.append(line)
    return markdown(header, lines)


def detail_table(rows: Sequence[Row]) -> str:
    """Return the table of each point's rates, memory and time shares."""
    unit = unit_of(rows)
    has_strategies = len({row.point.parallel for row in rows}) > 1
    header = [
        *(["strategy"] if has_strategies else []),
        f"{unit}s",
        "batch",
        "precision",
        "train images/s",
        "val images/s",
    ]
    header += [
        "gain",
        "efficiency",
        *(["GPU GB"] if unit == "GPU" else []),
        "host GB",
        "loading",
        "communication",
    ]
    lines = []
    for row in rows:
        p = row.point
        m = row.measured
        cells = [p.parallel] if has_strategies else []
        cells += [str(p.ranks), str(p.step_batch), m.precision if m else p.precision]
        if not m:
            lines.append([*cells, _short(row.failure), *["-"] * (len(header) - len(cells) - 1)])
            continue
        cells += [f"{m.train_images_per_s:.1f}", _optional(m.val_images_per_s, ".1f")]
        cells += [_optional(row.gain, ".2f"), _optional(row.efficiency, ".0%")]
        cells += [] if m.device_bytes is None else [_gigabytes(m.device_bytes)]
        communication = None if p.parallel in UNTIMED else m.sync_share
        lines.append(
            [*cells, _gigabytes(m.host_bytes), f"{m.data_share:.0%}", _optional(communication, ".0%")]
        )
    return markdown(header, lines)


def notes_of(rows: Sequence[Row]) -> list[str]:
    """Return the notes of the tables: extrapolations and failures."""
    done = [(row.point, row.measured) for row in rows if row.measured]
    notes = []
    if some := sorted({point.parallel for point, _ in done} & set(UNTIMED)):
        notes.append(f"{', '.join(some)}: communication is not timed separately and counts as computation")
    if steps := sorted({m.steps for _, m in done if m.steps < m.epoch_steps}):
        notes.append(f"~ train: extrapolated from {_span(steps)} steps")
    part = [m for _, m in done if m.val_epoch_s is not None and m.val_counted < m.val_images]
    if part:
        counted = sorted({m.val_counted for m in part})
        notes.append(f"~ val: extrapolated from {_span(counted)} of {part[0].val_images} images")
    for row in rows:
        if row.failure:
            strategy = "" if row.point.parallel == DEFAULT_STRATEGY else f"{row.point.parallel}, "
            where = f"batch {row.point.step_batch} on {row.point.ranks} ({strategy}{row.point.precision})"
            notes.append(f"{where}: {row.failure}")
    return notes


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def workers_table(found: Mapping[int, Sequence[Measurement]]) -> str:
    """Return the table of `bench workers`.

    A rate is the first number's median times the median ratio to it within a round, because the speed of a machine
    drifts.
    """
    first = next(iter(found.values()))
    base = statistics.median(m.train_images_per_s for m in first)
    rows = []
    for workers, rounds in found.items():
        ratios = [m.train_images_per_s / b.train_images_per_s for m, b in zip(rounds, first, strict=False)]
        loader = statistics.median(m.loader_images_per_s or 0.0 for m in rounds)
        waiting = statistics.median(m.data_share for m in rounds)
        memory = _gigabytes(max(m.host_bytes for m in rounds))
        rate = f"{base * statistics.median(ratios):.1f}"
        rows.append([str(workers), f"{loader:.1f}", rate, f"{waiting:.0%}", memory])
    return markdown(
        ["workers", "loader alone images/s", "training images/s", "waiting for data", "host GB"], rows
    )


def scaling_text(rows: Sequence[Row], settings: Settings, threads: int, rounds: int) -> str:
    """Return the full report: heading, tables, notes."""
    about = machine(rows)
    many = "round" if rounds == 1 else "rounds"
    parts = [
        f"{about['device']}, {about['cores']} cores, torch {about['torch']}, {about['date']}; "
        f"{settings.data}, {settings.imgsz} px, threads of a rank: {threads}, {rounds} {many}"
    ]
    several = len({row.point.parallel for row in rows}) > 1
    for precision, strategy in dict.fromkeys((row.point.precision, row.point.parallel) for row in rows):
        of_all = [row for row in rows if row.point.precision == precision]
        mine = [row for row in of_all if row.point.parallel == strategy or row.point.ranks == 1]
        computed = next((row.measured.precision for row in mine if row.measured), precision)
        kind = f"{computed}, {strategy}" if several else computed
        parts += [f"An epoch, {kind}:", yolov5_table(mine)]
        if len({row.point.ranks for row in mine}) > 1:
            whose = "of all ranks together" if mine[0].point.strong else f"of each {unit_of(mine)}"
            parts += [f"An epoch's training by batch size ({whose}), {kind}:", thread_table(mine)]
    parts += ["Where it goes:", detail_table(rows), *notes_of(rows)]
    return "\n\n".join(parts)


def machine(rows: Sequence[Row]) -> dict[str, Any]:
    """Return machine, versions and date of the figures."""
    device = next((row.measured.device for row in rows if row.measured), platform.machine())
    return {
        "device": device,
        "cores": usable_cores(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def values_of(row: Row) -> dict[str, Any]:
    """Return a row as plain values for CSV and JSON; None if it has no value."""
    p = row.point
    m = row.measured
    return {
        "parallel": p.parallel,
        "ranks": p.ranks,
        "batch": p.step_batch,
        **{field.name: getattr(m, field.name, None) for field in dataclasses.fields(Measurement)},
        "precision": m.precision if m else p.precision,
        "train_epoch_s": m and m.train_epoch_s,
        "val_epoch_s": m and m.val_epoch_s,
        "gain": row.gain,
        "efficiency": row.efficiency,
        "failure": row.failure,
    }


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the records as CSV, with an empty cell for None."""
    out = io.StringIO()
    table = csv.DictWriter(out, list(records[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(
        {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in record.items()} for record in records
    )
    return out.getvalue()


def curves_of(rows: Sequence[Row]) -> tuple[Curves, Curves]:
    """Return the gains by ranks, 1 for the fewest, and by batch size, without failed points."""
    fewest = min(row.point.ranks for row in rows)
    unit = unit_of(rows)
    more = [row for row in rows if row.point.ranks > fewest]
    kinds = {(row.point.precision, row.point.parallel) for row in more}
    by_ranks: Curves = {}
    by_batch: Curves = {}
    for row in more:
        if row.gain is not None:
            point = row.point
            kind = f", {point.precision}, {point.parallel}" if len(kinds) > 1 else ""
            by_ranks.setdefault(f"batch {point.batch}{kind}", {fewest: 1.0})[point.ranks] = row.gain
            by_batch.setdefault(f"{point.ranks} {unit}s{kind}", {})[point.batch] = row.gain
    return by_ranks, by_batch


def plot_scaling(rows: Sequence[Row], path: Path) -> None:
    """Write both charts as a PNG atomically."""
    unit = unit_of(rows)
    chart = figure(11, 4.2)
    left, right = chart.subplots(1, 2)
    counts, batches = (sorted({getattr(row.point, key) for row in rows}) for key in ("ranks", "batch"))
    left.plot(counts, [n / counts[0] for n in counts], color=GREY, linestyle="--", label="ideal")
    for axes, curves in zip((left, right), curves_of(rows), strict=True):
        for k, (label, gains) in enumerate(curves.items()):
            x = sorted(gains)
            style = {"color": COLOURS[k % len(COLOURS)], "marker": "o", "markersize": 4, "linewidth": 1.8}
            axes.plot(x, [gains[each] for each in x], label=label, **style)
    whose = "" if rows[0].point.strong else f" of each {unit}"
    style_axes(left, "speed-up", f"{unit}s", f"images/s over {counts[0]} {unit}")
    style_axes(right, "gain by batch size", f"batch size{whose}", f"images/s over {counts[0]} {unit}")
    left.set_xticks(counts)
    right.set_xscale("log", base=2)
    right.set_xticks(batches, [str(batch) for batch in batches])
    right.minorticks_off()
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)
    write(chart, path)
