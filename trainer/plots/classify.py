"""The pictures of a classifier's training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from trainer.plots.boxes import captioned, grid, write_picture
from trainer.plots.figure import class_bars
from trainer.plots.scores import plot_confusion

_CELL_PX, _MOST = 160, 16
_RIGHT, _WRONG = (0, 110, 60), (190, 60, 0)


def labels(dataset: Any, path: Path) -> None:
    """Write a bar for each class: how many pictures it has."""
    names = dataset.names
    counts = np.bincount([dataset.label(k) for k in range(len(dataset))], minlength=len(names))
    class_bars(names, counts, "pictures", len(dataset), path)


def batch(batch: Any, names: Sequence[str], path: Path) -> None:
    """Write the first pictures of a training batch as they were augmented, before they are mixed."""
    pairs = zip(batch.images[:_MOST].numpy(), batch.labels[:_MOST].tolist(), strict=True)
    write_picture(grid([_cell(image, _name(names, label), (60, 60, 60)) for image, label in pairs]), path, 88)


def shown(pictures: Sequence[Any], names: Sequence[str], path: Path) -> Any:
    """Write and return the validation pictures with the predicted classes (green: right)."""
    cells = []
    for image, label, found, sure in pictures:
        text = f"{_name(names, found)} {sure:.2f}" + ("" if found == label else f", is {_name(names, label)}")
        cells.append(_cell(image, text, _RIGHT if found == label else _WRONG))
    whole = grid(cells)
    write_picture(whole, path, jpeg_quality=88)
    return whole


def metric(metric: Any, folder: Path) -> list[Path]:
    """Write confusion_matrix.png into a folder."""
    path = folder / "confusion_matrix.png"
    plot_confusion(metric.confusion, metric.names, path, title="what was found for each true class", background=False)
    return [path]


def _name(names: Sequence[str], label: int) -> str:
    return names[label] if names[label].isascii() else f"class {label}"  # the font has no other letters


def _cell(image: Any, text: str, colour: tuple[int, int, int]) -> Any:
    """A picture with its text below it."""
    scale = _CELL_PX / max(image.shape[:2])
    size = (max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale)))
    how = cv2.INTER_NEAREST if scale > 1 else cv2.INTER_AREA
    small: Any = cv2.resize(np.ascontiguousarray(image), size, interpolation=how)
    return captioned(small, text, colour, _CELL_PX)
