"""Scan of a split: image sizes and labels, read and checked once, in flat arrays.

Reference counts would copy a list of a million objects into every worker process, page by page.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.config.faults import Fault, first_of
from trainer.config.text_file import read_text
from trainer.data.dataset import Floats, Ints, Labels
from trainer.data.formats import extra_columns
from trainer.data.formats.listing import Listing
from trainer.data.images.image_check import faults_of
from trainer.data.images.image_file import ImageState
from trainer.data.progress import in_threads

_ROW_HINT = "write each line as `class cx cy w h`, the last four as fractions of the image's sides"


@dataclass(frozen=True)
class Scan:
    """The readable images (n) of a split, their valid labels (m) and corners (p), and the faults of the others."""

    paths: npt.NDArray[np.bytes_]  # (n,), as in the listing
    sizes: npt.NDArray[np.int32]  # (n, 2): height, width in pixels, after the EXIF rotation
    offsets: Ints  # (n + 1,): image k has the labels offsets[k] to offsets[k + 1]
    labels: Labels  # (m, 5)
    corner_offsets: Ints  # (m + 1,)
    corners: npt.NDArray[np.float32]  # (p, 2): x, y as fractions
    faults: list[Fault]
    file: str = ""  # file of the label cache; "" if the scan is not cached


@dataclass(frozen=True)
class _Image:
    """One readable image, and the rows of its label file."""

    index: int  # in the listing
    size: tuple[int, int]
    rows: Floats  # (k, 5): class, cx, cy, w, h
    outlines: list[Floats]  # k arrays (c, 2); (0, 2) for a box
    lines: list[int]  # (k,)


def scan(listing: Listing, states: Sequence[ImageState], nc: int, extra: int | None = None) -> Scan:
    """Read all labels of `listing`, with classes 0 to nc - 1; `states` are those of its images.

    `extra` numbers follow the box in a row; they are not used. None: data.yaml does not say how many, so a longer
    row is an outline, unless the rows show that it is not. 0: a longer row is an outline.
    """
    faults: list[tuple[int, Fault]] = []  # with the image's index
    indices = range(len(listing.images))
    counts = Counter(kind for state in states for kind in state.oddities)
    for index, (path, state) in enumerate(zip(listing.image_files(), states, strict=True)):
        faults += [(index, fault) for fault in faults_of(path, state, counts)]
    reads = in_threads(
        lambda index: _read(listing, index, states[index], extra, faults), indices, "reading labels"
    )
    images = [image for image in reads if image]
    rows = np.concatenate([np.empty((0, 5)), *(image.rows for image in images)])
    owner = np.repeat(np.arange(len(images)), np.array([len(image.rows) for image in images], np.int64))
    sizes = np.array([image.size for image in images], np.int32).reshape(-1, 2)
    all_outlines = [outline for image in images for outline in image.outlines]
    extras = extra_columns.find(all_outlines) if extra is None else []
    is_outline = np.ones(len(rows), np.bool_)
    for columns in extras:
        is_outline[columns.rows] = not columns.is_certain
    labels, good, bad = _check(rows, owner, nc, is_outline)
    lines = [line for image in images for line in image.lines]
    hints = {}
    for columns in extras:
        first = int(columns.rows[0])
        if columns.is_certain:
            what = f"a box with {columns.what}, no outline"
        else:
            what = f"an outline, or a box with {columns.what}?"
        count = first_of(len(columns.rows))
        bad[first] = f"{columns.columns} columns: {what}{count}", not columns.is_certain
        hints[first] = f"{columns.hint}; if these rows are outlines: `extra_columns: 0`"
    clipped = np.flatnonzero(good & _is_beyond(rows, 1 / sizes[owner][:, ::-1]))
    if len(clipped):
        what = f"box partly outside the image, clipped to it{first_of(len(clipped))}"
        bad[int(clipped[0])] = what, True
    for k, (what, warning) in bad.items():
        index = images[owner[k]].index
        file = listing.label_file(index)
        text = read_text(file).splitlines()[lines[k] - 1].strip()[:60]
        faults.append((index, Fault(file, lines[k], f"{what}: `{text}`", hints.get(k, _ROW_HINT), warning)))
    faults.sort(key=lambda item: (item[0], item[1].line))
    outlines = [all_outlines[k] for k in np.flatnonzero(good)]
    return Scan(
        np.array([os.fsencode(listing.images[image.index]) for image in images], np.bytes_),
        sizes,
        _offsets(np.bincount(owner[good], minlength=len(images))),
        labels,
        _offsets([len(outline) for outline in outlines]),
        np.clip(np.concatenate([np.empty((0, 2)), *outlines]), 0, 1).astype(np.float32),
        [fault for _, fault in faults],
    )


def _offsets(counts: npt.ArrayLike) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _read(
    listing: Listing, index: int, state: ImageState, extra: int | None, faults: list[tuple[int, Fault]]
) -> _Image | None:
    """Return the image `index` of `listing` and its rows, polygons as their bounds; add faults to `faults`.

    An image whose labels cannot be read is omitted: without labels, it would count as background.
    """
    file = listing.label_file(index)
    if state.problem:
        return None
    content: list[str] = []
    if listing.stamps[index, 2] >= 0:
        try:
            content = read_text(file).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            faults.append((index, Fault(file, 0, f"cannot be read: {error}", _ROW_HINT)))
            return None
    rows = list[list[float]]()
    outlines = list[Floats]()
    lines = list[int]()
    for number, line in enumerate(content, 1):
        try:
            row = [float(word) for word in line.split()]
        except ValueError:
            faults.append((index, Fault(file, number, f"not a number in `{line.strip()[:60]}`", _ROW_HINT)))
            continue
        outline = np.empty((0, 2))
        if extra:
            row = row[:5] if len(row) == 5 + extra else row
        elif len(row) >= 7 and len(row) % 2:
            outline = np.array(row[1:]).reshape(-1, 2)
            low = outline.min(0)
            high = outline.max(0)
            row = [row[0], *(low + high) / 2, *(high - low)]
        if len(row) == 5:
            rows.append(row)
            outlines.append(outline)
            lines.append(number)
        elif row:
            expected = f"5 or {5 + extra}" if extra else "5"
            hint = _ROW_HINT
            if not extra and len(row) > 5:
                hint += f"; or add `extra_columns: {len(row) - 5}` to data.yaml, and the last {len(row) - 5} are left out"
            faults.append((index, Fault(file, number, f"{len(row)} columns instead of {expected}", hint)))
    return _Image(
        index, (state.height, state.width), np.array(rows, np.float64).reshape(-1, 5), outlines, lines
    )


def _check(
    rows: Floats, owner: Ints, nc: int, is_usable: npt.NDArray[np.bool_]
) -> tuple[Labels, npt.NDArray[np.bool_], dict[int, tuple[str, bool]]]:
    """Check `rows` (n, 5), of which only those that `is_usable` (n,) can be valid.

    Returns the valid rows as float32 with boxes clipped to the image, their mask (n,), and for each other row a message
    and whether it is only a warning.
    """
    low, high = (np.clip(edges, 0, 1) for edges in _edges(rows))
    tests = [
        (~np.isfinite(rows).all(1), "not a finite number"),
        ((rows[:, 0] < 0) | (rows[:, 0] >= nc), f"class out of range 0 to {nc - 1}"),
        (rows[:, 0] != np.floor(rows[:, 0]), "class is not a whole number"),
        ((rows[:, 1:] > 2).any(1), "pixels instead of fractions"),
        ((rows[:, 3:] <= 0).any(1), "box without area"),
        (((high - low).astype(np.float32) <= 0).any(1), "box outside the image"),
    ]
    bad: dict[int, tuple[str, bool]] = {}
    for fails, what in tests:
        for k in np.flatnonzero(fails).tolist():
            if is_usable[k]:
                bad.setdefault(k, (what, False))
    fine = is_usable & ~np.any([fails for fails, _ in tests], axis=0)
    _, first = np.unique(np.column_stack([owner, rows])[fine], axis=0, return_index=True)
    good = np.zeros_like(fine)
    good[np.flatnonzero(fine)[first]] = True
    bad.update(dict.fromkeys(np.flatnonzero(fine & ~good).tolist(), ("the same box twice", True)))
    low = low[good]
    high = high[good]
    labels = np.concatenate([rows[good, :1], (low + high) / 2, high - low], 1).astype(np.float32)
    return labels, good, bad


def _edges(rows: Floats) -> tuple[Floats, Floats]:
    """Return the left top and right bottom corners (n, 2) of `rows` (n, 5)."""
    half = rows[:, 3:] / 2
    return rows[:, 1:3] - half, rows[:, 1:3] + half


def _is_beyond(rows: Floats, pixel: Floats) -> npt.NDArray[np.bool_]:
    """Return whether each box of `rows` (n, 5) exceeds its image by more than a `pixel` (n, 2)."""
    low, high = _edges(rows)
    # Annotation tools round to whole pixels, so one pixel beyond the edge is nothing to report.
    beyond: npt.NDArray[np.bool_] = np.asarray(((low < -pixel) | (high > 1 + pixel)).any(1))
    return beyond
