"""Listing of a split: its images, their label files, and the sizes and times of both.

Only folders and lists are read, no images and labels, so it is fast enough for every start.
"""
# ruff: noqa: PTH100, PTH112, PTH114, PTH115, PTH116, PTH118, PTH120, PTH122, PTH208
# (Paths are strings: a hundred thousand pathlib objects would double the time to open a dataset.)

import errno
import os
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.config.faults import BadData, Fault, first_of
from trainer.config.text_file import read_text
from trainer.data.formats.data_yaml import DataYaml, mount_hint
from trainer.data.formats.named_files import NamedFiles
from trainer.data.progress import THREADS

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
_CHUNK = 64  # images of one task of a thread
_NOT_LABELS = frozenset({"classes.txt"})  # annotation tools write it next to the labels
_ABSENT = (-1, -1)
_ENDINGS = f"images end in {', '.join(sorted(SUFFIXES))}"
# Images of other programs, which would be missing from the dataset without a word.
_OTHER_IMAGES = frozenset(
    {".avif", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".ppm", ".dng", ".jxl"}
)
_FILE_HINT = "replace it with a file that this user may read"
LINK_HINT = (
    "correct the link; in a container, mount the folder that it leads to: clusterctl launch --mount FOLDER"
)


@dataclass(frozen=True)
class Listing:
    """The existing images of one split, and the faults of its folders and lists."""

    root: str  # folder of data.yaml; images inside are relative to it, so that the dataset can be moved
    images: list[str]
    # (n, 4): size and mtime in ns of the image and of its label file (-1: missing).
    stamps: npt.NDArray[np.int64]
    faults: list[Fault]

    def image_files(self) -> list[str]:
        """Return the full paths of the images."""
        return [os.path.join(self.root, image) for image in self.images]

    def label_file(self, index: int) -> str:
        """Return the full path of the label file of image `index`; a missing file means no boxes."""
        return label_file(os.path.join(self.root, self.images[index]))


class _Origin(NamedTuple):
    """Where an image is named: a line of a list; or the image itself, with the line 0, if its folder is."""

    file: str
    line: int


@dataclass(frozen=True)
class _Files:
    """The named images and their label files, and what the file system says about both."""

    images: list[str]
    labels: list[str]
    stamps: npt.NDArray[np.int64]  # see Listing
    obstacles: dict[int, tuple[str, str]]  # by image: why it, or its label file, cannot be followed

    def absent(self) -> list[str]:
        """Return the images at whose paths there is nothing."""
        return [
            image for k, image in enumerate(self.images) if self.stamps[k, 0] < 0 and k not in self.obstacles
        ]


def list_split(spec: DataYaml) -> Listing:
    """List the split of `spec`; raise BadData if it has no images."""
    faults: list[Fault] = []
    origins = _named_images(spec, faults)
    if not origins:
        raise BadData(faults)
    root = os.path.dirname(os.path.abspath(spec.path))
    files = _inspect(origins)
    absent_of_lists = [image for image in files.absent() if origins[image].line]
    if renamed := _in_another_form(absent_of_lists, root):
        first = next(iter(renamed))
        what = f"{first}: found as {renamed[first]}{first_of(len(renamed))}"
        faults.append(Fault(*origins[first], what, "nothing needs to be changed", warning=True))
        # If the list also names a file in its own form, that line counts.
        renamed_first = sorted(origins, key=lambda image: image not in renamed)
        origins = {renamed.get(image, image): origins[image] for image in renamed_first}
        files = _inspect(origins)
    kept = _usable_images(files, origins, root, spec, faults)
    faults += _without_label(files.images, files.labels, files.stamps, kept)
    images = [files.images[k].removeprefix(root + os.sep) for k in kept]
    return Listing(root, images, files.stamps[kept], faults)


def _named_images(spec: DataYaml, faults: list[Fault]) -> dict[str, _Origin]:
    """Return the images that the sources of `spec` name, with the first place that names each."""
    origins: dict[str, _Origin] = {}
    for source in spec.sources:
        if source.is_dir():
            named = [(image, _Origin(image, 0)) for image in images_below(source)]
        else:
            named = _images_of_list(source)
        if not named:
            faults.append(Fault(str(spec.path), spec.line, f"no images in {source}", _ENDINGS))
        for image, origin in named:
            if image in origins:
                where = origin if origin.line else _Origin(str(spec.path), spec.line)
                faults.append(Fault(*where, f"{image} is listed twice", "list each image once"))
            origins.setdefault(image, origin)
    return origins


def _usable_images(
    files: _Files, origins: dict[str, _Origin], root: str, spec: DataYaml, faults: list[Fault]
) -> list[int]:
    """Return the numbers of the images that can be read, with their label files; add a fault for each other."""
    hidden_folders = _unreachable_folders(files.labels, faults)
    misnamed = _check_label_folders(files.images, files.labels, faults)
    usable = []
    image_of_label: dict[str, str] = {}
    for k, (image, label) in enumerate(zip(files.images, files.labels, strict=True)):
        image_obstacle, label_obstacle = files.obstacles.get(k, ("", ""))
        origin = origins[image]
        if image_obstacle:
            what = f"{image} {image_obstacle}" if origin.line else image_obstacle
            faults.append(Fault(*origin, what, _hint(image_obstacle)))
        elif files.stamps[k, 0] < 0:
            faults.append(Fault(*origin, f"no such image: {image}", _absent_hint(image, origin, root, spec)))
        elif image_of_label.setdefault(label, image) != image:
            what = f"shares its label file {label} with {image_of_label[label]}"
            faults.append(Fault(image, 0, what, "rename one of the images"))
        elif os.path.dirname(label) in hidden_folders or label in misnamed:
            continue  # a fault already
        elif label_obstacle:
            faults.append(Fault(label, 0, label_obstacle, _hint(label_obstacle)))
        else:
            usable.append(k)
    return usable


def _absent_hint(image: str, origin: _Origin, root: str, spec: DataYaml) -> str:
    hint = f"correct or delete the line{mount_hint(os.path.dirname(image), spec.path)}"
    if origin.line:
        hint += f"; no image below {root}, or more than one, has a path that ends like it"
    return hint


def _inspect(images: Iterable[str]) -> _Files:
    """Look at the images and their label files."""
    paths = list(images)
    labels = [label_file(path) for path in paths]
    stamps, obstacles = _stamps(paths, labels)
    return _Files(paths, labels, stamps, obstacles)


def _in_another_form(absent: Sequence[str], root: str) -> dict[str, str]:
    """Return the file of each absent path of a list that is found below `root` in another form."""
    if not absent:
        return {}
    named_files = NamedFiles(root, images_below(Path(root)))
    files = {path: named_files.find(os.path.relpath(path, root)) for path in absent}
    return {path: file for path, file in files.items() if file}


def label_file(image: str) -> str:
    """Return the label file of `image`: the last folder `images` becomes `labels`, the suffix .txt."""
    head, found, tail = image.rpartition(f"{os.sep}images{os.sep}")
    moved = f"{head}{os.sep}labels{os.sep}{tail}" if found else image
    return os.path.splitext(moved)[0] + ".txt"


def images_below(folder: Path) -> Iterable[str]:
    """Yield the absolute path of each image below `folder`, sorted within each folder; follow links.

    Raises BadData for a folder that cannot be read, and for a link to something that does not exist.
    """
    for parent, folders, files in os.walk(folder.absolute(), onerror=_raise_unreadable, followlinks=True):
        folders[:] = sorted(name for name in folders if name[0] != "." and not _is_loop(parent, name))
        for name in sorted(files):
            path = os.path.normpath(os.path.join(parent, name))
            if name.startswith("."):
                continue
            if _is_image(name):
                yield path
            elif os.path.islink(path) and not name.lower().endswith(".txt") and (problem := _stamp(path)[2]):
                raise BadData([Fault(path, 0, problem, _hint(problem))])  # it may be a folder of images


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def _raise_unreadable(error: OSError) -> None:
    raise _unreadable(error)


def _unreadable(error: OSError) -> BadData:
    hint = "give this user read permission, or remove the folder from the dataset"
    return BadData([Fault(str(error.filename)[:200], 0, f"cannot be read: {error.strerror}", hint)])


def _is_loop(parent: str, name: str) -> bool:
    """Return whether a folder is a link to a folder that leads to it, which would be an endless loop."""
    path = os.path.join(parent, name)
    if not os.path.islink(path):
        return False
    there = os.path.realpath(path)
    above = [parent, *map(str, Path(parent).parents)]
    return any(os.path.commonpath([os.path.realpath(folder), there]) == there for folder in above)


def _images_of_list(listing: Path) -> list[tuple[str, _Origin]]:
    """Return the absolute path of each image in a text file of one path per line, relative to that file."""
    if listing.suffix != ".txt":
        fault = Fault(str(listing), 0, "neither a folder nor a .txt list of images", "correct the data.yaml")
        raise BadData([fault])
    try:
        lines = read_text(listing).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadData(
            [Fault(str(listing), 0, f"cannot be read: {error}", "write one path per line")]
        ) from None
    folder = listing.parent.absolute()
    images = []
    for number, line in enumerate(lines, 1):
        if path := line.strip():
            image = os.path.normpath(os.path.join(folder, path))
            images.append((image, _Origin(str(listing), number)))
    return images


def _stamps(images: list[str], files: list[str]) -> tuple[npt.NDArray[np.int64], dict[int, tuple[str, str]]]:
    """Return the stamps (n, 4) of the images and their label files, and why some of them cannot be followed."""

    def chunk(first: int) -> list[tuple[tuple[int, int, str], tuple[int, int, str]]]:
        part = slice(first, first + _CHUNK)
        return [(_stamp(image), _stamp(file)) for image, file in zip(images[part], files[part], strict=True)]

    with ThreadPoolExecutor(THREADS) as pool:
        pairs = [pair for found in pool.map(chunk, range(0, len(images), _CHUNK)) for pair in found]
    rows = [(*image[:2], *label[:2]) for image, label in pairs]
    obstacles = {k: (image[2], label[2]) for k, (image, label) in enumerate(pairs) if image[2] or label[2]}
    return np.array(rows, np.int64).reshape(-1, 4), obstacles


def _stamp(path: str) -> tuple[int, int, str]:
    """Return size and mtime in ns of a file, or -1, -1 and why not; "" if there is nothing at `path`."""
    try:
        found = os.stat(path)
    except OSError as error:
        return *_ABSENT, obstacle(path, error)
    if not stat.S_ISREG(found.st_mode):
        return *_ABSENT, "is a folder, not a file" if stat.S_ISDIR(found.st_mode) else "is not a file"
    return found.st_size, found.st_mtime_ns, ""


def obstacle(path: str, error: OSError) -> str:
    """Return why what is at `path` cannot be followed, given the error of stat; "" if nothing is there."""
    if os.path.islink(path):
        if error.errno == errno.ELOOP:
            return "is a link that leads to itself"
        why = (
            "does not exist here"
            if isinstance(error, FileNotFoundError)
            else f"cannot be followed: {error.strerror}"
        )
        return f"is a link to {os.readlink(path)}, which {why}"
    return "" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"


def _hint(problem: str) -> str:
    return LINK_HINT if problem.startswith("is a link") else _FILE_HINT


def _unreachable_folders(files: list[str], faults: list[Fault]) -> set[str]:
    """Return the folders of label files that exist but cannot be entered, with one fault for each."""
    found = set()
    counts: dict[str, int] = {}
    for file in files:
        counts[os.path.dirname(file)] = counts.get(os.path.dirname(file), 0) + 1
    for folder, count in counts.items():
        for path in (folder, *map(str, Path(folder).parents)):
            problem = _folder_obstacle(path)
            if problem:
                faults.append(
                    Fault(
                        path, 0, f"{problem}, so the labels of {count} images cannot be read", _hint(problem)
                    )
                )
                found.add(folder)
            if problem or os.path.isdir(path):
                break
    return found


def _folder_obstacle(path: str) -> str:
    try:
        return "" if stat.S_ISDIR(os.stat(path).st_mode) else "is a file, not a folder"
    except NotADirectoryError:  # that is said of the file above it
        return ""
    except OSError as error:
        return obstacle(path, error)


def _check_label_folders(images: list[str], files: list[str], faults: list[Fault]) -> set[str]:
    """Add a fault for each label file without an image; return the label files that exist under a wrong suffix."""
    misnamed = set()
    folders = {
        os.path.dirname(file): os.path.dirname(image) for image, file in zip(images, files, strict=True)
    }
    for folder, image_folder in folders.items():
        if not os.path.isdir(folder) or not os.path.isdir(image_folder):
            continue
        stems = {os.path.splitext(name)[0] for name in _names_in(image_folder) if _is_image(name)}
        names = _names_in(folder)
        labels = set(names)
        for name in names:
            stem, suffix = os.path.splitext(name)
            path = os.path.join(folder, name)
            if suffix.lower() != ".txt" or name in _NOT_LABELS:
                continue
            if suffix != ".txt" and stem in stems and f"{stem}.txt" not in labels:
                faults.append(Fault(path, 0, f"the label file of {stem} must end in .txt", "rename it"))
                misnamed.add(os.path.join(folder, f"{stem}.txt"))
            elif suffix == ".txt" and stem not in stems and folder != image_folder:
                # The image folder may have images of other splits.
                hint = f"put the image there, or delete the label file; {_ENDINGS}"
                faults.append(Fault(path, 0, f"label without image in {image_folder}", hint))
    faults += _elsewhere(folders)
    faults += _other_images(set(folders.values()))
    return misnamed


def _names_in(folder: str) -> list[str]:
    """Return the sorted names in a folder, without hidden ones: macOS puts `._x.txt` beside x.txt."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise _unreadable(error) from None


def _elsewhere(folders: dict[str, str]) -> list[Fault]:
    """Return a warning for each other folder below `labels` that has labels without an image."""
    sign = f"{os.sep}labels{os.sep}"
    tops = {(folder + os.sep).rpartition(sign)[0] for folder in folders if sign in folder + os.sep}
    faults = []
    for top in sorted(tops):
        for parent, below, names in os.walk(f"{top}{sign}"):
            below[:] = sorted(name for name in below if name[0] != ".")
            folder = os.path.normpath(parent)
            if folder in folders:
                continue
            image_folder = f"{top}{os.sep}images{folder.removeprefix(f'{top}{os.sep}labels')}"
            found = _names_in(image_folder) if os.path.isdir(image_folder) else []
            stems = {os.path.splitext(name)[0] for name in found if _is_image(name)}
            lost = [name for name in sorted(names) if name[0] != "." and os.path.splitext(name)[1] == ".txt"]
            lost = [
                name for name in lost if os.path.splitext(name)[0] not in stems and name not in _NOT_LABELS
            ]
            if lost:
                what = f"label without image in {image_folder}{first_of(len(lost))}"
                hint = "each label file belongs in the folder that corresponds to its image's"
                faults.append(Fault(os.path.join(folder, lost[0]), 0, what, hint, warning=True))
    return faults


def _other_images(folders: set[str]) -> list[Fault]:
    """Return a warning for each folder with images of a format that is not read."""
    faults = []
    for folder in filter(os.path.isdir, sorted(folders)):
        names = [name for name in _names_in(folder) if os.path.splitext(name)[1].lower() in _OTHER_IMAGES]
        if names:
            what = f"not read as an image{first_of(len(names))}"
            faults.append(
                Fault(os.path.join(folder, names[0]), 0, what, f"convert it; {_ENDINGS}", warning=True)
            )
    return faults


def _without_label(
    images: list[str], files: list[str], stamps: npt.NDArray[np.int64], kept: Sequence[int]
) -> list[Fault]:
    """Return a warning that counts the images without a label file, if others have one."""
    without = [k for k in kept if stamps[k, 2] < 0]
    if not without or len(without) == len(kept):
        return []
    what = f"has no label file, so it counts as background{first_of(len(without))}"
    return [
        Fault(
            images[without[0]], 0, what, f"expected {files[without[0]]}, empty for background", warning=True
        )
    ]
