"""Writer of converted datasets: images, label files and data.yaml, moved into place by one rename."""

import hashlib
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import yaml

from trainer.config.faults import BadData, Fault
from trainer.data.formats.listing import SUFFIXES, label_file
from trainer.data.images.image_check import decode_images, faults_of
from trainer.data.progress import track
from trainer.errors import TrainerError

HINT = "correct the annotations, or leave these out with --allow-bad-labels"
Points = npt.NDArray[np.float64]  # (k, 2): x, y in pixels from the image's top left corner


@dataclass(frozen=True)
class Annotated:
    """One image and the rows of its label file."""

    image: Path
    name: str  # path below images/SPLIT
    rows: list[str]


@dataclass
class Conversion:
    """The input of a conversion: classes, images by split, faults, and counts of omitted and clipped entries."""

    names: list[str]
    splits: dict[str, list[Annotated]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)  # messages about such entries
    hint: str = ""  # what to do if no box is left

    def fault(self, file: Path, what: str, line: int = 0) -> None:
        """Add a fault, which --allow-bad-labels leaves out."""
        self.faults.append(Fault(str(file), line, what, HINT))

    def row(
        self, number: int, box: Sequence[float], size: tuple[int, int], outline: Points | None = None
    ) -> str | None:
        """Return the label row of class `number`, or None if the box has no area or is outside the image.

        `box` is x1 y1 x2 y2 in pixels. It is clipped to the image of `size` (height, width), which is counted if it is
        more than a pixel. The polygon `outline` (k, 2) in pixels replaces the box.
        """
        height, width = size
        x1 = max(0.0, box[0])
        x2 = min(float(width), box[2])
        y1 = max(0.0, box[1])
        y2 = min(float(height), box[3])
        if x1 >= x2 or y1 >= y2:
            return None
        if box[0] < -1 or box[1] < -1 or box[2] > width + 1 or box[3] > height + 1:
            self.notes["box partly outside its image, clipped"] += 1
        if outline is not None:
            outline = np.clip(outline, 0, (width, height))
            outline = outline if np.ptp(outline, axis=0).all() else None  # a line, or outside: keep the box
        if outline is not None:
            values = np.clip(outline / (width, height), 0, 1).flatten().tolist()
        else:
            values = [(x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height]
        return " ".join([str(number), *(f"{value:.8g}" for value in values)])


def sizes(images: Sequence[Path]) -> list[tuple[int, int] | Fault]:
    """Return (height, width) of every image, or its fault."""
    hint = f"correct the folder of the images; they end in {', '.join(sorted(SUFFIXES))}"
    exist = [path.is_file() and path.suffix.lower() in SUFFIXES for path in images]
    states = iter(decode_images([str(path) for path, exists in zip(images, exist, strict=True) if exists]))
    found: list[tuple[int, int] | Fault] = []
    for path, exists in zip(images, exist, strict=True):
        state = next(states) if exists else None
        if not state:
            found.append(Fault(str(path), 0, "no such image", hint))
        elif state.problem:
            found += faults_of(str(path), state, {})
        else:
            found.append((state.height, state.width))
    return found


def split_by_name(items: list[Annotated], val_share: float) -> dict[str, list[Annotated]]:
    """Split `items` into train and val by a hash of their names, so that adding images moves no others."""
    if not 0 < val_share < 1:
        raise TrainerError(f"--val-share {val_share}: must be between 0 and 1", "use --val-share 0.1")

    def fraction(item: Annotated) -> float:
        return int.from_bytes(hashlib.sha256(os.fsencode(item.name)).digest()[:8], "big") / 2**64

    ordered = sorted(items, key=fraction)
    count = sum(fraction(item) < val_share for item in ordered)
    cut = min(max(count, 1), len(items) - 1)  # at least one image in each split
    in_val = {item.name for item in ordered[: max(cut, 0)]}
    train = [item for item in items if item.name not in in_val]
    return {"train": train, "val": [item for item in items if item.name in in_val]}


def write(conversion: Conversion, out: Path, *, copy: bool, allow_bad_labels: bool) -> None:
    """Write the dataset to the new folder `out`; raise BadData if it has faults."""
    if conversion.faults and not allow_bad_labels:
        raise BadData(conversion.faults, "--allow-bad-labels leaves them out")
    if not any(item.rows for items in conversion.splits.values() for item in items):
        why = "".join(f"; {note}: {count}" for note, count in conversion.notes.items())
        hint = conversion.hint or "check the path of the annotations"
        raise TrainerError(f"{out}: no image with a box to write{why}", hint)
    draft = out.absolute().parent / f".{out.name}.{uuid.uuid4().hex}"
    try:
        for split, items in conversion.splits.items():
            (draft / "images" / split).mkdir(parents=True)
            for item in track(items, len(items), f"writing {split}"):
                image = draft / "images" / split / item.name
                label = Path(label_file(str(image)))
                if label.exists():
                    what = f"{item.image}: another image has the same name without suffix"
                    raise TrainerError(what, "rename one of the images")
                for path in (image, label):
                    path.parent.mkdir(parents=True, exist_ok=True)
                if copy:
                    shutil.copyfile(item.image, image)
                else:
                    image.symlink_to(item.image.resolve())
                label.write_text("".join(f"{row}\n" for row in item.rows), encoding="utf-8")
        folders = {split: f"images/{split}" for split in conversion.splits}
        content = {"path": ".", **folders, "names": dict(enumerate(conversion.names))}
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        (draft / "data.yaml").write_text(text, encoding="utf-8")
        draft.rename(out)
    except OSError as error:
        raise TrainerError(f"{out}: cannot be written: {error}", "give another folder with --out") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_out(out: Path) -> None:
    """Raise TrainerError if `out` exists and is not an empty folder."""
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise TrainerError(f"--out {out}: exists already", "delete it, or give another folder")
