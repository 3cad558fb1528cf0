"""How a training picture is made: mosaic, affine, colour and flips, all from one random generator.

The mosaic's 2 s x 2 s canvas is never built: every tile is warped straight from its source to its place in
the s x s result, and a tile that the result does not show is not even decoded. A picture alone may also be
painted into a result that is not square; its longer side is then `s`.

Coordinates are continuous (pixel k covers k to k + 1), so a box and the pixels it names move alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import cv2
import numpy as np
import numpy.typing as npt

from trainer.config import Hyp
from trainer.data.dataset import Dataset, Image, Labels

FILL = 114  # gray of everything that no picture covers
_MIN_SIDE_PX = 2.0
_MIN_AREA_SHARE = 0.1  # of a box that must still be seen
_MIN_OUTLINE_SHARE = 0.01  # the same where the object's outline is known
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
    """The objects of all tiles, on the canvas."""

    classes: Floats  # (n,)
    boxes: Floats  # (n, 4) xyxy
    tiles: Ints  # (n,): which tile each lies on
    corners: Ints  # (n,): of its outline, 0 where that is not known
    points: Floats  # (sum of corners, 2): the outlines, one after the other


def _shift(x: float, y: float) -> Floats:
    return np.array([[1, 0, x], [0, 1, y], [0, 0, 1]], np.float64)


def _stretch(x: float, y: float) -> Floats:
    return np.array([[x, 0, 0], [0, y, 0], [0, 0, 1]], np.float64)


def random_affine(canvas: Floats, result: Floats, hyp: Hyp, rng: np.random.Generator) -> tuple[Floats, float]:
    """(matrix (3, 3) from canvas to result, its scale): YOLOv5's T S R P C about the canvas's centre.

    `canvas` and `result` are (width, height) in pixels.
    """
    centre = _shift(*(-canvas / 2))
    bend = np.eye(3)
    bend[2, :2] = rng.uniform(-hyp.perspective, hyp.perspective, 2)
    reach = float(np.abs(bend[2, :2]) @ canvas) / 2
    bend[2, :2] *= min(1.0, 0.8 / max(reach, 0.8))  # at a reach of 1 the canvas's corner is at infinity
    angle = math.radians(rng.uniform(-hyp.degrees, hyp.degrees))
    scale = rng.uniform(1 - hyp.scale, 1 + hyp.scale)
    cos, sin = scale * math.cos(angle), scale * math.sin(angle)
    turn = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    slant = np.eye(3)
    slant[0, 1], slant[1, 0] = np.tan(np.radians(rng.uniform(-hyp.shear, hyp.shear, 2)))
    move = _shift(*(result * rng.uniform(0.5 - hyp.translate, 0.5 + hyp.translate, 2)))
    return move @ slant @ turn @ bend @ centre, scale


def _fit(size: tuple[int, int], side: int) -> tuple[float, float]:
    """(width, height) of a picture of `size` (h, w) whose longer side is made `side`."""
    ratio = side / max(size)
    return size[1] * ratio, size[0] * ratio


def _mosaic_tiles(dataset: Dataset, index: int, near: Ints, side: int, rng: np.random.Generator) -> list[_Tile]:
    """The picture and three random ones of `near`, each with a corner at a random centre of a canvas of 2 x side."""
    cx, cy = rng.uniform(side / 2, 3 * side / 2, 2)
    indices = [index, *near[rng.integers(len(near), size=3)].tolist()]
    tiles = []
    for quarter, k in enumerate(indices[j] for j in rng.permutation(4).tolist()):
        w, h = _fit(dataset.size(k), side)
        tiles.append(_Tile(k, cx if quarter % 2 else cx - w, cy if quarter // 2 else cy - h, w, h))
    return tiles


def _single_tile(dataset: Dataset, index: int, width: int, height: int) -> list[_Tile]:
    w, h = _fit(dataset.size(index), max(width, height))
    return [_Tile(index, (width - w) / 2, (height - h) / 2, w, h)]


def _move(matrix: Floats, points: Floats) -> Floats:
    """`points` (..., 2) after `matrix` (3, 3)."""
    moved = points @ matrix[:, :2].T + matrix[:, 2]
    xy: Floats = moved[..., :2] / moved[..., 2:]
    return xy


def _bounds(matrix: Floats, boxes: Floats) -> Floats:
    """The upright boxes (n, 4) xyxy around `boxes` (n, 4) xyxy after `matrix` (3, 3)."""
    (scale_x, slant, x), (turn, scale_y, y), (bend_x, bend_y, _) = matrix.tolist()
    if slant == turn == bend_x == bend_y == 0 < scale_x:
        moved: Floats = boxes * np.array([scale_x, scale_y, scale_x, scale_y]) + np.array([x, y, x, y])
        return moved
    corners = _move(matrix, boxes[:, [[0, 1], [2, 1], [2, 3], [0, 3]]])
    return np.concatenate([corners.min(1), corners.max(1)], 1)


def _paint(out: Image, picture: Image, matrix: Floats, seen: Floats) -> None:
    """Warp `picture` by `matrix` (picture to result) into `out`; `seen` (4,) bounds it there."""
    (scale_x, slant, x), (turn, scale_y, y), (bend_x, bend_y, _) = matrix.tolist()
    if slant == turn == bend_x == bend_y == 0 < scale_x:
        _paint_upright(out, picture, (scale_x, scale_y), (x, y))
        return
    low, high = np.floor(seen[:2]), np.ceil(seen[2:])
    x1, y1, x2, y2 = np.append(low, high).clip(0, np.tile(out.shape[1::-1], 2)).astype(int).tolist()
    if x1 >= x2 or y1 >= y2:
        return
    m = _shift(-x1 - 0.5, -y1 - 0.5) @ matrix @ _shift(0.5, 0.5)  # OpenCV counts from pixel centres
    size, place = (x2 - x1, y2 - y1), out[y1:y2, x1:x2]
    if m[2, 0] == m[2, 1] == 0:
        cv2.warpAffine(picture, m[:2] / m[2, 2], size, dst=place, borderMode=cv2.BORDER_TRANSPARENT)
    else:
        cv2.warpPerspective(picture, m, size, dst=place, borderMode=cv2.BORDER_TRANSPARENT)


def _paste(out: Image, picture: Image, matrix: Floats, outline: Floats) -> None:
    """Warp into `out` what lies within `outline` (k, 2), given in the result's pixels."""
    bounds = np.concatenate([outline.min(0), outline.max(0)])
    x1, y1, x2, y2 = (int(v) for v in (*np.floor(bounds[:2]), *np.ceil(bounds[2:])))
    x1, y1, x2, y2 = max(x1, 0), max(y1, 0), min(x2, out.shape[1]), min(y2, out.shape[0])
    if x1 >= x2 or y1 >= y2:
        return
    place = out[y1:y2, x1:x2]
    cut, mask = place.copy(), np.zeros(place.shape[:2], np.uint8)
    _paint(cut, picture, _shift(-x1, -y1) @ matrix, np.array([0, 0, x2 - x1, y2 - y1], np.float64))
    cv2.fillPoly(mask, [np.rint(outline - (x1 + 0.5, y1 + 0.5)).astype(np.int32)], 1)
    cv2.copyTo(cut, mask, dst=place)


def _paint_upright(out: Image, picture: Image, scale: tuple[float, float], shift: tuple[float, float]) -> None:
    """The same for a matrix that only scales and shifts, given as (x, y): a resize, over three times as fast.

    Its edges are rounded to whole pixels, which moves the picture by less than half a pixel and leaves no seam
    between neighbours.
    """
    height, width = out.shape[:2]
    left, right, x1, x2 = _span(picture.shape[1], scale[0], shift[0], width)
    top, bottom, y1, y2 = _span(picture.shape[0], scale[1], shift[1], height)
    if min(x2, y2) > 0 and x1 < width and y1 < height:
        part = cv2.resize(picture[top:bottom, left:right], (x2 - x1, y2 - y1))
        part = part[max(0, -y1) : height - y1, max(0, -x1) : width - x1]
        y, x = max(0, y1), max(0, x1)
        out[y : y + part.shape[0], x : x + part.shape[1]] = part


def _span(length: int, scale: float, shift: float, side: int) -> tuple[int, int, int, int]:
    """(first, last) source pixel shown of a row of `length`, and (start, stop) of these in the result."""
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
    """Outlined objects, each with probability `chance`, once more: mirrored about the middle of `width`.

    Not where the copy's box would cover a share of 0.3 or more of another one (YOLOv5's copy-paste).
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
    """The boxes (k, 4) xyxy around what a result of size (w, h) shows of k polygons; 0, 0, 0, 0 if that is nothing.

    `points` (m, 2) holds their corners one polygon after the other, `corners` (k,) how many each has.
    """
    ends = np.cumsum(corners)
    begins = ends - corners
    following = np.arange(1, len(points) + 1)
    following[ends - 1] = begins
    edges = points[following] - points
    # Each edge is cut to its part within the result, from share `enter` to share `leave` of it (Liang and Barsky).
    with np.errstate(divide="ignore", invalid="ignore"):
        cuts = np.sort([-points / edges, (result - points) / edges], axis=0)
    along = edges == 0  # parallel to a side: within its strip all the way, or never
    within = (points >= 0) & (points <= result)
    enter = np.where(along, np.where(within, -np.inf, np.inf), cuts[0]).max(1, initial=0)
    leave = np.where(along, np.where(within, np.inf, -np.inf), cuts[1]).min(1, initial=1)
    shown = np.array(enter <= leave)[:, None]
    at = points + np.where(shown, np.stack([enter, leave])[:, :, None], 0) * edges
    low, high = np.where(shown, at.min(0), np.inf), np.where(shown, at.max(0), -np.inf)
    low, high = np.minimum.reduceat(low, begins), np.maximum.reduceat(high, begins)
    for corner in np.array([(0, 0), (1, 0), (0, 1), (1, 1)]) * result:  # one that lies within a polygon is shown too
        crosses = (points[:, 1] > corner[1]) != (points[following, 1] > corner[1])
        with np.errstate(divide="ignore", invalid="ignore"):
            x = points[:, 0] + (corner[1] - points[:, 1]) / edges[:, 1] * edges[:, 0]
        inside = np.add.reduceat((crosses & (x > corner[0])).astype(np.int64), begins).reshape(-1, 1) % 2 == 1
        low, high = np.where(inside, np.minimum(low, corner), low), np.where(inside, np.maximum(high, corner), high)
    bounds = np.concatenate([low, high], 1).clip(0, np.tile(result, 2))
    return np.where(np.isfinite(low[:, :1]), bounds, 0.0)


def _labels_in(objects: _Objects, matrix: Floats, scale: float, result: Floats) -> Floats:
    """The objects' boxes in the result (n, 5): class, x1, y1, x2, y2 in pixels, without hardly seen ones.

    Where there is an outline, the box is the one around what is seen of that.
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
    """Change hue, saturation and value of `image` (h, w, 3) in place, by U(-1, 1) * gain each.

    Value and saturation are multiplied by 1 + that, as in YOLOv5, and hue is turned by that share of half a circle,
    which is the mean of what multiplying it would do. No pixel is converted to HSV for it, which would take twice as
    long: with v the largest channel, value and saturation come out right as `value * (saturation * c + (1 -
    saturation) * v)` for each channel c, and a turn of hue is a turn about the gray axis.
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
    """Paint picture `index`, as a mosaic or alone, randomly warped into `out`; its boxes (n, 5)."""
    height, width = out.shape[:2]
    result, side = np.array([width, height], np.float64), max(height, width)
    is_mosaic = rng.random() < hyp.mosaic
    if is_mosaic:
        tiles = _mosaic_tiles(dataset, index, near, side, rng)
        matrix, scale = random_affine(2 * result, result, hyp, rng)
    else:
        tiles = _single_tile(dataset, index, width, height)
        matrix, scale = random_affine(result, result, hyp, rng)
    objects = _objects_of(dataset, tiles)
    originals = len(objects.classes)
    if is_mosaic and hyp.copy_paste and dataset.flips and len(objects.points):
        objects = _with_copies(objects, 2 * width, hyp.copy_paste, rng)

    @cache
    def source(k: int) -> tuple[Image, Floats]:
        """Tile `k`'s picture, and the matrix from its pixels to the canvas."""
        tile = tiles[k]
        picture = dataset.image(tile.index, side)
        height, width = picture.shape[:2]
        return picture, _shift(tile.x, tile.y) @ _stretch(tile.w / width, tile.h / height)

    out[:] = FILL
    seen = _bounds(matrix, np.array([(t.x, t.y, t.x + t.w, t.y + t.h) for t in tiles]))
    for k, bounds in enumerate(seen):
        x1, y1, x2, y2 = bounds.tolist()
        if x1 < width and y1 < height and min(x2, y2) > 0:
            picture, place = source(k)
            _paint(out, picture, matrix @ place, bounds)
    ends = np.cumsum(objects.corners)
    for k in range(originals, len(objects.classes)):
        outline = _move(matrix, objects.points[ends[k] - objects.corners[k] : ends[k]])
        picture, place = source(int(objects.tiles[k]))
        _paste(out, picture, matrix @ _shift(2 * width, 0) @ _stretch(-1, 1) @ place, outline)
    return _labels_in(objects, matrix, scale, result)


def training_picture(
    dataset: Dataset, index: int, near: Ints, hyp: Hyp, rng: np.random.Generator, out: Image
) -> Labels:
    """Write an augmented picture `index` to `out` (h, w, 3) and return its labels (n, 5) as fractions of w and h.

    What is shown beside it or mixed into it is drawn from `near`. A mosaic needs a square: h = w.
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
    """Fit `image`, its longer side made `side`, into the middle of `out` (h, w, 3), which has room for it.

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
