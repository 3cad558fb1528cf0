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
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * (width + 2) if k < left else "-" * (width + 1) + ":" for k, width in enumerate(widths)]

    def padded(row: Cells) -> str:
        cells = []
        for k, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.ljust(width) if k < left else cell.rjust(width))
        return "| " + " | ".join(cells) + " |"

    return "\n".join([padded(header), "|" + "|".join(rule) + "|", *map(padded, rows)])


def clock(seconds: float) -> str:
    """Format seconds as 20:39 or 1:02:03, with a tenth below a minute."""
    if seconds < 59.95:
        return f"0:{seconds:04.1f}"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _train_epoch(measured: Measurement) -> str:
    """Format the time of an epoch's training, with ~ if it is extrapolated."""
    about = "~" if measured.steps < measured.epoch_steps else ""
    return about + clock(measured.train_epoch_s)


def _val_epoch(measured: Measurement) -> str:
    """Format the time of an epoch's validation, with ~ if it is extrapolated."""
    if measured.val_epoch_s is None:
        return "-"
    about = "~" if measured.val_counted < measured.val_images else ""
    return about + clock(measured.val_epoch_s)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g}"


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _short(failure: str) -> str:
    return OUT_OF_MEMORY if failure.startswith(OUT_OF_MEMORY) else "failed"


def unit_of(rows: Sequence[Row]) -> str:
    """Return the name of a rank: GPU, or rank on a CPU."""
    measured = [row.measured for row in rows if row.measured]
    return "GPU" if any(one.device_bytes is not None for one in measured) else "rank"


def yolov5_table(rows: Sequence[Row]) -> str:
    """Return the table of YOLOv5's multi-GPU page: an epoch on 1x, 2x, 4x, 8x; batch-size is over all ranks."""
    unit = unit_of(rows)
    memory = "CUDA_mem (GB)" if unit == "GPU" else "host_mem (GB)"
    header = [f"{unit}s", "batch-size", memory, "train", "val"]
    lines = []
    for row in rows:
        measured = row.measured
        if measured:
            bytes_used = measured.host_bytes if measured.device_bytes is None else measured.device_bytes
            cells = [_gigabytes(bytes_used), _train_epoch(measured), _val_epoch(measured)]
        else:
            cells = ["-", _short(row.failure), "-"]
        lines.append([f"{row.point.ranks}x", str(row.point.step_batch), *cells])
    return markdown(header, lines)


def thread_table(rows: Sequence[Row]) -> str:
    """Return the table of the fast.ai thread: an epoch's time by batch size per rank, and the gain."""
    unit = unit_of(rows)
    counts = sorted({row.point.ranks for row in rows})
    titles = [f"{count} ranks" if unit == "rank" and count > 1 else f"{count} {unit}" for count in counts]
    header = ["bs", titles[0]]
    for title in titles[1:]:
        header += [title, "gain"]
    by_point = {(row.point.series, row.point.ranks): row for row in rows}
    lines = []
    for series in dict.fromkeys(row.point.series for row in rows):
        line = [str(series[0])]
        for count in counts:
            row = by_point.get((series, count))
            if not row:
                line.append("-")
            elif row.measured:
                line.append(_train_epoch(row.measured))
            else:
                line.append(_short(row.failure))
            if count > counts[0]:
                gain = row.gain if row else None
                line.append(_optional(gain, ".2f"))
        lines.append(line)
    return markdown(header, lines)


def detail_table(rows: Sequence[Row]) -> str:
    """Return the table of each point's rates, memory and time shares."""
    unit = unit_of(rows)
    has_strategies = len({row.point.parallel for row in rows}) > 1
    header = ["strategy"] if has_strategies else []
    header += [f"{unit}s", "batch", "precision", "train images/s", "val images/s", "gain", "efficiency"]
    header += ["GPU GB"] if unit == "GPU" else []
    header += ["host GB", "loading", "communication"]
    lines = []
    for row in rows:
        point = row.point
        measured = row.measured
        precision = measured.precision if measured else point.precision
        cells = [point.parallel] if has_strategies else []
        cells += [str(point.ranks), str(point.step_batch), precision]
        if not measured:
            cells.append(_short(row.failure))
            empty = len(header) - len(cells)
            lines.append([*cells, *["-"] * empty])
            continue
        cells += [f"{measured.train_images_per_s:.1f}", _optional(measured.val_images_per_s, ".1f")]
        cells += [_optional(row.gain, ".2f"), _optional(row.efficiency, ".0%")]
        cells += [] if measured.device_bytes is None else [_gigabytes(measured.device_bytes)]
        communication = None if point.parallel in UNTIMED else measured.sync_share
        cells += [_gigabytes(measured.host_bytes), f"{measured.data_share:.0%}"]
        cells.append(_optional(communication, ".0%"))
        lines.append(cells)
    return markdown(header, lines)


def notes_of(rows: Sequence[Row]) -> list[str]:
    """Return the notes of the tables: extrapolations and failures."""
    measurements = [row.measured for row in rows if row.measured]
    strategies = {row.point.parallel for row in rows if row.measured}
    notes = []
    untimed = sorted(strategies & set(UNTIMED))
    if untimed:
        notes.append(f"{', '.join(untimed)}: communication is not timed separately and counts as computation")
    steps = sorted({measured.steps for measured in measurements if measured.steps < measured.epoch_steps})
    if steps:
        notes.append(f"~ train: extrapolated from {_span(steps)} steps")
    validated = [measured for measured in measurements if measured.val_epoch_s is not None]
    partial = [measured for measured in validated if measured.val_counted < measured.val_images]
    if partial:
        counted = sorted({measured.val_counted for measured in partial})
        notes.append(f"~ val: extrapolated from {_span(counted)} of {partial[0].val_images} images")
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
        of_rounds = zip(rounds, first, strict=False)
        ratios = [mine.train_images_per_s / other.train_images_per_s for mine, other in of_rounds]
        rate = base * statistics.median(ratios)
        loader = statistics.median(m.loader_images_per_s or 0.0 for m in rounds)
        waiting = statistics.median(m.data_share for m in rounds)
        memory = _gigabytes(max(m.host_bytes for m in rounds))
        rows.append([str(workers), f"{loader:.1f}", f"{rate:.1f}", f"{waiting:.0%}", memory])
    header = ["workers", "loader alone images/s", "training images/s", "waiting for data", "host GB"]
    return markdown(header, rows)


def scaling_text(rows: Sequence[Row], settings: Settings, threads: int, rounds: int) -> str:
    """Return the full report: heading, tables, notes."""
    about = machine(rows)
    many = "round" if rounds == 1 else "rounds"
    parts = [
        f"{about['device']}, {about['cores']} cores, torch {about['torch']}, {about['date']}; "
        f"{settings.data}, {settings.imgsz} px, threads of a rank: {threads}, {rounds} {many}"
    ]
    has_strategies = len({row.point.parallel for row in rows}) > 1
    for precision, strategy in dict.fromkeys((row.point.precision, row.point.parallel) for row in rows):
        of_precision = [row for row in rows if row.point.precision == precision]
        # The point of a single rank belongs to every strategy.
        of_both = [row for row in of_precision if row.point.parallel == strategy or row.point.ranks == 1]
        computed = next((row.measured.precision for row in of_both if row.measured), precision)
        kind = f"{computed}, {strategy}" if has_strategies else computed
        parts += [f"An epoch, {kind}:", yolov5_table(of_both)]
        if len({row.point.ranks for row in of_both}) > 1:
            whose = "of all ranks together" if of_both[0].point.strong else f"of each {unit_of(of_both)}"
            parts += [f"An epoch's training by batch size ({whose}), {kind}:", thread_table(of_both)]
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
    point = row.point
    measured = row.measured
    return {
        "parallel": point.parallel,
        "ranks": point.ranks,
        "batch": point.step_batch,
        **{field.name: getattr(measured, field.name, None) for field in dataclasses.fields(Measurement)},
        "precision": measured.precision if measured else point.precision,
        "train_epoch_s": measured.train_epoch_s if measured else None,
        "val_epoch_s": measured.val_epoch_s if measured else None,
        "gain": row.gain,
        "efficiency": row.efficiency,
        "failure": row.failure,
    }


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the records as CSV, with an empty cell for None."""
    out = io.StringIO()
    table = csv.DictWriter(out, list(records[0]), lineterminator="\n")
    table.writeheader()
    for record in records:
        cells = {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in record.items()}
        table.writerow(cells)
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
    counts = sorted({row.point.ranks for row in rows})
    batches = sorted({row.point.batch for row in rows})
    ideal = [count / counts[0] for count in counts]
    left.plot(counts, ideal, color=GREY, linestyle="--", label="ideal")
    for axes, curves in zip((left, right), curves_of(rows), strict=True):
        for k, (label, gains) in enumerate(curves.items()):
            numbers = sorted(gains)  # of ranks, or batch sizes
            style = {"color": COLOURS[k % len(COLOURS)], "marker": "o", "markersize": 4, "linewidth": 1.8}
            axes.plot(numbers, [gains[number] for number in numbers], label=label, **style)
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
