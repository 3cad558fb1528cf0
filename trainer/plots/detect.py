"""Plots of detection: labels of a dataset, training batches, predictions and metrics."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.dataset import Dataset, Image
from trainer.data.loading.detection_loader import Batch
from trainer.detectors import Sample
from trainer.metrics import BoxMAP
from trainer.plots import charts
from trainer.plots.drawing import captioned, draw_boxes, scaled, write_grid

_CELL_PX = 420  # longer side of an image in the grid of a training batch
_SAMPLE_PX = 360  # longer side of each of the two images of a sample
_PAIR_GAP_PX = 3
_MOST_BINS = 50
_MOST_IMAGES = 16  # of a training batch
_TEXT = (60, 60, 60)  # RGB of a caption


def labels(dataset: Dataset, path: Path) -> None:
    """Write four panels: boxes per class, boxes per image, their centres, and their widths and heights."""
    from matplotlib.colors import PowerNorm

    tables = [dataset.labels(k) for k in range(len(dataset))]
    rows = np.concatenate([np.zeros((0, 5), np.float32), *tables])
    counts = np.bincount(rows[:, 0].astype(int), minlength=len(dataset.names))
    each = np.array([len(table) for table in tables])
    fig = charts.figure(11, 8.6)
    panels: Any = fig.subplots(2, 2)
    title = f"{len(rows):,} boxes of {len(dataset.names)} classes"
    charts.class_bars(panels[0, 0], dataset.names, counts, title, "boxes")
    panels[0, 1].hist(each, bins=whole_bins(each), color=charts.BLUE)
    title = f"{len(dataset):,} images, {int((each == 0).sum()):,} without boxes"
    charts.style_axes(panels[0, 1], title, "boxes in an image", "images")
    for axes, title, x, y, axis_labels in (
        (panels[1, 0], "centers of the boxes", rows[:, 1], rows[:, 2], ("x", "y (from the top)")),
        (
            panels[1, 1],
            "sizes of the boxes",
            rows[:, 3],
            rows[:, 4],
            ("width (share of the image)", "height (share of the image)"),
        ),
    ):
        # Square roots: rare positions and sizes stay visible.
        drawn = axes.hist2d(x, y, bins=32, range=[[0, 1], [0, 1]], cmap="Blues", norm=PowerNorm(0.5))
        charts.style_axes(axes, title, *axis_labels)
        axes.grid(False)
        fig.colorbar(drawn[3], ax=axes, fraction=0.045, pad=0.02, label="boxes")
    panels[1, 0].invert_yaxis()
    charts.write(fig, path)


def whole_bins(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the edges of at most 50 bins from 0 to the greatest count, each of equally many whole numbers."""
    values = int(counts.max(initial=0)) + 1
    width = -(-values // _MOST_BINS)
    bins = -(-values // width)
    return np.arange(bins + 1, dtype=np.float64) * width - 0.5


def batch(batch: Batch, names: Sequence[str], path: Path) -> None:
    """Write a grid of the first augmented images of a training batch, with their labels."""
    side = np.tile(batch.images.shape[2:0:-1], 2)  # w, h, w, h
    cells = []
    for k, image in enumerate(batch.images[:_MOST_IMAGES].cpu().numpy()):
        rows = batch.labels[batch.labels[:, 0] == k].numpy()
        centre = rows[:, 2:4]
        half = rows[:, 4:] / 2
        boxes = np.concatenate([centre - half, centre + half], 1) * side
        cells.append(_cell(image, _CELL_PX, boxes, None, rows[:, 1], names))
    write_grid(cells, path)


def shown(samples: Sequence[Sample], names: Sequence[str], path: Path) -> Image:
    """Write a grid of validation images to `path` (.png or .jpg), each with its labels and its detections; return it.

    A detection has its score. An object that was missed has a box on the left only.
    """
    cells = []
    for sample in samples:
        true = _cell(sample.image, _SAMPLE_PX, sample.true_boxes, None, sample.true_classes, names)
        predicted = _cell(sample.image, _SAMPLE_PX, sample.boxes, sample.scores, sample.classes, names)
        true = captioned(true, "true", _TEXT)
        predicted = captioned(predicted, "predicted", _TEXT)
        gap = np.full((len(true), _PAIR_GAP_PX, 3), 255, np.uint8)
        cells.append(np.concatenate((true, gap, predicted), 1))
    return write_grid(cells, path)


def _cell(image: Image, side: int, boxes: Any, scores: Any, classes: Any, names: Sequence[str]) -> Image:
    """Return the image with a longer side of `side` px and its boxes."""
    cell = scaled(image, side)
    scale = side / max(image.shape[:2])
    draw_boxes(cell, np.asarray(boxes, np.float64).reshape(-1, 4) * scale, scores, classes, names)
    return cell


def metric(metric: BoxMAP, folder: Path) -> None:
    """Write PR_curve.png, F1_curve.png and confusion_matrix.png into a folder."""
    curves = metric.curves()
    charts.plot_precision_recall(curves, folder / "PR_curve.png")
    charts.plot_over_confidence(curves, folder / "F1_curve.png")
    charts.plot_confusion(curves.confusion, metric.names, folder / "confusion_matrix.png")
