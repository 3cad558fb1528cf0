"""Pictures of a run: its curves, and what the model sees on validation images."""

from __future__ import annotations

import colorsys
import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import numpy.typing as npt

from trainer.data.dataset import Image
from trainer.errors import TrainerError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours: told apart by colour-blind readers too.
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_PANELS: list[tuple[str, list[tuple[str, str, str]]]] = [
    (
        "training loss",
        [
            ("box_loss", "box", _BLUE),
            ("obj_loss", "object", _ORANGE),
            ("cls_loss", "class", _GREEN),
            ("dfl_loss", "distribution", _RED),
        ],
    ),
    ("validation", [("map50", "mAP50", _BLUE), ("map", "mAP50-95", _RED)]),
]
_CELL_PX = 420  # the longer side of a picture in the grid
_GAP_PX = 10
_FONT = cv2.FONT_HERSHEY_SIMPLEX  # drawn from strokes, in OpenCV itself: nothing to download

Predictions = tuple[Image, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]


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
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("epoch")
    axes.locator_params(axis="x", integer=True)
    axes.grid(True, color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False, fontsize=9)


def plot_results(csv_path: str | Path, png_path: str | Path) -> None:
    """Draw a run's results.csv (columns of `_PANELS`, others ignored) as curves over the epochs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and only needed here
    from matplotlib.figure import Figure

    columns = _columns(Path(csv_path))
    figure = Figure(figsize=(10, 3.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for k, (title, lines) in enumerate(_PANELS):
        axes = figure.add_subplot(1, len(_PANELS), k + 1)
        _draw_panel(axes, columns, title, lines)
        axes.set_ylim(bottom=0)
        scores = columns.get("map50", [])
        if title == "validation" and any(math.isfinite(v) for v in scores):
            axes.set_ylim(0, 1)
            best = int(np.nanargmax(scores))
            axes.annotate(
                f"{scores[best]:.3f}",
                (columns["epoch"][best], scores[best]),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=_BLUE,
            )
    figure.savefig(str(png_path), format="png")


def class_colour(index: int) -> tuple[int, int, int]:
    """A strong RGB colour for class `index`, dark enough for white text; hues go in steps of the golden angle."""
    hue = (0.58 + index * 0.61803398875) % 1
    red, green, blue = colorsys.hls_to_rgb(hue, (0.38, 0.45, 0.30)[index % 3], 0.85)
    return round(red * 255), round(green * 255), round(blue * 255)


def _draw_label(picture: Image, text: str, x: int, y: int, colour: tuple[int, int, int]) -> None:
    """Text on a filled tag that stands on the box's upper edge `y`, or below it at the picture's border."""
    size, weight, margin = 0.42, 1, 3
    (width, height), below = cv2.getTextSize(text, _FONT, size, weight)
    tall = height + below + margin
    x = max(0, min(x, picture.shape[1] - width - 2 * margin))
    top = y - tall if y >= tall else y
    cv2.rectangle(picture, (x, top), (x + width + 2 * margin, top + tall), colour, cv2.FILLED)
    white = (255, 255, 255)
    cv2.putText(picture, text, (x + margin, top + height + 2), _FONT, size, white, weight, cv2.LINE_AA)


def _draw_picture(prediction: Predictions, names: Sequence[str]) -> Image:
    """One picture, its longer side made `_CELL_PX`, with its boxes; the surest are drawn last, on top."""
    image, boxes, scores, classes = prediction
    scale = _CELL_PX / max(image.shape[:2])
    size = (max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale)))
    how = cv2.INTER_CUBIC if scale > 1 else cv2.INTER_AREA
    picture: Any = cv2.resize(image, size, interpolation=how)
    xyxy = np.rint(np.asarray(boxes, np.float64).reshape(-1, 4) * scale).astype(int)
    score = np.asarray(scores, np.float64).reshape(-1)
    label = np.asarray(classes).astype(int).reshape(-1)
    order = np.argsort(score)
    for k in order:
        x1, y1, x2, y2 = xyxy[k].tolist()
        cv2.rectangle(picture, (x1, y1), (x2, y2), class_colour(int(label[k])), 2, cv2.LINE_AA)
    for k in order:  # tags over all boxes, else a box strikes its neighbour's text through
        text = f"{names[label[k]]} {score[k]:.2f}"
        _draw_label(picture, text, int(xyxy[k, 0]) - 1, int(xyxy[k, 1]), class_colour(int(label[k])))
    return np.asarray(picture)


def draw_predictions(predictions: Sequence[Predictions], names: Sequence[str], path: str | Path) -> None:
    """Write a grid of pictures with their boxes, class names and scores to `path` (.png or .jpg).

    A prediction is (image uint8 (h, w, 3) RGB, boxes (n, 4) xyxy in its pixels, scores (n,), classes (n,)).
    """
    if not predictions:
        raise ValueError("no pictures to draw")
    pictures = [_draw_picture(prediction, names) for prediction in predictions]
    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    width, height = max(p.shape[1] for p in pictures), max(p.shape[0] for p in pictures)
    grid = np.full((rows * (height + _GAP_PX) + _GAP_PX, columns * (width + _GAP_PX) + _GAP_PX, 3), 255, np.uint8)
    for k, picture in enumerate(pictures):
        h, w = picture.shape[:2]
        y = _GAP_PX + k // columns * (height + _GAP_PX) + (height - h) // 2
        x = _GAP_PX + k % columns * (width + _GAP_PX) + (width - w) // 2
        grid[y : y + h, x : x + w] = picture
    done, data = cv2.imencode(Path(path).suffix, cv2.cvtColor(grid, cv2.COLOR_RGB2BGR))
    if not done:
        raise ValueError(f"{path}: cannot be encoded")
    Path(path).write_bytes(data.tobytes())
