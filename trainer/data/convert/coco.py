"""COCO's JSON, read: objects with outlines become polygon rows, crowds are left out."""

from __future__ import annotations

import json
import math
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from trainer.data.convert.writer import Annotated, Conversion, Points, row, sizes, split_by_name
from trainer.data.faults import BadData, Fault
from trainer.errors import TrainerError

_SLACK_PX = 2.0  # between a box and the bounds of its outline; COCO rounds both
_HINT = "correct the annotations, or leave these out with --allow-bad-labels"


def from_coco(
    annotations: Path,
    images: Path,
    *,
    val_annotations: Path | None = None,
    val_images: Path | None = None,
    val_share: float | None = None,
) -> Conversion:
    """Read COCO annotations whose pictures are in the folder `images`.

    Validation gets its own annotations (whose pictures are in `val_images`, or in `images`), or else a share of the
    pictures, a tenth if none is named. Category ids become 0, 1, ... in their order.
    """
    if val_images and not val_annotations:
        raise TrainerError(f"--val-images {val_images}: no annotations of these pictures", "name them with --val")
    if val_annotations and val_share is not None:
        raise TrainerError(
            f"--val-share {val_share:g}: --val {val_annotations} says which pictures are for validation",
            "give one of them",
        )
    content = _load(annotations)
    names = _categories(content, annotations)
    conversion = Conversion(list(names.values()))
    items = _read(content, annotations, images, list(names), conversion)
    if not val_annotations:
        conversion.splits = split_by_name(items, 0.1 if val_share is None else val_share)
        return conversion
    content = _load(val_annotations)
    if _categories(content, val_annotations) != names:
        raise TrainerError(
            f"{val_annotations}: other categories than {annotations}", "both need the same ids and names"
        )
    val = _read(content, val_annotations, val_images or images, list(names), conversion)
    conversion.splits = {"train": items, "val": val}
    return conversion


def _load(path: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainerError(f"{path}: cannot be read: {error.strerror}", "give a COCO annotation file") from error
    except (ValueError, RecursionError) as error:
        raise TrainerError(f"{path}: not JSON: {error}", "give a COCO annotation file") from error
    for key in ("images", "annotations", "categories"):
        part = content.get(key) if isinstance(content, dict) else None
        if not isinstance(part, list) or not all(isinstance(entry, dict) for entry in part):
            what = f"`{key}` must be a list of objects"
            raise TrainerError(f"{path}: {what}", "is it a COCO file of instances?")
    return content  # type: ignore[no-any-return]


def _categories(content: dict[str, list[dict[str, Any]]], path: Path) -> dict[int, str]:
    """Names by id, in the order of the ids."""
    faults, names = [], dict[int, str]()
    for k, entry in enumerate(content["categories"]):
        number, name = entry.get("id"), entry.get("name")
        if not isinstance(number, int) or not isinstance(name, str):
            faults.append(Fault(str(path), 0, f"categories[{k}]: needs a whole `id` and a `name`", _HINT))
        elif number in names or name in names.values():
            faults.append(Fault(str(path), 0, f"categories[{k}]: {number} {name} is there twice", _HINT))
        else:
            names[number] = name
    if faults or not names:
        raise BadData(faults or [Fault(str(path), 0, "no categories", _HINT)])
    return dict(sorted(names.items()))


def _read(
    content: dict[str, list[dict[str, Any]]], path: Path, folder: Path, categories: list[int], conversion: Conversion
) -> list[Annotated]:
    """The good pictures, each with its good rows; what is wrong goes to the conversion's faults."""

    def fault(place: str, what: str) -> None:
        conversion.faults.append(Fault(str(path), 0, f"{place}: {what}", _HINT))

    entries: dict[Any, tuple[str, Path]] = {}
    declared: dict[Any, tuple[Any, Any]] = {}
    for k, entry in enumerate(content["images"]):
        name, number = entry.get("file_name"), entry.get("id")
        if not isinstance(name, str) or not _is_inside(name) or not isinstance(number, (int, str)):
            fault(f"images[{k}]", f"needs an `id` and a `file_name` below the pictures' folder, has {name!r}")
        elif number in entries:
            fault(f"images[{k}] (id {number})", "the id is there twice")
        else:
            entries[number] = (name, folder / name)
            declared[number] = (entry.get("height"), entry.get("width"))
    shapes: dict[Any, tuple[int, int]] = {}
    for (number, (_, picture)), size in zip(entries.items(), sizes([p for _, p in entries.values()]), strict=True):
        if isinstance(size, Fault):
            conversion.faults.append(size)
        elif declared[number] not in ((None, None), size):
            height, width = declared[number]
            what = f"{picture} is {size[1]} x {size[0]} px, not {width} x {height}"
            fault(f"images (id {number})", what)
        else:
            shapes[number] = size
    rows: dict[Any, list[str]] = {number: [] for number in shapes}
    for k, entry in enumerate(content["annotations"]):
        place = f"annotations[{k}] (id {entry.get('id')})"
        owner = entry.get("image_id")
        if entry.get("iscrowd"):
            conversion.note("crowd left out")
        elif not isinstance(owner, (int, str)) or owner not in entries:
            fault(place, f"no picture has the id {owner}")
        elif entry.get("category_id") not in categories:
            fault(place, f"no category has the id {entry.get('category_id')}")
        elif not _is_box(entry.get("bbox")):
            fault(place, f"`bbox` must be four numbers, is {str(entry.get('bbox'))[:60]}")
        elif owner in shapes:  # else its picture is a fault already
            x, y, width, height = entry["bbox"]
            box = (x, y, x + width, y + height)
            outline = _outline(entry.get("segmentation"), box, conversion)
            made = row(categories.index(entry["category_id"]), box, shapes[owner], outline)
            if made:
                rows[owner].append(made)
            else:
                fault(place, f"box without area or outside the picture: {entry['bbox']}")
    return [Annotated(entries[number][1], entries[number][0], rows[number]) for number in shapes]


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _is_box(box: object) -> bool:
    return (
        isinstance(box, list)
        and len(box) == 4
        and all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in box)
    )


def _outline(segmentation: object, box: tuple[float, float, float, float], conversion: Conversion) -> Points | None:
    """One polygon (k, 2) around all parts of an object, or None where there is none that fits its box."""
    if not segmentation:
        return None
    parts = []
    for part in segmentation if isinstance(segmentation, list) else []:
        if not isinstance(part, list) or len(part) < 6 or len(part) % 2:
            continue
        try:
            points = np.array(part, np.float64).reshape(-1, 2)
        except (TypeError, ValueError):
            continue
        if np.isfinite(points).all():
            parts.append(points)
    if not parts:
        conversion.note("mask kept as a box")
        return None
    ring = parts[0]
    for part in parts[1:]:
        ring = _bridge(ring, part)
    bounds = np.concatenate([ring.min(0), ring.max(0)])
    if np.abs(bounds - box).max() > _SLACK_PX:
        conversion.note("outline that does not fit its box, kept as a box")
        return None
    return ring


def _bridge(ring: Points, part: Points) -> Points:
    """One ring around both: from its corner nearest to `part` over to it, around it, and back the same way."""
    distances = ((ring[:, None] - part[None]) ** 2).sum(2)
    i, j = np.unravel_index(distances.argmin(), distances.shape)
    return np.concatenate([ring[: i + 1], part[j:], part[: j + 1], ring[i:]])
