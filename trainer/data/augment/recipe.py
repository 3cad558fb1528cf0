"""Augmentation of detection (mosaic, mixup, crops, flips, colours), as data: what a training image shows, and where.

A recipe is a function of one random generator, and needs no pixel. A painter makes the image from it: OpenCV in a
dataloader worker (paint.py), or a Triton kernel on the training device (device_painter.py).

A recipe consists of tiny arrays, for which a call of numpy takes far longer than its arithmetic. What every image needs
is therefore computed with Python's numbers, or with few calls. The numbers are drawn as Generator.uniform draws them.

The mosaic's 2 s x 2 s canvas is never built: each tile is warped directly into the s x s result. A single image may
have a rectangular result, whose longer side is `s`. Coordinates are continuous: pixel k covers k to k + 1.
"""

import math
from dataclasses import dataclass

import numpy as np

from trainer.config import Hyp
from trainer.data.dataset import Dataset, Floats, Ints, Labels

HORIZON = 1e-6  # smallest divisor of a perspective
_MIN_SIDE_PX = 2.0
_MIN_AREA_SHARE = 0.1  # of a box that must stay visible
_MIN_OUTLINE_SHARE = 0.01  # the same for an object with an outline
_MAX_ASPECT = 100.0
_MAX_COVERED = 0.3  # share of another box that a pasted object may cover


Bounds = tuple[float, float, float, float]  # x1, y1, x2, y2


@dataclass(slots=True)
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


@dataclass(slots=True)
class Layer:
    """A source image in a result, or the part of it within an outline."""

    tile: _Tile
    canvas: Floats  # (3, 3): from the canvas to the result
    bounds: Bounds  # of the whole layer in the result
    outline: Floats | None = None  # (k, 2) in the result

    def matrix(self, height: int, width: int) -> Floats:
        """Return the matrix (3, 3) to the result from the pixels of the source, decoded to `height` x `width`."""
        tile = self.tile
        if scaling := _scaling(self.canvas):
            scale_x, scale_y, x, y = scaling
            x_row = [scale_x * (tile.w / width), 0, scale_x * tile.x + x]
            y_row = [0, scale_y * (tile.h / height), scale_y * tile.y + y]
            return np.array([x_row, y_row, [0, 0, 1]])
        to_canvas = translation(tile.x, tile.y) @ np.diag([tile.w / width, tile.h / height, 1])
        return self.canvas @ to_canvas


@dataclass(frozen=True)
class Recipe:
    """A training image of `height` x `width` px, and its labels."""

    height: int
    width: int
    scenes: list[list[Layer]]  # two with mixup; later layers cover earlier ones
    share: float  # weight of the first scene
    colours: tuple[float, float, float] | None  # shifts of hue, saturation and value, in -1..1
    flips: tuple[bool, bool]  # left to right, upside down
    labels: Labels  # fractions of width and height


def translation(x: float, y: float) -> Floats:
    """Return the matrix (3, 3) of a translation."""
    return np.array([[1, 0, x], [0, 1, y], [0, 0, 1]], np.float64)


def _uniform(low: float, high: float, draw: float) -> float:
    """Return Generator.uniform(low, high) for the next number of Generator.random()."""
    return low + (high - low) * draw


def random_affine(
    canvas: tuple[float, float], result: tuple[float, float], hyp: Hyp, rng: np.random.Generator
) -> tuple[Floats, float]:
    """Return (matrix (3, 3) from canvas to result, its scale): YOLOv5's T S R P C about the canvas's centre.

    `canvas` and `result` are (width, height) in pixels.
    """
    # Two for the perspective, angle, scale, two for the shear, two for the translation.
    draws = rng.random(8).tolist()
    scale = _uniform(1 - hyp.scale, 1 + hyp.scale, draws[3])
    low = 0.5 - hyp.translate
    high = 0.5 + hyp.translate
    x, y = (side * _uniform(low, high, draw) for side, draw in zip(result, draws[6:], strict=True))
    if not (hyp.perspective or hyp.degrees or hyp.shear):
        x = scale * (-canvas[0] / 2) + x
        y = scale * (-canvas[1] / 2) + y
        return np.array([[scale, 0, x], [0, scale, y], [0, 0, 1]]), scale
    centre = translation(-canvas[0] / 2, -canvas[1] / 2)
    perspective = np.eye(3)
    perspective[2, :2] = [_uniform(-hyp.perspective, hyp.perspective, draw) for draw in draws[:2]]
    reach = float(np.abs(perspective[2, :2]) @ canvas) / 2
    perspective[2, :2] *= min(1.0, 0.8 / max(reach, 0.8))  # a reach of 1 maps the canvas's corner to infinity
    angle = math.radians(_uniform(-hyp.degrees, hyp.degrees, draws[2]))
    cos = scale * math.cos(angle)
    sin = scale * math.sin(angle)
    rotation = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    shear_angles = np.radians([_uniform(-hyp.shear, hyp.shear, draw) for draw in draws[4:6]])
    shear = np.eye(3)
    shear[0, 1], shear[1, 0] = np.tan(shear_angles)
    return translation(x, y) @ shear @ rotation @ perspective @ centre, scale


def _fit(size: tuple[int, int], side: int) -> tuple[float, float]:
    """Return (width, height) of an image of `size` (h, w) with its longer side scaled to `side`."""
    ratio = side / max(size)
    return size[1] * ratio, size[0] * ratio


def _mosaic_tiles(
    dataset: Dataset, index: int, near: Ints, side: int, rng: np.random.Generator
) -> list[_Tile]:
    """Return tiles of image `index` and three random ones of `near` around a random centre of a 2 side canvas."""
    cx, cy = (_uniform(side / 2, 3 * side / 2, draw) for draw in rng.random(2).tolist())
    indices = [index, *near[rng.integers(len(near), size=3)].tolist()]
    tiles = []
    for quarter, place in enumerate(rng.permutation(4).tolist()):
        tile_index = indices[place]
        w, h = _fit(dataset.size(tile_index), side)
        x = cx if quarter % 2 else cx - w  # to the right of the centre, or to the left
        y = cy if quarter // 2 else cy - h  # below the centre, or above
        tiles.append(_Tile(tile_index, x, y, w, h))
    return tiles


def _move(matrix: Floats, points: Floats) -> Floats:
    """Return `points` (..., 2) transformed by `matrix` (3, 3)."""
    moved = points @ matrix[:, :2].T + matrix[:, 2]
    xy: Floats = moved[..., :2] / moved[..., 2:]
    return xy


def _scaling(matrix: Floats) -> Bounds | None:
    """Return the scales and the translation (x, y, x, y) of an upright `matrix` (3, 3), None for another one."""
    (scale_x, slant, x), (turn, scale_y, y), (bend_x, bend_y, _) = matrix.tolist()
    if slant == turn == bend_x == bend_y == 0 < scale_x:
        return scale_x, scale_y, x, y
    return None


def is_upright(matrix: Floats) -> bool:
    """Return whether `matrix` (3, 3) only scales, to the same side, and translates; copies are mirrored."""
    return _scaling(matrix) is not None


def span(length: int, scale: float, origin: float, side: int) -> tuple[int, int, int, int]:
    """Return (first, last) of the visible source pixels of a row of `length`, and their (start, stop) in the result.

    Edges are rounded to whole pixels, so that adjacent tiles have no gap; this moves the image by under half a pixel.
    """
    first = max(0, math.floor(-origin / scale))
    last = min(length, math.ceil((side - origin) / scale))
    start = round(first * scale + origin)
    stop = round(last * scale + origin)
    return first, last, start, max(start + 1, stop)


def _bounds(matrix: Floats, boxes: Floats) -> Floats:
    """Return the axis-aligned bounds (n, 4) xyxy of `boxes` (n, 4) xyxy transformed by `matrix` (3, 3)."""
    if scaling := _scaling(matrix):
        moved: Floats = boxes * np.array(2 * scaling[:2])
        moved += np.array(2 * scaling[2:])
        return moved
    corners = _move(matrix, boxes[:, [[0, 1], [2, 1], [2, 3], [0, 3]]])
    return np.concatenate([corners.min(1), corners.max(1)], 1)


def _objects_of(dataset: Dataset, tiles: list[_Tile]) -> _Objects:
    labels = [dataset.labels(tile.index) for tile in tiles]
    rows = np.concatenate(labels, dtype=np.float64)
    owners = np.arange(len(tiles)).repeat([len(part) for part in labels])
    frames = np.array([(t.x, t.y, t.w, t.h) for t in tiles])[owners]
    half = rows[:, 3:] * frames[:, 2:]
    centre = rows[:, 1:3] * frames[:, 2:]
    half /= 2
    centre += frames[:, :2]
    boxes = np.empty((len(rows), 4))
    np.subtract(centre, half, out=boxes[:, :2])
    np.add(centre, half, out=boxes[:, 2:])
    outlines = [outline for tile in tiles for outline in dataset.segments(tile.index)]
    corners = np.zeros(len(outlines), np.int64)
    points = np.empty((0, 2))
    if any(map(len, outlines)):
        corners = np.array([len(outline) for outline in outlines], np.int64)
        frames = frames.repeat(corners, axis=0)
        points = np.concatenate(outlines) * frames[:, 2:] + frames[:, :2]
    return _Objects(rows[:, 0], boxes, owners, corners, points)


def _with_copies(objects: _Objects, width: float, chance: float, rng: np.random.Generator) -> _Objects:
    """Add a copy, mirrored about the middle of `width`, of outlined objects with probability `chance` (YOLOv5's)."""
    wanted = np.flatnonzero((objects.corners > 0) & (rng.random(len(objects.corners)) < chance))
    mirrored = objects.boxes[wanted][:, [2, 1, 0, 3]] * (-1, 1, -1, 1) + (width, 0, width, 0)
    boxes = objects.boxes
    chosen = []
    for k, box in zip(wanted.tolist(), mirrored, strict=True):
        shared = np.minimum(boxes[:, 2:], box[2:]) - np.maximum(boxes[:, :2], box[:2])
        covered = shared.clip(0).prod(1)
        areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
        if (covered < _MAX_COVERED * areas).all():
            boxes = np.concatenate([boxes, box[None]])
            chosen.append(k)
    ends = np.cumsum(objects.corners)
    copies = []
    for k in chosen:
        outline = objects.points[ends[k] - objects.corners[k] : ends[k]]
        copies.append(outline * (-1, 1) + (width, 0))
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
    low = np.where(shown, at.min(0), np.inf)
    high = np.where(shown, at.max(0), -np.inf)
    low = np.minimum.reduceat(low, begins)
    high = np.maximum.reduceat(high, begins)
    # A corner of the result is inside a polygon if an odd number of its edges crosses the ray to the right.
    for corner in np.array([(0, 0), (1, 0), (0, 1), (1, 1)]) * result:
        crosses = (points[:, 1] > corner[1]) != (points[following, 1] > corner[1])
        with np.errstate(divide="ignore", invalid="ignore"):
            x = points[:, 0] + (corner[1] - points[:, 1]) / edges[:, 1] * edges[:, 0]
        is_right = (crosses & (x > corner[0])).astype(np.int64)
        inside = np.add.reduceat(is_right, begins).reshape(-1, 1) % 2 == 1
        low = np.where(inside, np.minimum(low, corner), low)
        high = np.where(inside, np.maximum(high, corner), high)
    bounds = np.concatenate([low, high], 1).clip(0, np.tile(result, 2))
    return np.where(np.isfinite(low[:, :1]), bounds, 0.0)


def _labels_in(objects: _Objects, matrix: Floats, scale: float, result: tuple[float, float]) -> Floats:
    """Return the boxes (n, 5) in the result of size (w, h): class, x1, y1, x2, y2 in pixels.

    Barely visible ones are left out. The box of an outlined object is the bounds of its visible part.
    """
    whole = objects.boxes[:, 2:] - objects.boxes[:, :2]
    rows = np.empty((len(whole), 5))
    rows[:, 0] = objects.classes
    seen = rows[:, 1:]
    np.maximum(_bounds(matrix, objects.boxes), 0, out=seen)
    np.minimum(seen, np.array([*result, *result]), out=seen)
    least: Floats | float = _MIN_AREA_SHARE * scale**2
    if len(objects.points):
        outlined = objects.corners > 0
        points = _move(matrix, objects.points)
        seen[outlined] = _seen_bounds(points, objects.corners[outlined], np.array(result))
        least = np.where(outlined, _MIN_OUTLINE_SHARE, _MIN_AREA_SHARE) * scale**2
    sides = seen[:, 2:] - seen[:, :2]
    w, h = sides.T
    shorter = np.minimum(w, h)
    keep = (shorter > _MIN_SIDE_PX) & (w * h > least * whole[:, 0] * whole[:, 1])
    keep &= np.maximum(w, h) < _MAX_ASPECT * shorter
    kept: Floats = rows[keep]
    return kept


def _scene(
    dataset: Dataset, index: int, near: Ints, hyp: Hyp, rng: np.random.Generator, shape: tuple[int, int]
) -> tuple[list[Layer], Floats]:
    """Return the layers of image `index`, alone or in a mosaic, in a result of `shape` (h, w), and the boxes (n, 5)."""
    height, width = shape
    result = (float(width), float(height))
    side = max(height, width)
    is_mosaic = rng.random() < hyp.mosaic
    if is_mosaic:
        tiles = _mosaic_tiles(dataset, index, near, side, rng)
        matrix, scale = random_affine((2 * result[0], 2 * result[1]), result, hyp, rng)
    else:
        w, h = _fit(dataset.size(index), side)
        tiles = [_Tile(index, (width - w) / 2, (height - h) / 2, w, h)]
        matrix, scale = random_affine(result, result, hyp, rng)
    objects = _objects_of(dataset, tiles)
    originals = len(objects.classes)
    if is_mosaic and hyp.copy_paste and dataset.flips and len(objects.points):
        objects = _with_copies(objects, 2 * width, hyp.copy_paste, rng)
    frames = np.array([(t.x, t.y, t.x + t.w, t.y + t.h) for t in tiles])
    seen = _bounds(matrix, frames).tolist()
    layers = [Layer(tile, matrix, tuple(bounds)) for tile, bounds in zip(tiles, seen, strict=True)]
    if originals < len(objects.classes):
        layers += _pasted(objects, originals, tiles, matrix, 2 * width)
    visible = [layer for layer in layers if _is_visible(layer.bounds, result)]
    return visible, _labels_in(objects, matrix, scale, result)


def _pasted(
    objects: _Objects, originals: int, tiles: list[_Tile], matrix: Floats, width: float
) -> list[Layer]:
    """Return the layers of the copies, the objects from number `originals` on, on a canvas of `width` px."""
    mirrored = matrix @ translation(width, 0) @ np.diag([-1.0, 1, 1])
    ends = np.cumsum(objects.corners)
    layers = []
    for k in range(originals, len(objects.classes)):
        outline = _move(matrix, objects.points[ends[k] - objects.corners[k] : ends[k]])
        bounds = (*outline.min(0).tolist(), *outline.max(0).tolist())
        layers.append(Layer(tiles[objects.tiles[k]], mirrored, bounds, outline))
    return layers


def _is_visible(bounds: Bounds, result: tuple[float, float]) -> bool:
    x1, y1, x2, y2 = bounds
    return x1 < result[0] and y1 < result[1] and x2 > 0 and y2 > 0


def recipe_of(
    dataset: Dataset, index: int, near: Ints, hyp: Hyp, rng: np.random.Generator, shape: tuple[int, int]
) -> Recipe:
    """Return a random recipe of image `index` in `shape` (h, w), for mosaics h = w; `near` are other candidates."""
    height, width = shape
    layers, boxes = _scene(dataset, index, near, hyp, rng, shape)
    scenes = [layers]
    share = 1.0
    if hyp.mixup and rng.random() < hyp.mixup:
        other = int(near[rng.integers(len(near))])
        layers, more = _scene(dataset, other, near, hyp, rng, shape)
        scenes = [*scenes, layers]
        boxes = np.concatenate([boxes, more])
        share = rng.beta(32, 32)
    colours = None
    flips = (False, False)
    if hyp.hsv_h or hyp.hsv_s or hyp.hsv_v:
        hue, saturation, value = (_uniform(-1, 1, draw) for draw in rng.random(3).tolist())
        colours = hue * hyp.hsv_h, saturation * hyp.hsv_s, value * hyp.hsv_v
    if dataset.flips:
        flips = rng.random() < hyp.fliplr, rng.random() < hyp.flipud
    if flips[0]:
        boxes[:, 1::2] = width - boxes[:, 3:0:-2]
    if flips[1]:
        boxes[:, 2::2] = height - boxes[:, 4:1:-2]
    low = boxes[:, 1:3]
    high = boxes[:, 3:]
    size = np.array([width, height], np.float64)
    labels = np.empty((len(boxes), 5), np.float32)
    labels[:, 0] = boxes[:, 0]
    labels[:, 1:3] = (low + high) / (2 * size)
    labels[:, 3:] = (high - low) / size
    return Recipe(height, width, scenes, share, colours, flips, labels)


def colour_matrices(colours: tuple[float, float, float]) -> tuple[float, float, Floats | None]:
    """Return (own, shared, turn) for shifts r of hue, saturation and value: how a painter changes colours.

    Value and saturation are multiplied by 1 + r, as in YOLOv5. Hue is rotated by r * 180 degrees, the mean of YOLOv5's
    multiplication. No conversion to HSV is needed: with v the largest channel, each channel c becomes
    `value * (saturation * c + (1 - saturation) * v)`, here `own * c + shared * v`. `turn` (3, 3) then rotates hue about
    the gray axis; None without a rotation.
    """
    hue = colours[0]
    saturation = 1 + colours[1]
    value = 1 + colours[2]
    turn = None
    if hue:
        cos = math.cos(math.pi * hue)
        sin = math.sin(math.pi * hue) / math.sqrt(3)
        gray = (1 - cos) / 3
        turn = np.array(
            [
                [cos + gray, gray - sin, gray + sin],
                [gray + sin, cos + gray, gray - sin],
                [gray - sin, gray + sin, cos + gray],
            ]
        )
    return value * saturation, value * (1 - saturation), turn
