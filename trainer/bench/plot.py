"""Charts of a scaling benchmark: speed-up by ranks, and gain by batch size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.bench.scaling import Row
from trainer.bench.tables import unit_of
from trainer.plots.figure import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, figure, style_axes, write

COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
Curves = dict[str, dict[int, float]]  # label -> x -> gain


def curves_of(rows: Sequence[Row]) -> tuple[Curves, Curves]:
    """Return the gains by ranks, and by batch size, without failed points.

    The gain of the fewest ranks is 1 by definition.
    """
    fewest, unit = min(row.point.ranks for row in rows), unit_of(rows)
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
