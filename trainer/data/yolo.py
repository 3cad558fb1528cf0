"""Data sets in YOLO format: pictures in folders or lists, one text file of boxes per picture.

Everything is read and checked once, when the set is opened, so that a bad label stops the run before it starts.
Labels and paths are kept in flat arrays: a list of a million small objects would be copied, page by page, into
every worker process.
"""
# ruff: noqa: PTH112, PTH113, PTH118, PTH119, PTH120, PTH122, PTH123, PTH202, PTH208
# (Paths are strings here: a hundred thousand pathlib objects would double the time to open a set.)

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image as Pillow

from trainer.data.data_yaml import DataYaml, read_data_yaml
from trainer.data.dataset import Image, Labels, Segment
from trainer.errors import TrainerError

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
_NOT_LABELS = frozenset({"classes.txt"})  # annotation tools leave it among the labels
_ORIENTATION = 0x0112  # EXIF tag; 5 to 8 are quarter turns
_THREADS = 8  # they wait for the disk or the network most of the time
_CHUNK = 64
_REDUCED = {8: cv2.IMREAD_REDUCED_COLOR_8, 4: cv2.IMREAD_REDUCED_COLOR_4, 2: cv2.IMREAD_REDUCED_COLOR_2}


class Yolo:
    """Pictures and boxes of one split of a data.yaml."""

    flips = True

    def __init__(self, data_yaml: str, split: str) -> None:
        spec = read_data_yaml(Path(data_yaml), split)
        self.names = spec.names
        pictures = _pictures(spec)
        label_files = [label_file(picture) for picture in pictures]
        _check_orphans(pictures, label_files)
        with ThreadPoolExecutor(_THREADS) as pool:
            starts = range(0, len(pictures), _CHUNK)
            sizes = pool.map(lambda k: [_size(p) for p in pictures[k : k + _CHUNK]], starts)
            self._sizes = np.array([size for chunk in sizes for size in chunk], np.int32)
            rows = pool.map(lambda k: [_read_labels(f) for f in label_files[k : k + _CHUNK]], starts)
            files = [file for chunk in rows for file in chunk]
        tables = [table for table, _ in files]
        outlines = [outline for _, outlines in files for outline in outlines]
        # One array of corners and where each box's begin: many small arrays would be copied like many small lists.
        self._corners = np.concatenate([np.empty((0, 2)), *outlines]).astype(np.float32)
        self._corner_offsets = np.concatenate([[0], np.cumsum([len(outline) for outline in outlines])])
        self._offsets = np.concatenate([[0], np.cumsum([len(table) for table in tables])])
        self._labels = _checked(np.concatenate(tables), self._offsets, self._sizes, label_files, self.names)
        if not len(self._labels):
            raise TrainerError(
                f"{spec.where}: none of the {len(pictures)} {split} pictures has a labelled box",
                f"labels are looked for in {Path(label_files[0]).parent}",
            )
        self._paths = np.array([os.fsencode(picture) for picture in pictures])

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, index: int) -> Path:
        """The file of picture `index`."""
        return Path(os.fsdecode(self._paths[index]))

    def size(self, index: int) -> tuple[int, int]:
        """(height, width) in pixels of picture `index`, turned upright."""
        height, width = self._sizes[index].tolist()
        return height, width

    def image(self, index: int, min_side: int = 0) -> Image:
        """Picture `index` as uint8 (h, w, 3) RGB; JPEG decodes several times faster when `min_side` is small."""
        flags = cv2.IMREAD_COLOR
        if min_side:
            longer = int(self._sizes[index].max())
            flags = next((flag for by, flag in _REDUCED.items() if longer >= by * min_side), flags)
        path = os.fsdecode(self._paths[index])
        try:
            with open(path, "rb", buffering=0) as stream:
                picture = cv2.imdecode(np.frombuffer(stream.read(), np.uint8), flags)
        except (OSError, ValueError, cv2.error):
            picture = None
        if picture is None:
            raise TrainerError(f"{path}: cannot be decoded", "replace the picture, or delete it and its label file")
        return np.asarray(cv2.cvtColor(picture, cv2.COLOR_BGR2RGB, dst=picture))

    def labels(self, index: int) -> Labels:
        """The boxes of picture `index` as float32 (n, 5): class, cx, cy, w, h as fractions of its sides."""
        return self._labels[self._offsets[index] : self._offsets[index + 1]]

    def segments(self, index: int) -> list[Segment]:
        """The polygons of picture `index`, one for each of its labels: float32 (k, 2) fractions, (0, 2) for a box."""
        first, last = self._offsets[index : index + 2].tolist()
        cuts = self._corner_offsets[first : last + 1].tolist()
        return [self._corners[begin:end] for begin, end in pairwise(cuts)]


def label_file(picture: str) -> str:
    """Where the boxes of `picture` are: the last folder `images` becomes `labels`, the suffix .txt."""
    head, found, tail = picture.rpartition(f"{os.sep}images{os.sep}")
    moved = f"{head}{os.sep}labels{os.sep}{tail}" if found else picture
    return os.path.splitext(moved)[0] + ".txt"


def _pictures(spec: DataYaml) -> list[str]:
    """Absolute paths of the pictures of a split, sorted within each folder; a list keeps its order."""
    seen: dict[str, str] = {}
    for source in spec.sources:
        origins = _folder(source) if source.is_dir() else _listed(source)
        for picture, where in origins:
            if picture in seen:
                raise TrainerError(f"{where or spec.where}: {picture} is listed twice", "list each picture once")
            seen[picture] = where
    if not seen:
        raise TrainerError(
            f"{spec.where}: no pictures in {', '.join(str(s) for s in spec.sources)}",
            f"pictures end in {', '.join(sorted(SUFFIXES))}",
        )
    return list(seen)


def _folder(folder: Path) -> Iterable[tuple[str, str]]:
    for parent, folders, files in os.walk(folder.absolute(), followlinks=True):
        folders.sort()
        for name in sorted(files):
            if os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith("."):
                yield os.path.normpath(os.path.join(parent, name)), ""


def _listed(listing: Path) -> Iterable[tuple[str, str]]:
    """The pictures of a text file with one path per line, relative to that file."""
    if listing.suffix != ".txt":
        raise TrainerError(f"{listing}: neither a folder nor a .txt list of pictures", "correct the data.yaml")
    for number, line in enumerate(listing.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            path = os.path.normpath(os.path.join(listing.parent.absolute(), line.strip()))
            if not os.path.isfile(path):
                raise TrainerError(f"{listing}:{number}: no such picture: {path}", "correct or delete the line")
            yield path, f"{listing}:{number}"


def _stem(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0]


def _check_orphans(pictures: list[str], label_files: list[str]) -> None:
    """Every label file of a folder `labels` needs a picture; without one it was renamed, or lost its picture."""
    owners: dict[str, str] = {}
    folders: dict[str, str] = {}
    for picture, file in zip(pictures, label_files, strict=True):
        if owners.setdefault(file, picture) != picture:
            raise TrainerError(f"{picture} and {owners[file]} share one label file, {file}", "rename one of them")
        folders[os.path.dirname(file)] = os.path.dirname(picture)
    for folder, picture_folder in folders.items():
        if folder == picture_folder or not os.path.isdir(folder):
            continue
        found = {_stem(name) for name in os.listdir(picture_folder)}  # also those of other splits
        for name in sorted(os.listdir(folder)):
            if name.endswith(".txt") and name not in _NOT_LABELS and _stem(name) not in found:
                raise TrainerError(
                    f"{os.path.join(folder, name)}: label without picture in {picture_folder}",
                    "put the picture there, or delete the label file",
                )


def _size(picture: str) -> tuple[int, int]:
    """(height, width) from the picture's header, turned as its EXIF orientation says, as the decoder does."""
    try:
        with Pillow.open(picture) as header:
            width, height = header.size
            # Asked for EXIF it has not met yet, Pillow decodes the whole of a PNG.
            known = header.format == "TIFF" or "exif" in header.info
            turned = known and header.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
    except Exception as error:  # whatever Pillow's many readers raise, the picture is at fault
        what = "empty file" if os.path.isfile(picture) and not os.path.getsize(picture) else str(error)
        raise TrainerError(
            f"{picture}: not a readable picture: {what.replace(repr(picture), 'it')}",
            "replace the picture, or delete it and its label file",
        ) from None
    return (width, height) if turned else (height, width)


def _read_labels(file: str) -> tuple[npt.NDArray[np.float64], list[npt.NDArray[np.float64]]]:
    """The rows (n, 5) of a label file, and of each the corners (k, 2) of its polygon; no file means no boxes."""
    try:
        with open(file, encoding="utf-8") as stream:
            lines = stream.read().splitlines()
    except FileNotFoundError:
        return np.zeros((0, 5)), []
    except (OSError, UnicodeDecodeError) as error:
        raise TrainerError(f"{file}: cannot be read: {error}", "labels are text: class cx cy w h") from None
    rows, outlines = [], []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        try:
            row = [float(word) for word in words]
        except ValueError:
            raise TrainerError(f"{file}:{number}: not a number in `{line.strip()[:60]}`", _ROW_HINT) from None
        outline = np.empty((0, 2))
        if len(row) != 5:
            if len(row) < 7 or len(row) % 2 == 0:
                raise TrainerError(f"{file}:{number}: {len(row)} columns instead of 5", _ROW_HINT)
            outline = np.array(row[1:]).reshape(-1, 2)
            low, high = outline.min(0), outline.max(0)
            row = [row[0], *(low + high) / 2, *(high - low)]
        rows.append(row)
        outlines.append(outline)
    return np.array(rows, np.float64).reshape(-1, 5), outlines


_ROW_HINT = "a line is `class cx cy w h`, the last four as fractions of the picture's sides"


def _checked(
    rows: npt.NDArray[np.float64],
    offsets: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int32],
    label_files: list[str],
    names: list[str],
) -> Labels:
    """The rows (n, 5) of all files as float32, boxes cut to the picture; the first bad row is an error."""
    owner = np.repeat(np.arange(len(label_files)), np.diff(offsets))
    half = rows[:, 3:] / 2
    low, high = rows[:, 1:3] - half, rows[:, 1:3] + half
    # Annotation tools round to whole pixels: one pixel beyond the edge is no mistake.
    slack = 1 / sizes[owner][:, ::-1]
    tests = [
        (~np.isfinite(rows).all(1), "not a finite number"),
        ((rows[:, 0] < 0) | (rows[:, 0] >= len(names)), f"class out of range 0 to {len(names) - 1}"),
        (rows[:, 0] != np.floor(rows[:, 0]), "class is not a whole number"),
        ((rows[:, 1:] > 1 + slack.max(initial=0)).any(1) & (rows[:, 1:] > 2).any(1), "pixels instead of fractions"),
        ((rows[:, 3:] <= 0).any(1), "box without area"),
        (((low < -slack) | (high > 1 + slack)).any(1), "box outside the picture"),
    ]
    bad = np.any([test for test, _ in tests], axis=0)
    if bad.any():
        k = int(np.flatnonzero(bad)[0])
        what = next(text for test, text in tests if test[k])
        file = label_files[owner[k]]
        number, line = _line(file, k - int(offsets[owner[k]]))
        more = f" (and {bad.sum() - 1} more such lines)" if bad.sum() > 1 else ""
        raise TrainerError(f"{file}:{number}: {what}: `{line}`{more}", _ROW_HINT)
    low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
    return np.concatenate([rows[:, :1], (low + high) / 2, high - low], 1).astype(np.float32)


def _line(file: str, row: int) -> tuple[int, str]:
    """Number and text of the line that holds row `row` of a label file."""
    filled = [(k, line.strip()) for k, line in enumerate(Path(file).read_text().splitlines(), 1) if line.strip()]
    return filled[row]
