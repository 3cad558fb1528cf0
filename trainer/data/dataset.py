"""Datasets of detection: their protocol, how an image file is decoded, and fingerprints of the files."""

import hashlib
from pathlib import Path
from typing import Protocol

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image as Pillow

from trainer.errors import TrainerError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Image = npt.NDArray[np.uint8]  # (h, w, 3), RGB
Pixels = npt.NDArray[np.uint8]  # (p, 3), RGB
Labels = npt.NDArray[np.float32]  # (n, 5): class, cx, cy, w, h as fractions of the image's sides
Segment = npt.NDArray[np.float32]  # (k, 2): a polygon's corners x, y as fractions; (0, 2) without one

IMAGE_HINT = "replace the image, or delete it and its label file"
MOST_PIXELS = 2**30  # of an image that OpenCV decodes, to 3 GiB
END = b"\xff\xd9"  # the end marker of a JPEG
# Pillow refuses 179 megapixels, to protect programs that decode uploads.
if Pillow.MAX_IMAGE_PIXELS is not None:
    Pillow.MAX_IMAGE_PIXELS = max(Pillow.MAX_IMAGE_PIXELS, MOST_PIXELS)
_FLAGS = {1: cv2.IMREAD_COLOR, 2: cv2.IMREAD_REDUCED_COLOR_2, 4: cv2.IMREAD_REDUCED_COLOR_4}
_FLAGS[8] = cv2.IMREAD_REDUCED_COLOR_8


def reduction(longer: int, min_side: int) -> int:
    """Return the factor, 1, 2, 4 or 8, of a reduced decoding of a side of `longer` px (see Dataset.image)."""
    return next((by for by in (8, 4, 2) if min_side and longer >= by * min_side), 1)


def completed(content: bytes) -> bytes:
    """Return the bytes of a JPEG with an end marker, without which OpenCV refuses it, and others as they are."""
    return content + END if content.startswith(b"\xff\xd8") and not content.endswith(END) else content


def read_image(path: str, factor: int = 1, *, completes: bool = False) -> Image:
    """Decode an image file at 1 / `factor` of its size, with its EXIF orientation, as uint8 (h, w, 3) RGB.

    With `completes`, a JPEG may lack its end marker: its file must be known to be complete otherwise, because OpenCV
    fills missing rows with gray.
    """
    try:
        with open(path, "rb", buffering=0) as stream:  # noqa: PTH123 (faster than Path.open)
            content = completed(stream.read()) if completes else stream.read()
        image = cv2.imdecode(np.frombuffer(content, np.uint8), _FLAGS[factor])
    except (OSError, ValueError, cv2.error):
        image = None
    if image is None:
        raise TrainerError(f"{path}: cannot be decoded", IMAGE_HINT)
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image))


class Dataset(Protocol):
    """Protocol of a map-style dataset of images with labelled boxes.

    A dataset whose `image` uses `min_side` sets the attribute `decodes_reduced`; a cache then reserves less memory.
    """

    @property
    def names(self) -> list[str]:
        """The class names; a label's class is an index into them."""

    @property
    def flips(self) -> bool:
        """Whether a mirrored image keeps its labels (a mirrored digit does not)."""

    def __len__(self) -> int: ...

    def size(self, index: int) -> tuple[int, int]:
        """Return (height, width) in pixels of the stored image, without decoding it."""

    def name(self, index: int) -> str:
        """Return the image's name for messages and results: its file."""

    def image(self, index: int, min_side: int = 0) -> Image:
        """Return the image as uint8 (h, w, 3) RGB, read-only.

        A nonzero `min_side` permits a decoding reduced by `reduction`, down to a longer side of `min_side` px.
        """

    def labels(self, index: int) -> Labels:
        """Return the boxes as float32 (n, 5): class, cx, cy, w, h as fractions of the image's sides."""

    def segments(self, index: int) -> list[Segment]:
        """Return the polygons of `labels(index)`, in the same order; (0, 2) for a plain box."""


class NoImages:
    """A split without images: the validation split with --noval."""

    flips = True

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return 0


def fingerprint_of(dataset: Dataset) -> str:
    """Return a string that is equal on two nodes with the same images and boxes.

    A dataset without a method `fingerprint` is compared by its number of images and its classes only.
    """
    own = getattr(dataset, "fingerprint", None)
    return str(own()) if own else f"{len(dataset)} {dataset.names}"


def file_fingerprint(names: list[str], folder: Path, files: list[str]) -> str:
    """Return a hash of class names, and of the names and sizes of `files` in `folder`; shows an incomplete copy."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=16)
    for file in files:
        digest.update(f"{file} {(folder / file).stat().st_size}\n".encode())
    return digest.hexdigest()
