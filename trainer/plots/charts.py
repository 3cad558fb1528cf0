"""Charts of losses and scores in a common style; the palette is Okabe and Ito's, which is safe for colour blindness."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.metrics import CONFIDENCES, RECALLS, BoxCurves
from trainer.metrics.curves import Floats
from trainer.weights.checkpoint_file import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
GREY = "#c4c4c4"
_LONGEST_TICK = 20  # characters of a class's name
_MOST_TICKS = 100  # more classes have no names below their bars
_MOST_NAMED = 6  # of more classes only those with the lowest AP have a colour and a name
_COLOURS = (RED, ORANGE, GREEN, PURPLE, SKY, "#8c6d31")
_MOST_NUMBERED = 24  # a confusion matrix of more classes has no numbers
_MOST_LABELLED = 100  # and of more than these no names
BOXES_TITLE = "predicted class for each true class\n(IoU 0.45, confidence 0.25)"
_LOSSES = [
    ("box_loss", "box", BLUE),
    ("obj_loss", "obj", ORANGE),
    ("cls_loss", "cls", GREEN),
    ("dfl_loss", "dfl", PURPLE),
    ("l1_loss", "L1", SKY),
]
_PANELS = [  # title; column of results.csv, label and colour of its lines
    ("loss", _LOSSES),
    ("validation", [("map50", "mAP50", BLUE), ("map", "mAP50-95", RED)]),
    ("validation", [("top1", "top-1", BLUE), ("top5", "top-5", RED)]),
    ("validation", [("miou", "mIoU", BLUE), ("accuracy", "pixel accuracy", RED)]),
    ("precision and recall", [("precision", "precision", GREEN), ("recall", "recall", PURPLE)]),
]


def figure(width_in: float, height_in: float) -> Figure:
    """Return an empty figure."""
    from matplotlib.figure import Figure  # slow to import

    return Figure(figsize=(width_in, height_in), dpi=120, layout="constrained")


def style_axes(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    """Set title, axis labels, a light grid, and no frame at the top and the right."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def class_bars(axes: Axes, names: Sequence[str], values: Sequence[float] | Any, title: str, y: str) -> None:
    """Draw a bar for each class of a dataset; `y` labels the values."""
    axes.bar(range(len(names)), values, color=BLUE)
    style_axes(axes, title, y=y)
    axes.grid(False, axis="x")
    if len(names) <= _MOST_TICKS:
        turned = len(names) > 6 or max(map(len, names)) > 12
        axes.set_xticks(range(len(names)), [_tick(name) for name in names], rotation=90 if turned else 0)


def _tick(name: str) -> str:
    """Return a class's name below its bar, shortened so that it does not reach the next chart."""
    short = name if len(name) <= _LONGEST_TICK else f"{name[: _LONGEST_TICK - 1]}…"
    return _escape_dollar(short)


def _escape_dollar(text: str) -> str:
    """Escape $, which matplotlib would parse as a formula."""
    return text.replace("$", r"\$")


def write(fig: Figure, path: Path) -> None:
    """Save a figure atomically as PNG."""
    png = io.BytesIO()
    fig.savefig(png, format="png")
    write_bytes(path, png.getvalue())


def plot_results(csv_path: Path, png_path: Path) -> None:
    """Plot the columns of a results.csv that `_PANELS` contains over the epochs."""
    # By default, NumPy removes the slash of val/box_loss.
    rows = np.atleast_1d(np.genfromtxt(csv_path, delimiter=",", names=True, deletechars=""))
    columns = rows.dtype.names or ()
    found = [(title, [line for line in lines if line[0] in columns]) for title, lines in _PANELS]
    panels = [(title, lines) for title, lines in found if lines]
    fig = figure(5 * max(2, len(panels)), 3.8)
    for k, (title, lines) in enumerate(panels):
        axes = fig.add_subplot(1, len(panels), k + 1)
        for name, label, colour in lines:
            marker = "o" if len(rows) < 40 else ""
            how: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 3.5}
            axes.plot(rows["epoch"], rows[name], label=label, **how)
            validated = f"val/{name}"
            if validated in columns:
                # The epochs without a validation have no value, and would interrupt the line.
                has_value = np.isfinite(rows[validated])
                epochs = rows["epoch"][has_value]
                axes.plot(epochs, rows[validated][has_value], label=f"val {label}", linestyle="--", **how)
        style_axes(axes, title, "epoch")
        axes.locator_params(axis="x", integer=True)
        axes.set_ylim(0, None if title == "loss" else 1.02)
        axes.legend(frameon=False, fontsize=9)
    write(fig, png_path)


def plot_precision_recall(curves: BoxCurves, path: Path) -> None:
    """Plot precision over recall at IoU 0.5; the area below a class's line is its AP50."""
    fig = figure(7.4, 5)
    axes = fig.add_subplot()
    named = {k: f"{curves.names[k]} {curves.ap[k, 0]:.3f}" for k in _named(curves)}
    mean = f"all {len(curves.names)} classes {curves.ap[:, 0].mean():.3f}" if len(curves.names) else ""
    _draw_lines(axes, RECALLS, curves.precision_at, named, mean)
    style_axes(axes, "precision over recall at IoU 0.5", "recall", "precision")
    _legend(axes, "AP50" if len(named) == len(curves.names) else "AP50 (colored: the lowest)")
    write(fig, path)


def plot_over_confidence(curves: BoxCurves, path: Path) -> None:
    """Plot F1, precision and recall at IoU 0.5 over the confidence threshold; mark the highest mean F1."""
    fig = figure(14, 4.4)
    named = {k: curves.names[k] for k in _named(curves)}
    panels = [("F1", curves.f1), ("precision", curves.precision), ("recall", curves.recall)]
    for position, (title, lines) in enumerate(panels):
        axes = fig.add_subplot(1, 3, position + 1)
        _draw_lines(axes, CONFIDENCES, lines, named, f"all {len(curves.names)} classes")
        if len(lines):
            value = lines[:, int(np.searchsorted(CONFIDENCES, curves.confidence))].mean()
            title += f" over confidence: {value:.3f} at {curves.confidence:.2f}"
            axes.axvline(curves.confidence, color="#888888", linewidth=1, linestyle="--")
        style_axes(axes, title, "confidence threshold")
    _legend(axes, "" if len(named) == len(curves.names) else "colored: the lowest AP50")
    write(fig, path)


def _named(curves: BoxCurves) -> list[int]:
    """Return the classes with a colour: all if they are few, else those with the lowest AP."""
    if len(curves.names) <= _MOST_NAMED:
        return list(range(len(curves.names)))
    return [int(k) for k in np.argsort(curves.ap[:, 0], kind="stable")[:_MOST_NAMED]]


def _draw_lines(axes: Axes, x: Floats, lines: Floats, named: dict[int, str], mean_label: str) -> None:
    """Draw a line per class (classes, points), the named ones in colour, and their mean on top."""
    for k, line in enumerate(lines):
        if k not in named:
            axes.plot(x, line, color=GREY, linewidth=0.6)
    for colour, (k, label) in zip(_COLOURS, named.items(), strict=False):
        axes.plot(x, lines[k], color=colour, linewidth=1.3, label=_escape_dollar(label))
    if len(lines):
        axes.plot(x, lines.mean(0), color=BLUE, linewidth=2.6, label=mean_label)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)


def _legend(axes: Axes, title: str) -> None:
    if axes.lines:
        axes.legend(title=title, frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def plot_confusion(
    confusion: np.ndarray, names: list[str], path: Path, *, title: str = BOXES_TITLE, background: bool = True
) -> None:
    """Plot a confusion matrix (predicted, true) as shares of its columns.

    Its shape is (nc + 1, nc + 1) with `background`, the class of missing boxes, else (nc, nc).
    """
    labels = [_escape_dollar(name) for name in names] + ["background"] * background
    n = len(labels)
    columns = confusion.sum(0, keepdims=True)
    share = np.divide(confusion, columns, out=np.zeros(confusion.shape), where=columns > 0)
    side = min(16.0, 4 + 0.5 * n)
    fig = figure(side + 1.2, side)
    axes = fig.add_subplot()
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    fig.colorbar(image, ax=axes, fraction=0.04, pad=0.02)
    size = 9 if n <= _MOST_NUMBERED else 5
    if n <= _MOST_LABELLED:
        axes.set_xticks(range(n), labels, rotation=90, fontsize=size)
        axes.set_yticks(range(n), labels, fontsize=size)
    for row, column in zip(*np.nonzero(confusion), strict=True) if n <= _MOST_NUMBERED else ():
        colour = "white" if share[row, column] > 0.55 else "black"
        text = f"{share[row, column]:.2f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)
    missing = (" (background: no object)", " (background: missed)") if background else ("", "")
    style_axes(axes, title, f"true{missing[0]}", f"predicted{missing[1]}")
    axes.grid(False)
    write(fig, path)
