"""Data sets by name or by file, and the loaders that turn them into batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from trainer.data.dataset import Dataset
from trainer.data.digits import Digits
from trainer.data.loader import Batch, TrainLoader, ValBatch, ValLoader
from trainer.data.yolo import Yolo

Split = Literal["train", "val"]

# Data sets that need no file; anything else that is asked for is the path of a data.yaml.
EMBEDDED: dict[str, Callable[[Split, int], Dataset]] = {
    "digits": lambda split, imgsz: Digits(split, imgsz),
}


def open_dataset(source: str, split: Split, *, imgsz: int) -> Dataset:
    """The data set `source`: an embedded one's name (its pages have side `imgsz`) or the path of a data.yaml."""
    if source in EMBEDDED:
        return EMBEDDED[source](split, imgsz)
    return Yolo(source, split)


__all__ = ["EMBEDDED", "Batch", "Dataset", "TrainLoader", "ValBatch", "ValLoader", "open_dataset"]
