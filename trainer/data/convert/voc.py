"""Pascal VOC's XML, read: one file per picture, boxes in pixels that count from 1."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from trainer.data.convert.writer import Annotated, Conversion, row, sizes, split_by_name
from trainer.data.faults import Fault
from trainer.data.listing import SUFFIXES
from trainer.errors import TrainerError
from trainer.progress import track

_HINT = "correct the file, or leave this out with --allow-bad-labels"
_LINE = "line"  # attribute that the parser adds


class _Refused(Exception):
    """Something that an annotation has no use for."""


def from_voc(folder: Path, *, skip_difficult: bool = False, val_share: float = 0.1) -> Conversion:
    """Read a folder with Annotations and JPEGImages, or with XML files and pictures side by side.

    Train and val are those of ImageSets/Main where it names them, else val is a share. Classes are sorted by name.
    """
    if not folder.is_dir():
        raise TrainerError(f"{folder}: no such folder", "give the folder that holds Annotations and JPEGImages")
    below = folder / "Annotations"
    files = sorted((below if below.is_dir() else folder).glob("*.xml"))
    if not files:
        raise TrainerError(f"{folder}: no XML files, neither there nor in Annotations", "give the set's folder")
    conversion = Conversion([])
    trees: dict[Path, Element] = {}
    for file in track(files, len(files), "reading annotations"):
        tree = _parse(file)
        if isinstance(tree, Fault):
            conversion.faults.append(tree)
        else:
            trees[file] = tree
    names = {_text(thing, "name") for tree in trees.values() for thing in tree.iter("object")}
    conversion.names = sorted(names - {""})
    pictures = _pictures(folder)
    paths = [
        pictures.get(file.stem) or pictures.get(Path(_text(tree, "filename")).stem) for file, tree in trees.items()
    ]
    items = []
    found = sizes([path or file.with_suffix(".jpg") for path, file in zip(paths, trees, strict=True)])
    for (file, tree), path, size in zip(trees.items(), paths, found, strict=True):
        if not path or isinstance(size, Fault):
            what = size.what if path and isinstance(size, Fault) else f"its picture is not there: {file.stem}.*"
            conversion.faults.append(Fault(str(path or file), 0, what, _HINT))
        else:
            rows = _rows(tree, file, size, conversion, skip_difficult)
            if rows is not None:
                items.append(Annotated(path, path.name, rows))
    conversion.splits = _listed(folder, items, conversion) or split_by_name(items, val_share)
    return conversion


def _parse(file: Path) -> Element | Fault:
    """The tree of an XML file, each element with its line; nothing but elements and text is accepted."""
    builder, parser = TreeBuilder(), expat.ParserCreate()

    def refuse(*_: object) -> None:
        raise _Refused("has a DOCTYPE, which could name other files or grow without end")

    def start(tag: str, _: dict[str, str]) -> None:
        builder.start(tag, {_LINE: str(parser.CurrentLineNumber)})

    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler = start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    try:
        parser.Parse(file.read_bytes(), True)
    except expat.ExpatError as error:
        return Fault(str(file), error.lineno, f"not XML: {expat.ErrorString(error.code)}", _HINT)
    except (_Refused, OSError, ValueError) as error:
        return Fault(str(file), parser.CurrentLineNumber, str(error), _HINT)
    root: Element = builder.close()
    return root if root.tag == "annotation" else Fault(str(file), 1, f"<{root.tag}> instead of <annotation>", _HINT)


def _text(element: Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _rows(
    tree: Element, file: Path, size: tuple[int, int], conversion: Conversion, skip_difficult: bool
) -> list[str] | None:
    """The rows of one picture, or None where the file is about a picture of another size."""

    def fault(element: Element, what: str) -> None:
        conversion.faults.append(Fault(str(file), int(element.get(_LINE, "0")), what, _HINT))

    declared = tree.find("size")
    if declared is not None:
        said = (_number(declared, "height"), _number(declared, "width"))
        if said not in (size, (0, 0)):  # some tools leave zeros
            fault(declared, f"the picture is {size[1]} x {size[0]} px, not {said[1]:g} x {said[0]:g}")
            return None
    rows = []
    for thing in tree.iter("object"):
        name = _text(thing, "name")
        if skip_difficult and _text(thing, "difficult") == "1":
            conversion.note("difficult object left out")
            continue
        x1, y1, x2, y2 = (_number(thing, f"bndbox/{key}") for key in ("xmin", "ymin", "xmax", "ymax"))
        if not name:
            fault(thing, "object without a name")
        elif not all(map(math.isfinite, (x1, y1, x2, y2))):
            fault(thing, "`bndbox` needs the numbers xmin, ymin, xmax, ymax")
        # The first pixel is 1, and the last one belongs to the box.
        elif made := row(conversion.names.index(name), (x1 - 1, y1 - 1, x2, y2), size):
            rows.append(made)
        else:
            fault(thing, f"box without area or outside the picture: {name} {x1:g} {y1:g} {x2:g} {y2:g}")
    return rows


def _number(element: Element, path: str) -> float:
    try:
        return float(_text(element, path))
    except ValueError:
        return math.nan


def _pictures(folder: Path) -> dict[str, Path]:
    """Pictures by name without suffix."""
    found: dict[str, Path] = {}
    for place in (folder / "JPEGImages", folder / "images", folder, folder / "Annotations"):
        if place.is_dir():
            for path in sorted(place.iterdir()):
                if path.suffix.lower() in SUFFIXES:
                    found.setdefault(path.stem, path)
    return found


def _listed(folder: Path, items: list[Annotated], conversion: Conversion) -> dict[str, list[Annotated]]:
    """The splits as ImageSets/Main lists them, or nothing if it does not list both."""
    lists = {split: folder / "ImageSets" / "Main" / f"{split}.txt" for split in ("train", "val")}
    if not all(path.is_file() for path in lists.values()):
        return {}
    by_stem = {Path(item.name).stem: item for item in items}
    bad = {Path(fault.file).stem for fault in conversion.faults}
    splits: dict[str, list[Annotated]] = {}
    for split, path in lists.items():
        splits[split] = []
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            words = line.split()
            if not words:
                continue
            item = by_stem.get(words[0])
            if item:
                splits[split].append(item)
            elif words[0] not in bad:
                conversion.faults.append(Fault(str(path), number, f"no annotation of {words[0]}", _HINT))
    listed = {item.name for items in splits.values() for item in items}
    for item in items:
        if item.name not in listed:
            conversion.note("picture in neither train.txt nor val.txt left out")
    return splits
