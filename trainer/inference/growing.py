"""Files that grow while a source is looked at, and are there once they are whole."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2

from trainer.data.dataset import Image
from trainer.errors import TrainerError


@contextlib.contextmanager
def mp4(path: Path) -> Iterator[Callable[[Image, float], None]]:
    """A function that adds a frame (RGB, frames per second) to an MP4 file, which is there once it is whole."""
    temporary = path.with_name(f".{path.stem}.tmp.mp4")
    writer: Any = None

    def add(image: Image, fps: float) -> None:
        nonlocal writer
        if writer is None:
            size = (image.shape[1], image.shape[0])
            writer = cv2.VideoWriter(str(temporary), cv2.VideoWriter.fourcc(*"mp4v"), fps, size)
            if not writer.isOpened():
                raise TrainerError(f"{path}: this OpenCV cannot write MP4 videos", "use --nosave with --save-txt")
        writer.write(cv2.cvtColor(image, cv2.COLOR_RGB2BGR))

    try:
        yield add
        if writer:
            writer.release()
            temporary.replace(path)
    finally:
        if writer:
            writer.release()
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def json_list(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that adds an entry to a JSON list in a file, which is there once it is whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            between = "[\n"

            def add(entry: dict[str, Any]) -> None:
                nonlocal between
                file.write(between + json.dumps(entry))
                between = ",\n"

            yield add
            file.write("\n]\n" if between == ",\n" else "[]\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
