"""Segmentation datasets: folders of images and masks, and the embedded digits."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image as Pillow

from trainer.config import DIGITS, IGNORED
from trainer.config.text_file import read_text
from trainer.data.dataset import Image, Ints, NoImages, file_fingerprint, read_image
from trainer.data.formats.digits import Digits
from trainer.data.formats.listing import images_below
from trainer.data.images.image_check import read_headers
from trainer.data.images.image_file import ImageState
from trainer.data.progress import in_threads
from trainer.errors import TrainerError

Split = Literal["train", "val"]
Mask = npt.NDArray[np.uint8]  # (h, w): a class, or IGNORED

CLASSES = "classes.txt"
MASKED_PAGES = {"train": 512, "val": 64}  # fewer than in detection: enough for two classes
_LAYOUT = "see docs/how-to/train.md"
_PIXELS = {"1", "L", "P"}  # Pillow's modes with one channel of at most 8 bits


class MaskFolder:
    """Dataset of images ROOT/images/SPLIT/a.jpg and masks ROOT/masks/SPLIT/a.png; all masks are checked when opened."""

    def __init__(self, root: str, split: Split) -> None:
        self.names: list[str] = []  # set by check_classes
        self._images = Path(root) / "images" / split
        self._masks = Path(root) / "masks" / split
        for folder in (self._images, self._masks):
            if not folder.is_dir():
                raise TrainerError(f"--data {root}: it has no folder {folder.relative_to(root)}", _LAYOUT)
        names = sorted(os.path.relpath(path, self._images) for path in images_below(self._images))
        self._paths = np.array(names, object).astype("U")
        self.counts = np.zeros(256, np.int64)  # pixels of each value
        self._highest: list[int] = []  # class of each mask
        states = read_headers([str(self._images / name) for name in names])
        for counts in in_threads(lambda k: self._checked(k, states[k]), range(len(names)), "reading masks"):
            self.counts += counts
            self._highest.append(int(np.flatnonzero(counts[:IGNORED]).max(initial=0)))

    def _checked(self, index: int, state: ImageState) -> Ints:
        """Return the number of pixels of each value of a mask; raise TrainerError if the mask is invalid."""
        image = self._images / self.name(index)
        path = self._mask_path(index)
        size = state.height, state.width
        if state.problem:
            raise TrainerError(f"{image}: not a readable image: {state.problem}", "remove or replace it")
        mask = self.mask(index)
        if mask.shape != size:
            what = f"{path}: {mask.shape[1]} x {mask.shape[0]} px, but its image has {size[1]} x {size[0]}"
            raise TrainerError(what, "a mask has a class for every pixel of its image")
        return np.bincount(mask.reshape(-1), minlength=256)

    def check_classes(self, names: list[str]) -> None:
        """Set the class names; raise TrainerError for the first mask with a value that is none of them."""
        self.names = names
        for index, highest in enumerate(self._highest):
            if highest >= len(names):
                raise TrainerError(
                    f"{self._mask_path(index)}: a pixel has the value {highest}, but the classes are 0 to {len(names) - 1}",
                    f"add its name to {CLASSES}, or set the pixels to {IGNORED}, which is ignored",
                )

    def __len__(self) -> int:
        return len(self._paths)

    def name(self, index: int) -> str:
        """Return the image's path relative to the split's folder."""
        return str(self._paths[index])

    def _mask_path(self, index: int) -> Path:
        return (self._masks / self.name(index)).with_suffix(".png")

    def image(self, index: int) -> Image:
        """Decode the file, with its EXIF orientation, as uint8 (h, w, 3) RGB."""
        return read_image(str(self._images / self.name(index)), completes=True)

    def mask(self, index: int) -> Mask:
        """Return the values of the mask's pixels, or their palette indices: a class, or IGNORED."""
        path = self._mask_path(index)
        try:
            with Pillow.open(path) as opened:
                if opened.mode not in _PIXELS:
                    what = f"{path}: its pixels are {opened.mode}, but a mask must have one channel of 8 bits"
                    hint = "save the index of each pixel's class, in a PNG of one channel or with a palette"
                    raise TrainerError(what, hint)
                return np.asarray(opened).astype(np.uint8)
        except (OSError, SyntaxError, ValueError) as error:  # Pillow's errors for damaged files
            what = f"{path}: not a readable PNG: {error}"
            raise TrainerError(what, "add or replace it, or remove the image") from None

    def pixels(self) -> Ints:
        """Return the number of pixels of each class (nc,), counted when the dataset was opened."""
        return self.counts[: len(self.names)]

    def fingerprint(self) -> str:
        """Return a hash of the names and sizes of all files, which detects an incomplete copy."""
        names = self._paths.tolist()
        masks = [str(Path(name).with_suffix(".png")) for name in names]
        return file_fingerprint(self.names, self._images, names) + file_fingerprint([], self._masks, masks)


class DigitMasks(Digits):
    """Dataset of pages of handwritten digits with the classes background and digit.

    Ten digit classes would need more than minutes of training.
    """

    def __init__(self, split: Split, imgsz: int) -> None:
        super().__init__(split, imgsz, MASKED_PAGES[split], masks=True)
        self.names = ["background", "digit"]

    def pixels(self) -> Ints:
        """Return the number of pixels of each class (nc,) on all pages."""
        counts = (np.bincount(self.mask(k).reshape(-1), minlength=len(self.names)) for k in range(len(self)))
        return sum(counts, np.zeros(len(self.names), np.int64))


SegmentedImages: TypeAlias = MaskFolder | DigitMasks
EMBEDDED: dict[str, Callable[[Split, int], SegmentedImages]] = {DIGITS: DigitMasks}


def open_segmentation(
    source: str, imgsz: int, *, validates: bool = True
) -> tuple[SegmentedImages, SegmentedImages | NoImages]:
    """Return the training and validation datasets of a folder, or of an embedded one with images of side `imgsz`.

    Unless the training `validates`, the folder needs no validation images.
    """
    if source in EMBEDDED:
        return EMBEDDED[source]("train", imgsz), EMBEDDED[source]("val", imgsz)
    root = Path(source)
    if not root.is_dir():
        raise TrainerError(
            f"--data {source}: no such folder",
            f"for --task segment give {', '.join(EMBEDDED)}, or a folder with images/train, images/val, masks/train "
            "and masks/val; in a container, mount the folder",
        )
    train = MaskFolder(source, "train")
    val = MaskFolder(source, "val") if validates else None
    parts = {"train": train, **({} if val is None else {"val": val})}
    for split, part in parts.items():
        least = 2 if split == "train" else min(len(part), 1)
        if np.count_nonzero(part.counts[:IGNORED]) < least:
            seen = ", ".join(map(str, np.flatnonzero(part.counts))) or "none, because it has no image"
            what = f"--data {source}: too few classes in masks/{split} (values: {seen})"
            raise TrainerError(what, f"number the classes 0, 1, ...; use {IGNORED} only for pixels to ignore")
    values = np.flatnonzero(np.sum([part.counts for part in parts.values()], axis=0)[:IGNORED])
    names = _names(root) or [str(k) for k in range(int(values[-1]) + 1)]
    for part in parts.values():
        part.check_classes(names)
    return train, NoImages(names) if val is None else val


def _names(root: Path) -> list[str]:
    """Return the class names of classes.txt, one per line; empty without the file."""
    path = root / CLASSES
    if not path.is_file():
        return []
    try:
        names = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise TrainerError(f"{path}: cannot be read: {error}", "write one class name per line") from None
    if not 0 < len(names) <= IGNORED or len(set(names)) < len(names):
        what = f"{path}: {len(names)} names, of which only {len(set(names))} are different"
        raise TrainerError(what, "write one class name per line")
    return names
