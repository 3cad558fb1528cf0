"""Painting with OpenCV, in a dataloader worker: a recipe becomes a training image, an image a letterboxed one."""

from collections.abc import Callable

import cv2
import numpy as np
import numpy.typing as npt

from trainer.data.augment.recipe import Bounds, Layer, Recipe, colour_matrices, is_upright, span, translation
from trainer.data.batch import FILL
from trainer.data.dataset import Floats, Image


def paint(recipe: Recipe, image_of: Callable[[int], Image], out: Image) -> None:
    """Paint the training image of `recipe` into `out` (h, w, 3); `image_of` decodes only the visible sources."""
    _paint_scene(recipe.scenes[0], image_of, out)
    for layers in recipe.scenes[1:]:
        other = np.empty_like(out)
        _paint_scene(layers, image_of, other)
        cv2.addWeighted(out, recipe.share, other, 1 - recipe.share, 0, dst=out)
    if recipe.colours:
        shift_colours(out, recipe.colours)
    for is_flipped, axis in zip(recipe.flips, (1, 0), strict=True):
        if is_flipped:
            cv2.flip(out, axis, dst=out)


def _paint_scene(layers: list[Layer], image_of: Callable[[int], Image], out: Image) -> None:
    out[:] = FILL
    for layer in layers:
        image = image_of(layer.tile.index)
        matrix = layer.matrix(*image.shape[:2])
        if layer.outline is None:
            _paint(out, image, matrix, layer.bounds)
        else:
            _paste(out, image, matrix, layer.outline)


def _paint(out: Image, image: Image, matrix: Floats, seen: Bounds) -> None:
    """Warp `image` by `matrix` (image to result) into the part of `out` bounded by `seen`."""
    if is_upright(matrix):
        _paint_upright(out, image, matrix)
        return
    height, width = out.shape[:2]
    pixels = np.append(np.floor(seen[:2]), np.ceil(seen[2:]))
    x1, y1, x2, y2 = pixels.clip(0, (width, height, width, height)).astype(int).tolist()
    if x1 >= x2 or y1 >= y2:
        return
    m = translation(-x1 - 0.5, -y1 - 0.5) @ matrix @ translation(0.5, 0.5)  # OpenCV counts from pixel centres
    size = (x2 - x1, y2 - y1)
    place = out[y1:y2, x1:x2]
    if m[2, 0] == m[2, 1] == 0:
        cv2.warpAffine(image, m[:2] / m[2, 2], size, dst=place, borderMode=cv2.BORDER_TRANSPARENT)
    else:
        cv2.warpPerspective(image, m, size, dst=place, borderMode=cv2.BORDER_TRANSPARENT)


def _paste(out: Image, image: Image, matrix: Floats, outline: Floats) -> None:
    """Warp the part of `image` within `outline` (k, 2), in the result's pixels, into `out`."""
    left, top = np.floor(outline.min(0))
    right, bottom = np.ceil(outline.max(0))
    x1 = max(int(left), 0)
    y1 = max(int(top), 0)
    x2 = min(int(right), out.shape[1])
    y2 = min(int(bottom), out.shape[0])
    if x1 >= x2 or y1 >= y2:
        return
    place = out[y1:y2, x1:x2]
    cut = place.copy()
    mask = np.zeros(place.shape[:2], np.uint8)
    _paint(cut, image, translation(-x1, -y1) @ matrix, (0, 0, x2 - x1, y2 - y1))
    fill_outline(mask, outline - (x1, y1), 1)
    cv2.copyTo(cut, mask, dst=place)


def fill_outline(mask: npt.NDArray[np.uint8], outline: Floats, value: int) -> None:
    """Set the pixels of `mask` (h, w) within `outline` (k, 2) to `value`."""
    corners = np.rint(outline - 0.5).astype(np.int32)
    filled = cv2.fillPoly(np.zeros(mask.shape, np.uint8), [corners], 1)
    mask[filled > 0] = value


def _paint_upright(out: Image, image: Image, matrix: Floats) -> None:
    """Resize `image` into `out`: `_paint` for a matrix of scale and translation only, over three times as fast."""
    height, width = out.shape[:2]
    (scale_x, _, x), (_, scale_y, y), _ = matrix.tolist()
    left, right, x1, x2 = span(image.shape[1], scale_x, x, width)
    top, bottom, y1, y2 = span(image.shape[0], scale_y, y, height)
    if min(x2, y2) > 0 and x1 < width and y1 < height:
        part = cv2.resize(image[top:bottom, left:right], (x2 - x1, y2 - y1))
        part = part[max(0, -y1) : height - y1, max(0, -x1) : width - x1]
        y = max(0, y1)
        x = max(0, x1)
        out[y : y + part.shape[0], x : x + part.shape[1]] = part


def shift_colours(image: Image, colours: tuple[float, float, float]) -> None:
    """Change hue, saturation and value of `image` (h, w, 3) in place; a conversion to HSV would take twice as long."""
    own, shared, turn = colour_matrices(colours)
    channels = cv2.split(image)
    top = cv2.max(cv2.max(channels[0], channels[1]), channels[2])
    cv2.merge([cv2.addWeighted(channel, own, top, shared, 0) for channel in channels], dst=image)
    if turn is not None:
        cv2.transform(image, turn, dst=image)


def letterbox(image: Image, side: int, out: Image) -> tuple[float, float, float]:
    """Fit `image` to `side` px, centred in `out` (h, w, 3); return (scale, pad_x, pad_y): out_xy = xy * scale + pad."""
    height, width = image.shape[:2]
    scale = side / max(height, width)
    w = max(1, round(width * scale))
    h = max(1, round(height * scale))
    x = (out.shape[1] - w) // 2
    y = (out.shape[0] - h) // 2
    out[:] = FILL
    how = cv2.INTER_LINEAR if scale >= 1 else cv2.INTER_AREA
    out[y : y + h, x : x + w] = cv2.resize(image, (w, h), interpolation=how)
    return scale, float(x), float(y)
