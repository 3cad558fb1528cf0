"""Plots of segmentation: labels of a dataset, training batches, predictions and metrics."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import IGNORED
from trainer.plots.charts import class_bars, figure, plot_confusion, write
from trainer.plots.drawing import captioned, class_colour, class_text, scaled, write_grid

_CELL_PX = 240
_MOST_IMAGES = 16
_SHARE = 0.55  # opacity of the class colours


def labels(dataset: Any, path: Path) -> None:
    """Write a bar chart of the share of pixels per class."""
    names = dataset.names
    pixels = dataset.pixels()
    fig = figure(9, 4)
    title = f"{len(dataset):,} images of {len(names)} classes"
    class_bars(fig.add_subplot(), names, 100 * pixels / max(1, pixels.sum()), title, "% of the pixels")
    write(fig, path)


def batch(batch: Any, names: Sequence[str], path: Path) -> None:
    """Write a grid of the first augmented images of a training batch, with their masks."""
    cells = []
    images, masks = (part[:_MOST_IMAGES].cpu().numpy() for part in (batch.images, batch.masks))
    for image, mask in zip(images, masks, strict=True):
        present = [class_text(names, k) for k in np.unique(mask).tolist() if 0 < k < len(names)]
        cells.append(_cell(image, mask, ", ".join(present)))
    write_grid(cells, path)


def shown(images: Sequence[Any], names: Sequence[str], path: Path) -> Any:
    """Write and return a grid of validation images, each with its true and its predicted mask."""
    cells = []
    for image, mask, predicted in images:
        counted = np.where(mask == IGNORED, IGNORED, predicted)  # the padding has no class
        cells.append(np.concatenate([_cell(image, mask, "true"), _cell(image, counted, "predicted")], 1))
    return write_grid(cells, path)


def metric(metric: Any, folder: Path) -> None:
    """Write confusion_matrix.png into a folder."""
    title = "pixels: predicted class for each true class"
    plot_confusion(
        metric.confusion, metric.names, folder / "confusion_matrix.png", title=title, background=False
    )


def coloured(image: Any, mask: Any) -> Any:
    """Return an image uint8 (h, w, 3) with the colours of the classes in `mask` (h, w), except 0."""
    colours = np.array([class_colour(k) for k in range(256)], np.float32)
    share = np.where((mask != 0) & (mask != IGNORED), np.float32(_SHARE), np.float32(0))[..., None]
    return (image * (1 - share) + colours[mask] * share).astype(np.uint8)


def _cell(image: Any, mask: Any, text: str) -> Any:
    """Return a scaled image with the colours of its classes except 0, and text below it."""
    return captioned(scaled(coloured(image, mask), _CELL_PX), text, (60, 60, 60))
