"""Data sets of pictures with a class for every pixel: folders of pictures and masks, and the embedded digits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image as Pillow

from trainer.config import DIGITS, IGNORED
from trainer.data.dataset import Image
from trainer.data.digits import Digits
from trainer.data.faults import Fault
from trainer.data.listing import THREADS, pictures_below
from trainer.data.scan import picture_size
from trainer.errors import TrainerError
from trainer.progress import track

Split = Literal["train", "val"]
Mask = npt.NDArray[np.uint8]  # (h, w): a class, or IGNORED
Ints = npt.NDArray[np.int64]

CLASSES = "classes.txt"
MASKED_PAGES = {"train": 512, "val": 64}  # enough for two classes, and a page costs more time than in detection
_LAYOUT = "see docs/segmentation.md"
_PIXELS = {"1", "L", "P", "I", "I;16"}  # Pillow's kinds of pictures with one number for a pixel


class Masked(Protocol):
    """Pictures with a class for every pixel, addressed by a number from 0 to len - 1."""

    @property
    def names(self) -> list[str]:
        """The class names; a mask's values are indices into them."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What the picture is called in messages: its file."""

    def image(self, index: int) -> Image:
        """The picture as uint8 (h, w, 3) RGB."""

    def mask(self, index: int) -> Mask:
        """The class of each of its pixels, or IGNORED."""

    def pixels(self) -> Ints:
        """(nc,): how many pixels of each class there are in all."""


class MaskFolder:
    """ROOT/images/SPLIT/a.jpg with its classes in ROOT/masks/SPLIT/a.png; all masks are read and checked at once."""

    def __init__(self, root: str, split: Split) -> None:
        self.names: list[str] = []  # known once the masks of all splits are
        self._images, self._masks = Path(root) / "images" / split, Path(root) / "masks" / split
        for folder in (self._images, self._masks):
            if not folder.is_dir():
                raise TrainerError(f"--data {root}: it has no folder {folder.relative_to(root)}", _LAYOUT)
        self._paths = np.array(_names_below(self._images), object).astype("U")
        self.counts = self._count()  # (256,): pixels of each value

    def _count(self) -> Ints:
        counts = np.zeros(256, np.int64)
        with ThreadPoolExecutor(THREADS) as pool:
            for each in track(pool.map(self._checked, range(len(self))), len(self), "reading masks"):
                counts += each
        return counts

    def _checked(self, index: int) -> Ints:
        """The pixels of each value of a mask that is there, readable and as large as its picture."""
        picture, path = self._images / self.name(index), self._mask_path(index)
        size = picture_size(str(picture))
        if isinstance(size, Fault):
            raise TrainerError(f"{picture}: {size.what}", "remove or replace it")
        mask = read_mask(path, picture)
        if mask.shape != size:
            raise TrainerError(
                f"{path}: {mask.shape[1]} x {mask.shape[0]} px, its picture has {size[1]} x {size[0]}",
                "a mask has a class for every pixel of its picture",
            )
        return np.bincount(mask.reshape(-1), minlength=256)

    def check_classes(self, names: list[str]) -> None:
        """Take the class names; TrainerError naming the first mask with a value that is none of them."""
        self.names = names
        odd = np.flatnonzero(self.counts[:IGNORED])
        if not len(odd) or odd[-1] < len(names):
            return
        for index in range(len(self)):
            self.mask(index)

    def __len__(self) -> int:
        return len(self._paths)

    def name(self, index: int) -> str:
        """The picture's path below the split's folder."""
        return str(self._paths[index])

    def _mask_path(self, index: int) -> Path:
        return (self._masks / self.name(index)).with_suffix(".png")

    def image(self, index: int) -> Image:
        """The decoded file, turned as its camera was."""
        path = self._images / self.name(index)
        picture: Any = cv2.imread(str(path), cv2.IMREAD_COLOR)
        if picture is None:
            raise TrainerError(f"{path}: cannot be read as a picture", "remove or replace it")
        return np.asarray(cv2.cvtColor(picture, cv2.COLOR_BGR2RGB))

    def mask(self, index: int) -> Mask:
        """The mask's file, as it is now."""
        path = self._mask_path(index)
        mask = read_mask(path, self._images / self.name(index))
        odd = mask[(mask >= len(self.names)) & (mask != IGNORED)]
        if len(odd):
            raise TrainerError(
                f"{path}: a pixel has the value {odd[0]}, the classes are 0 to {len(self.names) - 1}",
                f"add its name to {CLASSES}, or make it {IGNORED}, which does not count",
            )
        return mask

    def pixels(self) -> Ints:
        """Counted when the set was opened."""
        return self.counts[: len(self.names)]

    def fingerprint(self) -> str:
        """Of the names and sizes of all files, so that a half-copied set is found out."""
        digest = hashlib.blake2b(repr(self.names).encode(), digest_size=16)
        for index, name in enumerate(self._paths.tolist()):
            sizes = [path.stat().st_size for path in (self._images / name, self._mask_path(index))]
            digest.update(f"{name} {sizes}\n".encode())
        return digest.hexdigest()


def _names_below(folder: Path) -> list[str]:
    """The pictures below `folder`, relative to it; TrainerError where two would have one mask."""
    names = sorted(os.path.relpath(path, folder) for path in pictures_below(folder))
    owners: dict[str, str] = {}
    for name in names:
        other = owners.setdefault(str(Path(name).with_suffix("")), name)
        if other != name:
            raise TrainerError(f"{folder / name}: shares its mask with {other}", "rename one of the pictures")
    return names


def read_mask(path: Path, picture: Path) -> Mask:
    """The numbers of a PNG's pixels, of one with a palette those of its colours; TrainerError where it has none."""
    try:
        with Pillow.open(path) as opened:
            if opened.mode not in _PIXELS:
                raise TrainerError(
                    f"{path}: a picture in colours ({opened.mode}), a mask has one number for each pixel",
                    "save the number of the class for each pixel, in a PNG of one channel or with a palette",
                )
            values = np.asarray(opened)
    except FileNotFoundError:
        raise TrainerError(f"{picture}: it has no mask {path}", "add it, or remove the picture") from None
    except (OSError, SyntaxError, ValueError) as error:  # Pillow's own for broken files
        raise TrainerError(f"{path}: not a readable PNG: {error}", "remove or replace it") from None
    if values.size and (values.min() < 0 or values.max() > IGNORED):
        raise TrainerError(
            f"{path}: a pixel has the value {values.max()}", f"classes are numbers from 0 to {IGNORED - 1}"
        )
    return values.astype(np.uint8)


class DigitMasks(Digits):
    """The pages of handwritten digits; a pixel lies within the outline of a digit, or beside all.

    Which digit it is would be a class of its own that minutes do not teach a network for pixels.
    """

    def __init__(self, split: Split, imgsz: int) -> None:
        super().__init__(split, imgsz, MASKED_PAGES[split], masks=True)
        self.names = ["background", "digit"]

    def pixels(self) -> Ints:
        """Counted over all pages."""
        return sum(
            (np.bincount(self.mask(k).reshape(-1), minlength=len(self.names)) for k in range(len(self))),
            np.zeros(len(self.names), np.int64),
        )


EMBEDDED: dict[str, Callable[[Split, int], Masked]] = {DIGITS: DigitMasks}


def open_masked(source: str, imgsz: int) -> tuple[Masked, Masked]:
    """The training and validation pictures of `source`: an embedded set's name, whose pages have side `imgsz`, or

    a folder with images/train, images/val, masks/train and masks/val.
    """
    if source in EMBEDDED:
        return EMBEDDED[source]("train", imgsz), EMBEDDED[source]("val", imgsz)
    root = Path(source)
    if not root.is_dir():
        raise TrainerError(
            f"--data {source}: no such folder",
            f"for --task segment give {', '.join(EMBEDDED)}, or a folder with images/train, images/val, masks/train "
            "and masks/val; a container sees only the folders that are mounted into it",
        )
    train, val = MaskFolder(source, "train"), MaskFolder(source, "val")
    if not len(train):
        raise TrainerError(f"--data {source}: there is no picture in images/train", _LAYOUT)
    for split, part in (("train", train), ("val", val)):
        if len(part) and not part.counts[:IGNORED].any():
            raise TrainerError(
                f"--data {source}: no mask in masks/{split} has a pixel that counts, all are {IGNORED}", _LAYOUT
            )
    learnt = np.flatnonzero(train.counts[:IGNORED])
    if len(learnt) < 2:
        others = f", but for {IGNORED}, which does not count" if train.counts[IGNORED] else ""
        raise TrainerError(
            f"--data {source}: every pixel of the masks in masks/train is of class {learnt[0]}{others}",
            f"give what is to be told apart numbers of its own, 0, 1, ...; {IGNORED} is for what is not to be learnt",
        )
    values = np.flatnonzero((train.counts + val.counts)[:IGNORED])
    names = _names(root) or [str(k) for k in range(int(values[-1]) + 1)]
    for part in (train, val):
        part.check_classes(names)
    return train, val


def _names(root: Path) -> list[str]:
    """The class names of classes.txt, a line for each; none where it is not there."""
    path = root / CLASSES
    if not path.is_file():
        return []
    try:
        names = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise TrainerError(f"{path}: cannot be read: {error}", "write the name of a class on each line") from None
    if not 0 < len(names) <= IGNORED or len(set(names)) < len(names):
        raise TrainerError(
            f"{path}: {len(names)} names, {len(set(names))} of them different", "write the name of a class on each line"
        )
    return names
