"""A run's curves over its epochs."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.errors import TrainerError
from trainer.plots.figure import BLUE, GREEN, ORANGE, PURPLE, RED, dress, figure, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOSSES = [("box_loss", "box", BLUE), ("obj_loss", "object", ORANGE), ("cls_loss", "class", GREEN)]
_PANELS: list[tuple[str, list[tuple[str, str, str]]]] = [
    ("training loss", [*_LOSSES, ("dfl_loss", "distribution", PURPLE)]),
    ("validation", [("map50", "mAP50", BLUE), ("map", "mAP50-95", RED)]),
    ("validation", [("top1", "top-1", BLUE), ("top5", "top-5", RED)]),
    ("validation", [("miou", "mIoU", BLUE), ("accuracy", "pixel accuracy", RED)]),
    ("precision and recall", [("precision", "precision", GREEN), ("recall", "recall", PURPLE)]),
]


def _columns(csv_path: Path) -> dict[str, list[float]]:
    """The numeric columns of a results.csv; an empty or odd cell is nan."""

    def number(cell: str | None) -> float:
        try:
            return float(cell or "nan")
        except ValueError:
            return math.nan

    try:
        with csv_path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream, skipinitialspace=True))
    except FileNotFoundError:
        raise TrainerError(f"{csv_path}: no such file", "give the results.csv of a run directory") from None
    if not rows or "epoch" not in rows[0]:
        raise TrainerError(f"{csv_path}: no epochs to plot", "a results.csv has a header with `epoch` and a row each")
    return {name.strip(): [number(row[name]) for row in rows] for name in rows[0] if name}


def _draw_panel(axes: Axes, columns: dict[str, list[float]], title: str, lines: list[tuple[str, str, str]]) -> None:
    epochs = columns["epoch"]
    marker = "o" if len(epochs) < 40 else ""
    for name, label, colour in lines:
        if name in columns:
            axes.plot(epochs, columns[name], color=colour, label=label, marker=marker, markersize=3.5, linewidth=1.8)
    dress(axes, title, "epoch")
    axes.locator_params(axis="x", integer=True)
    if axes.lines:
        axes.legend(frameon=False, fontsize=9)


def plot_results(csv_path: str | Path, png_path: str | Path) -> None:
    """Draw a run's results.csv (columns of `_PANELS`, others ignored) as curves over the epochs."""
    columns = _columns(Path(csv_path))
    panels = [(title, lines) for title, lines in _PANELS if any(name in columns for name, _, _ in lines)]
    made = figure(5 * max(2, len(panels)), 3.8)
    for k, (title, lines) in enumerate(panels):
        axes = made.add_subplot(1, len(panels), k + 1)
        _draw_panel(axes, columns, title, lines)
        axes.set_ylim(bottom=0)
        scores = columns.get(lines[0][0], [])
        if any(name in columns and np.isfinite(columns[name]).any() for name, _, _ in lines) and k:
            axes.set_ylim(0, 1.02)
        if title == "validation" and any(math.isfinite(v) for v in scores):
            best = int(np.nanargmax(scores))
            axes.annotate(
                f"{scores[best]:.3f}",
                (columns["epoch"][best], scores[best]),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=BLUE,
            )
    write(made, Path(png_path))
