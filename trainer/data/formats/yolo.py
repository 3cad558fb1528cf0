"""Datasets in YOLO format: images in folders or lists, one text file of boxes per image.

All labels are read and checked when the dataset is opened, before training starts.
"""
# ruff: noqa: PTH118

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.faults import BadData, Fault
from trainer.data.dataset import Image, Labels, Segment, read_image, reduction
from trainer.data.formats.data_yaml import DataYaml, read_data_yaml
from trainer.data.formats.fetch import fetch_missing
from trainer.data.formats.label_cache import cached_scan, load
from trainer.data.formats.listing import Listing, list_split
from trainer.data.formats.scan import Scan
from trainer.errors import TrainerError

SINGLE_CLASS = "item"  # the class with --single-cls
_ONE_CLASS = np.array([0, 1, 1, 1, 1], np.float32)
_NO_SEGMENT: Segment = np.empty((0, 2), np.float32)


@dataclass(frozen=True)
class Source:
    """One split of a data.yaml, with its faults."""

    split: str
    spec: DataYaml
    listing: Listing
    scan: Scan

    def faults(self) -> list[Fault]:
        """Return all faults and warnings except `no_boxes`."""
        return self.spec.warnings + self.listing.faults + self.scan.faults

    def no_boxes(self) -> Fault | None:
        """Return a fault if the split has no boxes at all."""
        if len(self.scan.labels) or not len(self.scan.paths):  # without images there are other faults
            return None
        folders = sorted(
            {str(Path(self.listing.label_file(k)).parent) for k in range(len(self.listing.images))}
        )
        what = f"none of the {len(self.scan.paths)} {self.split} images has a labelled box"
        return Fault(str(self.spec.path), self.spec.line, what, f"put the labels in {', '.join(folders[:3])}")


@dataclass(frozen=True)
class Reading:
    """What was found in the splits of a data.yaml: what `trainer data check` prints, and a training refuses."""

    sources: list[Source]  # of the splits that can be used
    faults: list[Fault]  # all of them, and the warnings
    fatal: list[Fault]  # those without which nothing is left of a split


def read_splits(data_yaml: str, splits: Sequence[str], *, decode: bool = True) -> Reading:
    """Read splits with all their faults; without `decode`, of the images only what their headers show."""
    sources = list[Source]()
    faults = list[Fault]()
    fatal = list[Fault]()
    for split in splits:
        try:
            source = read_split(data_yaml, split, decode=decode)
        except BadData as error:
            faults += error.faults
            fatal += error.faults
            continue
        sources.append(source)
        faults += source.faults()
        if nothing := source.no_boxes():
            faults.append(nothing)
            fatal.append(nothing)
    # Both share those of data.yaml.
    return Reading(sources, list(dict.fromkeys(faults)), list(dict.fromkeys(fatal)))


def read_split(data_yaml: str, split: str, *, decode: bool = True) -> Source:
    """Read one split and all its faults; raise BadData if it cannot be listed."""
    spec = read_data_yaml(Path(data_yaml), split)
    listing = list_split(spec)
    found = cached_scan(listing, len(spec.names), spec.extra_columns, decode=decode)
    return Source(split, spec, listing, found)


def open_sources(data_yaml: str, splits: Sequence[str], *, allow_bad_labels: bool) -> list[Source]:
    """Return the splits; raise one BadData for all faults of all of them, those that cannot be left out at least.

    Missing images are fetched if data.yaml has `download`.
    """
    fetch_missing(data_yaml)
    reading = read_splits(data_yaml, splits)
    stopping = [fault for fault in reading.faults if not fault.warning]
    if stopping and not allow_bad_labels:
        hint = f"`trainer data check --data {data_yaml}` lists all faults; --allow-bad-labels leaves them out"
        raise BadData(stopping, hint)
    if reading.fatal:
        raise BadData(reading.fatal)
    for source in reading.sources:
        if not len(source.scan.paths):
            left_out = [fault for fault in source.faults() if not fault.warning]
            raise BadData(left_out, f"all {source.split} images are faulty: correct some of them")
    return reading.sources


class Yolo:
    """Dataset of one split of a data.yaml."""

    flips = True
    decodes_reduced = True

    def __init__(
        self, data: str | Source, split: str = "", *, single_cls: bool = False, allow_bad_labels: bool = False
    ) -> None:
        """Open a split of the data.yaml `data`, or one that `open_sources` has opened."""
        source = data
        if isinstance(source, str):
            (source,) = open_sources(source, [split], allow_bad_labels=allow_bad_labels)
        self._scan = source.scan
        self._root = source.listing.root
        self._single = single_cls
        self.names = [SINGLE_CLASS] if single_cls else source.spec.names
        self.faults = source.faults()  # of omitted entries, and warnings

    def __getstate__(self) -> dict[str, Any]:
        # A worker maps the cached arrays instead of receiving a copy.
        return {**self.__dict__, "_scan": self._scan.file or self._scan}

    def __setstate__(self, state: dict[str, Any]) -> None:
        file = state["_scan"]
        if isinstance(file, str):
            try:
                state["_scan"] = load(Path(file))
            except OSError as error:
                what = f"{file}: the label cache was removed while in use: {error}"
                raise TrainerError(what, "start the command again") from None
        self.__dict__.update(state)

    def __len__(self) -> int:
        return len(self._scan.paths)

    def fingerprint(self) -> str:
        """Return a hash of the images' relative paths and sizes, and of the boxes."""
        parts = (self._scan.paths, self._scan.sizes, self._scan.labels)
        digest = hashlib.sha256(json.dumps(self.names).encode())
        for part in parts:
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()

    def name(self, index: int) -> str:
        """Return the file of image `index`."""
        return os.path.join(self._root, os.fsdecode(self._scan.paths[index]))

    def size(self, index: int) -> tuple[int, int]:
        """Return (height, width) in pixels of image `index`, after the EXIF rotation."""
        height, width = self._scan.sizes[index].tolist()
        return height, width

    def image(self, index: int, min_side: int = 0) -> Image:
        """Return image `index` as uint8 (h, w, 3) RGB; a small `min_side` decodes JPEG several times faster."""
        return read_image(
            self.name(index), reduction(int(self._scan.sizes[index].max()), min_side), completes=True
        )

    def labels(self, index: int) -> Labels:
        """Return the boxes of image `index` as float32 (n, 5): class, cx, cy, w, h as fractions of its sides."""
        first, last = self._scan.offsets[index : index + 2].tolist()
        rows: Labels = np.asarray(self._scan.labels[first:last])
        return rows * _ONE_CLASS if self._single else rows

    def segments(self, index: int) -> list[Segment]:
        """Return the polygon of each label of image `index`: float32 (k, 2) fractions, (0, 2) for a box."""
        first, last = self._scan.offsets[index : index + 2].tolist()
        cuts = self._scan.corner_offsets[first : last + 1].tolist()
        if cuts[0] == cuts[-1]:  # boxes only, as in most sets
            return [_NO_SEGMENT] * (last - first)
        return [np.asarray(self._scan.corners[begin:end]) for begin, end in pairwise(cuts)]
