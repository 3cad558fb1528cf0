"""A picture of a data set's labels: how many, where, how large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trainer.data import Dataset
from trainer.plots.figure import BLUE, dress, figure, plain, write

_TICKS = 100  # up to so many classes are named below their bars


def plot_labels(dataset: Dataset, path: Path) -> None:
    """Write four panels: boxes per class, boxes per picture, their centres, and their widths and heights."""
    from matplotlib.colors import LogNorm

    tables = [dataset.labels(k) for k in range(len(dataset))]
    rows = np.concatenate([np.zeros((0, 5), np.float32), *tables])
    names = dataset.names
    counts = np.bincount(rows[:, 0].astype(int), minlength=len(names))
    many = len(names) > 20
    made = figure(13 if many else 11, 8.6)
    halves: Any = made.subfigures(2, 1)
    top, bottom = halves

    axes, of_pictures = top.subplots(1, 2, width_ratios=[3, 1] if many else [1, 1])
    axes.bar(range(len(names)), counts, color=BLUE, width=0.8 if len(names) < 40 else 1.0)
    dress(axes, f"{len(rows):,} boxes of {len(names)} classes", y="boxes")
    axes.grid(False, axis="x")
    if len(names) <= _TICKS:
        size = 9.0 if not many else min(8.0, 560 / len(names))
        turned = len(names) > 6 or max(map(len, names)) > 12
        axes.set_xticks(range(len(names)), [plain(n) for n in names], rotation=90 if turned else 0, fontsize=size)
    axes.set_xlim(-0.6, len(names) - 0.4)
    if len(names) <= 8:
        for k, count in enumerate(counts.tolist()):
            axes.annotate(f"{count:,}", (k, count), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=9)

    axes = of_pictures
    each = np.array([len(table) for table in tables])
    most = int(each.max(initial=0))
    step = max(1, -(-most // 50))
    axes.hist(each, bins=[k - 0.5 for k in range(0, most + 1 + step, step)], color=BLUE)
    dress(
        axes, f"{len(dataset):,} pictures, {int((each == 0).sum()):,} without boxes", "boxes in a picture", "pictures"
    )

    panels = bottom.subplots(1, 2)
    for axes, title, x, y, labels in (
        (panels[0], "where the boxes' centres are", rows[:, 1], rows[:, 2], ("x", "y (from the top)")),
        (
            panels[1],
            "how large the boxes are",
            rows[:, 3],
            rows[:, 4],
            ("width / picture's width", "height / picture's height"),
        ),
    ):
        centres = axes is panels[0]
        grid, _, _ = np.histogram2d(x, y, bins=32 if centres else 64, range=[[0, 1], [0, 1]])
        drawn = grid.T if centres else np.ma.masked_equal(grid.T, 0)
        norm = None if centres else LogNorm(1, max(2.0, grid.max()))  # sizes differ by more than places do
        style = {"cmap": "Blues" if centres else "viridis", "norm": norm, "interpolation": "nearest"}
        image = axes.imshow(drawn, extent=(0, 1, 0, 1), origin="lower", **style)
        dress(axes, title, *labels)
        axes.grid(False)
        if centres:
            axes.invert_yaxis()
        bar = made.colorbar(image, ax=axes, fraction=0.045, pad=0.02)
        bar.outline.set_visible(False)
        bar.set_label("boxes")
    write(made, path)
