"""Classification datasets: class folders, CIFAR, and the embedded digits."""

import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import cv2
import numpy as np

from trainer.config import CIFAR, DIGITS
from trainer.data.dataset import Image, file_fingerprint, read_image, reduction
from trainer.data.formats.digits import scans
from trainer.data.formats.listing import LINK_HINT, images_below
from trainer.distributed.machine_lock import one_per_machine
from trainer.errors import TrainerError

Split = Literal["train", "val"]
_FOLDERS = {"train": ("train",), "val": ("val", "test", "valid", "validation")}


class Folder:
    """Dataset of class folders: ROOT/train/cat/1.jpg."""

    def __init__(self, root: str, split: Split) -> None:
        found = [Path(root, name) for name in _FOLDERS[split] if Path(root, name).is_dir()]
        if not found:
            raise TrainerError(
                f"--data {root}: no folder {' or '.join(_FOLDERS[split])}", "see docs/how-to/train.md"
            )
        self._root = found[0]
        broken = [
            str(path) for path in sorted(self._root.iterdir()) if path.is_symlink() and not path.exists()
        ]
        if broken:
            raise TrainerError(f"{broken[0]}: broken symbolic link", LINK_HINT)
        # Skip hidden names: `.ipynb_checkpoints` is no class, and `._1.jpg` of macOS no image.
        self.names = sorted(
            path.name for path in self._root.iterdir() if path.is_dir() and path.name[0] != "."
        )
        paths = [
            [os.path.relpath(path, self._root) for path in images_below(self._root / name)]
            for name in self.names
        ]
        empty = [name for name, found in zip(self.names, paths, strict=True) if not found]
        if len(self.names) < 2 or empty:
            what = (
                f"no image in {', '.join(empty[:5])}"
                if empty
                else f"fewer than two class folders: {self.names}"
            )
            hint = "each class needs a folder with images; if the class folders are inside another one, move them up"
            raise TrainerError(f"--data {root}: {self._root}: {what}", hint)
        # Flat arrays: reference counts would copy a list of tuples into every worker, page by page.
        self._paths = np.array([path for found in paths for path in found], object).astype("U")
        self._labels = np.repeat(np.arange(len(paths)), [len(found) for found in paths])

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, index: int) -> str:
        """Return the image's path relative to the split's folder."""
        return str(self._paths[index])

    def label(self, index: int) -> int:
        """Return the index of the image's folder in the sorted folders."""
        return int(self._labels[index])

    def image(self, index: int, min_side: int = 0) -> Image:
        """Decode the file as uint8 (h, w, 3) RGB; `min_side` permits a JPEG with a shorter side of so many pixels."""
        path = self._root / self.name(index)
        factor = 1
        if min_side and path.suffix.lower() in (".jpg", ".jpeg"):
            from PIL import Image as Header  # reads a few bytes only

            try:
                with Header.open(path) as header:
                    factor = reduction(min(header.size), min_side)
            except OSError as error:
                raise TrainerError(f"{path}: not an image: {error}", "remove or replace it") from None
        return read_image(str(path), factor)

    def fingerprint(self) -> str:
        """Return a hash of the names and sizes of all files, which detects an incomplete copy."""
        return file_fingerprint(self.names, self._root, self._paths.tolist())


class Arrays:
    """Dataset in memory: images uint8 (n, h, w, 3) and their classes (n,)."""

    def __init__(self, source: str, names: list[str], images: Any, labels: Any) -> None:
        self.names = names
        self._source = source
        self._images = images
        self._labels = np.asarray(labels, np.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, index: int) -> str:
        """Return the dataset's name and the image's index."""
        return f"{self._source} {index}"

    def label(self, index: int) -> int:
        """Return the image's class."""
        return int(self._labels[index])

    def image(self, index: int, min_side: int = 0) -> Image:
        """Return the image; `min_side` is ignored."""
        return np.asarray(self._images[index])

    def fingerprint(self) -> str:
        """Return a hash of all images and classes."""
        digest = hashlib.blake2b(repr(self.names).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self._images).tobytes() + self._labels.tobytes())
        return digest.hexdigest()


def _digits(split: Split) -> Arrays:
    """Return scikit-learn's handwritten digits, enlarged to 32 x 32 px."""
    levels, digits = scans(split)
    resized = [cv2.resize(scan * np.uint8(15), (32, 32), interpolation=cv2.INTER_CUBIC) for scan in levels]
    images = np.repeat(np.stack(resized)[..., None], 3, 3)
    return Arrays("digit", [str(digit) for digit in range(10)], images, digits)


def _cifar(source: str, split: Split) -> Arrays:
    """Return CIFAR from `$TORCH_HOME/datasets`, by default ~/.cache/torch/datasets; download it if necessary."""
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


ClassifiedImages: TypeAlias = Folder | Arrays
EMBEDDED: dict[str, Callable[[Split], ClassifiedImages]] = {DIGITS: _digits}
EMBEDDED |= {name: partial(_cifar, name) for name in CIFAR}


def open_classification(source: str, split: Split) -> ClassifiedImages:
    """Open `source`: the name of an embedded dataset, or a folder with train/ and val/ (or test/) of class folders."""
    if source in EMBEDDED:
        return EMBEDDED[source](split)
    if not Path(source).is_dir():
        raise TrainerError(
            f"--data {source}: no such folder",
            f"for --task classify give {', '.join(EMBEDDED)}, or a folder with train/ and val/, each with a folder "
            "per class; in a container, mount the folder",
        )
    return Folder(source, split)
