"""Augmentation: boxes match their objects, and the fused mosaic equals the mosaic on a canvas."""

import math

import cv2
import numpy as np
import pytest

from trainer.config import Hyp
from trainer.data.augment.paint import letterbox, paint, shift_colours
from trainer.data.augment.recipe import Layer, _mosaic_tiles, _seen_bounds, _Tile, random_affine, recipe_of
from trainer.data.batch import FILL

STILL = {"hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0}
MARGIN = np.array([-5, -5, 5, 5])
COLOURS = [(250, 20, 20), (20, 250, 20), (20, 20, 250), (250, 250, 20), (250, 20, 250), (20, 250, 250)]


def every(data):
    return np.arange(len(data))


class Blocks:
    """Gray images of different shapes, each with one or two blocks in a colour of its own class."""

    def __init__(
        self, flips=True, sizes=((90, 120), (150, 100), (128, 128), (60, 120), (240, 180), (100, 100))
    ):
        self.flips = flips
        self.sizes = sizes
        self.decoded = []
        self.names = [str(k) for k in range(len(COLOURS))]

    def __len__(self):
        return len(self.sizes)

    def size(self, index):
        return self.sizes[index]

    def labels(self, index):
        boxes = [[index, 0.3, 0.4, 0.25, 0.4]] if index % 2 else [[index, 0.7, 0.6, 0.4, 0.2]]
        return np.array(boxes, np.float32)

    def segments(self, index):
        return [np.zeros((0, 2), np.float32)]

    def name(self, index):
        return str(index)

    def image(self, index, min_side=0):
        self.decoded.append(index)
        height, width = self.sizes[index]
        image = np.full((height, width, 3), 128, np.uint8)
        for _, cx, cy, w, h in self.labels(index):
            x1 = (cx - w / 2) * width
            y1 = (cy - h / 2) * height
            x2 = (cx + w / 2) * width
            y2 = (cy + h / 2) * height
            image[round(y1) : round(y2), round(x1) : round(x2)] = COLOURS[index]
        return image


def training_image(data, index, near, hyp, rng, out):
    recipe = recipe_of(data, index, near, hyp, rng, out.shape[:2])
    paint(recipe, data.image, out)
    return recipe.labels


class Photos(Blocks):
    """Smooth images, whose pixel values encode positions."""

    def image(self, index, min_side=0):
        height, width = self.sizes[index]
        coarse = np.random.default_rng(index).integers(0, 256, (4, 4, 3), np.uint8)
        return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_LINEAR)


def visible(image, colour, around=None):
    """Return the bounds (x1, y1, x2, y2) of the pixels close to a colour within `around` (4,), or None."""
    x, y, x2, y2 = (0, 0, *image.shape[1::-1]) if around is None else np.rint(around).astype(int).clip(0)
    near = (np.abs(image[y:y2, x:x2].astype(int) - colour) < 60).all(2)
    if not near.any():
        return None
    ys = np.flatnonzero(near.any(1))
    xs = np.flatnonzero(near.any(0))
    return np.array([xs[0] + x, ys[0] + y, xs[-1] + 1 + x, ys[-1] + 1 + y])


@pytest.mark.parametrize(
    ("hyp", "slack"),
    [
        (Hyp(**STILL), 1.6),
        (Hyp(**STILL, mosaic=0.0), 1.6),
        (Hyp(**STILL, fliplr=1.0, flipud=1.0), 1.6),
        (Hyp(**STILL, scale=0.9, translate=0.3), 2.6),
        (Hyp(**STILL, degrees=45.0, shear=10.0), 2.6),
        (Hyp(**STILL, perspective=0.001, degrees=10.0), 2.6),
    ],
    ids=["default", "no mosaic", "flips", "scale", "degrees", "perspective"],
)
def test_boxes_stay_around_their_blocks(hyp, slack):
    data = Blocks()
    out = np.empty((160, 160, 3), np.uint8)
    checked = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        labels = training_image(data, seed % len(data), every(data), hyp, rng, out)
        classes = labels[:, 0].astype(int)
        for cls, cx, cy, w, h in labels:
            box = np.array([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2]) * 160
            assert box.min() >= -1e-3
            assert box.max() <= 160 + 1e-3
            if (classes == int(cls)).sum() == 1 and min(w, h) * 160 > 8 and box.min() > 1 and box.max() < 159:
                seen = visible(out, COLOURS[int(cls)], around=box + MARGIN)
                np.testing.assert_allclose(seen, box, atol=slack)
                checked += 1
        for index in set(range(len(data))) - set(classes.tolist()):
            seen = visible(out, COLOURS[index])  # at most a sliver may be without a box
            assert seen is None or min(seen[2:] - seen[:2]) < 24
    assert checked > 10


@pytest.mark.parametrize("turn", [0.0, 20.0])
def test_the_fused_mosaic_equals_a_mosaic_on_a_canvas(turn):
    """Reference: four resized images on a canvas of 2 s, then one warp (YOLOv5's mosaic)."""
    data = Photos()
    side = 128
    hyp = Hyp(**STILL, degrees=turn, translate=0.0, scale=0.0, fliplr=0.0)
    for seed in range(6):
        fused = np.empty((side, side, 3), np.uint8)
        training_image(data, 0, every(data), hyp, np.random.default_rng(seed), fused)

        rng = np.random.default_rng(seed)
        rng.random()  # mosaic or not
        canvas = np.full((2 * side, 2 * side, 3), FILL, np.uint8)
        for tile in _mosaic_tiles(data, 0, every(data), side, rng):
            x = round(tile.x)
            y = round(tile.y)
            image = cv2.resize(data.image(tile.index), (round(tile.w), round(tile.h)))
            shown = image[max(0, -y) : 2 * side - y, max(0, -x) : 2 * side - x]
            x = max(0, x)
            y = max(0, y)
            canvas[y : y + shown.shape[0], x : x + shown.shape[1]] = shown
        rng.uniform(size=2)  # perspective
        angle = rng.uniform(-turn, turn) if turn else 0.0
        matrix = cv2.getRotationMatrix2D((side - 0.5, side - 0.5), angle, 1.0)
        matrix[:, 2] -= side / 2
        slow = cv2.warpAffine(canvas, matrix, (side, side), borderValue=(FILL,) * 3)
        difference = np.abs(fused.astype(int) - slow)
        assert difference.mean() < 3
        assert np.median(difference) <= 2


def test_mosaic_centre_and_corners():
    data = Blocks()
    side = 100
    centres = []
    for seed in range(200):
        tiles = _mosaic_tiles(data, 3, every(data), side, np.random.default_rng(seed))
        assert 3 in [tile.index for tile in tiles]
        cx = tiles[3].x
        cy = tiles[3].y
        assert (tiles[0].x + tiles[0].w, tiles[0].y + tiles[0].h) == pytest.approx((cx, cy))
        assert (tiles[1].x, tiles[1].y + tiles[1].h) == pytest.approx((cx, cy))
        assert (tiles[2].x + tiles[2].w, tiles[2].y) == pytest.approx((cx, cy))
        assert all(max(tile.w, tile.h) == pytest.approx(side) for tile in tiles)
        centres.append((cx, cy))
    assert np.min(centres) >= side / 2
    assert np.max(centres) <= 1.5 * side
    assert np.std(centres, 0) == pytest.approx(side / math.sqrt(12), rel=0.15)  # uniform


def test_an_invisible_tile_is_not_decoded():
    data = Blocks()
    out = np.empty((64, 64, 3), np.uint8)
    counts = []
    for seed in range(80):
        data.decoded.clear()
        training_image(data, 0, every(data), Hyp(), np.random.default_rng(seed), out)
        counts.append(len(data.decoded))
    assert max(counts) == 4
    assert min(counts) < 4


def test_barely_visible_boxes_are_dropped():
    class OneBox(Blocks):
        box = (0.0, 0.5, 0.5, 0.5, 0.5)

        def labels(self, index):
            return np.array([self.box], np.float32)

    data = OneBox(sizes=((64, 64),))
    plain = Hyp(**STILL, mosaic=0.0, scale=0.0, translate=0.0, fliplr=0.0)
    out = np.empty((64, 64, 3), np.uint8)

    def kept(box, hyp=plain):
        data.box = box
        return len(training_image(data, 0, every(data), hyp, np.random.default_rng(0), out))

    assert kept((0, 0.5, 0.5, 0.5, 0.5)) == 1
    assert kept((0, 0.5, 0.5, 0.5, 1.9 / 64)) == 0  # under 2 px
    assert kept((0, 0.5, 0.5, 0.5, 2.1 / 64)) == 1
    assert kept((0, 0.02, 0.5, 0.6, 0.5)) == 1  # half of it outside
    assert kept((0, -0.25, 0.5, 0.6, 0.5)) == 0  # a twelfth inside


class Trapezoids(Blocks):
    """Gray images, each with a trapezoid, higher on its left, in the colour of its class, whose outline is known."""

    corners = np.array([(0.1, 0.15), (0.45, 0.35), (0.45, 0.55), (0.1, 0.75)], np.float32)

    def labels(self, index):
        low = self.corners.min(0)
        high = self.corners.max(0)
        return np.array([[index, *((low + high) / 2), *(high - low)]], np.float32)

    def segments(self, index):
        return [self.corners]

    def image(self, index, min_side=0):
        height, width = self.sizes[index]
        image = np.full((height, width, 3), 128, np.uint8)
        points = np.rint(self.corners * (width, height) - 0.5).astype(np.int32)
        return cv2.fillPoly(image, [points], COLOURS[index])


def scene(data, hyp, seed, side=160):
    out = np.empty((side, side, 3), np.uint8)
    labels = training_image(data, seed % len(data), every(data), hyp, np.random.default_rng(seed), out)
    half = labels[:, 3:] / 2
    return (
        out,
        labels[:, 0].astype(int),
        np.concatenate([labels[:, 1:3] - half, labels[:, 1:3] + half], 1) * side,
    )


def check_colours(out, classes, boxes):
    """Check that each colour matches its boxes; return the number of boxes far from all others."""
    checked = 0
    slack = 3
    for cls in range(len(COLOURS)):
        near = (np.abs(out.astype(int) - COLOURS[cls]) < 60).all(2)
        for k in np.flatnonzero(classes == cls):
            box = boxes[k]
            others = np.delete(boxes, k, axis=0)
            x1, y1, x2, y2 = np.rint(box).astype(int)
            apart = (others[:, :2] > box[2:] + 2 * slack) | (others[:, 2:] < box[:2] - 2 * slack)
            if min(x2 - x1, y2 - y1) > 12 and apart.any(1).all():
                seen = visible(out, COLOURS[cls], around=box + np.array([-1, -1, 1, 1]) * slack)
                np.testing.assert_allclose(seen, box, atol=slack)
                checked += 1
            near[max(0, y1 - slack) : y2 + slack, max(0, x1 - slack) : x2 + slack] = False
        # At most a sliver is without a box.
        assert not cv2.erode(np.pad(near, 1).astype(np.uint8), np.ones((5, 5))).any()
    return checked


@pytest.mark.parametrize(
    "hyp", [Hyp(), Hyp(degrees=10.0, shear=4.0, perspective=0.0005), Hyp(scale=0.9, translate=0.4)]
)
def test_the_affine_matrix_is_the_product_of_its_steps(hyp):
    """Also for an upright one, which is computed without these matrices; each draw is one of Generator.uniform."""
    canvas = np.array([1280.0, 960.0])
    result = np.array([640.0, 480.0])
    for seed in range(50):
        matrix, scale = random_affine(tuple(canvas), tuple(result), hyp, np.random.default_rng(seed))
        rng = np.random.default_rng(seed)
        bend = rng.uniform(-hyp.perspective, hyp.perspective, 2)
        angle = np.radians(rng.uniform(-hyp.degrees, hyp.degrees))
        wanted = rng.uniform(1 - hyp.scale, 1 + hyp.scale)
        slant = np.tan(np.radians(rng.uniform(-hyp.shear, hyp.shear, 2)))
        x, y = result * rng.uniform(0.5 - hyp.translate, 0.5 + hyp.translate, 2)
        bend *= min(1, 0.8 / max(np.abs(bend) @ canvas / 2, 0.8))
        cos = wanted * np.cos(angle)
        sin = wanted * np.sin(angle)
        steps = [[[1, 0, x], [0, 1, y], [0, 0, 1]], [[1, slant[0], 0], [slant[1], 1, 0], [0, 0, 1]]]
        steps += [[[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]], [[1, 0, 0], [0, 1, 0], [*bend, 1]]]
        steps += [[[1, 0, -canvas[0] / 2], [0, 1, -canvas[1] / 2], [0, 0, 1]]]
        assert scale == wanted
        np.testing.assert_allclose(
            matrix, np.linalg.multi_dot([np.array(step) for step in steps]), 1e-12, 1e-12
        )


def test_a_layers_matrix_places_the_source_in_its_tile():
    """The same for an upright canvas, which is computed without the product, and for another one."""
    for canvas in (
        np.array([[0.75, 0, 31], [0, 0.5, -17], [0, 0, 1]]),
        np.array([[0.75, 0.1, 31], [0, 0.5, -17], [0, 0, 1]]),
    ):
        layer = Layer(_Tile(0, 20.0, 10.0, 300.0, 200.0), canvas, (0, 0, 0, 0))
        corners = np.array([[0, 0, 1], [53, 0, 1], [53, 37, 1]]) @ layer.matrix(37, 53).T
        np.testing.assert_allclose(corners, np.array([[20, 10, 1], [320, 10, 1], [320, 210, 1]]) @ canvas.T)


@pytest.mark.parametrize(
    "hyp",
    [
        Hyp(**STILL),
        Hyp(**STILL, degrees=45.0),
        Hyp(**STILL, degrees=20.0, perspective=0.001),
        Hyp(**STILL, mosaic=0.0),
    ],
    ids=["default", "degrees", "perspective", "no mosaic"],
)
def test_the_box_of_an_outline_bounds_its_visible_part(hyp):
    # A box turned by 45 degrees has a far larger box around it; the trapezoid's own has not.
    assert sum(check_colours(*scene(Trapezoids(), hyp, seed)) for seed in range(40)) > 20


def test_bounds_of_the_visible_parts_of_polygons():
    rng = np.random.default_rng(0)
    fine = 16
    size = np.array([40.0, 30.0])
    polygons = []
    for _ in range(200):
        turns = np.sort(rng.uniform(0, 2 * np.pi, int(rng.integers(3, 9))))
        spokes = rng.uniform(2, 40, len(turns))[:, None] * np.stack([np.cos(turns), np.sin(turns)], 1)
        polygons.append(np.rint((spokes + rng.uniform(-10, 50, 2)) * fine) / fine)
    polygons.append(
        np.array([(-9.0, -9.0), (60.0, -9.0), (60.0, 60.0), (-9.0, 60.0)])
    )  # covers the whole result
    bounds = _seen_bounds(np.concatenate(polygons), np.array([len(p) for p in polygons]), size)
    seen = []
    for polygon, found in zip(polygons, bounds, strict=True):
        image = np.zeros((30 * fine, 40 * fine), np.uint8)
        cv2.fillPoly(image, [(polygon * fine).astype(np.int32)], 1)
        rows = np.flatnonzero(image.any(1))
        columns = np.flatnonzero(image.any(0))
        if len(rows) > 2 and len(columns) > 2:
            expected = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]) / fine
            seen.append(np.abs(found - expected).max())
        else:
            assert (found[2:] - found[:2]).min() < 3 / fine
    assert len(seen) > 100
    assert np.median(seen) < 1.5 / fine
    assert (
        np.percentile(seen, 97) < 3 / fine
    )  # the drawing has a line of a pixel around it, also where that is all
    np.testing.assert_array_equal(bounds[-1], [0, 0, 40, 30])


@pytest.mark.parametrize("turn", [0.0, 30.0])
def test_copy_paste_adds_mirrored_objects_with_their_boxes(turn):
    plain = Hyp(**STILL, degrees=turn)
    pasted = Hyp(**STILL, degrees=turn, copy_paste=1.0)
    more = 0
    for seed in range(40):
        _, before, _ = scene(Trapezoids(), plain, seed)
        out, classes, boxes = scene(Trapezoids(), pasted, seed)
        check_colours(out, classes, boxes)
        more += len(classes) - len(before)
    assert more > 30
    # The trapezoid's long side is on its left; a copy's is on its right.
    sides = set()
    for seed in range(40):
        out, classes, boxes = scene(Trapezoids(), Hyp(**STILL, copy_paste=1.0, fliplr=0.0), seed)
        for cls, box in zip(classes, boxes, strict=True):
            x1, y1, x2, y2 = np.rint(box).astype(int)
            if (classes == cls).sum() == 2 and box.min() > 1 and box.max() < 159:
                near = (np.abs(out[y1:y2, x1:x2].astype(int) - COLOURS[cls]) < 60).all(2)
                half = near.shape[1] // 2
                sides.add(bool(near[:, :half].sum() > near[:, -half:].sum()))
    assert sides == {True, False}


def test_copy_paste_covers_no_object_and_respects_flips():
    def count(data, **options):
        return sum(len(scene(data, Hyp(**STILL, **options), seed)[1]) for seed in range(30))

    class Wide(Trapezoids):  # a mirrored one always covers another
        corners = np.array([(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0)], np.float32)

    square = ((100, 100),) * 4
    assert count(Trapezoids(), copy_paste=1.0) > count(Trapezoids(), copy_paste=0.3) > count(Trapezoids())
    assert count(Wide(sizes=square), copy_paste=1.0) < 1.3 * count(Wide(sizes=square))
    assert count(Trapezoids(flips=False), copy_paste=1.0) == count(Trapezoids(flips=False))
    assert count(Trapezoids(), copy_paste=1.0, mosaic=0.0) == count(Trapezoids(), mosaic=0.0)
    assert count(Blocks(), copy_paste=1.0) == count(Blocks())  # boxes only


def test_digits_are_never_flipped():
    hyp = Hyp(**STILL, mosaic=0.0, scale=0.0, translate=0.0, fliplr=1.0, flipud=1.0)
    images = []
    for flips in (False, True):
        data = Photos(flips=flips, sizes=((64, 64),))
        out = np.empty((64, 64, 3), np.uint8)
        training_image(data, 0, every(data), hyp, np.random.default_rng(0), out)
        images.append(out)
    np.testing.assert_array_equal(images[0], data.image(0))
    np.testing.assert_array_equal(images[1], data.image(0)[::-1, ::-1])


def hues_after(gains, count=200):
    """Return the HSV values, in degrees and fractions, of a muted orange (hue 30 degrees) after the shift."""
    found = []
    for seed in range(count):
        image = np.full((4, 4, 3), (200, 150, 100), np.uint8)
        shifts = np.random.default_rng(seed).uniform(-1, 1, 3) * gains
        shift_colours(image, tuple(shifts.tolist()))
        found.append(cv2.cvtColor(image.astype(np.float32) / 255, cv2.COLOR_RGB2HSV)[0, 0])
    return np.array(found)


def test_saturation_and_value_are_scaled_and_hue_is_rotated():
    saturated = hues_after((0, 0.7, 0))
    assert saturated[:, 1].min() == pytest.approx(0.3 * 0.5, abs=0.02)
    assert saturated[:, 1].max() == pytest.approx(1.7 * 0.5, abs=0.02)
    np.testing.assert_allclose(saturated[:, 0], 30, atol=2)
    np.testing.assert_allclose(saturated[:, 2], 200 / 255, atol=0.01)
    turned = hues_after((0.1, 0, 0))
    assert turned[:, 0].min() == pytest.approx(30 - 18, abs=1.5)
    assert turned[:, 0].max() == pytest.approx(30 + 18, abs=1.5)
    np.testing.assert_allclose(turned[:, 1:], [[0.5, 200 / 255]] * len(turned), atol=0.08)
    darker = hues_after((0, 0, 0.4))
    assert darker[:, 2].min() == pytest.approx(0.6 * 200 / 255, abs=0.02)
    assert darker[:, 2].max() == 1
    np.testing.assert_allclose(hues_after((0, 0, 0), 1), [[30, 0.5, 200 / 255]], atol=1e-4)
    gray = np.full((4, 4, 3), 77, np.uint8)
    shift_colours(gray, (0.3, -0.4, 0.0))
    np.testing.assert_array_equal(gray, 77)


def test_mixup_blends_two_scenes():
    alone, mixed = (
        sum(len(scene(Blocks(), hyp, k)[1]) for k in range(30)) for hyp in (Hyp(), Hyp(mixup=1.0))
    )
    assert mixed > 1.6 * alone


def test_letterbox_is_inverted_by_its_scale_and_pad():
    for height, width in ((100, 200), (200, 100), (33, 64), (640, 480), (1, 500)):
        image = np.zeros((height, width, 3), np.uint8)
        image[height // 2 :, width // 2 :] = 255
        out = np.empty((64, 64, 3), np.uint8)
        scale, pad_x, pad_y = letterbox(image, 64, out)
        assert scale == 64 / max(height, width)
        corner = np.array([width // 2, height // 2]) * scale + (pad_x, pad_y)
        ys, xs = np.nonzero((out > 200).all(2))
        if height > 1:
            np.testing.assert_allclose((xs.min(), ys.min()), corner, atol=1)
            np.testing.assert_allclose((xs.max() + 1, ys.max() + 1), (64 - pad_x, 64 - pad_y), atol=1.01)
        border = out[: int(pad_y)] if pad_y else out[:, : int(pad_x)]
        assert (border == FILL).all()
