"""What `trainer data check` finds: every fault of both splits, and how boxes are spread over the classes."""
# ruff: noqa: PTH118, PTH123, PTH202

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import cv2
import numpy as np

from trainer.data.faults import BadData, Fault
from trainer.data.listing import THREADS
from trainer.data.yolo import Source, read_split
from trainer.progress import track

SPLITS = ("train", "val")


@dataclass(frozen=True)
class ClassRow:
    """One class in one split."""

    name: str
    pictures: int  # that show it
    boxes: int
    share: float  # of the split's boxes
    median_px: tuple[float, float]  # width and height of its boxes; (0, 0) where there are none


@dataclass(frozen=True)
class SplitTable:
    """One split's readable pictures and good boxes."""

    split: str
    pictures: int
    background: int  # pictures without a box
    boxes: int
    classes: list[ClassRow]


@dataclass(frozen=True)
class Report:
    """All faults (they stop a training), all warnings (they do not), and a table of each split that can be read."""

    faults: list[Fault]
    warnings: list[Fault]
    tables: list[SplitTable]


def check(data_yaml: str, *, decode: bool) -> Report:
    """Read both splits of `data_yaml`; with `decode` every picture is decoded, too, else only its header is read."""
    found: dict[Fault, None] = {}  # without repeating what both splits have in common, such as data.yaml's faults
    sources = []
    for split in SPLITS:
        try:
            source = read_split(data_yaml, split)
        except BadData as error:
            found.update(dict.fromkeys(error.faults))
            continue
        sources.append(source)
        nothing = source.no_boxes()
        found.update(dict.fromkeys(source.faults() + ([nothing] if nothing else [])))
        if decode:
            found.update(dict.fromkeys(_undecodable(source)))
    if len(sources) == len(SPLITS):
        found.update(dict.fromkeys(_leaks(*sources)))
    return Report(
        [fault for fault in found if not fault.warning],
        [fault for fault in found if fault.warning],
        [_table(source) for source in sources],
    )


def _table(source: Source) -> SplitTable:
    scan = source.scan
    owner = np.repeat(np.arange(len(scan.paths)), np.diff(scan.offsets))
    classes = scan.labels[:, 0].astype(np.int64)
    sides = scan.labels[:, 3:] * scan.sizes[owner][:, ::-1]  # width, height in pixels
    rows = []
    for number, name in enumerate(source.spec.names):
        mine = classes == number
        width, height = np.median(sides[mine], axis=0).tolist() if mine.any() else (0.0, 0.0)
        boxes = int(mine.sum())
        rows.append(
            ClassRow(name, len(np.unique(owner[mine])), boxes, boxes / max(1, len(classes)), (width, height)),
        )
    background = int((np.diff(scan.offsets) == 0).sum())
    return SplitTable(source.split, len(scan.paths), background, len(classes), rows)


def _paths(source: Source) -> list[str]:
    return [os.path.join(source.listing.root, os.fsdecode(path)) for path in source.scan.paths]


def _undecodable(source: Source) -> list[Fault]:
    def problem(path: str, size: list[int]) -> Fault | None:
        try:
            with open(path, "rb") as stream:
                picture = cv2.imdecode(np.frombuffer(stream.read(), np.uint8), cv2.IMREAD_COLOR)
        except (OSError, ValueError, cv2.error):
            picture = None
        hint = "replace the picture, or delete it and its label file"
        if picture is None:
            return Fault(path, 0, "cannot be decoded", hint)
        height, width = picture.shape[:2]
        if [height, width] != size:
            return Fault(path, 0, f"is {width} x {height} px, but its header says {size[1]} x {size[0]}", hint)
        return None

    cv2.utils.logging.setLogLevel(2)  # errors only: what it warns of is reported here, with the file's name
    paths = _paths(source)
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(problem, paths, source.scan.sizes.tolist())
        problems = track(found, len(paths), f"decoding {source.split} pictures")
        return [fault for fault in problems if fault]


def _leaks(train: Source, val: Source) -> list[Fault]:
    """Pictures of `val` that are in `train`, too: a score on them says nothing about new pictures."""
    by_size: defaultdict[int, list[str]] = defaultdict(list)
    for path in _paths(train):
        by_size[os.path.getsize(path)].append(path)
    contents: dict[bytes, str] = {}
    faults = []
    for path in _paths(val):
        for twin in by_size.pop(size := os.path.getsize(path), []):
            contents.setdefault(_digest(twin), twin)
        by_size[size] = []  # digested
        if contents and (twin := contents.get(_digest(path), "")):
            hint = "delete one of them: validation should show pictures that the model has not learnt"
            faults.append(Fault(path, 0, f"the same picture as {twin} of the training", hint, warning=True))
    return faults


def _digest(path: str) -> bytes:
    with open(path, "rb") as stream:
        return hashlib.blake2b(stream.read(), digest_size=16).digest()
