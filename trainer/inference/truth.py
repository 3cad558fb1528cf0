"""Ground truth as COCO's own JSON tells it: with the crowds and areas that YOLO's rows have no place for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.errors import TrainerError
from trainer.metrics.matching import Bools, Floats, Ints


class Truth(NamedTuple):
    """What is in a picture: boxes (m, 4) xyxy px, classes (m,), whether each is a crowd (m,), areas (m,) px."""

    boxes: Floats
    classes: Ints
    crowd: Bools
    areas: Floats


class CocoTruth:
    """The annotations of an instances_*.json, by a picture's file name."""

    def __init__(self, path: str, names: list[str]) -> None:
        """`names` are the classes, each the name of one of the file's categories."""
        self._path = path
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
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
                "it has images, categories, and annotations with bbox and area",
            ) from None
        missing = [name for name in names if name not in categories]
        if missing:
            raise TrainerError(
                f"--annotations {path}: it has no category `{missing[0]}`", "its classes must be the data's"
            )
        self.categories = [int(categories[name]) for name in names]
        number = {category: k for k, category in enumerate(self.categories)}
        self._rows: dict[Any, list[tuple[Any, ...]]] = {}
        for image, category, *rest in annotations:
            if category in number:
                self._rows.setdefault(image, []).append((number[category], *rest))

    def id_of(self, picture: str) -> Any:
        """COCO's number of a picture."""
        try:
            return self._ids[Path(picture).name]
        except KeyError:
            raise TrainerError(f"--annotations {self._path}: it does not know {Path(picture).name}") from None

    def of(self, picture: str) -> Truth:
        """The objects of a picture."""
        rows = np.array(self._rows.get(self.id_of(picture), []), np.float64).reshape(-1, 7)
        boxes = np.concatenate([rows[:, 1:3], rows[:, 1:3] + rows[:, 3:5]], 1)
        return Truth(boxes, rows[:, 0].astype(np.int64), rows[:, 5] > 0, rows[:, 6])
