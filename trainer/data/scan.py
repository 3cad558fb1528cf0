"""Everything that a split's pictures and label files say, read and checked once, in flat arrays.

A list of a million small objects would be copied, page by page, into every worker process.
"""
# ruff: noqa: PTH113, PTH118, PTH123, PTH202
# (Paths are strings here: a hundred thousand pathlib objects would double the time to open a set.)

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image as Pillow
from PIL.TiffImagePlugin import TiffImageFile

from trainer.data.dataset import Labels
from trainer.data.faults import Fault
from trainer.data.listing import CHUNK, THREADS, Listing
from trainer.progress import track

_ORIENTATION = 0x0112  # EXIF tag; 5 to 8 are quarter turns
_TIFF_WIDTH, _TIFF_HEIGHT = 256, 257  # tags of TIFF, as the picture is stored
_LAST_BYTES = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB\x60\x82"}
_ROW_HINT = "a line is `class cx cy w h`, the last four as fractions of the picture's sides"
_PICTURE_HINT = "replace the picture, or delete it and its label file"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scan:
    """The readable pictures (n) of a split, their good labels (m) and corners (p); and what was left out, why."""

    paths: npt.NDArray[np.bytes_]  # (n,), as in the listing
    sizes: npt.NDArray[np.int32]  # (n, 2): height, width in pixels, turned upright
    offsets: npt.NDArray[np.int64]  # (n + 1,): the labels of picture k are those from offsets[k] to offsets[k + 1]
    labels: Labels  # (m, 5)
    corner_offsets: npt.NDArray[np.int64]  # (m + 1,)
    corners: npt.NDArray[np.float32]  # (p, 2): x, y as fractions
    faults: list[Fault]
    folder: str = ""  # where all this is cached, or "" if it is only in this process's memory


def scan(listing: Listing, nc: int) -> Scan:
    """Read all pictures' headers and all labels of `listing`, whose classes are 0 to nc - 1; needs some seconds."""
    starts = range(0, len(listing.pictures), CHUNK)
    with ThreadPoolExecutor(THREADS) as pool:
        parts = pool.map(
            lambda first: _read_chunk(listing, range(len(listing.pictures))[first : first + CHUNK], nc), starts
        )
        return _joined(list(track(parts, len(starts), "reading labels")))


def _joined(parts: list[Scan]) -> Scan:
    def offsets(arrays: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        return np.cumsum(np.concatenate([[0], *(np.diff(array) for array in arrays)]))

    return Scan(
        np.concatenate([part.paths for part in parts]),
        np.concatenate([part.sizes for part in parts]),
        offsets([part.offsets for part in parts]),
        np.concatenate([part.labels for part in parts]),
        offsets([part.corner_offsets for part in parts]),
        np.concatenate([part.corners for part in parts]),
        [fault for part in parts for fault in part.faults],
    )


@dataclass
class _Rows:
    """The rows of a chunk's label files, in the order of `owner` and `line`."""

    values: list[list[float]]  # class, cx, cy, w, h
    outlines: list[Floats]  # (k, 2)
    owner: list[int]  # place of the picture in the chunk
    line: list[int]


def _read_chunk(listing: Listing, indices: range, nc: int) -> Scan:
    found: list[tuple[int, Fault]] = []  # with the picture's index
    paths: list[bytes] = []
    sizes: list[tuple[int, int]] = []
    files: list[tuple[int, str]] = []
    rows = _Rows([], [], [], [])
    for index in indices:
        picture, file = os.path.join(listing.root, listing.pictures[index]), listing.label_file(index)
        size = picture_size(picture)
        if isinstance(size, Fault):
            found.append((index, size))
            continue
        lines = _lines(file) if listing.stamps[index, 2] >= 0 else []
        if isinstance(lines, Fault):
            found.append((index, lines))  # without its labels the picture would be taken for background
            continue
        found += [(index, fault) for fault in _parse(lines, file, len(paths), rows)]
        paths.append(os.fsencode(listing.pictures[index]))
        sizes.append(size)
        files.append((index, file))
    table = np.array(rows.values, np.float64).reshape(-1, 5)
    owner, shape = np.array(rows.owner, np.int64), np.array(sizes, np.int32).reshape(-1, 2)
    labels, good, bad = _check(table, owner, shape, nc)
    for k, (what, warning) in bad.items():
        index, file = files[owner[k]]
        fault = Fault(file, rows.line[k], f"{what}: `{_text(file, rows.line[k])}`", _ROW_HINT, warning)
        found.append((index, fault))
    found.sort(key=lambda item: (item[0], item[1].line))
    outlines = [rows.outlines[k] for k in np.flatnonzero(good)]
    corners = np.concatenate([np.empty((0, 2)), *outlines])
    return Scan(
        np.array(paths, np.bytes_),
        shape,
        np.concatenate([[0], np.cumsum(np.bincount(owner[good], minlength=len(paths)))]).astype(np.int64),
        labels,
        np.concatenate([[0], np.cumsum([len(outline) for outline in outlines])]).astype(np.int64),
        np.clip(corners, 0, 1).astype(np.float32),
        [fault for _, fault in found],
    )


def picture_size(picture: str) -> tuple[int, int] | Fault:
    """(height, width) from the picture's header, turned as its EXIF orientation says, as the decoder does."""
    try:
        with Pillow.open(picture) as header:
            width, height = header.size
            if isinstance(header, TiffImageFile):  # of which newer Pillows tell the size as it is when turned
                width, height = header.tag_v2[_TIFF_WIDTH], header.tag_v2[_TIFF_HEIGHT]
            # Asked for EXIF it has not met yet, Pillow decodes the whole of a PNG.
            known = header.format == "TIFF" or "exif" in header.info
            turned = known and header.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
            last = _LAST_BYTES.get(header.format or "", b"")
            if last and header.fp and _tail(header.fp, len(last)) != last:
                # It breaks off, which OpenCV's decoder would fill up with gray; or something was appended to it.
                with Pillow.open(picture) as whole:
                    whole.load()
    except Exception as error:  # whatever Pillow's many readers raise, the picture is at fault
        what = "empty file" if os.path.isfile(picture) and not os.path.getsize(picture) else str(error)
        return Fault(picture, 0, f"not a readable picture: {what.replace(repr(picture), 'it')}", _PICTURE_HINT)
    return (width, height) if turned else (height, width)


def _tail(stream: object, length: int) -> bytes:
    stream.seek(-length, os.SEEK_END)  # type: ignore[attr-defined]
    return stream.read(length)  # type: ignore[attr-defined, no-any-return]


def _lines(file: str) -> list[str] | Fault:
    try:
        with open(file, encoding="utf-8-sig") as stream:
            return stream.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        return Fault(file, 0, f"cannot be read: {error}", "labels are text: class cx cy w h")


def _text(file: str, line: int) -> str:
    lines = _lines(file)
    return "" if isinstance(lines, Fault) or line > len(lines) else lines[line - 1].strip()[:60]


def _parse(lines: list[str], file: str, owner: int, rows: _Rows) -> list[Fault]:
    """Add the rows of one label file to `rows`, polygons as the boxes around them; the lines that are no row."""
    faults = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        try:
            row = [float(word) for word in words]
        except ValueError:
            faults.append(Fault(file, number, f"not a number in `{line.strip()[:60]}`", _ROW_HINT))
            continue
        outline = np.empty((0, 2))
        if len(row) != 5:
            if len(row) < 7 or len(row) % 2 == 0:
                faults.append(Fault(file, number, f"{len(row)} columns instead of 5", _ROW_HINT))
                continue
            outline = np.array(row[1:]).reshape(-1, 2)
            low, high = outline.min(0), outline.max(0)
            row = [row[0], *(low + high) / 2, *(high - low)]
        rows.values.append(row)
        rows.outlines.append(outline)
        rows.owner.append(owner)
        rows.line.append(number)
    return faults


def _check(
    rows: Floats, owner: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32], nc: int
) -> tuple[Labels, npt.NDArray[np.bool_], dict[int, tuple[str, bool]]]:
    """The good ones of `rows` (n, 5) as float32 with boxes cut to the picture; which these are; and of each other
    what is wrong, and whether that is only worth a warning."""
    half = rows[:, 3:] / 2
    low, high = rows[:, 1:3] - half, rows[:, 1:3] + half
    # Annotation tools round to whole pixels: one pixel beyond the edge is no mistake.
    slack = 1 / sizes[owner][:, ::-1]
    tests = [
        (~np.isfinite(rows).all(1), "not a finite number"),
        ((rows[:, 0] < 0) | (rows[:, 0] >= nc), f"class out of range 0 to {nc - 1}"),
        (rows[:, 0] != np.floor(rows[:, 0]), "class is not a whole number"),
        ((rows[:, 1:] > 2).any(1), "pixels instead of fractions"),
        ((rows[:, 3:] <= 0).any(1), "box without area"),
        (((low < -slack) | (high > 1 + slack)).any(1), "box outside the picture"),
    ]
    bad: dict[int, tuple[str, bool]] = {}
    for fails, what in tests:
        for k in np.flatnonzero(fails).tolist():
            bad.setdefault(k, (what, False))
    fine = ~np.any([fails for fails, _ in tests], axis=0)
    _, first = np.unique(np.column_stack([owner, rows])[fine], axis=0, return_index=True)
    good = np.zeros_like(fine)
    good[np.flatnonzero(fine)[first]] = True
    bad.update(dict.fromkeys(np.flatnonzero(fine & ~good).tolist(), ("the same box twice", True)))
    low, high = np.clip(low[good], 0, 1), np.clip(high[good], 0, 1)
    labels = np.concatenate([rows[good, :1], (low + high) / 2, high - low], 1).astype(np.float32)
    return labels, good, bad
