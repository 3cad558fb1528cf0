"""The look of all diagrams: off-line, without a screen, in colours that colour-blind readers tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
GREY = "#c4c4c4"
_NAMED = 100  # up to so many classes are named below their bars


def figure(width_in: float, height_in: float) -> Figure:
    """An empty figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    made = Figure(figsize=(width_in, height_in), dpi=120, layout="constrained")
    FigureCanvasAgg(made)
    return made


def dress(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    """Give a panel its title and labels, a light grid, and no frame above and at the right."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def class_bars(names: Sequence[str], values: Sequence[float] | Any, y: str, pictures: int, path: Path) -> None:
    """Write a bar for each class of a data set of so many pictures; `y` says what the bars count."""
    made = figure(11 if len(names) > 20 else 7, 4)
    axes = made.add_subplot()
    axes.bar(range(len(names)), values, color=BLUE)
    dress(axes, f"{pictures:,} pictures of {len(names)} classes", y=y)
    axes.grid(False, axis="x")
    if len(names) <= _NAMED:
        turned = len(names) > 6 or max(map(len, names)) > 12
        axes.set_xticks(range(len(names)), [plain(n) for n in names], rotation=90 if turned else 0)
    write(made, path)


def plain(text: str) -> str:
    """A name as it is: matplotlib would read a pair of $ as a formula."""
    return text.replace("$", r"\$")


def write(made: Figure, path: Path) -> None:
    """Save a figure as PNG, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        made.savefig(str(temporary), format="png")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
