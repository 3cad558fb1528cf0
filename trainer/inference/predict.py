"""Detection in images and videos, with drawn images, labels and JSON as output."""

import contextlib
import glob
import itertools
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from trainer.config.inference import PredictSettings
from trainer.config.text_file import read_text
from trainer.data.dataset import Image
from trainer.data.detection_loader import check_imgsz
from trainer.data.listing import SUFFIXES
from trainer.data.paint import letterbox
from trainer.data.progress import bar
from trainer.detectors import Detections, Limits, Parts
from trainer.distributed import comm
from trainer.errors import TrainerError
from trainer.inference.formats import mp4, unique_stems, write_labels
from trainer.plots import draw_boxes, write_image
from trainer.tasks.detector import Detector, load_trained, to_original, type_for
from trainer.weights import checkpoint_file

VIDEOS = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ts", ".webm", ".wmv"})
_DRAWN_PX = 700  # side of an image that gets lines and text of size 1


@dataclass
class Predictions:
    """Result of a prediction: numbers of images, video frames and boxes per class, and the unreadable sources."""

    folder: Path | None
    names: list[str]
    images: int = 0
    frames: int = 0
    boxes: Counter[int] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)


def entry_of(source: Path, frame: int | None, image: Image, found: Detections, names: list[str]) -> dict[str, Any]:
    """Return the entry for JSON of an image, or of a video's frame (from 1)."""
    rows = zip(found.boxes.tolist(), found.scores.tolist(), found.classes.tolist(), strict=True)
    boxes = [
        {"class": c, "name": names[c], "score": round(score, 6), "xyxy": [round(v, 2) for v in box]}
        for box, score, c in rows
    ]
    number = {} if frame is None else {"frame": frame}
    size = {"width": image.shape[1], "height": image.shape[0]}
    return {"source": str(source), **number, **size, "boxes": boxes}


def class_numbers(classes: str, names: list[str]) -> tuple[int, ...] | None:
    """Return the numbers of the given classes, or None for all classes."""
    numbers = []
    # Numbers may be separated by spaces, as in YOLOv5; names may contain spaces.
    words = classes.split() if classes.replace(" ", "").isdecimal() else classes.split(",")
    for word in filter(None, map(str.strip, words)):
        if word in names:
            numbers.append(names.index(word))
        elif word.isdecimal() and int(word) < len(names):
            numbers.append(int(word))
        else:
            known = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            raise TrainerError(f"--classes {word}: no such class", f"the weights have {known}")
    return tuple(numbers) or None


def predict(settings: PredictSettings, sources: Sequence[str], as_json: bool) -> Predictions:
    """Detect objects in all sources and write the files that the settings name.

    Print one line per source, or with `as_json` one line of JSON per image. Unreadable sources are printed on stderr.
    """
    s = settings
    if comm.world_of(os.environ).size > 1:
        raise TrainerError("predict runs in one process", "start it without torchrun")
    device = comm.pick_device(s.device, comm.World())
    comm.limit_threads(comm.World(), device)
    paths = find_sources(sources)
    trained = load_trained(s.weights, s.cfg)
    imgsz = trained.imgsz if s.imgsz is None else s.imgsz
    check_imgsz(imgsz, trained.stride)
    limits = Limits(s.conf, s.iou, s.max_det, class_numbers(s.classes, trained.names))
    dtype = type_for(s.precision, s.half, device)
    detector = Detector(trained.model, trained.parts, device, dtype, limits)
    writes = not s.nosave or s.save_txt or s.save_json
    folder = checkpoint_file.make_run_dir(os.environ, s.project, s.name, s.exist_ok) if writes else None
    done = Predictions(folder, trained.names)
    entries: list[dict[str, Any]] = []  # for predictions.json
    with bar(len(paths)) as move:
        for path, stem in zip(paths, unique_stems([str(path) for path in paths]), strict=True):
            boxes, begin, count, error = Counter[int](), time.perf_counter(), 0, ""
            with mp4(folder / f"{stem}.mp4") if folder else contextlib.nullcontext() as append_frame:
                try:
                    for frame, image, fps in frames(path):
                        move(description=f"{path.name} {frame or ''}")
                        found = detect_in(detector, image, imgsz, trained.parts)
                        entry = entry_of(path, frame, image, found, trained.names)
                        if as_json:
                            print(json.dumps(entry), flush=True)
                        if s.save_json:
                            entries.append(entry)
                        if folder and s.save_txt:
                            label = folder / "labels" / (f"{stem}.txt" if frame is None else f"{stem}_{frame}.txt")
                            write_labels(label, found.boxes, found.scores, found.classes, image.shape[:2], s.save_conf)
                        if folder and not s.nosave:
                            scale = max(0.8, max(image.shape[:2]) / _DRAWN_PX)
                            draw_boxes(image, found.boxes, found.scores, found.classes, trained.names, scale)
                            if append_frame and frame:
                                append_frame(image, fps)
                            else:
                                write_image(image, folder / f"{stem}{path.suffix.lower()}")
                        boxes.update(found.classes.tolist())
                        count += 1
                except Unreadable as reason:
                    error = str(reason)
            move(advance=1, description="")
            done.boxes.update(boxes)
            if _is_video(path):
                done.frames += count
            else:
                done.images += count
            if error:
                done.unreadable.append(str(path))
                print(f"error: {path}: {error}", file=sys.stderr, flush=True)
            elif not as_json:
                each = 1000 * (time.perf_counter() - begin) / count
                text = f"{count} frames, " if _is_video(path) else ""
                text += counts_text(boxes, trained.names) or "no boxes"
                print(f"{path}: {text} ({each:.0f} ms{' each' if _is_video(path) else ''})", flush=True)
    if folder and s.save_json:
        checkpoint_file.write_bytes(folder / "predictions.json", json.dumps(entries).encode())
    return done


def detect_in(detector: Detector, image: Image, imgsz: int, parts: Parts) -> Detections:
    """Return the detections of an image in its pixels.

    The image is padded to the next multiple of the stride, or to a square if the model needs one.
    """
    height, width = image.shape[:2]
    scale = imgsz / max(height, width)
    sides = [math.ceil(max(1, round(side * scale)) / parts.stride) * parts.stride for side in (height, width)]
    if parts.needs_squares:
        sides = [max(sides)] * 2
    boxed = np.empty((*sides, 3), np.uint8)
    pad = letterbox(image, imgsz, boxed)
    (found,) = detector(torch.from_numpy(boxed)[None])
    return Detections(to_original(found.boxes, list(pad), height, width), found.scores, found.classes)


def counts_text(boxes: Counter[int], names: list[str]) -> str:
    """Return the boxes per class, for example `3 cat, 1 dog`."""
    return ", ".join(f"{boxes[c]} {names[c]}" for c in sorted(boxes))


def find_sources(sources: Sequence[str]) -> list[Path]:
    """Return the images and videos of files, folders (without subfolders), patterns and .txt lists of paths."""
    if not sources:
        raise TrainerError("--source: not given", "use images, videos, folders, patterns or a .txt list")
    found = list(itertools.chain.from_iterable(_expand(source) for source in sources))
    return list(dict.fromkeys(found))


def _expand(source: str) -> list[Path]:
    where, path = f"--source {source}", Path(source)
    if (source.isdecimal() and not path.exists()) or "://" in source:
        raise TrainerError(f"{where}: cameras and URLs are not supported", "save it as an image or video first")
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
    files = sorted(p for p in candidates if p.suffix.lower() in SUFFIXES | VIDEOS and not p.name.startswith("."))
    if not files:
        images, videos = (", ".join(sorted(suffixes)) for suffixes in (SUFFIXES, VIDEOS))
        raise TrainerError(f"{where}: no image or video", f"images end in {images}, videos in {videos}")
    return files


def _read_list(path: Path, where: str) -> list[Path]:
    """Return the files of a list of paths, which are relative to the list."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrainerError(f"{where}: cannot be read: {error}", "expected one path per line, in UTF-8") from None
    files = {number: path.parent / line.strip() for number, line in enumerate(lines, 1) if line.strip()}
    for number, file in files.items():
        if not file.is_file():
            raise TrainerError(f"{path}:{number}: no such file: {file}", "correct or delete the line")
    if not files:
        raise TrainerError(f"{where}: the list is empty", "expected one path per line, relative to the list")
    return list(files.values())


class Unreadable(Exception):
    """An image or video that cannot be decoded."""


def _is_video(path: Path) -> bool:
    return path.suffix.lower() in VIDEOS


def frames(path: Path) -> Iterator[tuple[int | None, Image, float]]:
    """Yield (None, image (h, w, 3) RGB, 0.0), or for each video frame (number from 1, image, frames per second)."""
    if _is_video(path):
        yield from _frames(path)
        return
    try:
        image = cv2.imdecode(np.frombuffer(path.read_bytes(), np.uint8), cv2.IMREAD_COLOR)
    except OSError as error:
        raise Unreadable(error.strerror) from None
    except cv2.error:
        image = None
    if image is None:
        raise Unreadable("not an image that can be decoded")
    yield None, np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB)), 0.0


def _frames(path: Path) -> Iterator[tuple[int, Image, float]]:
    """Yield (number from 1, frame, frames per second)."""
    video = cv2.VideoCapture(str(path))
    try:
        fps, expected = video.get(cv2.CAP_PROP_FPS), int(video.get(cv2.CAP_PROP_FRAME_COUNT))
        number = 0
        while (read := video.read())[0]:
            number += 1
            yield number, np.asarray(cv2.cvtColor(read[1], cv2.COLOR_BGR2RGB)), fps if fps > 0 else 30.0
        if not number:
            raise Unreadable("not a video that can be decoded")
        if number < 0.9 * expected:  # the header's number may be inexact
            raise Unreadable(f"it ends after {number} of {expected} frames")
    finally:
        video.release()
