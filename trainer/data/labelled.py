"""Data sets of whole pictures with one class each: folders, CIFAR, and the embedded digits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import cv2
import numpy as np

from trainer.config import CIFAR, DIGITS
from trainer.data.dataset import Image, reduction
from trainer.data.digits import scans
from trainer.errors import TrainerError
from trainer.machine_lock import one_per_machine

Split = Literal["train", "val"]
_FOLDERS = {"train": ("train",), "val": ("val", "test", "valid", "validation")}
_READ = {1: cv2.IMREAD_COLOR, 2: cv2.IMREAD_REDUCED_COLOR_2, 4: cv2.IMREAD_REDUCED_COLOR_4}
_READ[8] = cv2.IMREAD_REDUCED_COLOR_8


class Labelled(Protocol):
    """Pictures with one class each, addressed by a number from 0 to len - 1."""

    @property
    def names(self) -> list[str]:
        """The class names; a label is an index into them."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What the picture is called in messages: its file."""

    def image(self, index: int, min_side: int = 0) -> Image:
        """The picture as uint8 (h, w, 3) RGB.

        With `min_side` the reader may shrink it while decoding, its shorter side to no less than `min_side` px.
        """

    def label(self, index: int) -> int:
        """Its class."""


class Folder:
    """Pictures in a folder for each class: ROOT/train/cat/1.jpg, as torchvision's ImageFolder reads them."""

    def __init__(self, root: str, split: Split) -> None:
        from torchvision.datasets.folder import find_classes, make_dataset

        self._root = _split_folder(Path(root), split)
        try:
            # Without what other programs hide: `.ipynb_checkpoints` is no class, and `._1.jpg` of macOS no picture.
            self.names: list[str] = [name for name in find_classes(str(self._root))[0] if not name.startswith(".")]
            numbers = {name: number for number, name in enumerate(self.names)}
            samples = make_dataset(str(self._root), numbers, is_valid_file=_is_picture) if numbers else []
        except FileNotFoundError as error:
            raise TrainerError(
                f"--data {root}: {' '.join(str(error).split())}", "each class needs a folder with pictures"
            ) from None
        if not samples:
            raise TrainerError(
                f"--data {root}: no class folder in {self._root}", "each class needs a folder with pictures"
            )
        if len(self.names) < 2:
            raise TrainerError(
                f"--data {root}: one class folder alone in {self._root}: {self.names[0]}",
                "each class needs a folder of its own there; if they are in that one, move them up",
            )
        # Flat arrays: a list of a million tuples would be copied into every loading process, page by page.
        self._paths = np.array([os.path.relpath(path, self._root) for path, _ in samples], object).astype("U")
        self._labels = np.array([label for _, label in samples], np.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, index: int) -> str:
        """The picture's path below the split's folder."""
        return str(self._paths[index])

    def label(self, index: int) -> int:
        """The number of the picture's folder, in the order of their names."""
        return int(self._labels[index])

    def image(self, index: int, min_side: int = 0) -> Image:
        """The decoded file, turned as its camera was; shrunk while decoding where it is large."""
        path = self._root / self.name(index)
        read = cv2.IMREAD_COLOR
        if min_side and path.suffix.lower() in (".jpg", ".jpeg"):
            from PIL import Image as Header  # reads a few bytes only

            try:
                with Header.open(path) as header:
                    read = _READ[reduction(min(header.size), min_side)]
            except OSError as error:
                raise TrainerError(f"{path}: not a picture: {error}", "remove or replace it") from None
        picture: Any = cv2.imread(str(path), read)
        if picture is None:
            raise TrainerError(f"{path}: cannot be read as a picture", "remove or replace it")
        return np.asarray(cv2.cvtColor(picture, cv2.COLOR_BGR2RGB))

    def fingerprint(self) -> str:
        """Of the names and sizes of all files, so that a half-copied set is found out."""
        digest = hashlib.blake2b(repr(self.names).encode(), digest_size=16)
        for name in self._paths.tolist():
            digest.update(f"{name} {(self._root / name).stat().st_size}\n".encode())
        return digest.hexdigest()


class Arrays:
    """Small pictures that are all in memory: uint8 (n, h, w, 3) and their classes (n,)."""

    def __init__(self, source: str, names: list[str], images: Any, labels: Any) -> None:
        self.names = names
        self._source, self._images, self._labels = source, images, np.asarray(labels, np.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, index: int) -> str:
        """The picture's number: there is no file."""
        return f"{self._source} {index}"

    def label(self, index: int) -> int:
        """Its class."""
        return int(self._labels[index])

    def image(self, index: int, min_side: int = 0) -> Image:
        """The picture; it costs no decoding, so `min_side` changes nothing."""
        return np.asarray(self._images[index])

    def fingerprint(self) -> str:
        """Of all pictures and classes."""
        digest = hashlib.blake2b(repr(self.names).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self._images).tobytes() + self._labels.tobytes())
        return digest.hexdigest()


def _is_picture(path: str) -> bool:
    from torchvision.datasets.folder import is_image_file

    return is_image_file(path) and not Path(path).name.startswith(".")


def _digits(split: Split) -> Arrays:
    """scikit-learn's handwritten digits, enlarged to 32 x 32 px; every fifth is for validation."""
    levels, digits = scans()
    of_val = np.arange(len(digits)) % 5 == 4
    chosen = np.flatnonzero(of_val if split == "val" else ~of_val)
    pictures = [cv2.resize(levels[k] * np.uint8(15), (32, 32), interpolation=cv2.INTER_CUBIC) for k in chosen]
    images = np.repeat(np.stack(pictures)[..., None], 3, 3)
    return Arrays("digit", [str(digit) for digit in range(10)], images, digits[chosen])


def _cifar(source: str, split: Split) -> Arrays:
    """CIFAR from where torchvision keeps or fetches it: `$TORCH_HOME/datasets`, by default ~/.cache/torch/datasets."""
    import torch
    from torchvision import datasets

    root = Path(torch.hub.get_dir()).with_name("datasets")
    made = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[source]
    try:
        with one_per_machine(root.absolute()):
            found = made(str(root), train=split == "train", download=True)
    except (OSError, RuntimeError) as error:
        raise TrainerError(
            f"--data {source}: not in {root}, and it cannot be fetched: {' '.join(str(error).split())}",
            f'on a machine with a network: python -c "from torchvision.datasets import {made.__name__} as C; '
            f"C('{root}', download=True)\", and copy that folder",
        ) from None
    return Arrays(source, list(found.classes), found.data, found.targets)


EMBEDDED: dict[str, Callable[[Split], Labelled]] = {
    DIGITS: _digits,
    **{name: partial(_cifar, name) for name in CIFAR},
}


def open_labelled(source: str, split: Split) -> Labelled:
    """The data set `source`: an embedded one's name, or a folder with train/ and val/ (or test/) of class folders."""
    if source in EMBEDDED:
        return EMBEDDED[source](split)
    if not Path(source).is_dir():
        raise TrainerError(
            f"--data {source}: no such folder",
            f"for --task classify give {', '.join(EMBEDDED)}, or a folder with train/ and val/, which hold a folder "
            "for each class; a container sees only the folders that are mounted into it",
        )
    return Folder(source, split)


def _split_folder(root: Path, split: Split) -> Path:
    names = _FOLDERS[split]
    for name in names:
        if (root / name).is_dir():
            return root / name
    raise TrainerError(f"--data {root}: it has no folder {' or '.join(names)}", "see docs/classification.md")
