"""Data sets in YOLO format: pictures in folders or lists, one text file of boxes per picture.

Everything is read and checked once, when the set is opened, so that a bad label stops the run before it starts.
"""
# ruff: noqa: PTH118, PTH123

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from trainer.data.data_yaml import DataYaml, read_data_yaml
from trainer.data.dataset import Image, Labels, Segment, reduction
from trainer.data.faults import BadData, Fault
from trainer.data.fetch import fetch_missing
from trainer.data.label_cache import cached, load
from trainer.data.listing import Listing, list_split
from trainer.data.scan import Scan, scan
from trainer.errors import TrainerError

SINGLE_CLASS = "item"  # what all classes become with --single-cls
_ONE_CLASS = np.array([0, 1, 1, 1, 1], np.float32)
_NO_SEGMENT: Segment = np.empty((0, 2), np.float32)
_FLAGS = {
    8: cv2.IMREAD_REDUCED_COLOR_8,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    1: cv2.IMREAD_COLOR,
}


@dataclass(frozen=True)
class Source:
    """One split of a data.yaml as it was found, with its faults."""

    split: str
    spec: DataYaml
    listing: Listing
    scan: Scan

    def faults(self) -> list[Fault]:
        """All faults and warnings but that there are no boxes."""
        return self.listing.faults + self.scan.faults

    def no_boxes(self) -> Fault | None:
        """The fault of a split that nothing can be learnt from, or None."""
        if len(self.scan.labels):
            return None
        folders = sorted({str(Path(self.listing.label_file(k)).parent) for k in range(len(self.listing.pictures))})
        what = f"none of the {len(self.scan.paths)} {self.split} pictures has a labelled box"
        return Fault(str(self.spec.path), self.spec.line, what, f"labels are looked for in {', '.join(folders[:3])}")


def read_split(data_yaml: str, split: str) -> Source:
    """Read one split and all its faults; BadData only where there is nothing to read."""
    spec = read_data_yaml(Path(data_yaml), split)
    listing = list_split(spec)
    nc = len(spec.names)
    return Source(split, spec, listing, cached(listing, nc, lambda: scan(listing, nc)))


class Yolo:
    """Pictures and boxes of one split of a data.yaml."""

    flips = True

    def __init__(self, data_yaml: str, split: str, *, single_cls: bool = False, allow_bad_labels: bool = False) -> None:
        """BadData for a set with faults; with `allow_bad_labels` the bad rows and pictures are left out instead.

        Pictures that are missing are fetched, if data.yaml names an archive of them. With `single_cls` every box is
        of the one class "item".
        """
        fetch_missing(data_yaml)
        source = read_split(data_yaml, split)
        self._scan, self._root = source.scan, source.listing.root
        self._single = single_cls
        self.names = [SINGLE_CLASS] if single_cls else source.spec.names
        self.faults = source.faults()  # what was left out, and warnings
        stopping = [fault for fault in self.faults if not fault.warning]
        if stopping and not allow_bad_labels:
            raise BadData(
                stopping,
                f"`trainer data check --data {data_yaml}` lists all faults; --allow-bad-labels leaves them out",
            )
        if nothing := source.no_boxes():
            raise BadData([nothing])

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the cached arrays into its memory, too, instead of getting a copy of its own.
        return {**self.__dict__, "_scan": self._scan.folder or self._scan}

    def __setstate__(self, state: dict[str, Any]) -> None:
        folder = state["_scan"]
        if isinstance(folder, str):
            try:
                state["_scan"] = load(Path(folder))
            except (OSError, ValueError) as error:
                raise TrainerError(f"{folder}: the labels read before are gone: {error}", "start again") from None
        self.__dict__.update(state)

    def __len__(self) -> int:
        return len(self._scan.paths)

    def fingerprint(self) -> str:
        """The same for the same pictures (by path in the set, and size) with the same boxes, wherever the set lies."""
        parts = (self._scan.paths, self._scan.sizes, self._scan.labels)
        digest = hashlib.sha256(json.dumps(self.names).encode())
        for part in parts:
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()

    def _path(self, index: int) -> str:
        return os.path.join(self._root, os.fsdecode(self._scan.paths[index]))

    def path(self, index: int) -> Path:
        """The file of picture `index`."""
        return Path(self._path(index))

    def name(self, index: int) -> str:
        """The file of picture `index`."""
        return self._path(index)

    def size(self, index: int) -> tuple[int, int]:
        """(height, width) in pixels of picture `index`, turned upright."""
        height, width = self._scan.sizes[index].tolist()
        return height, width

    def image(self, index: int, min_side: int = 0) -> Image:
        """Picture `index` as uint8 (h, w, 3) RGB; JPEG decodes several times faster when `min_side` is small."""
        flags = _FLAGS[reduction(int(self._scan.sizes[index].max()), min_side)]
        path = self._path(index)
        try:
            with open(path, "rb", buffering=0) as stream:
                picture = cv2.imdecode(np.frombuffer(stream.read(), np.uint8), flags)
        except (OSError, ValueError, cv2.error):
            picture = None
        if picture is None:
            raise TrainerError(f"{path}: cannot be decoded", "replace the picture, or delete it and its label file")
        return np.asarray(cv2.cvtColor(picture, cv2.COLOR_BGR2RGB, dst=picture))

    def labels(self, index: int) -> Labels:
        """The boxes of picture `index` as float32 (n, 5): class, cx, cy, w, h as fractions of its sides."""
        first, last = self._scan.offsets[index : index + 2].tolist()
        rows: Labels = np.asarray(self._scan.labels[first:last])
        return rows * _ONE_CLASS if self._single else rows

    def segments(self, index: int) -> list[Segment]:
        """The polygons of picture `index`, one for each of its labels: float32 (k, 2) fractions, (0, 2) for a box."""
        first, last = self._scan.offsets[index : index + 2].tolist()
        cuts = self._scan.corner_offsets[first : last + 1].tolist()
        if cuts[0] == cuts[-1]:  # boxes only, as in most sets
            return [_NO_SEGMENT] * (last - first)
        return [np.asarray(self._scan.corners[begin:end]) for begin, end in pairwise(cuts)]
