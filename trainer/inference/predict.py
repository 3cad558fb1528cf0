"""What a trained model sees in pictures and videos: drawn, and as text for other programs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer import dist
from trainer.data.augment import letterbox
from trainer.data.dataset import Image
from trainer.errors import TrainerError
from trainer.inference.formats import label_rows, unique_stems, write_text
from trainer.inference.growing import json_list, mp4
from trainer.inference.sources import Unreadable, find_sources, frames, is_video
from trainer.plots import draw_boxes, write_picture
from trainer.progress import bar
from trainer.tasks.inference import Detections, Detector, Limits, load_trained, to_original, type_for
from trainer.weights import checkpoint

_DRAWN_PX = 700  # a picture of this size gets boxes and text of size 1


@dataclass(frozen=True)
class PredictSettings:
    """What a prediction was told."""

    weights: str
    sources: tuple[str, ...]
    imgsz: int | None = None  # None: the side that the weights were trained at
    device: str = ""
    confidence: float = 0.25
    iou: float = 0.45
    most: int = 1000
    classes: tuple[str, ...] = ()  # names or numbers; none: all
    precision: str = "auto"
    half: bool = False
    save: bool = True  # the pictures with their boxes
    save_txt: bool = False
    save_conf: bool = False
    save_json: bool = False
    project: str = "runs"
    name: str = "predict"
    exist_ok: bool = False
    cfg: str = ""  # of a user's own model

    def __post_init__(self) -> None:
        if self.save_conf and not self.save_txt:
            raise TrainerError("--save-conf: no labels are written for it to stand in", "add --save-txt")


@dataclass
class Predictions:
    """What came of it: pictures and video frames seen, boxes of each class, sources that could not be read."""

    folder: Path | None
    names: list[str]
    pictures: int = 0
    frames: int = 0
    boxes: Counter[int] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Seen:
    """One picture or video frame, and what is in it, in its own pixels."""

    source: Path
    frame: int | None  # of a video, from 1
    image: Image
    found: Detections

    def entry(self, names: list[str]) -> dict[str, Any]:
        """For JSON."""
        height, width = self.image.shape[:2]
        found = self.found
        rows = zip(found.boxes.tolist(), found.scores.tolist(), found.classes.tolist(), strict=True)
        return {
            "source": str(self.source),
            **({} if self.frame is None else {"frame": self.frame}),
            "width": width,
            "height": height,
            "boxes": [
                {"class": c, "name": names[c], "score": round(score, 6), "xyxy": [round(v, 2) for v in box]}
                for box, score, c in rows
            ],
        }


def class_numbers(wanted: tuple[str, ...], names: list[str]) -> tuple[int, ...] | None:
    """Numbers of the classes given by name or number; None, for all, if none is given."""
    numbers = []
    for word in wanted:
        if word in names:
            numbers.append(names.index(word))
        elif word.isdecimal() and int(word) < len(names):
            numbers.append(int(word))
        else:
            known = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            raise TrainerError(f"--classes {word}: no such class", f"the weights know {known}")
    return tuple(numbers) or None


def predict(settings: PredictSettings, as_json: bool = False) -> Predictions:
    """Look at every source; a source that cannot be read is named, and the others go on.

    With `as_json` each picture's boxes are a line of JSON on stdout, else a line to read.
    """
    s = settings
    if dist.world_of(os.environ).size > 1:
        raise TrainerError("predict runs in one process", "start it without torchrun")
    device = dist.pick_device(s.device, dist.World())
    dist.limit_threads(dist.World())
    paths = find_sources(s.sources)
    trained = load_trained(s.weights, s.cfg)
    imgsz = s.imgsz or trained.imgsz
    trained.check_imgsz(imgsz)
    limits = Limits(s.confidence, s.iou, s.most, class_numbers(s.classes, trained.names))
    dtype = type_for(s.precision, s.half, device)
    detector = Detector(trained.model, device, dtype, limits)
    writes = s.save or s.save_txt or s.save_json
    folder = checkpoint.make_run_dir(os.environ, s.project, s.name, s.exist_ok) if writes else None
    done = Predictions(folder, trained.names)
    with contextlib.ExitStack() as stack:
        tell: list[Callable[[dict[str, Any]], None]] = []
        if as_json:
            tell.append(lambda entry: print(json.dumps(entry), flush=True))
        if folder and s.save_json:
            tell.append(stack.enter_context(json_list(folder / "predictions.json")))
        move = stack.enter_context(bar(len(paths)))
        for path, stem in zip(paths, unique_stems([str(path) for path in paths]), strict=True):
            boxes, begin, count, error = Counter[int](), time.perf_counter(), 0, ""
            with _Files(s, folder, stem, trained.names) as files:
                try:
                    for frame, image, fps in frames(path):
                        move(description=f"{path.name} {frame or ''}")
                        seen = Seen(path, frame, image, look(detector, image, imgsz, trained.stride))
                        for to in tell:
                            to(seen.entry(trained.names))
                        files.add(seen, fps)
                        boxes.update(seen.found.classes.tolist())
                        count += 1
                except Unreadable as found:
                    error = str(found)
            move(advance=1, description="")
            done.boxes.update(boxes)
            if is_video(path):
                done.frames += count
            else:
                done.pictures += count
            if error:
                done.unreadable.append(str(path))
                print(f"error: {path}: {error}", file=sys.stderr, flush=True)
            elif not as_json:
                each = 1000 * (time.perf_counter() - begin) / count
                what = f"{count} frames, " if is_video(path) else ""
                what += counted(boxes, trained.names) or "nothing"
                print(f"{path}: {what} ({each:.0f} ms{' each' if is_video(path) else ''})", flush=True)
    return done


def look(detector: Detector, image: Image, imgsz: int, stride: int) -> Detections:
    """What is in a picture, in its own pixels; it is padded no further than to whole strides."""
    height, width = image.shape[:2]
    scale = imgsz / max(height, width)
    sides = (math.ceil(max(1, round(side * scale)) / stride) * stride for side in (height, width))
    boxed = np.empty((*sides, 3), np.uint8)
    pad = letterbox(image, imgsz, boxed)
    (found,) = detector(torch.from_numpy(boxed)[None])
    return Detections(to_original(found.boxes, list(pad), height, width), found.scores, found.classes)


def counted(boxes: Counter[int], names: list[str]) -> str:
    """`3 cat, 1 dog`."""
    return ", ".join(f"{boxes[c]} {names[c]}" for c in sorted(boxes))


class _Files:
    """What is written for one source, as the settings ask for it."""

    def __init__(self, settings: PredictSettings, folder: Path | None, stem: str, names: list[str]) -> None:
        self._settings, self._folder, self._stem, self._names = settings, folder, stem, names
        self._stack = contextlib.ExitStack()
        self._video: Callable[[Image, float], None] | None = None

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def add(self, seen: Seen, fps: float) -> None:
        """Write one picture or frame; it is drawn upon."""
        s, folder, found = self._settings, self._folder, seen.found
        if folder and s.save_txt:
            (folder / "labels").mkdir(exist_ok=True)
            file = f"{self._stem}.txt" if seen.frame is None else f"{self._stem}_{seen.frame}.txt"
            size = (seen.image.shape[0], seen.image.shape[1])
            rows = label_rows(found.boxes, found.scores, found.classes, size, s.save_conf)
            write_text(folder / "labels" / file, rows)
        if folder and s.save:
            scale = max(0.8, max(seen.image.shape[:2]) / _DRAWN_PX)
            draw_boxes(seen.image, found.boxes, found.scores, found.classes, self._names, scale)
            if seen.frame is None:
                write_picture(seen.image, folder / f"{self._stem}{seen.source.suffix.lower()}")
            else:
                self._video = self._video or self._stack.enter_context(mp4(folder / f"{self._stem}.mp4"))
                self._video(seen.image, fps)
