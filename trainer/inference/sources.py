"""Pictures and videos by what a person types, and how they are read."""

from __future__ import annotations

import glob
import itertools
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np

from trainer.data.dataset import Image
from trainer.data.listing import SUFFIXES
from trainer.errors import TrainerError

VIDEOS = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ts", ".webm", ".wmv"})


def find_sources(sources: tuple[str, ...]) -> list[Path]:
    """The pictures and videos that are meant: files, folders (not those below), patterns, .txt lists of paths."""
    if not sources:
        raise TrainerError("--source: nothing to look at", "give pictures, videos, folders, patterns or a .txt list")
    found = list(itertools.chain.from_iterable(_expand(source) for source in sources))
    return list(dict.fromkeys(found))


def _expand(source: str) -> list[Path]:
    where, path = f"--source {source}", Path(source)
    known = f"pictures end in {_listed(SUFFIXES)}, videos in {_listed(VIDEOS)}"
    if (source.isdecimal() and not path.exists()) or "://" in source:
        raise TrainerError(f"{where}: cameras and addresses are not read", "save it as a picture or video first")
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if _is_known(p))
        if not files:
            raise TrainerError(f"{where}: no picture and no video in this folder", known)
        return files
    if path.suffix.lower() == ".txt" and path.is_file():
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise TrainerError(f"{where}: cannot be read: {error}", "one path in each line, in UTF-8") from None
        lines = [(k, line.strip()) for k, line in enumerate(text.splitlines(), 1)]
        files = []
        for number, line in lines:
            if line:
                file = path.parent / line
                if not file.is_file():
                    raise TrainerError(f"{source}:{number}: no such file: {file}", "correct or delete the line")
                files.append(file)
        if not files:
            raise TrainerError(f"{where}: the list is empty", "write one path to a line, relative to the list")
        return files
    if path.is_file():
        if not _is_known(path):
            raise TrainerError(f"{where}: neither a picture nor a video", known)
        return [path]
    if glob.has_magic(source):
        files = sorted(Path(p) for p in glob.glob(source, recursive=True) if _is_known(Path(p)))  # noqa: PTH207
        if not files:
            raise TrainerError(f"{where}: no picture and no video has such a name", known)
        return files
    raise TrainerError(f"{where}: no such file or folder", f"looked for {path.absolute()}")


def _listed(suffixes: frozenset[str]) -> str:
    return ", ".join(sorted(suffixes))


def _is_known(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES | VIDEOS and not path.name.startswith(".")


class Unreadable(Exception):
    """A picture or video that cannot be decoded."""


def frames(path: Path) -> Iterator[tuple[int | None, Image, float]]:
    """(None, picture (h, w, 3) RGB, 0.0), or of a video each frame's number from 1, frame and frames per second."""
    return _frames(path) if is_video(path) else _picture(path)


def is_video(path: Path) -> bool:
    """Whether it is read as a video."""
    return path.suffix.lower() in VIDEOS


def _picture(path: Path) -> Iterator[tuple[None, Image, float]]:
    try:
        picture = cv2.imdecode(np.frombuffer(path.read_bytes(), np.uint8), cv2.IMREAD_COLOR)
    except OSError as error:
        raise Unreadable(error.strerror) from None
    except cv2.error:
        picture = None
    if picture is None:
        raise Unreadable("not a picture that can be decoded")
    yield None, np.asarray(cv2.cvtColor(picture, cv2.COLOR_BGR2RGB)), 0.0


def _frames(path: Path) -> Iterator[tuple[int, Image, float]]:
    """A video's frames, numbered from 1, with its frames per second."""
    video = cv2.VideoCapture(str(path))
    try:
        fps, expected = video.get(cv2.CAP_PROP_FPS), int(video.get(cv2.CAP_PROP_FRAME_COUNT))
        number = 0
        while True:
            more, frame = video.read()
            if not more:
                break
            number += 1
            yield number, np.asarray(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)), fps if fps > 0 else 30.0
        if not number:
            raise Unreadable("not a video that can be decoded")
        if number < 0.9 * expected:  # the header's number may be a little off
            raise Unreadable(f"it breaks off after {number} of {expected} frames")
    finally:
        video.release()
