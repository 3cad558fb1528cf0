"""Embedded dataset: synthetic pages of the 1 797 handwritten digits in scikit-learn.

Nothing is downloaded. A page depends on its split, index and size alone. Training and validation use different scans.
"""

import importlib.util
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from trainer.data.dataset import Image, Labels, Segment
from trainer.errors import TrainerError

PAGES = {"train": 2000, "val": 256}
_SPLIT_KEY = {"train": 1, "val": 2}
_HEIGHTS = (0.13, 0.42)  # of a digit, as fractions of the page's side
_CANDIDATES = 14  # candidate positions per page; those that would cover an earlier digit are dropped
_MAX_DIGITS = 8
_MAX_OVERLAP = 0.04  # of the smaller of two boxes
_INK = 64  # least coverage of a pixel of a digit
_GLYPH_SCALE = 8  # pixels of a prepared glyph per pixel of the 8 x 8 scan

Gray = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Page:
    ink: Gray  # (side, side): 0 is paper, 255 is ink
    tint: npt.NDArray[np.uint8]  # (256, 1, 3): RGB of each level of `ink`
    labels: Labels
    mask: Gray | None  # (side, side): 0 is background, 1 is inside the outline of a digit


def scans(split: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return the scans (n, 8, 8) of a split with values 0 to 16, and their digits (n,): every fifth is of validation.

    scikit-learn's file is read directly, because importing sklearn.datasets takes over a second in every process.
    """
    spec = importlib.util.find_spec("sklearn")
    folders = (spec and spec.submodule_search_locations) or []
    for folder in folders:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
            table = table[(np.arange(len(table)) % 5 == 4) == (split == "val")]
            return table[:, :64].reshape(-1, 8, 8), table[:, 64]
    raise TrainerError("--data digits: scikit-learn is not installed", "pip install scikit-learn")


def _prepare(scan: npt.NDArray[np.uint8]) -> Gray:
    """Return an 8 x 8 scan as a smooth glyph (h, w) with sharp strokes, cropped to its ink: coverage 0 to 255."""
    side = 10 * _GLYPH_SCALE
    padded = np.pad(scan.astype(np.float32) / 16, 1)
    smooth = cv2.resize(padded, (side, side), interpolation=cv2.INTER_CUBIC)
    level = np.clip((smooth - 0.32) / 0.36, 0, 1)
    ink = level * level * (3 - 2 * level)  # smoothstep sharpens the scan's blur to an edge of about a pixel
    ys = np.flatnonzero((ink > 0.3).any(1))
    xs = np.flatnonzero((ink > 0.3).any(0))
    crop = ink[ys[0] : ys[-1] + 1, xs[0] : xs[-1] + 1]
    return np.ascontiguousarray((crop * 255).astype(np.uint8))


@lru_cache(maxsize=2)
def _glyphs(split: str) -> tuple[list[Gray], npt.NDArray[np.uint8]]:
    """Return the glyphs of a split, and their digits (n,)."""
    levels, digits = scans(split)
    return [_prepare(scan) for scan in levels], digits


def _apart(boxes: npt.NDArray[np.float64], limit: int) -> list[int]:
    """Return the indices of the first `limit` boxes (n, 4) xyxy that overlap no earlier chosen box."""
    low = np.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    shared = np.prod(np.clip(high - low, 0, None), axis=2)
    area = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    clash = shared > _MAX_OVERLAP * np.minimum(area[:, None], area[None])
    chosen: list[int] = []
    for k in range(len(boxes)):
        if len(chosen) < limit and not clash[k, chosen].any():
            chosen.append(k)
    return chosen


def _tint(rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return the colours from paper to ink (256, 1, 3): dark ink on light paper, reversed with probability 1/3."""
    light = rng.uniform(170, 250) + rng.uniform(-22, 22, 3)
    dark = rng.uniform(10, 90) + rng.uniform(-30, 30, 3)
    paper, ink = (dark, light) if rng.random() < 1 / 3 else (light, dark)
    ramp = paper + (ink - paper) * (np.arange(256)[:, None] / 255)
    return np.clip(ramp, 0, 255).astype(np.uint8)[:, None]


def _compose(split: str, index: int, side: int, masks: bool) -> _Page:
    """Return page `index`: digits of random size and position with little overlap, on uneven, grainy paper."""
    rng = np.random.default_rng([_SPLIT_KEY[split], index, side])
    glyphs, digits = _glyphs(split)
    drawn = rng.integers(len(glyphs), size=_CANDIDATES)
    shapes = np.array([glyphs[k].shape for k in drawn], np.float64)
    heights = side * np.exp(rng.uniform(math.log(_HEIGHTS[0]), math.log(_HEIGHTS[1]), _CANDIDATES))
    widths = heights * shapes[:, 1] / shapes[:, 0] * rng.uniform(0.85, 1.2, _CANDIDATES)
    wh = np.maximum(np.rint(np.stack([widths, heights], 1)), 3)
    wh = np.minimum(wh, side)
    xy = np.floor(rng.random((_CANDIDATES, 2)) * (side - wh + 1))
    strength = rng.uniform(0.65, 0.9, _CANDIDATES)
    chosen = _apart(np.concatenate([xy, xy + wh], 1), int(rng.integers(3, _MAX_DIGITS + 1)))

    ink: Any = np.zeros((side, side), np.uint8)
    mask: Any = np.zeros((side, side), np.uint8) if masks else None
    for k in chosen:
        x, y, w, h = (int(v) for v in (*xy[k], *wh[k]))
        glyph = glyphs[drawn[k]]
        digit = cv2.resize(
            glyph, (w, h), interpolation=cv2.INTER_AREA if h < len(glyph) else cv2.INTER_LINEAR
        )
        place = ink[y : y + h, x : x + w]
        np.maximum(place, cv2.convertScaleAbs(digit, alpha=strength[k]), out=place)
        if masks:
            outline = cv2.convexHull(np.argwhere(digit > _INK)[:, ::-1].astype(np.int32)) + np.array(
                [x, y], np.int32
            )
            cv2.fillConvexPoly(mask, outline, 1)
    shade = (rng.random((3, 3)) * rng.uniform(0, 45)).astype(np.uint8)
    ink = cv2.add(ink, cv2.resize(shade, (side, side), interpolation=cv2.INTER_CUBIC))
    grain = np.frombuffer(rng.bytes(side * side), np.uint8).reshape(side, side) >> 4
    ink = cv2.add(ink, grain)

    xy = xy[chosen]
    wh = wh[chosen]
    labels = np.column_stack([digits[drawn[chosen]], (xy + wh / 2) / side, wh / side]).astype(np.float32)
    return _Page(ink, _tint(rng), labels, mask)


class Digits:
    """Dataset of pages with 3 to 8 handwritten digits in 10 classes; each page is composed at first access."""

    flips = False

    def __init__(self, split: str, imgsz: int, pages: int | None = None, *, masks: bool = False) -> None:
        self.names = [str(digit) for digit in range(10)]
        self._split = split
        self._side = imgsz
        self._masks = masks
        self._pages: list[_Page | None] = [None] * (PAGES[split] if pages is None else pages)

    def __getstate__(self) -> dict[str, Any]:
        # Composing pages in the worker is faster than sending 51 MB through a pipe.
        return {**self.__dict__, "_pages": [None] * len(self._pages)}

    def __len__(self) -> int:
        return len(self._pages)

    def _page(self, index: int) -> _Page:
        page = self._pages[index]
        if page is None:
            page = self._pages[index] = _compose(self._split, index, self._side, self._masks)
        return page

    def name(self, index: int) -> str:
        """Return `page INDEX`."""
        return f"page {index}"

    def size(self, index: int) -> tuple[int, int]:
        """Return (side, side)."""
        return self._side, self._side

    def image(self, index: int, min_side: int = 0) -> Image:
        """Return page `index` as uint8 (side, side, 3) RGB; `min_side` is ignored."""
        page = self._page(index)
        return np.asarray(cv2.LUT(cv2.cvtColor(page.ink, cv2.COLOR_GRAY2RGB), page.tint))

    def labels(self, index: int) -> Labels:
        """Return the digits of page `index` as float32 (n, 5): digit, cx, cy, w, h as fractions of the side."""
        return self._page(index).labels

    def segments(self, index: int) -> list[Segment]:
        """Return an empty polygon (0, 2) for every digit."""
        return [np.empty((0, 2), np.float32)] * len(self.labels(index))

    def mask(self, index: int) -> Gray:
        """Return the mask of page `index`: 0 is background, 1 is digit. Requires `masks`."""
        mask = self._page(index).mask
        assert mask is not None
        return mask
