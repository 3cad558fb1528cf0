"""Pascal VOC reader: one XML file per image, boxes in pixels counted from 1."""

import math
from pathlib import Path
from xml.etree import ElementTree

from trainer.config.faults import Fault
from trainer.config.text_file import read_text
from trainer.data.convert.writer import Annotated, Conversion, sizes, split_by_name
from trainer.data.formats.listing import SUFFIXES
from trainer.data.progress import track
from trainer.errors import TrainerError


def from_voc(folder: Path, *, skip_difficult: bool = False, val_share: float = 0.1) -> Conversion:
    """Read Annotations and JPEGImages; ImageSets/Main defines the splits, or `val_share` of the images is val."""
    # Hidden files are those of macOS: `._a.xml` beside a.xml.
    files = sorted(path for path in (folder / "Annotations").glob("*.xml") if path.name[0] != ".")
    if not files:
        raise TrainerError(f"{folder}: no XML files in {folder / 'Annotations'}", "give the dataset's folder")
    conversion = Conversion([])
    trees: dict[Path, ElementTree.Element] = {}
    for file in track(files, len(files), "reading annotations"):
        try:
            trees[file] = ElementTree.parse(file).getroot()  # loads no external entities
        except (ElementTree.ParseError, OSError, ValueError) as error:
            conversion.fault(file, f"not XML: {error}")
    names = {_text(thing, "name") for tree in trees.values() for thing in tree.iter("object")}
    conversion.names = sorted(names - {""})
    images = {path.stem: path for path in folder.glob("JPEGImages/*") if path.suffix.lower() in SUFFIXES}
    items = []
    paths = [images.get(file.stem, folder / "JPEGImages" / f"{file.stem}.jpg") for file in trees]
    for (file, tree), path, size in zip(trees.items(), paths, sizes(paths), strict=True):
        if isinstance(size, Fault):
            conversion.faults.append(size)
        else:
            rows = _rows(tree, file, size, conversion, skip_difficult)
            if rows is not None:
                items.append(Annotated(path, path.name, rows))
    conversion.splits = _image_sets(folder, items, conversion) or split_by_name(items, val_share)
    return conversion


def _text(element: ElementTree.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _number(element: ElementTree.Element, path: str) -> float:
    try:
        return float(_text(element, path))
    except ValueError:
        return math.nan


def _rows(
    tree: ElementTree.Element, file: Path, size: tuple[int, int], conversion: Conversion, skip_difficult: bool
) -> list[str] | None:
    """Return the rows of one image; None if the declared size is wrong."""
    height = _number(tree, "size/height")
    width = _number(tree, "size/width")
    if (
        height and width and (height, width) != size and tree.find("size") is not None
    ):  # some tools write zeros
        conversion.fault(file, f"the image is {size[1]} x {size[0]} px, not {width:g} x {height:g}")
        return None
    rows = []
    for number, thing in enumerate(tree.iter("object"), 1):
        name = _text(thing, "name")
        if skip_difficult and _text(thing, "difficult") == "1":
            conversion.notes["difficult object left out"] += 1
            continue
        x1, y1, x2, y2 = (_number(thing, f"bndbox/{key}") for key in ("xmin", "ymin", "xmax", "ymax"))
        if not name:
            conversion.fault(file, f"object {number}: it has no name")
        elif not all(map(math.isfinite, (x1, y1, x2, y2))):
            conversion.fault(file, f"object {number}: `bndbox` needs the numbers xmin, ymin, xmax, ymax")
        # The first pixel is 1, and the box includes the last one.
        elif label := conversion.row(conversion.names.index(name), (x1 - 1, y1 - 1, x2, y2), size):
            rows.append(label)
        else:
            box = f"{name} {x1:g} {y1:g} {x2:g} {y2:g}"
            conversion.fault(file, f"object {number}: box without area or outside the image: {box}")
    return rows


def _image_sets(folder: Path, items: list[Annotated], conversion: Conversion) -> dict[str, list[Annotated]]:
    """Return the splits in ImageSets/Main; empty if it does not list both."""
    lists = {split: folder / "ImageSets" / "Main" / f"{split}.txt" for split in ("train", "val")}
    if not all(path.is_file() for path in lists.values()):
        return {}
    left = {Path(item.name).stem: item for item in items}
    bad = {Path(fault.file).stem for fault in conversion.faults}
    splits: dict[str, list[Annotated]] = {split: [] for split in lists}
    for split, path in lists.items():
        try:
            lines = read_text(path).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise TrainerError(
                f"{path}: cannot be read: {error}", "write one name per line, in UTF-8"
            ) from None
        for number, line in enumerate(lines, 1):
            for stem in line.split()[:1]:
                if stem in left:
                    splits[split].append(left.pop(stem))
                elif stem not in bad:
                    conversion.fault(path, f"no annotation of {stem}, or it is listed twice", number)
    if left:
        conversion.notes["image in neither train.txt nor val.txt left out"] += len(left)
    return splits
