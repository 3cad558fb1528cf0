"""Data sets by name or by file, and the loaders that turn them into batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from trainer import imports
from trainer.data.dataset import Dataset
from trainer.data.digits import Digits
from trainer.data.faults import Fault
from trainer.data.loader import Batch, TrainLoader, ValBatch, ValLoader
from trainer.data.stream import start_forkserver
from trainer.data.yolo import Yolo
from trainer.errors import TrainerError

Split = Literal["train", "val", "test"]

# Data sets that need no file; anything else that is asked for is the path of a data.yaml.
EMBEDDED: dict[str, Callable[[Literal["train", "val"], int], Dataset]] = {
    "digits": lambda split, imgsz: Digits(split, imgsz),
}


def open_dataset(
    source: str, split: Split, *, imgsz: int, single_cls: bool = False, allow_bad_labels: bool = False
) -> Dataset:
    """The data set `source`: an embedded one's name, the path of a data.yaml, or an import path.

    An embedded one's pages have side `imgsz`; an import path, package.module:function, names a function(split, imgsz).

    `single_cls` makes all its classes one, "item"; `allow_bad_labels` leaves bad rows and pictures out, which are
    an error else (see `left_out`).
    """
    if source in EMBEDDED:
        if single_cls:
            raise TrainerError(f"--single-cls: the classes of {source} are fixed", "use it with a data.yaml")
        if split == "test":
            raise TrainerError(f"--split test: {source} has no such pictures", "use --split val")
        return EMBEDDED[source](split, imgsz)
    if imports.is_import_path(source) and not Path(source).is_file():
        if single_cls:
            raise TrainerError(f"--single-cls: the classes of {source} are its own", "use it with a data.yaml")
        return _imported(source, split, imgsz)
    return Yolo(source, split, single_cls=single_cls, allow_bad_labels=allow_bad_labels)


def _imported(path: str, split: Split, imgsz: int) -> Dataset:
    """A user's own data set."""
    made = imports.load(path, "--data")(split, imgsz)
    missing = [
        part
        for part in ("names", "flips", "__len__", "size", "name", "image", "labels", "segments")
        if not hasattr(made, part)
    ]
    if missing:
        raise TrainerError(
            f"--data {path}: it makes a {type(made).__name__} without {', '.join(missing)}", "see docs/python.md"
        )
    return made  # type: ignore[no-any-return]


def left_out(*datasets: Dataset) -> list[Fault]:
    """What is missing from the data sets: bad rows and pictures (with allow_bad_labels) and boxes given twice."""
    return [fault for dataset in datasets if isinstance(dataset, Yolo) for fault in dataset.faults]


__all__ = [
    "EMBEDDED",
    "Batch",
    "Dataset",
    "TrainLoader",
    "ValBatch",
    "ValLoader",
    "left_out",
    "open_dataset",
    "start_forkserver",
]
