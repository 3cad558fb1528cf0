"""The folder that a conversion makes, whole or not at all: pictures, label files and data.yaml."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import yaml

from trainer.data.faults import BadData, Fault
from trainer.data.listing import SUFFIXES, THREADS
from trainer.data.scan import picture_size
from trainer.errors import TrainerError
from trainer.progress import track

Points = npt.NDArray[np.float64]  # (k, 2): x, y in pixels from the picture's top left corner


@dataclass(frozen=True)
class Annotated:
    """One picture and the rows of its label file."""

    picture: Path
    name: str  # where it goes below images/SPLIT
    rows: list[str]


@dataclass
class Conversion:
    """What was read for a conversion: pictures by split, the classes, what is wrong and what was left out."""

    names: list[str]
    splits: dict[str, list[Annotated]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)  # how often something worth knowing was met

    def note(self, what: str) -> None:
        """Count one more of `what`."""
        self.notes[what] = self.notes.get(what, 0) + 1


def row(number: int, box: Sequence[float], size: tuple[int, int], outline: Points | None = None) -> str | None:
    """A label row of class `number`: `box` is x1 y1 x2 y2 in pixels of a picture of `size` (height, width).

    None for a box that is not inside the picture (one pixel is forgiven) or has no area; with an outline (k, 2),
    the row has its corners instead.
    """
    height, width = size
    x1, y1, x2, y2 = box
    if not (-1 <= x1 < x2 <= width + 1 and -1 <= y1 < y2 <= height + 1):
        return None
    x1, x2 = max(0.0, x1), min(float(width), x2)
    y1, y2 = max(0.0, y1), min(float(height), y2)
    if x1 >= x2 or y1 >= y2:
        return None
    if outline is not None:
        values = np.clip(outline / (width, height), 0, 1).flatten().tolist()
    else:
        values = [(x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height]
    return " ".join([str(number), *(f"{value:.8g}" for value in values)])


def sizes(pictures: Sequence[Path]) -> list[tuple[int, int] | Fault]:
    """(height, width) of every picture, or what is wrong with it."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(track(pool.map(lambda path: _size(path), pictures), len(pictures), "reading pictures"))


def _size(path: Path) -> tuple[int, int] | Fault:
    if not path.is_file():
        return Fault(str(path), 0, "no such picture", "name their folder; see --help")
    if path.suffix.lower() not in SUFFIXES:
        return Fault(
            str(path), 0, f"{path.suffix or 'no suffix'}: not a picture's", f"known: {', '.join(sorted(SUFFIXES))}"
        )
    return picture_size(str(path))


def split_by_name(items: list[Annotated], val_share: float) -> dict[str, list[Annotated]]:
    """`items` as train and val: a picture's name alone decides, so that it stays where it is in a set that grows."""
    if not 0 < val_share < 1:
        raise TrainerError(f"--val-share {val_share}: must be between 0 and 1", "0.1 is a tenth for validation")

    def place(item: Annotated) -> float:
        return int.from_bytes(hashlib.sha256(os.fsencode(item.name)).digest()[:8], "big") / 2**64

    ordered = sorted(items, key=place)
    count = sum(place(item) < val_share for item in ordered)
    cut = min(max(count, 1), len(items) - 1)  # both splits get a picture
    in_val = {item.name for item in ordered[: max(cut, 0)]}
    return {
        "train": [item for item in items if item.name not in in_val],
        "val": [item for item in items if item.name in in_val],
    }


def write(conversion: Conversion, out: Path, *, copy: bool, allow_bad_labels: bool) -> None:
    """Write the data set to the folder `out`, which must not exist yet; BadData for one with faults."""
    _check_names(conversion)
    if conversion.faults and not allow_bad_labels:
        raise BadData(conversion.faults, "--allow-bad-labels leaves them out")
    if not any(item.rows for items in conversion.splits.values() for item in items):
        raise TrainerError(f"{out}: there is no picture with a box to write", "are these the right annotations?")
    check_out(out)
    draft = out.absolute().parent / f".{out.name}.{uuid.uuid4().hex}"
    try:
        draft.mkdir(parents=True)
        for split, items in conversion.splits.items():
            (draft / "images" / split).mkdir(parents=True)
            (draft / "labels" / split).mkdir(parents=True)
            for item in track(items, len(items), f"writing {split}"):
                picture = draft / "images" / split / item.name
                label = (draft / "labels" / split / item.name).with_suffix(".txt")
                for path in (picture, label):
                    path.parent.mkdir(parents=True, exist_ok=True)
                if copy:
                    shutil.copyfile(item.picture, picture)
                else:
                    picture.symlink_to(item.picture.resolve())
                label.write_text("".join(f"{row}\n" for row in item.rows), encoding="utf-8")
        content = {
            "path": ".",
            **{split: f"images/{split}" for split in conversion.splits},
            "names": dict(enumerate(conversion.names)),
        }
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        (draft / "data.yaml").write_text(text, encoding="utf-8")
        draft.rename(out)
    except OSError as error:
        raise TrainerError(f"{out}: cannot be written: {error}", "name another folder with --out") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_out(out: Path) -> None:
    """An error for an output folder that is there already: nothing is overwritten."""
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise TrainerError(f"--out {out}: exists already", "delete it, or name another folder")


def _check_names(conversion: Conversion) -> None:
    """Two pictures of one split that would share a label file are a fault; the first one stays."""
    for split, items in conversion.splits.items():
        owners: dict[str, Annotated] = {}
        for item in items:
            stem = os.path.splitext(item.name)[0]  # noqa: PTH122 (a suffix alone is to go, not a folder)
            if owners.setdefault(stem, item) is not item:
                what = f"would share its label file with {owners[stem].picture}"
                conversion.faults.append(Fault(str(item.picture), 0, what, "rename one of the pictures"))
        conversion.splits[split] = list(owners.values())
