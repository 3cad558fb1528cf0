"""COCO reader: objects with outlines become polygon rows. Crowds and the parents of classes are left out."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated as Checked
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from trainer.config.faults import BadData, Fault
from trainer.config.text_file import read_text
from trainer.data.convert.writer import HINT, Annotated, Conversion, Points, sizes, split_by_name
from trainer.data.formats.listing import images_below
from trainer.data.formats.named_files import NamedFiles
from trainer.errors import TrainerError

#: Notes about objects with `iscrowd: 1`, with which some tools mark all objects that have a mask.
CROWDS = "crowd left out (iscrowd: 1; --crowd boxes keeps their boxes)"
EMPTY_BY_CROWDS = "image that is background, because all its objects are crowds"
_Entry = TypeVar("_Entry", bound=BaseModel)


class _Category(BaseModel):
    id: int
    name: str
    supercategory: str | None = None


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


@dataclass(frozen=True)
class Choice:
    """Which objects to convert: those of `classes`, names or ids (none: all), and `crowds` as boxes or not at all."""

    classes: Sequence[str] = ()
    crowds: bool = False


def from_coco(
    annotations: Path,
    images: Path,
    *,
    val_annotations: Path | None,
    val_images: Path | None,
    val_share: float | None,
    choice: Choice,
) -> Conversion:
    """Read COCO annotations; category ids become 0, 1, ... in their order.

    `val_images` is the folder of the val split's images, by default `images`. Without `val_annotations` the val split
    is `val_share` of the images, by default 0.1. Raises TrainerError for what cannot be read.
    """
    if val_images and not val_annotations:
        raise TrainerError(
            f"--val-images {val_images}: no annotations of these images", "name them with --val"
        )
    if val_annotations and val_share is not None:
        what = f"--val-share {val_share:g}: --val {val_annotations} defines the images of the val split"
        raise TrainerError(what, "give one of them")
    files = {annotations: _load(annotations)}
    if val_annotations:
        files[val_annotations] = _load(val_annotations)
    every = {path: _categories(content, path) for path, content in files.items()}
    if val_annotations and every[val_annotations] != every[annotations]:
        raise TrainerError(
            f"{val_annotations}: other categories than {annotations}", "use equal ids and names in both"
        )
    used = {number for content in files.values() for number in _used(content)}
    chosen, parents = _chosen(every[annotations], used, annotations, choice.classes)
    conversion = Conversion([category.name for category in chosen])
    for parent in parents:
        conversion.notes[
            f"category {parent.name!r} left out, which has no boxes and is the parent of others"
        ] = 1
    reader = _Reader(
        conversion, [category.id for category in chosen], {each.id for each in every[annotations]}, choice
    )
    items = reader.read(files[annotations], annotations, images)
    if not val_annotations:
        conversion.splits = split_by_name(items, 0.1 if val_share is None else val_share)
        return conversion
    val = reader.read(files[val_annotations], val_annotations, val_images or images)
    conversion.splits = {"train": items, "val": val}
    return conversion


def _load(path: Path) -> dict[str, list[Any]]:
    try:
        content: dict[str, list[Any]] = json.loads(read_text(path))
    except OSError as error:
        raise TrainerError(
            f"{path}: cannot be read: {error.strerror}", "give a COCO annotation file"
        ) from error
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


def _categories(content: dict[str, list[Any]], path: Path) -> list[_Category]:
    """Return the categories, sorted by id."""
    faults: list[Fault] = []
    found = [entry for _, entry in _entries(_Category, content, "categories", path, faults)]
    if faults or not found:
        raise BadData(faults or [Fault(str(path), 0, "no categories", HINT)])
    if len({entry.id for entry in found}) < len(found):
        raise TrainerError(f"{path}: an id of `categories` occurs twice", "give each a unique id")
    return sorted(found, key=lambda entry: entry.id)


def _used(content: dict[str, list[Any]]) -> set[int]:
    """Return the ids of the categories of all objects."""
    numbers = (entry.get("category_id") for entry in content["annotations"] if isinstance(entry, dict))
    return {number for number in numbers if isinstance(number, int)}


def _chosen(
    categories: Sequence[_Category], used: set[int], path: Path, classes: Sequence[str]
) -> tuple[list[_Category], list[_Category]]:
    """Return the categories that become classes, and the parents that do not, such as the root of Roboflow's files.

    A parent has no object, and is the supercategory of another category. Raises TrainerError if a name is left twice.
    """
    if classes:
        unknown = [
            name for name in classes if not any(name in (each.name, str(each.id)) for each in categories)
        ]
        if unknown:
            known = ", ".join(f"{each.name} ({each.id})" for each in categories)
            raise TrainerError(
                f"--classes {unknown[0]}: no such category in {path}", f"use names or ids of: {known}"
            )
        chosen = [each for each in categories if {each.name, str(each.id)} & {*classes}]
        parents = []
    else:
        above = {each.id: each.supercategory for each in categories}
        parents = [
            each
            for each in categories
            if each.id not in used
            and any(each.name == name for number, name in above.items() if number != each.id)
        ]
        chosen = [each for each in categories if each not in parents]
    by_name: dict[str, list[int]] = {}
    for each in chosen:
        by_name.setdefault(each.name, []).append(each.id)
    firsts = ",".join(str(ids[0]) for ids in by_name.values())
    for name, ids in by_name.items():
        if len(ids) > 1:
            what = f"{path}: the categories {', '.join(map(str, ids))} have the same name, {name!r}"
            raise TrainerError(what, f"choose by id, for example --classes {firsts}")
    return chosen, parents


class _Reader:
    """Reads the splits of a conversion: `categories` are the ids of its classes, `known` those of the whole file."""

    def __init__(
        self, conversion: Conversion, categories: list[int], known: set[int], choice: Choice
    ) -> None:
        self._conversion = conversion
        self._categories = categories
        self._known = known
        self._crowds = choice.crowds
        self._known_files: dict[Path, NamedFiles] = {}

    def read(self, content: dict[str, list[Any]], path: Path, folder: Path) -> list[Annotated]:
        """Return the valid images with their valid rows; add the others to the conversion's faults."""
        images = self._images(content, path, folder)
        shapes = self._shapes(images, path, folder)
        rows: dict[int | str, list[str]] = {number: [] for number in shapes}
        crowded = set[int | str]()
        for where, thing in _entries(_Object, content, "annotations", path, self._conversion.faults):
            if thing.image_id not in images:
                self._conversion.fault(path, f"{where}: no image has the id {thing.image_id}")
            elif thing.category_id not in self._known:
                self._conversion.fault(path, f"{where}: no category has the id {thing.category_id}")
            elif thing.category_id not in self._categories:
                self._conversion.notes["object of another class left out"] += 1
            elif thing.iscrowd and not self._crowds:
                self._conversion.notes[CROWDS] += 1
                crowded.add(thing.image_id)
            elif thing.image_id in shapes:  # otherwise its image is already a fault
                label = self._row(thing, shapes[thing.image_id])
                if label:
                    rows[thing.image_id].append(label)
                else:
                    self._conversion.fault(
                        path, f"{where}: box without area or outside the image: {thing.bbox}"
                    )
        if empty := sum(number in rows and not rows[number] for number in crowded):
            self._conversion.notes[EMPTY_BY_CROWDS] += empty
            self._conversion.hint = "--crowd boxes: convert them as objects"
        return [
            Annotated(folder / images[number].file_name, images[number].file_name, rows[number])
            for number in shapes
        ]

    def _images(self, content: dict[str, list[Any]], path: Path, folder: Path) -> dict[int | str, _Image]:
        images: dict[int | str, _Image] = {}
        for where, image in _entries(_Image, content, "images", path, self._conversion.faults):
            name = self._name(image.file_name, folder)
            if not name:
                self._conversion.fault(path, f"{where}: {image.file_name!r} is not below the images' folder")
            elif image.id in images:
                self._conversion.fault(path, f"{where}: the id {image.id} occurs twice")
            else:
                images[image.id] = image.model_copy(update={"file_name": name})
        return images

    def _name(self, text: str, folder: Path) -> str:
        """Return the path below `folder` of the image that `file_name` means; "" if it cannot be there."""
        name = PurePosixPath(text)
        is_below = not (name.is_absolute() or ".." in name.parts or "\0" in text)
        if is_below and (folder / text).exists():
            return text
        if folder not in self._known_files:
            self._known_files[folder] = NamedFiles(str(folder.absolute()), images_below(folder))
        if found := self._known_files[folder].find(text):
            self._conversion.notes["image whose path is written in another form, found by its end"] += 1
            return os.path.relpath(found, folder.absolute())
        return text if is_below else ""

    def _shapes(
        self, images: dict[int | str, _Image], path: Path, folder: Path
    ) -> dict[int | str, tuple[int, int]]:
        """Return (height, width) of each readable image."""
        shapes: dict[int | str, tuple[int, int]] = {}
        found = sizes([folder / image.file_name for image in images.values()])
        for image, size in zip(images.values(), found, strict=True):
            if isinstance(size, Fault):
                self._conversion.faults.append(size)
            elif (image.height, image.width) not in ((None, None), size):
                what = f"is {size[1]} x {size[0]} px, not {image.width} x {image.height}"
                self._conversion.fault(path, f"image {image.id}: {folder / image.file_name} {what}")
            else:
                shapes[image.id] = size
        return shapes

    def _row(self, thing: _Object, size: tuple[int, int]) -> str | None:
        """Return the label row of an object, or None if its box has no area or is outside the image."""
        x, y, width, height = thing.bbox
        outline = None if thing.iscrowd else _outline(thing.segmentation, self._conversion)
        number = self._categories.index(thing.category_id)
        return self._conversion.row(number, (x, y, x + width, y + height), size, outline)


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
