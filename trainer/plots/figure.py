"""Common style of all charts: size, axes, and Okabe and Ito's colour-blind safe palette."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.weights.checkpoint_file import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
GREY = "#c4c4c4"
_MOST_TICKS = 100  # more classes have no names below their bars


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
        axes.set_xticks(range(len(names)), [escape_dollar(n) for n in names], rotation=90 if turned else 0)


def escape_dollar(text: str) -> str:
    """Escape $, which matplotlib would parse as a formula."""
    return text.replace("$", r"\$")


def write(fig: Figure, path: Path) -> None:
    """Save a figure atomically as PNG."""
    png = io.BytesIO()
    fig.savefig(png, format="png")
    write_bytes(path, png.getvalue())
