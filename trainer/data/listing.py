"""Which pictures belong to a split, where the labels of each are, and when all of these last changed.

Reads folders and lists, but no picture and no label: that is what makes it quick enough for every start.
"""
# ruff: noqa: PTH100, PTH112, PTH114, PTH116, PTH118, PTH119, PTH120, PTH122, PTH208
# (Paths are strings here: a hundred thousand pathlib objects would double the time to open a set.)

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.data.data_yaml import DataYaml
from trainer.data.faults import BadData, Fault

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
THREADS = 8  # they wait for the disk or the network most of the time
CHUNK = 64  # pictures that a thread takes at once
_NOT_LABELS = frozenset({"classes.txt"})  # annotation tools leave it among the labels
_ABSENT = (-1, -1)
_ENDINGS = f"pictures end in {', '.join(sorted(SUFFIXES))}"


@dataclass(frozen=True)
class Listing:
    """The pictures of one split that are there, and what is wrong with the list."""

    root: str  # data.yaml's folder; pictures below it are named relative to it, so that the set can be moved
    pictures: list[str]
    label_files: list[str]  # of the same length; a file that is not there means no boxes
    stamps: npt.NDArray[np.int64]  # (n, 4): size and mtime in ns of the picture, and of its label file (-1: not there)
    faults: list[Fault]

    def label_file(self, index: int) -> str:
        """The full path of the label file of picture `index`."""
        return os.path.join(self.root, self.label_files[index])


def list_split(spec: DataYaml) -> Listing:
    """List the split that `spec` describes; BadData where there is nothing to list."""
    faults: list[Fault] = []
    pictures: dict[str, Fault] = {}
    empty: list[Path] = []
    for source in spec.sources:
        named = list(_named(source) if source.is_dir() else _listed(source))
        if not named:
            empty.append(source)
        for picture, file, line in named:
            fault = Fault(file, line, f"no such picture: {picture}", "correct or delete the line")
            if picture in pictures:
                where = (file, line) if line else (str(spec.path), spec.line)
                faults.append(Fault(*where, f"{picture} is listed twice", "list each picture once"))
            pictures.setdefault(picture, fault)
    if empty:
        fault = Fault(str(spec.path), spec.line, f"no pictures in {', '.join(map(str, empty))}", _ENDINGS)
        if not pictures:
            raise BadData([fault])
        faults.append(fault)
    paths = list(pictures)
    files = [label_file(path) for path in paths]
    stamps = _stamps(paths, files)
    kept, owners = [], dict[str, str]()
    for k, (path, file) in enumerate(zip(paths, files, strict=True)):
        if stamps[k, 0] < 0:
            faults.append(pictures[path])
        elif owners.setdefault(file, path) != path:
            what = f"shares its label file {file} with {owners[file]}"
            faults.append(Fault(path, 0, what, "rename one of the pictures"))
        else:
            kept.append(k)
    faults += _orphans(paths, files)
    root = os.path.dirname(os.path.abspath(spec.path))
    return Listing(
        root,
        [_relative(paths[k], root) for k in kept],
        [_relative(files[k], root) for k in kept],
        stamps[kept],
        faults,
    )


def label_file(picture: str) -> str:
    """Where the boxes of `picture` are: the last folder `images` becomes `labels`, the suffix .txt."""
    head, found, tail = picture.rpartition(f"{os.sep}images{os.sep}")
    moved = f"{head}{os.sep}labels{os.sep}{tail}" if found else picture
    return os.path.splitext(moved)[0] + ".txt"


def _relative(path: str, root: str) -> str:
    return path.removeprefix(root + os.sep)


def pictures_below(folder: Path) -> Iterable[str]:
    """The absolute path of each picture below `folder`, also behind links, sorted within each folder."""
    for parent, folders, files in os.walk(folder.absolute(), onerror=_unreadable, followlinks=True):
        folders[:] = sorted(name for name in folders if not _leads_back(parent, name))
        for name in sorted(files):
            if os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith("."):
                yield os.path.normpath(os.path.join(parent, name))


def _unreadable(error: OSError) -> None:
    hint = "give this user the right to read it, or take it out of the set"
    raise BadData([Fault(str(error.filename), 0, f"cannot be read: {error.strerror}", hint)])


def _leads_back(parent: str, name: str) -> bool:
    """Whether a folder is a link to one that it is in: what is below it would be listed again and again."""
    path = os.path.join(parent, name)
    if not os.path.islink(path):
        return False
    here, there = os.path.realpath(parent), os.path.realpath(path)
    return here == there or here.startswith(there.rstrip(os.sep) + os.sep)


def _named(folder: Path) -> Iterable[tuple[str, str, int]]:
    """(absolute path, file and line that name it) of each picture below `folder`."""
    return ((path, path, 0) for path in pictures_below(folder))


def _listed(listing: Path) -> Iterable[tuple[str, str, int]]:
    """The same of a text file with one path per line, relative to that file, in its order."""
    if listing.suffix != ".txt":
        fault = Fault(str(listing), 0, "neither a folder nor a .txt list of pictures", "correct the data.yaml")
        raise BadData([fault])
    try:
        lines = listing.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadData([Fault(str(listing), 0, f"cannot be read: {error}", "one path in each line")]) from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            path = os.path.normpath(os.path.join(listing.parent.absolute(), line.strip()))
            yield path, str(listing), number


def _stamps(pictures: list[str], files: list[str]) -> npt.NDArray[np.int64]:
    def stamp(path: str) -> tuple[int, int]:
        try:
            found = os.stat(path)
        except OSError:
            return _ABSENT
        return found.st_size, found.st_mtime_ns

    def chunk(first: int) -> list[tuple[int, int, int, int]]:
        part = slice(first, first + CHUNK)
        return [(*stamp(picture), *stamp(file)) for picture, file in zip(pictures[part], files[part], strict=True)]

    with ThreadPoolExecutor(THREADS) as pool:
        rows = [row for rows in pool.map(chunk, range(0, len(pictures), CHUNK)) for row in rows]
    return np.array(rows, np.int64).reshape(-1, 4)


def _stem(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0]


def _orphans(pictures: list[str], files: list[str]) -> list[Fault]:
    """Every label file of a folder `labels` needs a picture; without one it was renamed, or lost its picture."""
    known: dict[str, set[str]] = {}  # label folder: the label files that its pictures have
    folders: dict[str, str] = {}  # label folder: the folder of its pictures
    for picture, file in zip(pictures, files, strict=True):
        folder, _, name = file.rpartition(os.sep)
        if folder not in known:
            known[folder], folders[folder] = set(), os.path.dirname(picture)
        known[folder].add(name)
    faults = []
    for folder, names in known.items():
        picture_folder = folders[folder]
        if folder == picture_folder or not os.path.isdir(folder) or not os.path.isdir(picture_folder):
            continue
        skipped = names | _NOT_LABELS
        others = [name for name in os.listdir(folder) if name.endswith(".txt") and name not in skipped]
        there = os.listdir(picture_folder) if others else []  # also the pictures of other splits
        found = {_stem(name) for name in there if os.path.splitext(name)[1].lower() in SUFFIXES}
        for name in sorted(others):
            if _stem(name) not in found:
                what = f"label without picture in {picture_folder}"
                hint = f"put the picture there, or delete the label file; {_ENDINGS}"
                faults.append(Fault(os.path.join(folder, name), 0, what, hint))
    return faults
