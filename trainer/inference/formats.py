"""Files of detections: YOLO labels, COCO annotations and results, MP4 videos."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from trainer.config.text_file import read_text
from trainer.data.dataset import Image
from trainer.errors import TrainerError
from trainer.metrics.curves import Bools, Floats, Ints
from trainer.weights.checkpoint_file import write_bytes


def write_labels(path: Path, boxes: Any, scores: Any, classes: Any, size: tuple[int, int], with_score: bool) -> None:
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
            self._ids = {Path(entry["file_name"]).name: entry["id"] for entry in content["images"]}
            annotations = [
                (entry["image_id"], entry["category_id"], *entry["bbox"], entry.get("iscrowd", 0), entry["area"])
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
        """Return COCO's id of an image."""
        try:
            return self._ids[Path(image).name]
        except KeyError:
            raise TrainerError(f"--annotations {self._path}: it has no image {Path(image).name}") from None

    def of(self, image: str) -> Truth:
        """Return the objects of an image."""
        rows = np.array(self._rows.get(self.id_of(image), []), np.float64).reshape(-1, 7)
        boxes = np.concatenate([rows[:, 1:3], rows[:, 1:3] + rows[:, 3:5]], 1)
        return Truth(boxes, rows[:, 0].astype(np.int64), rows[:, 5] > 0, rows[:, 6])


def image_id(image: str) -> int | str:
    """Return the number in an image's file name, as in COCO, else the name without suffix."""
    stem = Path(image).stem
    return int(stem) if stem.isdecimal() else stem


def coco_results(found: Iterable[tuple[Any, Any, Any, Any]], categories: Sequence[int]) -> list[dict[str, Any]]:
    """Return COCO results of (image id, boxes (n, 4) xyxy px, scores (n,), classes (n,))."""
    results = []
    for image, boxes, scores, classes in found:
        for (x1, y1, x2, y2), score, c in zip(boxes.tolist(), scores.tolist(), classes.tolist(), strict=True):
            box = [round(v, 4) for v in (x1, y1, x2 - x1, y2 - y1)]
            results.append({"image_id": image, "category_id": categories[c], "bbox": box, "score": round(score, 8)})
    return results


@contextlib.contextmanager
def mp4(path: Path) -> Iterator[Callable[[Image, float], None]]:
    """Yield a function that appends a frame (RGB, frames per second); the MP4 file gets its name at the end."""
    temporary = path.with_name(f".{path.stem}.tmp.mp4")
    writer: Any = None

    def add(image: Image, fps: float) -> None:
        nonlocal writer
        if writer is None:
            size = (image.shape[1], image.shape[0])
            writer = cv2.VideoWriter(str(temporary), cv2.VideoWriter.fourcc(*"mp4v"), fps, size)
            if not writer.isOpened():
                raise TrainerError(f"{path}: this OpenCV cannot write MP4 videos", "use --nosave --save-txt")
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
