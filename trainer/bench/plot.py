"""The two diagrams of a scaling benchmark: speed-up against devices, and gain against batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from trainer.bench.scaling import Row
from trainer.bench.tables import unit_of
from trainer.plots.figure import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, dress, figure, write

COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
Curve = tuple[str, list[int], list[float]]  # label, x, y


def speed_ups(rows: Sequence[Row]) -> list[Curve]:
    """For each batch size, precision and mode, the gain by the number of ranks; one rank is the start of all modes."""
    drawn = [
        replace(row, point=replace(row.point, parallel=mode))
        for row in rows
        for mode in (sorted(_modes(rows)) if row.point.ranks == 1 else []) or [row.point.parallel]
    ]
    return _curves(drawn, lambda row: row.point.ranks, lambda row: f"batch {row.point.batch}{_kind(row, drawn)}")


def gains(rows: Sequence[Row]) -> list[Curve]:
    """For each number of ranks but the fewest, each precision and each mode, the gain by the batch size."""
    fewest = min(row.point.ranks for row in rows)
    more = [row for row in rows if row.point.ranks > fewest]
    unit = unit_of(rows)
    return _curves(more, lambda row: row.point.batch, lambda row: f"{row.point.ranks} {unit}s{_kind(row, rows)}")


def plot_scaling(rows: Sequence[Row], path: Path) -> None:
    """Draw both as PNG, whole or not at all; points that failed are not drawn."""
    unit = unit_of(rows)
    made = figure(11, 4.2)
    left, right = made.add_subplot(1, 2, 1), made.add_subplot(1, 2, 2)
    counts = sorted({row.point.ranks for row in rows})
    left.plot(counts, [n / counts[0] for n in counts], color=GREY, linestyle="--", label="ideal")
    for axes, curves in ((left, speed_ups(rows)), (right, gains(rows))):
        for k, (label, x, y) in enumerate(curves):
            axes.plot(x, y, color=COLOURS[k % len(COLOURS)], marker="o", markersize=4, linewidth=1.8, label=label)
    dress(left, "speed-up", f"{unit}s", f"images/s over {counts[0]} {unit}")
    dress(right, "gain by batch size", _what(rows), f"images/s over {counts[0]} {unit}")
    left.set_xticks(counts)
    right.set_xscale("log", base=2)
    batches = sorted({row.point.batch for row in rows})
    right.set_xticks(batches, [str(batch) for batch in batches])
    right.minorticks_off()
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)
    write(made, path)


def _curves(rows: Sequence[Row], x: Callable[[Row], int], label: Callable[[Row], str]) -> list[Curve]:
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.gain is not None:
            found.setdefault(label(row), []).append((x(row), row.gain))
    return [(name, [a for a, _ in sorted(points)], [b for _, b in sorted(points)]) for name, points in found.items()]


def _kind(row: Row, rows: Sequence[Row]) -> str:
    """Precision and mode, where they differ between the rows."""
    values = ((row.point.precision, {r.point.precision for r in rows}), (row.point.parallel, _modes(rows)))
    return "".join(f", {own}" for own, all_ in values if len(all_) > 1)


def _modes(rows: Sequence[Row]) -> set[str]:
    """The modes of several ranks; one alone has none."""
    return {row.point.parallel for row in rows if row.point.ranks > 1}


def _what(rows: Sequence[Row]) -> str:
    return "batch size" if rows[0].point.strong else f"batch size of each {unit_of(rows)}"
