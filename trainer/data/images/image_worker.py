"""Program that decodes images (python -m trainer.data.images.image_worker): stdin has a path a line, stdout its state.

OpenCV's JPEG decoder writes about damage to stderr, without the file's name. Here stderr is a file that is read after
each image. A separate process also survives a file that ends the decoder.

Pillow's verify() and load() would be 150 lines less and no faster (1.5 to 2.2 s for 1,000 JPEGs of 640 x 480 px on two
cores; here 1.7 to 1.8 s), and they do not suffice: of the files in tests/unit/test_image_faults.py they report all that
cannot be read, but they hide what libjpeg says of damaged JPEGs, and refuse a JPEG that only lacks its end marker.
"""

import dataclasses
import json
import os
import signal
import sys
import tempfile
from typing import IO

import cv2
import numpy as np

from trainer.data.dataset import END, Image, completed
from trainer.data.images.image_file import (
    DAMAGED,
    DARK,
    FRAMES,
    NO_END,
    Header,
    ImageState,
    UnreadableError,
    read_header,
)

_REDUCED = 8  # a JPEG is decoded at an eighth of its size: all its data is read, several times faster
_PNG_BITS = 24  # position of a PNG's bits per value
_DARK_BELOW = 2**14  # values of a sensor with 10, 12 or 14 bits


def main() -> None:
    """Answer until the end of stdin."""
    # Ctrl-C is for the process that asks, whose end closes stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cv2.utils.logging.setLogLevel(0)
    with tempfile.TemporaryFile() as messages:
        os.dup2(messages.fileno(), 2)
        for line in sys.stdin:
            print(json.dumps(dataclasses.asdict(inspect(json.loads(line), messages))), flush=True)


def inspect(path: str, messages: IO[bytes]) -> ImageState:
    """Read and decode an image as training does; `messages` gets what is written to stderr."""
    try:
        header = read_header(path)
        with open(path, "rb") as file:  # noqa: PTH123
            content = file.read()
    except UnreadableError as error:
        return ImageState(problem=str(error))
    except OSError as error:
        return ImageState(problem=error.strerror or str(error))
    if content.startswith(b"\xff\xd8"):
        return _jpeg(content, header, messages)
    image = _decoded(content, cv2.IMREAD_COLOR)
    oddities = {}
    if header.frames > 1:
        oddities[FRAMES] = str(header.frames)
    bits = content[_PNG_BITS] if header.format == "PNG" else header.bits
    if bits == 16 and image is not None:
        exact = _decoded(content, cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH)
        most = 0 if exact is None else int(exact.max())
        if 0 < most < _DARK_BELOW:
            oddities[DARK] = f"{2 ** most.bit_length() - 1:,}"
    return _state(image, header, 1, oddities)


def _jpeg(content: bytes, header: Header, messages: IO[bytes]) -> ImageState:
    messages.truncate(0)
    messages.seek(0)
    image = _decoded(content, cv2.IMREAD_REDUCED_COLOR_8)
    has_end = image is not None or content.endswith(END)
    if not has_end:
        image = _decoded(completed(content), cv2.IMREAD_REDUCED_COLOR_8)
    messages.seek(0)
    said = " ".join(messages.read().decode(errors="replace").split())
    if said and not has_end:
        return ImageState(problem="truncated, its last rows are missing")
    oddities = {DAMAGED: said} if said else {}
    if not has_end:
        oddities[NO_END] = ""
    return _state(image, header, _REDUCED, oddities)


def _decoded(content: bytes, flags: int) -> Image | None:
    try:
        return cv2.imdecode(np.frombuffer(content, np.uint8), flags)  # type: ignore[return-value]
    except (cv2.error, MemoryError):
        return None


def _state(image: Image | None, header: Header, factor: int, oddities: dict[str, str]) -> ImageState:
    """Return the state of an image that was decoded at 1 / `factor` of its size."""
    if image is None:
        return ImageState(problem="it cannot be decoded")
    height, width = image.shape[:2]
    # A decoder rounds up or down.
    if any(
        not side // factor <= found <= -(-side // factor)
        for side, found in zip((header.height, header.width), (height, width), strict=True)
    ):
        found = f"{width * factor} x {height * factor}"
        return ImageState(problem=f"it has {found} px, but its header says {header.width} x {header.height}")
    return ImageState(header.height, header.width, oddities=oddities)


if __name__ == "__main__":
    main()
