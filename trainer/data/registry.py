"""Registry of detection datasets: by name, by data.yaml or by import path."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from trainer.config import imports
from trainer.data.dataset import Dataset
from trainer.data.formats.digits import Digits
from trainer.data.formats.yolo import Yolo, open_sources
from trainer.errors import TrainerError

Split = Literal["train", "val", "test"]

# Datasets that need no file.
EMBEDDED: dict[str, Callable[[Literal["train", "val"], int], Dataset]] = {"digits": Digits}


def open_dataset(
    source: str, split: Split, *, imgsz: int, single_cls: bool = False, allow_bad_labels: bool = False
) -> Dataset:
    """Open one split of a dataset, see `open_datasets`."""
    (dataset,) = open_datasets(
        source, [split], imgsz=imgsz, single_cls=single_cls, allow_bad_labels=allow_bad_labels
    )
    return dataset


def open_datasets(
    source: str,
    splits: Sequence[Split],
    *,
    imgsz: int,
    single_cls: bool = False,
    allow_bad_labels: bool = False,
) -> list[Dataset]:
    """Open splits of `source`: the name of an embedded dataset, the path of a data.yaml, or package.module:function.

    The function takes (split, imgsz); `imgsz` is the side of an embedded dataset's images. With `single_cls` all
    classes become one, "item". The faults of all splits are one BadData; with `allow_bad_labels`, bad rows and images
    are left out instead.
    """
    is_import = imports.is_import_path(source) and not Path(source).is_file()
    if not is_import and source not in EMBEDDED:
        _refuse_folder(source)
        sources = open_sources(source, splits, allow_bad_labels=allow_bad_labels)
        return [Yolo(each, single_cls=single_cls) for each in sources]
    if single_cls:
        raise TrainerError(f"--single-cls: the classes of {source} are fixed", "use it with a data.yaml")
    if is_import:
        return [_imported(source, split, imgsz) for split in splits]
    return [_embedded(source, split, imgsz) for split in splits]


def _refuse_folder(source: str) -> None:
    folder = Path(source)
    if folder.is_dir():
        described = folder / "data.yaml"
        other = "name its data.yaml; folders of classes are for classifiers (--task classify)"
        hint = f"--data {described}" if described.is_file() else other
        raise TrainerError(f"--data {source}: it is a folder, but a detector needs a data.yaml", hint)


def _embedded(source: str, split: Split, imgsz: int) -> Dataset:
    if split == "test":
        raise TrainerError(f"--split test: {source} has no such images", "use --split val")
    return EMBEDDED[source](split, imgsz)


def _imported(path: str, split: Split, imgsz: int) -> Dataset:
    dataset = imports.load(path, "--data")(split, imgsz)
    parts = ("names", "flips", "__len__", "size", "name", "image", "labels", "segments")
    missing = [part for part in parts if not hasattr(dataset, part)]
    if missing:
        what = f"--data {path}: it returns a {type(dataset).__name__} without {', '.join(missing)}"
        raise TrainerError(what, "see docs/how-to/any-program.md")
    return dataset  # type: ignore[no-any-return]
