"""COCO reader: objects with outlines become polygon rows, crowds are left out."""

import json
from pathlib import Path, PurePosixPath
from typing import Annotated as Checked
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from trainer.config.faults import BadData, Fault
from trainer.config.text_file import read_text
from trainer.data.convert.writer import HINT, Annotated, Conversion, Points, sizes, split_by_name
from trainer.errors import TrainerError

_Entry = TypeVar("_Entry", bound=BaseModel)


class _Category(BaseModel):
    id: int
    name: str


class _Image(BaseModel):
    id: int | str
    file_name: str
    height: int | None = None
    width: int | None = None


class _Object(BaseModel):
    image_id: int | str
    category_id: int
    bbox: Checked[list[FiniteFloat], Field(min_length=4, max_length=4)]  # x, y, width, height in pixels
    segmentation: Any = None
    iscrowd: bool = False


def from_coco(
    annotations: Path, images: Path, *, val_annotations: Path | None, val_images: Path | None, val_share: float | None
) -> Conversion:
    """Read COCO annotations; category ids become 0, 1, ... in their order.

    `val_images` is the folder of the val split's images, by default `images`. Without `val_annotations` the val split
    is `val_share` of the images, by default 0.1.
    """
    if val_images and not val_annotations:
        raise TrainerError(f"--val-images {val_images}: no annotations of these images", "name them with --val")
    if val_annotations and val_share is not None:
        what = f"--val-share {val_share:g}: --val {val_annotations} defines the images of the val split"
        raise TrainerError(what, "give one of them")
    content = _load(annotations)
    names = _categories(content, annotations)
    conversion = Conversion(list(names.values()))
    items = _read(content, annotations, images, list(names), conversion)
    if not val_annotations:
        conversion.splits = split_by_name(items, 0.1 if val_share is None else val_share)
        return conversion
    content = _load(val_annotations)
    if _categories(content, val_annotations) != names:
        raise TrainerError(f"{val_annotations}: other categories than {annotations}", "use equal ids and names in both")
    val = _read(content, val_annotations, val_images or images, list(names), conversion)
    conversion.splits = {"train": items, "val": val}
    return conversion


def _load(path: Path) -> dict[str, list[Any]]:
    try:
        content: dict[str, list[Any]] = json.loads(read_text(path))
    except OSError as error:
        raise TrainerError(f"{path}: cannot be read: {error.strerror}", "give a COCO annotation file") from error
    except (ValueError, RecursionError) as error:
        raise TrainerError(f"{path}: not JSON: {error}", "give a COCO annotation file") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise TrainerError(f"{path}: `{key}` must be a list of objects", "give a COCO file of instances")
    return content


def _entries(
    model: type[_Entry], content: dict[str, list[Any]], key: str, path: Path, faults: list[Fault]
) -> list[tuple[str, _Entry]]:
    """Return the valid entries of a list, each with its place; add the others to `faults`."""
    found = []
    for k, entry in enumerate(content[key]):
        try:
            found.append((f"{key}[{k}]", model.model_validate(entry)))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join([f"{key}[{k}]", *map(str, first["loc"])])
            faults.append(Fault(str(path), 0, f"{where}: {first['msg']}", HINT))
    return found


def _categories(content: dict[str, list[Any]], path: Path) -> dict[int, str]:
    """Return the names by id, sorted by id."""
    faults: list[Fault] = []
    found = [entry for _, entry in _entries(_Category, content, "categories", path, faults)]
    names = {entry.id: entry.name for entry in found}
    if faults or not names:
        raise BadData(faults or [Fault(str(path), 0, "no categories", HINT)])
    if len(set(names.values())) < len(found):
        raise TrainerError(f"{path}: an id or a name of `categories` occurs twice", "give each a unique id and name")
    return dict(sorted(names.items()))


def _read(
    content: dict[str, list[Any]], path: Path, folder: Path, categories: list[int], conversion: Conversion
) -> list[Annotated]:
    """Return the valid images with their valid rows; add the others to the conversion's faults."""
    images: dict[int | str, _Image] = {}
    for where, image in _entries(_Image, content, "images", path, conversion.faults):
        name = PurePosixPath(image.file_name)
        if name.is_absolute() or ".." in name.parts or "\0" in image.file_name:
            conversion.fault(path, f"{where}: {image.file_name!r} is not below the images' folder")
        elif image.id in images:
            conversion.fault(path, f"{where}: the id {image.id} occurs twice")
        else:
            images[image.id] = image
    shapes: dict[int | str, tuple[int, int]] = {}
    found = sizes([folder / image.file_name for image in images.values()])
    for image, size in zip(images.values(), found, strict=True):
        if isinstance(size, Fault):
            conversion.faults.append(size)
        elif (image.height, image.width) not in ((None, None), size):
            what = f"is {size[1]} x {size[0]} px, not {image.width} x {image.height}"
            conversion.fault(path, f"image {image.id}: {folder / image.file_name} {what}")
        else:
            shapes[image.id] = size
    rows: dict[int | str, list[str]] = {number: [] for number in shapes}
    for where, thing in _entries(_Object, content, "annotations", path, conversion.faults):
        if thing.iscrowd:
            conversion.notes["crowd left out"] += 1
        elif thing.image_id not in images:
            conversion.fault(path, f"{where}: no image has the id {thing.image_id}")
        elif thing.category_id not in categories:
            conversion.fault(path, f"{where}: no category has the id {thing.category_id}")
        elif thing.image_id in shapes:  # otherwise its image is already a fault
            x, y, width, height = thing.bbox
            outline = _outline(thing.segmentation, conversion)
            number = categories.index(thing.category_id)
            label = conversion.row(number, (x, y, x + width, y + height), shapes[thing.image_id], outline)
            if label:
                rows[thing.image_id].append(label)
            else:
                conversion.fault(path, f"{where}: box without area or outside the image: {thing.bbox}")
    return [Annotated(folder / images[number].file_name, images[number].file_name, rows[number]) for number in shapes]


def _outline(segmentation: Any, conversion: Conversion) -> Points | None:
    """Return one polygon (k, 2) around all parts of an object; None if it has none."""
    if not segmentation:
        return None
    try:
        parts = [np.array(part, np.float64).reshape(-1, 2) for part in segmentation if len(part) >= 6]
    except (TypeError, ValueError):
        parts = []
    if not parts or not all(np.isfinite(part).all() for part in parts):
        conversion.notes["mask kept as a box"] += 1
        return None
    ring = parts[0]
    for part in parts[1:]:
        # Connect the two nearest corners by a bridge without area.
        distances = ((ring[:, None] - part[None]) ** 2).sum(2)
        i, j = np.unravel_index(distances.argmin(), distances.shape)
        ring = np.concatenate([ring[: i + 1], part[j:], part[: j + 1], ring[i:]])
    return ring
