"""Dataset check (`trainer data check`): all faults of both splits, and statistics of the classes."""
# ruff: noqa: PTH118, PTH123, PTH202

import hashlib
import os
from typing import Any

import numpy as np

from trainer.config.faults import Fault
from trainer.data.formats.data_yaml import SPLITS
from trainer.data.formats.yolo import Source, read_splits


def check(data_yaml: str, *, decode: bool) -> tuple[list[Fault], list[dict[str, Any]]]:
    """Return the faults of both splits, and a table of each readable one; `decode` images, or read their headers."""
    reading = read_splits(data_yaml, SPLITS, decode=decode)
    faults = list(reading.faults)
    sources = reading.sources
    if len(sources) == len(SPLITS):
        faults += _duplicates(*sources)
    return faults, [_table(source) for source in sources]


def _table(source: Source) -> dict[str, Any]:
    """Return the numbers of a split's readable images and valid boxes, in total and by class."""
    scan = source.scan
    owner = np.repeat(np.arange(len(scan.paths)), np.diff(scan.offsets))
    classes = scan.labels[:, 0].astype(np.int64)
    sides = scan.labels[:, 3:] * scan.sizes[owner][:, ::-1]  # width, height in pixels
    rows = []
    for number, name in enumerate(source.spec.names):
        mine = classes == number
        boxes = int(mine.sum())
        counts = {"name": name, "images": len(np.unique(owner[mine])), "boxes": boxes}
        median = np.median(sides[mine], axis=0).tolist() if boxes else (0.0, 0.0)
        rows.append({**counts, "share": boxes / max(1, len(classes)), "median_px": median})
    table = {
        "split": source.split,
        "images": len(scan.paths),
        "background": int((np.diff(scan.offsets) == 0).sum()),
    }
    return {**table, "boxes": len(classes), "classes": rows}


def _paths(source: Source) -> list[str]:
    return [os.path.join(source.listing.root, os.fsdecode(path)) for path in source.scan.paths]


def _duplicates(train: Source, val: Source) -> list[Fault]:
    """Return a warning for each image of `val` that is also in `train`."""
    sizes = {path: os.path.getsize(path) for source in (train, val) for path in _paths(source)}
    shared = {sizes[path] for path in _paths(train)} & {sizes[path] for path in _paths(val)}

    def digest(path: str) -> bytes:
        with open(path, "rb") as stream:
            return hashlib.blake2b(stream.read(), digest_size=16).digest()

    # Only files of equal size can be equal, so few are read.
    twins = {digest(path): path for path in _paths(train) if sizes[path] in shared}
    hint = "delete one of them: validation needs images that are not in the training split"
    return [
        Fault(path, 0, f"the same image as {twins[key]} of the training", hint, warning=True)
        for path in _paths(val)
        if sizes[path] in shared and (key := digest(path)) in twins
    ]
