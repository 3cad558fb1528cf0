"""Sources of a prediction: the images and frames of files, videos, folders, patterns, lists, and arrays."""

import glob
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from trainer.config.text_file import read_text
from trainer.data.dataset import Image
from trainer.data.formats.listing import SUFFIXES
from trainer.errors import TrainerError

VIDEOS = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ts", ".webm", ".wmv"})


class Frame(NamedTuple):
    """An image to predict on."""

    source: str  # its path; "" for an array
    number: int | None  # of a video's frame, from 1
    image: Image  # uint8 (h, w, 3), RGB
    fps: float = 0.0  # frames per second of the video


class SourceError(TrainerError):
    """An image or video that cannot be decoded, or drawn again. The other sources are not affected."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")


def is_video(path: Path) -> bool:
    """Return whether a file is a video, by its suffix."""
    return path.suffix.lower() in VIDEOS


def find_sources(sources: Sequence[str]) -> list[Path]:
    """Return the images and videos of files, folders (without subfolders), patterns and .txt lists of paths."""
    if not sources:
        raise TrainerError(
            "--source is required", "name images, videos, folders, patterns or a .txt list of paths"
        )
    found = list(itertools.chain.from_iterable(_expand(source) for source in sources))
    return list(dict.fromkeys(found))


def _expand(source: str) -> list[Path]:
    where = f"--source {source}"
    path = Path(source)
    if (source.isdecimal() and not path.exists()) or "://" in source:
        raise TrainerError(
            f"{where}: cameras and URLs are not supported",
            "save the images or the video to a file, and name that",
        )
    if path.suffix.lower() == ".txt" and path.is_file():
        return _read_list(path, where)
    if path.is_dir():
        candidates = list(path.iterdir())
    elif path.is_file():
        candidates = [path]
    elif glob.has_magic(source):
        candidates = [Path(match) for match in glob.glob(source, recursive=True)]  # noqa: PTH207
    else:
        raise TrainerError(f"{where}: no such file or folder", f"the full path is {path.absolute()}")
    files = sorted(
        p for p in candidates if p.suffix.lower() in SUFFIXES | VIDEOS and not p.name.startswith(".")
    )
    if not files:
        images, videos = (", ".join(sorted(suffixes)) for suffixes in (SUFFIXES, VIDEOS))
        raise TrainerError(f"{where}: no image or video", f"images end in {images}, videos in {videos}")
    return files


def _read_list(path: Path, where: str) -> list[Path]:
    """Return the files of a list of paths, which are relative to the list."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrainerError(
            f"{where}: cannot be read: {error}", "expected one path per line, in UTF-8"
        ) from None
    files = {number: path.parent / line.strip() for number, line in enumerate(lines, 1) if line.strip()}
    for number, file in files.items():
        if not file.is_file():
            raise TrainerError(f"{path}:{number}: no such file: {file}", "correct or delete the line")
    if not files:
        raise TrainerError(f"{where}: the list is empty", "expected one path per line, relative to the list")
    return list(files.values())


def frames(path: Path) -> Iterator[Frame]:
    """Yield the image of a file, or a video's frames; raise SourceError where one cannot be decoded."""
    if is_video(path):
        yield from _frames_of_video(path)
        return
    try:
        image = cv2.imdecode(np.frombuffer(path.read_bytes(), np.uint8), cv2.IMREAD_COLOR)
    except OSError as error:
        raise SourceError(path, error.strerror or str(error)) from None
    except cv2.error:
        image = None
    if image is None:
        raise SourceError(path, "not an image that can be decoded")
    yield Frame(str(path), None, np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB)))


def _frames_of_video(path: Path) -> Iterator[Frame]:
    video = cv2.VideoCapture(str(path))
    try:
        fps = video.get(cv2.CAP_PROP_FPS)
        expected = int(video.get(cv2.CAP_PROP_FRAME_COUNT))
        number = 0
        while (read := video.read())[0]:
            number += 1
            image = np.asarray(cv2.cvtColor(read[1], cv2.COLOR_BGR2RGB), np.uint8)
            yield Frame(str(path), number, image, fps if fps > 0 else 30.0)
        if not number:
            raise SourceError(path, "not a video that can be decoded")
        if number < 0.9 * expected:  # the header's number may be inexact
            raise SourceError(path, f"it ends after {number} of {expected} frames")
    finally:
        video.release()


def frame_of_array(array: Any) -> Frame:
    """Return a user's image, uint8 (h, w, 3) in BGR, as cv2.imread returns it; raise TrainerError for another array."""
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise TrainerError(
            f"source: an array of shape {array.shape} and type {array.dtype} is not an image",
            "expected uint8 (height, width, 3), in BGR as cv2.imread returns it",
        )
    return Frame("", None, np.ascontiguousarray(array[..., ::-1]))
