"""Listing of a split: its images, their label files, and the sizes and times of both.

Only folders and lists are read, no images and labels, so it is fast enough for every start.
"""
# ruff: noqa: PTH100, PTH112, PTH114, PTH116, PTH118, PTH120, PTH122, PTH208
# (Paths are strings: a hundred thousand pathlib objects would double the time to open a dataset.)

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.config.faults import BadData, Fault
from trainer.data.data_yaml import DataYaml
from trainer.data.progress import THREADS

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
_CHUNK = 64  # images of one task of a thread
_NOT_LABELS = frozenset({"classes.txt"})  # annotation tools write it next to the labels
_ABSENT = (-1, -1)
_ENDINGS = f"images end in {', '.join(sorted(SUFFIXES))}"


@dataclass(frozen=True)
class Listing:
    """The existing images of one split, and the faults of its folders and lists."""

    root: str  # folder of data.yaml; images inside are relative to it, so that the dataset can be moved
    images: list[str]
    stamps: npt.NDArray[np.int64]  # (n, 4): size and mtime in ns of the image and of its label file (-1: missing)
    faults: list[Fault]

    def label_file(self, index: int) -> str:
        """Return the full path of the label file of image `index`; a missing file means no boxes."""
        return label_file(os.path.join(self.root, self.images[index]))


def list_split(spec: DataYaml) -> Listing:
    """List the split of `spec`; raise BadData if it has no images."""
    faults: list[Fault] = []
    images: dict[str, Fault] = {}  # each with the fault if it does not exist
    for source in spec.sources:
        found = [(path, path, 0) for path in images_below(source)] if source.is_dir() else _images_of_list(source)
        if not found:
            faults.append(Fault(str(spec.path), spec.line, f"no images in {source}", _ENDINGS))
        for image, file, line in found:
            if image in images:
                where = (file, line) if line else (str(spec.path), spec.line)
                faults.append(Fault(*where, f"{image} is listed twice", "list each image once"))
            images.setdefault(image, Fault(file, line, f"no such image: {image}", "correct or delete the line"))
    if not images:
        raise BadData(faults)
    paths = list(images)
    files = [label_file(path) for path in paths]
    stamps = _stamps(paths, files)
    kept, owners = [], dict[str, str]()
    for k, (path, file) in enumerate(zip(paths, files, strict=True)):
        if stamps[k, 0] < 0:
            faults.append(images[path])
        elif owners.setdefault(file, path) != path:
            what = f"shares its label file {file} with {owners[file]}"
            faults.append(Fault(path, 0, what, "rename one of the images"))
        else:
            kept.append(k)
    faults += _orphans(paths, files)
    root = os.path.dirname(os.path.abspath(spec.path))
    return Listing(root, [paths[k].removeprefix(root + os.sep) for k in kept], stamps[kept], faults)


def label_file(image: str) -> str:
    """Return the label file of `image`: the last folder `images` becomes `labels`, the suffix .txt."""
    head, found, tail = image.rpartition(f"{os.sep}images{os.sep}")
    moved = f"{head}{os.sep}labels{os.sep}{tail}" if found else image
    return os.path.splitext(moved)[0] + ".txt"


def images_below(folder: Path) -> Iterable[str]:
    """Yield the absolute path of each image below `folder`, sorted within each folder; follow links."""
    for parent, folders, files in os.walk(folder.absolute(), onerror=_raise_unreadable, followlinks=True):
        folders[:] = sorted(name for name in folders if name[0] != "." and not _is_link_to_ancestor(parent, name))
        for name in sorted(files):
            if _is_image(name) and not name.startswith("."):
                yield os.path.normpath(os.path.join(parent, name))


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def _raise_unreadable(error: OSError) -> None:
    hint = "give this user read permission, or remove the folder from the dataset"
    raise BadData([Fault(str(error.filename)[:200], 0, f"cannot be read: {error.strerror}", hint)])


def _is_link_to_ancestor(parent: str, name: str) -> bool:
    """Return whether a folder is a link to a folder that contains it, which would be an endless loop."""
    path = os.path.join(parent, name)
    there = os.path.realpath(path)
    return os.path.islink(path) and os.path.commonpath([os.path.realpath(parent), there]) == there


def _images_of_list(listing: Path) -> list[tuple[str, str, int]]:
    """Return (absolute path, file, line) of each image in a text file of one path per line, relative to that file."""
    if listing.suffix != ".txt":
        fault = Fault(str(listing), 0, "neither a folder nor a .txt list of images", "correct the data.yaml")
        raise BadData([fault])
    try:
        lines = listing.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadData([Fault(str(listing), 0, f"cannot be read: {error}", "write one path per line")]) from None
    folder = listing.parent.absolute()
    numbered = ((number, line.strip()) for number, line in enumerate(lines, 1))
    return [(os.path.normpath(os.path.join(folder, path)), str(listing), number) for number, path in numbered if path]


def _stamps(images: list[str], files: list[str]) -> npt.NDArray[np.int64]:
    def stamp(path: str) -> tuple[int, int]:
        try:
            found = os.stat(path)
        except OSError:
            return _ABSENT
        return found.st_size, found.st_mtime_ns

    def chunk(first: int) -> list[tuple[int, int, int, int]]:
        part = slice(first, first + _CHUNK)
        return [(*stamp(image), *stamp(file)) for image, file in zip(images[part], files[part], strict=True)]

    with ThreadPoolExecutor(THREADS) as pool:
        rows = [row for rows in pool.map(chunk, range(0, len(images), _CHUNK)) for row in rows]
    return np.array(rows, np.int64).reshape(-1, 4)


def _orphans(images: list[str], files: list[str]) -> list[Fault]:
    """Return a fault for each label file in a folder `labels` without an image."""
    faults = []
    folders = {os.path.dirname(file): os.path.dirname(image) for image, file in zip(images, files, strict=True)}
    for folder, image_folder in folders.items():
        if folder == image_folder or not os.path.isdir(folder) or not os.path.isdir(image_folder):
            continue
        # The folder may have images of other splits.
        stems = {os.path.splitext(name)[0] for name in os.listdir(image_folder) if _is_image(name)}
        for name in sorted(os.listdir(folder)):
            stem, suffix = os.path.splitext(name)
            if suffix == ".txt" and stem not in stems and name not in _NOT_LABELS:
                hint = f"put the image there, or delete the label file; {_ENDINGS}"
                faults.append(Fault(os.path.join(folder, name), 0, f"label without image in {image_folder}", hint))
    return faults
