"""Detections in the formats that other programs read: YOLO's rows of labels, COCO's list of results."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

# COCO numbers its 80 classes from 1 to 90, with gaps.
_COCO_GAPS = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)
_COCO_ENDS = ("person", "toothbrush")


def label_rows(boxes: Any, scores: Any, classes: Any, size: tuple[int, int], with_score: bool) -> str:
    """Lines `class cx cy w h [score]` as fractions of the picture's `size` (height, width): YOLO's label format."""
    height, width = size
    lines = []
    for (x1, y1, x2, y2), score, c in zip(boxes.tolist(), scores.tolist(), classes.tolist(), strict=True):
        values = [(x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height]
        values += [score] if with_score else []
        lines.append(" ".join([str(c), *(f"{v:.6g}" for v in values)]) + "\n")
    return "".join(lines)


def unique_stems(names: list[str]) -> list[str]:
    """File names without folder and suffix; of equal ones the later get _2, _3, ..."""
    taken: dict[str, int] = {}
    stems = []
    for name in names:
        stem = Path(name).stem
        while stem in taken:
            taken[stem] += 1
            stem = f"{Path(name).stem}_{taken[Path(name).stem]}"
        taken[stem] = 1
        stems.append(stem)
    return stems


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def image_id(picture: str) -> int | str:
    """The number that a picture's file is named for, as COCO's are, or its name where that is none."""
    stem = Path(picture).stem
    return int(stem) if stem.isdecimal() else stem


def category_ids(names: list[str]) -> list[int]:
    """The classes' numbers in COCO's results: from 0, and for COCO's own classes COCO's own numbers."""
    if len(names) == 80 and (names[0], names[-1]) == _COCO_ENDS:
        return [k for k in range(1, 91) if k not in _COCO_GAPS]
    return list(range(len(names)))


def coco_results(found: Iterable[tuple[Any, Any, Any, Any]], categories: list[int]) -> list[dict[str, Any]]:
    """COCO's format of results from (image id, boxes (n, 4) xyxy px, scores (n,), classes (n,))."""
    results = []
    for image, boxes, scores, classes in found:
        for (x1, y1, x2, y2), score, c in zip(boxes.tolist(), scores.tolist(), classes.tolist(), strict=True):
            results.append(
                {
                    "image_id": image,
                    "category_id": categories[c],
                    "bbox": [round(v, 4) for v in (x1, y1, x2 - x1, y2 - y1)],
                    "score": round(score, 8),
                }
            )
    return results
