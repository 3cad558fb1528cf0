"""Plots of classification: labels of a dataset, training batches, predictions and metrics."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.plots.charts import class_bars, figure, plot_confusion, write
from trainer.plots.drawing import captioned, class_text, scaled, write_grid

_CELL_PX = 160
_MOST_IMAGES = 16
_CORRECT = (0, 110, 60)
_WRONG = (190, 60, 0)
_GREY = (60, 60, 60)


def labels(dataset: Any, path: Path) -> None:
    """Write a bar chart of the images per class."""
    names = dataset.names
    fig = figure(9, 4)
    counts = np.bincount([dataset.label(k) for k in range(len(dataset))], minlength=len(names))
    class_bars(fig.add_subplot(), names, counts, f"{len(dataset):,} images of {len(names)} classes", "images")
    write(fig, path)


def batch(batch: Any, names: Sequence[str], path: Path) -> None:
    """Write a grid of the first augmented images of a training batch, before mixup and cutmix."""
    pairs = zip(batch.images[:_MOST_IMAGES].cpu().numpy(), batch.labels[:_MOST_IMAGES].tolist(), strict=True)
    cells = [captioned(scaled(image, _CELL_PX), class_text(names, label), _GREY) for image, label in pairs]
    write_grid(cells, path)


def shown(images: Sequence[Any], names: Sequence[str], path: Path) -> Any:
    """Write and return a grid of validation images with predicted classes (green: correct)."""
    cells = []
    for image, label, predicted, score in images:
        text = f"{class_text(names, predicted)} {score:.2f}"
        colour = _CORRECT
        if predicted != label:
            text = f"{text}, is {class_text(names, label)}"
            colour = _WRONG
        cells.append(captioned(scaled(image, _CELL_PX), text, colour))
    return write_grid(cells, path)


def metric(metric: Any, folder: Path) -> None:
    """Write confusion_matrix.png into a folder."""
    title = "predicted class for each true class"
    plot_confusion(
        metric.confusion, metric.names, folder / "confusion_matrix.png", title=title, background=False
    )
