"""What is known of an image file before training: its size, why it cannot be read, and what is odd about it."""
# ruff: noqa: PTH113, PTH202

import os
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from PIL import Image as Pillow
from PIL.TiffImagePlugin import TiffImageFile

from trainer.data.dataset import MOST_PIXELS

_ORIENTATION = 0x0112  # EXIF tag; 5 to 8 are quarter turns
_TIFF_WIDTH, _TIFF_HEIGHT, _TIFF_BITS = 256, 257, 258  # TIFF tags; the size is that before the rotation
_LAST_BYTES = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
_WITH_FRAMES = ("GIF", "PNG", "TIFF", "WEBP")  # a JPEG's other images (MPO) are previews

# Oddities of an image that can be read, with their text; DAMAGED is named for each image, the others are counted.
DAMAGED = "damaged"
NO_END = "no end"
DARK = "dark"
FRAMES = "frames"
ODDITIES = {
    DAMAGED: "is damaged, so a part of it is wrong: {}",
    NO_END: "lacks the end marker of a JPEG, and is complete without it",
    DARK: "has 16 bits per value but none above {}: training reads the upper 8 bits, which are nearly black",
    FRAMES: "has {} frames, of which the first is read",
}


@dataclass(frozen=True)
class ImageState:
    """An image's (height, width) in pixels after its EXIF rotation, or its problem; `oddities` are by ODDITIES."""

    height: int = 0
    width: int = 0
    problem: str = ""
    oddities: dict[str, str] = field(default_factory=dict)
    is_final: bool = True  # False: another try may find another state


class Header(NamedTuple):
    """What an image's first bytes say."""

    height: int  # after the EXIF rotation that the decoder applies
    width: int
    is_whole: bool  # whether it ends as its format does, where that is known
    format: str
    frames: int
    bits: int  # per value, of a TIFF; 0 for other formats


class UnreadableError(Exception):
    """An image that cannot be read, with the reason."""


def read_header(path: str) -> Header:
    """Read the header of an image; raise UnreadableError."""
    try:
        with Pillow.open(path) as header:
            width, height = header.size
            bits = 0
            if isinstance(
                header, TiffImageFile
            ):  # newer versions of Pillow return the size after the rotation
                width = header.tag_v2[_TIFF_WIDTH]
                height = header.tag_v2[_TIFF_HEIGHT]
                bits = max(header.tag_v2.get(_TIFF_BITS, (1,)))
            kind = header.format or ""
            # getexif() decodes a whole PNG if its header has no EXIF.
            has_exif = kind == "TIFF" or "exif" in header.info
            if has_exif and header.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8):
                width, height = height, width
            frames = getattr(header, "n_frames", 1) if kind in _WITH_FRAMES else 1
            last = _LAST_BYTES.get(kind, b"")
            stream = header.fp
            is_whole = True
            if last and stream:
                stream.seek(-len(last), os.SEEK_END)
                is_whole = stream.read() == last
    except Exception as error:  # Pillow's readers raise many types
        what = str(error) if not os.path.isfile(path) or os.path.getsize(path) else "empty file"
        raise UnreadableError(re.sub(r"<_io\.[^>]*>", "it", what.replace(repr(path), "it"))) from None
    if width * height > MOST_PIXELS:
        raise UnreadableError(
            f"{width} x {height} px are more than the {MOST_PIXELS:,} px that can be decoded"
        )
    return Header(height, width, is_whole, kind, frames, bits)
