"""The pictures of a segmentation's training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from trainer.config import IGNORED
from trainer.plots.boxes import captioned, class_colour, grid, write_picture
from trainer.plots.figure import class_bars
from trainer.plots.scores import plot_confusion

_CELL_PX, _MOST = 240, 16
_SHARE = 0.55  # of the class's colour in a pixel


def labels(dataset: Any, path: Path) -> None:
    """Write a bar for each class: the share of the counted pixels that it has."""
    names, pixels = dataset.names, dataset.pixels()
    class_bars(names, 100 * pixels / max(1, pixels.sum()), "% of the pixels", len(dataset), path)


def batch(batch: Any, names: Sequence[str], path: Path) -> None:
    """Write the first pictures of a training batch as they were augmented, their masks on them."""
    pairs = zip(batch.images[:_MOST].numpy(), batch.masks[:_MOST].numpy(), strict=True)
    cells = [_cell(image, mask, _text(mask, names)) for image, mask in pairs]
    write_picture(grid(cells), path, 88)


def shown(pictures: Sequence[Any], names: Sequence[str], path: Path) -> Any:
    """Write and return the validation pictures, each with its true mask and beside it the predicted one."""
    cells = []
    for image, mask, found in pictures:
        seen = np.where(mask == IGNORED, IGNORED, found)  # beside the picture there is nothing to find
        cells.append(np.concatenate([_cell(image, mask, "true"), _cell(image, seen, "found")], 1))
    whole = grid(cells)
    write_picture(whole, path, jpeg_quality=88)
    return whole


def metric(metric: Any, folder: Path) -> list[Path]:
    """Write confusion_matrix.png into a folder."""
    path = folder / "confusion_matrix.png"
    title = "pixels: what was found for each true class"
    plot_confusion(metric.confusion, metric.names, path, title=title, background=False)
    return [path]


def _text(mask: Any, names: Sequence[str]) -> str:
    """The classes of a mask, the largest first, but for class 0, which is nearly always the background."""
    pixels = np.bincount(mask.reshape(-1), minlength=256)[1 : len(names)]
    order = [int(k) + 1 for k in np.argsort(-pixels, kind="stable") if pixels[k]]
    return ", ".join(names[k] if names[k].isascii() else f"class {k}" for k in order)  # the font has no other letters


def _cell(image: Any, mask: Any, text: str) -> Any:
    """A picture under the colours of its classes, class 0 left as it is, with its text below it."""
    colours = np.array([class_colour(k) for k in range(256)], np.float32)
    coloured = (mask != 0) & (mask != IGNORED)
    share = np.where(coloured, _SHARE, 0)[..., None]
    picture = (image * (1 - share) + colours[mask] * share).astype(np.uint8)
    how = cv2.INTER_NEAREST if max(picture.shape[:2]) < _CELL_PX else cv2.INTER_AREA
    square = cv2.resize(picture, (_CELL_PX, _CELL_PX), interpolation=how)
    return captioned(square, text, (60, 60, 60))
