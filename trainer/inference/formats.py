"""Files of detections: YOLO labels, COCO annotations and results, MP4 videos."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import cv2
import numpy as np

from trainer.config.text_file import read_text
from trainer.data.dataset import Image
from trainer.errors import TrainerError
from trainer.inference.sources import SourceError
from trainer.metrics.curves import Bools, Floats, Ints
from trainer.weights.checkpoint_file import write_bytes


def write_labels(
    path: Path, boxes: Any, scores: Any, classes: Any, size: tuple[int, int], with_score: bool
) -> None:
    """Write lines `class cx cy w h [score]` in fractions of the image's `size` (height, width)."""
    height, width = size
    lines = []
    for (x1, y1, x2, y2), score, c in zip(boxes.tolist(), scores.tolist(), classes.tolist(), strict=True):
        values = [(x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height]
        values += [score] if with_score else []
        lines.append(" ".join([str(c), *(f"{v:.6g}" for v in values)]) + "\n")
    path.parent.mkdir(exist_ok=True)
    write_bytes(path, "".join(lines).encode())


def unique_stems(names: list[str]) -> list[str]:
    """Return file names without folder and suffix; repeated names get _2, _3, ..."""
    last: dict[str, int] = {}
    stems: dict[str, None] = {}
    for name in names:
        base = stem = Path(name).stem
        number = last.get(base, 1)
        while stem in stems:
            number += 1
            stem = f"{base}_{number}"
        last[base], stems[stem] = number, None
    return list(stems)


class Truth(NamedTuple):
    """Objects of an image: boxes (m, 4) xyxy px, classes (m,), crowd flags (m,), areas (m,) px."""

    boxes: Floats
    classes: Ints
    crowd: Bools
    areas: Floats


class CocoTruth:
    """Annotations of an instances_*.json by image file name."""

    def __init__(self, path: str, names: list[str]) -> None:
        """Read a file. Each class in `names` must be a category of it."""
        self._path = path
        try:
            content = json.loads(read_text(path))
            categories = {entry["name"]: entry["id"] for entry in content["categories"]}
            self._images: dict[str, list[tuple[PurePath, Any]]] = {}
            for entry in content["images"]:
                file = PurePath(entry["file_name"])
                self._images.setdefault(file.name, []).append((file, entry["id"]))
            annotations = [
                (
                    entry["image_id"],
                    entry["category_id"],
                    *entry["bbox"],
                    entry.get("iscrowd", 0),
                    entry["area"],
                )
                for entry in content["annotations"]
            ]
        except OSError as error:
            raise TrainerError(f"--annotations {path}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise TrainerError(
                f"--annotations {path}: not a COCO file of instances: {type(error).__name__}: {error}",
                "expected images, categories, and annotations with bbox and area",
            ) from None
        missing = [name for name in names if name not in categories]
        if missing:
            raise TrainerError(
                f"--annotations {path}: it has no category `{missing[0]}`",
                "its categories must contain the data's classes",
            )
        self.categories = [int(categories[name]) for name in names]
        number = {category: k for k, category in enumerate(self.categories)}
        self._rows: dict[Any, list[tuple[Any, ...]]] = {}
        for image, category, *rest in annotations:
            if category in number:
                self._rows.setdefault(image, []).append((number[category], *rest))

    def id_of(self, image: str) -> Any:
        """Return COCO's id of an image, by its file name; by its folders too if several images have that name."""
        path = PurePath(image)
        found = self._images.get(path.name, [])
        if len(found) > 1:
            found = [(file, number) for file, number in found if path.parts[-len(file.parts) :] == file.parts]
            longest = max((len(file.parts) for file, _ in found), default=0)
            found = [(file, number) for file, number in found if len(file.parts) == longest]
        if len(found) != 1:
            what = f"it has {'no' if not found else 'more than one'} image {path.name} for {image}"
            raise TrainerError(
                f"--annotations {self._path}: {what}", "`file_name` must be the end of the image's path"
            )
        return found[0][1]

    def check_images(self, images: Sequence[str]) -> None:
        """Raise TrainerError unless every image has its own id."""
        owners: dict[Any, str] = {}
        for image in images:
            if (other := owners.setdefault(self.id_of(image), image)) != image:
                what = f"--annotations {self._path}: {other} and {image} have the same id"
                raise TrainerError(what, "write the folders of the images into `file_name`")

    def of(self, image: str) -> Truth:
        """Return the objects of an image."""
        rows = np.array(self._rows.get(self.id_of(image), []), np.float64).reshape(-1, 7)
        boxes = np.concatenate([rows[:, 1:3], rows[:, 1:3] + rows[:, 3:5]], 1)
        return Truth(boxes, rows[:, 0].astype(np.int64), rows[:, 5] > 0, rows[:, 6])


def image_ids(images: Sequence[str]) -> list[int | str]:
    """Return an id of each image: the number in its file name, as in COCO, else the name without suffix.

    Images whose ids would be equal have their path below the common folder instead.
    """
    stems = [Path(image).stem for image in images]
    ids: list[int | str] = [int(stem) if stem.isdecimal() else stem for stem in stems]
    counts = Counter(ids)
    if len(counts) == len(ids):
        return ids
    top = os.path.commonpath([os.path.dirname(image) for image in images])  # noqa: PTH120
    return [
        own if counts[own] == 1 else os.path.relpath(image, top or ".")
        for own, image in zip(ids, images, strict=True)
    ]


def coco_results(
    found: Iterable[tuple[Any, Any, Any, Any]], categories: Sequence[int]
) -> list[dict[str, Any]]:
    """Return COCO results of (image id, boxes (n, 4) xyxy px, scores (n,), classes (n,))."""
    results = []
    for image, boxes, scores, classes in found:
        for (x1, y1, x2, y2), score, c in zip(boxes.tolist(), scores.tolist(), classes.tolist(), strict=True):
            box = [round(v, 4) for v in (x1, y1, x2 - x1, y2 - y1)]
            results.append(
                {"image_id": image, "category_id": categories[c], "bbox": box, "score": round(score, 8)}
            )
    return results


def mpeg4_rate(fps: float) -> float:
    """Return the frame rate nearest to `fps` that MPEG-4 part 2 can hold, whose time base has 16 bits.

    OpenCV passes a rate on as a fraction of whole numbers, with up to three decimals.
    """
    highest = 2**16 - 1
    for digits in (3, 2, 1, 0):
        rate = Fraction(str(round(fps, digits)))
        if 0 < rate.numerator <= highest:
            return float(rate)
    return float(highest) if fps > 1 else 1.0


@contextlib.contextmanager
def mp4(path: Path, source: Path) -> Iterator[Callable[[Image, float], None]]:
    """Yield a function that appends a frame (RGB, frames per second); the MP4 file gets its name at the end.

    It raises SourceError, about the video `source`, if the frames cannot be written.
    """
    temporary = path.with_name(f".{path.stem}.tmp.mp4")
    writer: Any = None

    def add(image: Image, fps: float) -> None:
        nonlocal writer
        if writer is None:
            size = (image.shape[1], image.shape[0])
            rate = mpeg4_rate(fps)
            writer = cv2.VideoWriter(str(temporary), cv2.VideoWriter.fourcc(*"mp4v"), rate, size)
            if not writer.isOpened():
                writer = None
                what = (
                    f"OpenCV cannot write an MP4 video of {size[0]} x {size[1]} px; use --nosave --save-txt"
                )
                raise SourceError(source, what)
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
