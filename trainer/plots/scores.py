"""Pictures of a metric: precision over recall, F1, precision and recall over the confidence, the confusions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.metrics import CONFIDENCES, RECALLS, BoxCurves, BoxMAP
from trainer.metrics.matching import Floats
from trainer.plots.figure import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, dress, figure, plain, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMED = 6  # up to so many classes each have a colour and a name; of more, the worst do
_COLOURS = (RED, ORANGE, GREEN, PURPLE, SKY, "#8c6d31")
_NUMBERED = 24  # up to so many classes a confusion matrix has room for numbers


def draw_metric(metric: BoxMAP, folder: Path) -> list[Path]:
    """Write PR_curve.png, F1_curve.png and confusion_matrix.png into a folder."""
    curves = metric.curves()
    paths = [folder / name for name in ("PR_curve.png", "F1_curve.png", "confusion_matrix.png")]
    plot_precision_recall(curves, paths[0])
    plot_over_confidence(curves, paths[1])
    plot_confusion(curves.confusion, metric.names, paths[2])
    return paths


def _draw_lines(axes: Axes, x: Floats, lines: Floats, named: dict[int, str], mean_label: str) -> None:
    """A line per class (classes, points), the named ones coloured, and the mean of all on top."""
    for k, line in enumerate(lines):
        if k not in named:
            axes.plot(x, line, color=GREY, linewidth=0.6)
    for colour, (k, label) in zip(_COLOURS, named.items(), strict=False):
        axes.plot(x, lines[k], color=colour, linewidth=1.3, label=plain(label))
    if len(lines):
        axes.plot(x, lines.mean(0), color=BLUE, linewidth=2.6, label=mean_label)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)


def _named(curves: BoxCurves) -> list[int]:
    """The classes that get a colour: all where they are few, else those with the lowest AP."""
    order = np.argsort(curves.ap[:, 0], kind="stable") if len(curves.names) > _NAMED else np.arange(len(curves.names))
    return [int(k) for k in order[:_NAMED]]


def plot_precision_recall(curves: BoxCurves, path: Path) -> None:
    """Precision over recall at IoU 0.5, a line per class; the area under it is the class's AP50."""
    made = figure(7.4, 5)
    axes = made.add_subplot()
    named = {k: f"{curves.names[k]} {curves.ap[k, 0]:.3f}" for k in _named(curves)}
    mean = f"all {len(curves.names)} classes {curves.ap[:, 0].mean():.3f}" if len(curves.names) else ""
    _draw_lines(axes, RECALLS, curves.precision_at, named, mean)
    dress(axes, "precision over recall at IoU 0.5", "recall", "precision")
    _legend(axes, "AP50" if len(named) == len(curves.names) else "AP50 (coloured: the lowest)")
    write(made, path)


def plot_over_confidence(curves: BoxCurves, path: Path) -> None:
    """F1, precision and recall at IoU 0.5 over the least confidence, with the confidence of the best mean F1."""
    made = figure(14, 4.4)
    panels = [("F1", curves.f1), ("precision", curves.precision), ("recall", curves.recall)]
    named = {k: curves.names[k] for k in _named(curves)}
    for position, (title, lines) in enumerate(panels):
        axes = made.add_subplot(1, 3, position + 1)
        _draw_lines(axes, CONFIDENCES, lines, named, f"all {len(curves.names)} classes")
        dress(axes, f"{title} over confidence", "least confidence")
        if len(lines):
            at = int(np.searchsorted(CONFIDENCES, curves.confidence))
            value = float(lines[:, at].mean())
            axes.axvline(curves.confidence, color="#888888", linewidth=1, linestyle=(0, (4, 3)))
            axes.plot([curves.confidence], [value], "o", color=BLUE, markersize=6)
            right = curves.confidence < 0.7
            axes.annotate(
                f"{value:.3f} at {curves.confidence:.2f}",
                (curves.confidence, value),
                xytext=(9 if right else -9, -16 if value > 0.1 else 10),
                textcoords="offset points",
                ha="left" if right else "right",
                fontsize=9.5,
                color=BLUE,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
            )
    _legend(axes, "" if len(named) == len(curves.names) else "coloured: the lowest AP50")
    write(made, path)


def _legend(axes: Axes, title: str) -> None:
    if axes.lines:
        axes.legend(
            title=title, frameon=False, fontsize=9, title_fontsize=9, loc="upper left", bbox_to_anchor=(1.01, 1.0)
        )


BOXES_TITLE = "what was found for each true class\n(IoU 0.45, confidence 0.25)"


def plot_confusion(
    confusion: np.ndarray, names: list[str], path: Path, *, title: str = BOXES_TITLE, background: bool = True
) -> None:
    """Confusions, found by row and true by column, as shares of each column.

    (nc + 1, nc + 1) with `background`, the class of what is no box, else (nc, nc).
    """
    labels = [plain(name) for name in names] + ["background"] * background
    n = len(labels)
    columns = confusion.sum(0, keepdims=True)
    share = np.divide(confusion, columns, out=np.zeros(confusion.shape), where=columns > 0)
    side = min(16.0, max(5.2, 2.6 + 0.62 * n if n <= _NUMBERED else 0.165 * n))
    made = figure(side + 1.2, side)
    axes = made.add_subplot()
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    bar = made.colorbar(image, ax=axes, fraction=0.04, pad=0.02)
    bar.outline.set_visible(False)
    size = 9.5 if n <= 12 else 7.5 if n <= _NUMBERED else max(3.0, min(7.0, 480 / n))
    if n <= 250:
        axes.set_xticks(range(n), labels, rotation=45 if n <= _NUMBERED else 90, fontsize=size, rotation_mode="anchor")
        for tick in axes.get_xticklabels():
            tick.set_horizontalalignment("right")
            tick.set_verticalalignment("center" if n > _NUMBERED else "top")
        axes.set_yticks(range(n), labels, fontsize=size)
    axes.tick_params(length=0)
    if n <= _NUMBERED:
        for row, column in zip(*np.nonzero(confusion), strict=True):
            text = f"{share[row, column]:.2f}" + (f"\n{confusion[row, column]}" if n <= 12 else "")
            dark = share[row, column] > 0.55
            axes.text(
                column, row, text, ha="center", va="center", fontsize=size - 1, color="white" if dark else "#333333"
            )
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("true" + " (background: nothing is there)" * background)
    axes.set_ylabel("found" + " (background: missed)" * background)
    axes.spines[:].set_visible(False)
    write(made, path)
