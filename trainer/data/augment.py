"""Augmentation of detection: mosaic, affine, colour and flips, all from one random generator.

The mosaic's 2 s x 2 s canvas is never built: each tile is warped directly into the s x s result. A tile outside of
the result is not decoded. A single image may have a rectangular result, whose longer side is `s`.

Coordinates are continuous: pixel k covers k to k + 1.
"""

import math
from dataclasses import dataclass
from functools import cache

import cv2
import numpy as np
import numpy.typing as npt

from trainer.config import Hyp
from trainer.data.dataset import Dataset, Image, Labels

FILL = 114  # gray of the background
_MIN_SIDE_PX = 2.0
_MIN_AREA_SHARE = 0.1  # of a box that must stay visible
_MIN_OUTLINE_SHARE = 0.01  # the same for an object with an outline
_MAX_ASPECT = 100.0
_MAX_COVERED = 0.3  # share of another box that a pasted object may cover

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Tile:
    index: int
    x: float  # left edge on the canvas
    y: float
    w: float  # size on the canvas
    h: float


@dataclass(frozen=True)
class _Objects:
    """The objects of all tiles, in canvas coordinates."""

    classes: Floats  # (n,)
    boxes: Floats  # (n, 4) xyxy
    tiles: Ints  # (n,): index of each object's tile
    corners: Ints  # (n,): number of corners of its outline, 0 without one
    points: Floats  # (sum of corners, 2): the concatenated outlines


def _shift(x: float, y: float) -> Floats:
    return np.array([[1, 0, x], [0, 1, y], [0, 0, 1]], np.float64)


def _stretch(x: float, y: float) -> Floats:
    return np.array([[x, 0, 0], [0, y, 0], [0, 0, 1]], np.float64)


def random_affine(canvas: Floats, result: Floats, hyp: Hyp, rng: np.random.Generator) -> tuple[Floats, float]:
    """Return (matrix (3, 3) from canvas to result, its scale): YOLOv5's T S R P C about the canvas's centre.

    `canvas` and `result` are (width, height) in pixels.
    """
    centre = _shift(*(-canvas / 2))
    perspective = np.eye(3)
    perspective[2, :2] = rng.uniform(-hyp.perspective, hyp.perspective, 2)
    reach = float(np.abs(perspective[2, :2]) @ canvas) / 2
    perspective[2, :2] *= min(1.0, 0.8 / max(reach, 0.8))  # a reach of 1 maps the canvas's corner to infinity
    angle = math.radians(rng.uniform(-hyp.degrees, hyp.degrees))
    scale = rng.uniform(1 - hyp.scale, 1 + hyp.scale)
    cos, sin = scale * math.cos(angle), scale * math.sin(angle)
    rotation = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    shear = np.eye(3)
    shear[0, 1], shear[1, 0] = np.tan(np.radians(rng.uniform(-hyp.shear, hyp.shear, 2)))
    translation = _shift(*(result * rng.uniform(0.5 - hyp.translate, 0.5 + hyp.translate, 2)))
    return translation @ shear @ rotation @ perspective @ centre, scale


def _fit(size: tuple[int, int], side: int) -> tuple[float, float]:
    """Return (width, height) of an image of `size` (h, w) with its longer side scaled to `side`."""
    ratio = side / max(size)
    return size[1] * ratio, size[0] * ratio


def _mosaic_tiles(dataset: Dataset, index: int, near: Ints, side: int, rng: np.random.Generator) -> list[_Tile]:
    """Return tiles of image `index` and three random ones of `near` around a random centre of a 2 side canvas."""
    cx, cy = rng.uniform(side / 2, 3 * side / 2, 2)
    indices = [index, *near[rng.integers(len(near), size=3)].tolist()]
    tiles = []
    for quarter, k in enumerate(indices[j] for j in rng.permutation(4).tolist()):
        w, h = _fit(dataset.size(k), side)
        tiles.append(_Tile(k, cx if quarter % 2 else cx - w, cy if quarter // 2 else cy - h, w, h))
    return tiles


def _move(matrix: Floats, points: Floats) -> Floats:
    """Return `points` (..., 2) transformed by `matrix` (3, 3)."""
    moved = points @ matrix[:, :2].T + matrix[:, 2]
    xy: Floats = moved[..., :2] / moved[..., 2:]
    return xy


def _bounds(matrix: Floats, boxes: Floats) -> Floats:
    """Return the axis-aligned bounds (n, 4) xyxy of `boxes` (n, 4) xyxy transformed by `matrix` (3, 3)."""
    (scale_x, slant, x), (turn, scale_y, y), (bend_x, bend_y, _) = matrix.tolist()
    if slant == turn == bend_x == bend_y == 0 < scale_x:
        moved: Floats = boxes * np.array([scale_x, scale_y, scale_x, scale_y]) + np.array([x, y, x, y])
        return moved
    corners = _move(matrix, boxes[:, [[0, 1], [2, 1], [2, 3], [0, 3]]])
    return np.concatenate([corners.min(1), corners.max(1)], 1)


def _paint(out: Image, image: Image, matrix: Floats, seen: Floats) -> None:
    """Warp `image` by `matrix` (image to result) into the part of `out` bounded by `seen` (4,)."""
    (scale_x, slant, x), (turn, scale_y, y), (bend_x, bend_y, _) = matrix.tolist()
    if slant == turn == bend_x == bend_y == 0 < scale_x:
        _paint_upright(out, image, (scale_x, scale_y), (x, y))
        return
    low, high = np.floor(seen[:2]), np.ceil(seen[2:])
    x1, y1, x2, y2 = np.append(low, high).clip(0, np.tile(out.shape[1::-1], 2)).astype(int).tolist()
    if x1 >= x2 or y1 >= y2:
        return
    m = _shift(-x1 - 0.5, -y1 - 0.5) @ matrix @ _shift(0.5, 0.5)  # OpenCV counts from pixel centres
    size, place = (x2 - x1, y2 - y1), out[y1:y2, x1:x2]
    if m[2, 0] == m[2, 1] == 0:
        cv2.warpAffine(image, m[:2] / m[2, 2], size, dst=place, borderMode=cv2.BORDER_TRANSPARENT)
    else:
        cv2.warpPerspective(image, m, size, dst=place, borderMode=cv2.BORDER_TRANSPARENT)


def _paste(out: Image, image: Image, matrix: Floats, outline: Floats) -> None:
    """Warp the part of `image` within `outline` (k, 2), in the result's pixels, into `out`."""
    bounds = np.concatenate([outline.min(0), outline.max(0)])
    x1, y1, x2, y2 = (int(v) for v in (*np.floor(bounds[:2]), *np.ceil(bounds[2:])))
    x1, y1, x2, y2 = max(x1, 0), max(y1, 0), min(x2, out.shape[1]), min(y2, out.shape[0])
    if x1 >= x2 or y1 >= y2:
        return
    place = out[y1:y2, x1:x2]
    cut, mask = place.copy(), np.zeros(place.shape[:2], np.uint8)
    _paint(cut, image, _shift(-x1, -y1) @ matrix, np.array([0, 0, x2 - x1, y2 - y1], np.float64))
    cv2.fillPoly(mask, [np.rint(outline - (x1 + 0.5, y1 + 0.5)).astype(np.int32)], 1)
    cv2.copyTo(cut, mask, dst=place)


def _paint_upright(out: Image, image: Image, scale: tuple[float, float], shift: tuple[float, float]) -> None:
    """Resize `image` into `out`: `_paint` for a matrix of scale and shift only, over three times as fast.

    Edges are rounded to whole pixels, so that adjacent tiles have no gap; this moves the image by under half a pixel.
    """
    height, width = out.shape[:2]
    left, right, x1, x2 = _span(image.shape[1], scale[0], shift[0], width)
    top, bottom, y1, y2 = _span(image.shape[0], scale[1], shift[1], height)
    if min(x2, y2) > 0 and x1 < width and y1 < height:
        part = cv2.resize(image[top:bottom, left:right], (x2 - x1, y2 - y1))
        part = part[max(0, -y1) : height - y1, max(0, -x1) : width - x1]
        y, x = max(0, y1), max(0, x1)
        out[y : y + part.shape[0], x : x + part.shape[1]] = part


def _span(length: int, scale: float, shift: float, side: int) -> tuple[int, int, int, int]:
    """Return (first, last) of the visible source pixels of a row of `length`, and their (start, stop) in the result."""
    first = max(0, math.floor(-shift / scale))
    last = min(length, math.ceil((side - shift) / scale))
    start = round(first * scale + shift)
    return first, last, start, max(start + 1, round(last * scale + shift))


def _objects_of(dataset: Dataset, tiles: list[_Tile]) -> _Objects:
    labels = [dataset.labels(tile.index) for tile in tiles]
    rows = np.concatenate(labels, dtype=np.float64)
    owners = np.arange(len(tiles)).repeat([len(part) for part in labels])
    frames = np.array([(t.x, t.y, t.w, t.h) for t in tiles])[owners]
    centre, half = frames[:, :2] + rows[:, 1:3] * frames[:, 2:], rows[:, 3:] * frames[:, 2:] / 2
    outlines = [outline for tile in tiles for outline in dataset.segments(tile.index)]
    corners, points = np.array([len(outline) for outline in outlines], np.int64), np.empty((0, 2))
    if corners.any():
        frames = frames.repeat(corners, axis=0)
        points = np.concatenate(outlines) * frames[:, 2:] + frames[:, :2]
    return _Objects(rows[:, 0], np.concatenate([centre - half, centre + half], 1), owners, corners, points)


def _with_copies(objects: _Objects, width: float, chance: float, rng: np.random.Generator) -> _Objects:
    """Add a mirrored copy of each outlined object with probability `chance` (YOLOv5's copy-paste).

    Copies are mirrored about the middle of `width`. A copy whose box would cover 0.3 of another box is left out.
    """
    wanted = np.flatnonzero((objects.corners > 0) & (rng.random(len(objects.corners)) < chance))
    mirrored = objects.boxes[wanted][:, [2, 1, 0, 3]] * (-1, 1, -1, 1) + (width, 0, width, 0)
    boxes, chosen = objects.boxes, []
    for k, box in zip(wanted.tolist(), mirrored, strict=True):
        shared = np.minimum(boxes[:, 2:], box[2:]) - np.maximum(boxes[:, :2], box[:2])
        if (shared.clip(0).prod(1) < _MAX_COVERED * (boxes[:, 2:] - boxes[:, :2]).prod(1)).all():
            boxes = np.concatenate([boxes, box[None]])
            chosen.append(k)
    ends = np.cumsum(objects.corners)
    copies = [objects.points[ends[k] - objects.corners[k] : ends[k]] * (-1, 1) + (width, 0) for k in chosen]
    return _Objects(
        np.append(objects.classes, objects.classes[chosen]),
        boxes,
        np.append(objects.tiles, objects.tiles[chosen]),
        np.append(objects.corners, objects.corners[chosen]),
        np.concatenate([objects.points, *copies]),
    )


def _seen_bounds(points: Floats, corners: Ints, result: Floats) -> Floats:
    """Return the bounds (k, 4) xyxy of the visible parts of k polygons in a result of size (w, h); 0 if invisible.

    `points` (m, 2) are the concatenated corners, `corners` (k,) their number per polygon.
    """
    ends = np.cumsum(corners)
    begins = ends - corners
    following = np.arange(1, len(points) + 1)
    following[ends - 1] = begins
    edges = points[following] - points
    # Clip each edge to the result (Liang and Barsky); `enter` and `leave` are fractions of the edge.
    with np.errstate(divide="ignore", invalid="ignore"):
        cuts = np.sort([-points / edges, (result - points) / edges], axis=0)
    along = edges == 0  # parallel to a side: completely inside or outside
    within = (points >= 0) & (points <= result)
    enter = np.where(along, np.where(within, -np.inf, np.inf), cuts[0]).max(1, initial=0)
    leave = np.where(along, np.where(within, np.inf, -np.inf), cuts[1]).min(1, initial=1)
    shown = np.array(enter <= leave)[:, None]
    at = points + np.where(shown, np.stack([enter, leave])[:, :, None], 0) * edges
    low, high = np.where(shown, at.min(0), np.inf), np.where(shown, at.max(0), -np.inf)
    low, high = np.minimum.reduceat(low, begins), np.maximum.reduceat(high, begins)
    for corner in np.array([(0, 0), (1, 0), (0, 1), (1, 1)]) * result:  # a corner of the result inside a polygon
        crosses = (points[:, 1] > corner[1]) != (points[following, 1] > corner[1])
        with np.errstate(divide="ignore", invalid="ignore"):
            x = points[:, 0] + (corner[1] - points[:, 1]) / edges[:, 1] * edges[:, 0]
        inside = np.add.reduceat((crosses & (x > corner[0])).astype(np.int64), begins).reshape(-1, 1) % 2 == 1
        low, high = np.where(inside, np.minimum(low, corner), low), np.where(inside, np.maximum(high, corner), high)
    bounds = np.concatenate([low, high], 1).clip(0, np.tile(result, 2))
    return np.where(np.isfinite(low[:, :1]), bounds, 0.0)


def _labels_in(objects: _Objects, matrix: Floats, scale: float, result: Floats) -> Floats:
    """Return the boxes in the result (n, 5): class, x1, y1, x2, y2 in pixels, without barely visible ones.

    The box of an outlined object is the bounds of its visible part.
    """
    whole = objects.boxes[:, 2:] - objects.boxes[:, :2]
    seen = np.minimum(np.maximum(_bounds(matrix, objects.boxes), 0), np.concatenate([result, result]))
    outlined = objects.corners > 0
    if outlined.any():
        seen[outlined] = _seen_bounds(_move(matrix, objects.points), objects.corners[outlined], result)
    w, h = seen[:, 2] - seen[:, 0], seen[:, 3] - seen[:, 1]
    least = np.where(outlined, _MIN_OUTLINE_SHARE, _MIN_AREA_SHARE) * scale**2
    keep = (np.minimum(w, h) > _MIN_SIDE_PX) & (w * h > least * whole[:, 0] * whole[:, 1])
    keep &= np.maximum(w, h) < _MAX_ASPECT * np.minimum(w, h)
    rows: Floats = np.concatenate([objects.classes[:, None], seen], 1)[keep]
    return rows


def shift_colours(image: Image, hyp: Hyp, rng: np.random.Generator) -> None:
    """Change hue, saturation and value of `image` (h, w, 3) in place, by r = U(-1, 1) * gain each.

    Value and saturation are multiplied by 1 + r, as in YOLOv5. Hue is rotated by r * 180 degrees, the mean of YOLOv5's
    multiplication. No conversion to HSV is needed, which would take twice as long: with v the largest channel, each
    channel c becomes `value * (saturation * c + (1 - saturation) * v)`, and hue rotates about the gray axis.
    """
    hue, saturation, value = (rng.uniform(-1, 1, 3) * (hyp.hsv_h, hyp.hsv_s, hyp.hsv_v)).tolist()
    saturation, value = 1 + saturation, 1 + value
    channels = cv2.split(image)
    top = cv2.max(cv2.max(channels[0], channels[1]), channels[2])
    own, shared = value * saturation, value * (1 - saturation)
    cv2.merge([cv2.addWeighted(channel, own, top, shared, 0) for channel in channels], dst=image)
    if hue:
        cos, sin = math.cos(math.pi * hue), math.sin(math.pi * hue) / math.sqrt(3)
        gray = (1 - cos) / 3
        turn = [
            [cos + gray, gray - sin, gray + sin],
            [gray + sin, cos + gray, gray - sin],
            [gray - sin, gray + sin, cos + gray],
        ]
        cv2.transform(image, np.array(turn), dst=image)


def _scene(dataset: Dataset, index: int, near: Ints, hyp: Hyp, rng: np.random.Generator, out: Image) -> Floats:
    """Warp image `index`, alone or in a mosaic, randomly into `out`; return the boxes (n, 5)."""
    height, width = out.shape[:2]
    result, side = np.array([width, height], np.float64), max(height, width)
    is_mosaic = rng.random() < hyp.mosaic
    if is_mosaic:
        tiles = _mosaic_tiles(dataset, index, near, side, rng)
        matrix, scale = random_affine(2 * result, result, hyp, rng)
    else:
        w, h = _fit(dataset.size(index), side)
        tiles = [_Tile(index, (width - w) / 2, (height - h) / 2, w, h)]
        matrix, scale = random_affine(result, result, hyp, rng)
    objects = _objects_of(dataset, tiles)
    originals = len(objects.classes)
    if is_mosaic and hyp.copy_paste and dataset.flips and len(objects.points):
        objects = _with_copies(objects, 2 * width, hyp.copy_paste, rng)

    @cache
    def source(k: int) -> tuple[Image, Floats]:
        """Return tile `k`'s image and the matrix from its pixels to the canvas."""
        tile = tiles[k]
        image = dataset.image(tile.index, side)
        height, width = image.shape[:2]
        return image, _shift(tile.x, tile.y) @ _stretch(tile.w / width, tile.h / height)

    out[:] = FILL
    seen = _bounds(matrix, np.array([(t.x, t.y, t.x + t.w, t.y + t.h) for t in tiles]))
    for k, bounds in enumerate(seen):
        x1, y1, x2, y2 = bounds.tolist()
        if x1 < width and y1 < height and min(x2, y2) > 0:
            image, place = source(k)
            _paint(out, image, matrix @ place, bounds)
    ends = np.cumsum(objects.corners)
    for k in range(originals, len(objects.classes)):
        outline = _move(matrix, objects.points[ends[k] - objects.corners[k] : ends[k]])
        image, place = source(int(objects.tiles[k]))
        _paste(out, image, matrix @ _shift(2 * width, 0) @ _stretch(-1, 1) @ place, outline)
    return _labels_in(objects, matrix, scale, result)


def training_image(dataset: Dataset, index: int, near: Ints, hyp: Hyp, rng: np.random.Generator, out: Image) -> Labels:
    """Write the augmented image `index` to `out` (h, w, 3) and return its labels (n, 5) as fractions of w and h.

    `near` are the candidates for mosaic and mixup. A mosaic needs h = w.
    """
    height, width = out.shape[:2]
    boxes = _scene(dataset, index, near, hyp, rng, out)
    if hyp.mixup and rng.random() < hyp.mixup:
        other = np.empty_like(out)
        boxes = np.concatenate([boxes, _scene(dataset, int(near[rng.integers(len(near))]), near, hyp, rng, other)])
        share = rng.beta(32, 32)
        cv2.addWeighted(out, share, other, 1 - share, 0, dst=out)
    if hyp.hsv_h or hyp.hsv_s or hyp.hsv_v:
        shift_colours(out, hyp, rng)
    if dataset.flips:
        if rng.random() < hyp.fliplr:
            cv2.flip(out, 1, dst=out)
            boxes[:, [1, 3]] = width - boxes[:, [3, 1]]
        if rng.random() < hyp.flipud:
            cv2.flip(out, 0, dst=out)
            boxes[:, [2, 4]] = height - boxes[:, [4, 2]]
    labels = np.empty((len(boxes), 5), np.float32)
    labels[:, 0] = boxes[:, 0]
    size = np.array([width, height])
    labels[:, 1:3] = (boxes[:, 1:3] + boxes[:, 3:]) / (2 * size)
    labels[:, 3:] = (boxes[:, 3:] - boxes[:, 1:3]) / size
    return labels


def letterbox(image: Image, side: int, out: Image) -> tuple[float, float, float]:
    """Scale `image` to a longer side of `side` and center it in `out` (h, w, 3).

    Returns (scale, pad_x, pad_y): out_xy = xy * scale + pad.
    """
    height, width = image.shape[:2]
    scale = side / max(height, width)
    w, h = max(1, round(width * scale)), max(1, round(height * scale))
    x, y = (out.shape[1] - w) // 2, (out.shape[0] - h) // 2
    out[:] = FILL
    how = cv2.INTER_LINEAR if scale >= 1 else cv2.INTER_AREA
    out[y : y + h, x : x + w] = cv2.resize(image, (w, h), interpolation=how)
    return scale, float(x), float(y)
