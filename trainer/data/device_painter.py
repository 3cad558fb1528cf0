"""Painting with torch, on the training device: the recipes of a batch become its images.

A dataloader worker packs the recipes as a `Painting`, with the visible parts of their sources, unless the sources stay
on the device (resident_images.py). The operations are those of paint.py. A host never waits for a GPU here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.augment import Layer, Recipe, colour_matrices, is_upright, span, translation
from trainer.data.dataloader import BatchData, empty_images
from trainer.data.dataset import Floats, Image
from trainer.data.paint import FILL, fill_outline
from trainer.data.resident_images import ResidentImages, ResidentTable, Uploads

_CHUNK_PX = 2**22  # pixels that are painted at once, to bound the memory of intermediate results
_UNBOUNDED = (-np.inf, np.inf, -np.inf, np.inf)
_HORIZON = 1e-6  # smallest divisor of a perspective


@dataclass
class Painting(BatchData):
    """The images of a batch before they are painted: b images of s scenes, the last s - b of them for mixup.

    A scene has at most `l` layers. `places` holds per layer: the pixel number of the source's origin in the pool, and
    the pixels of a row. `maps` holds per layer: the matrix from result to source by rows (9); the painted area
    x1, x2, y1, y2 of the result; the packed area of the source; the area of the source, unbounded if upright.
    """

    shape: tuple[int, int]
    upright: bool  # no layer is rotated, sheared or mirrored
    bends: bool  # some layer has a perspective
    colours: bool
    pixels: Tensor  # uint8 (p, 3): the pool, gray at first; empty with `uploads`
    uploads: Uploads | None  # if the pool is the resident one: the images that it lacks
    outlines: Tensor  # uint8 (s, h, w), flipped: layer number + 1 of the pasted objects; empty without any
    places: Tensor  # int64 (s, l, 2)
    maps: Tensor  # float32 (s, l, 21)
    changes: Tensor  # float32 (s, 14): share of the first scene, own, shared and turn of colour_matrices, two flips
    partners: Tensor  # int64 (s - b,): the images of the last scenes
    pasted: Tensor  # bool (s, l)

    def to(self, device: torch.device) -> "Painting":
        """Return the same painting on a device; from pinned memory the host does not wait."""
        tensors = {k: v for k, v in vars(self).items() if isinstance(v, Tensor)}
        moved: dict[str, Any] = {k: v.to(device, non_blocking=True) for k, v in tensors.items()}
        return replace(self, **moved)


def pack(
    recipes: Sequence[Recipe], image_of: Callable[[int], Image], resident: ResidentTable | None = None, number: int = 0
) -> Painting:
    """Return the painting of `recipes` of one shape, with the visible parts of the sources.

    With the table of the resident images, the sources are in the pool on the device, and the painting takes those that
    are absent there with it; it is batch `number`.
    """
    shape = recipes[0].height, recipes[0].width
    partners = [k for k, recipe in enumerate(recipes) if len(recipe.scenes) > 1]
    owners = [*recipes, *(recipes[k] for k in partners)]
    scenes = [recipe.scenes[0] for recipe in recipes] + [recipes[k].scenes[1] for k in partners]
    uploads = None
    if resident:
        needed = dict.fromkeys(layer.tile.index for layers in scenes for layer in layers)
        uploads = resident.uploads(needed, number, image_of)
    most = max(1, *map(len, scenes))
    places, maps = np.zeros((len(scenes), most, 2), np.int64), np.zeros((len(scenes), most, 21), np.float32)
    maps[..., 8] = 1  # an absent layer paints nothing, and divides by 1
    pasted = np.array([[k < len(s) and s[k].outline is not None for k in range(most)] for s in scenes])
    outlines = torch.empty((0, 0, 0), dtype=torch.uint8)
    if pasted.any():
        outlines = empty_images((len(scenes), *shape)).zero_()
    parts: list[Image] = [np.full((1, 1, 3), FILL, np.uint8)]
    upright, bends, end = True, False, 1
    for j, layers in enumerate(scenes):
        for k, layer in enumerate(layers):
            index = layer.tile.index
            size = resident.size(index) if resident else image_of(index).shape[:2]
            matrix = layer.matrix(*size)
            row, (left, right, top, bottom) = _map(layer, matrix, size, shape)
            if left >= right or top >= bottom:  # only its bounds are in the result
                continue
            maps[j, k] = row
            if not is_upright(matrix):
                upright, bends = False, bends or bool(matrix[2, :2].any())
            if resident:
                places[j, k] = resident.first_pixel(index), size[1]
            else:
                parts.append(image_of(index)[top:bottom, left:right])
                places[j, k] = end - top * (right - left) - left, right - left
                end += (bottom - top) * (right - left)
            if layer.outline is not None:
                flip_x, flip_y = owners[j].flips
                mask = outlines[j].numpy()[:: -1 if flip_y else 1, :: -1 if flip_x else 1]
                fill_outline(mask, layer.outline, k + 1)
    changes = np.array([_changes(recipe) for recipe in owners], np.float32)
    pixels = torch.empty((0, 3), dtype=torch.uint8)
    if not resident:
        # A sample also reads the pixels to its right and below, with a weight of 0 at the source's edges.
        pixels = empty_images((end + int(places[..., 1].max()) + 1, 3))
        np.concatenate([part.reshape(-1, 3) for part in parts], out=pixels[:end].numpy())
        pixels[end:] = 0
    tensors = map(torch.from_numpy, (places, maps, changes, np.array(partners, np.int64), pasted))
    has_colours = any(recipe.colours for recipe in recipes)
    return Painting(shape, upright, bends, has_colours, pixels, uploads, outlines, *tensors)


def _changes(recipe: Recipe) -> list[float]:
    own, shared, turn = colour_matrices(recipe.colours or (0.0, 0.0, 0.0))
    turned = np.eye(3) if turn is None else turn
    return [recipe.share, own, shared, *turned.ravel().tolist(), *recipe.flips]


def _map(
    layer: Layer, matrix: Floats, source: tuple[int, int], result: tuple[int, int]
) -> tuple[list[float], tuple[int, int, int, int]]:
    """Return a layer's row of `Painting.maps`, and the part of the source (left, right, top, bottom) that it samples.

    `matrix` is from the source of size (h, w) to the result of size (h, w).
    """
    if is_upright(matrix):
        (scale_x, _, x), (_, scale_y, y), _ = matrix.tolist()
        left, right, x1, x2 = span(source[1], scale_x, x, result[1])
        top, bottom, y1, y2 = span(source[0], scale_y, y, result[0])
        a, b = (right - left) / (x2 - x1), (bottom - top) / (y2 - y1)
        scaling = [a, 0, (0.5 - x1) * a - 0.5 + left, 0, b, (0.5 - y1) * b - 0.5 + top, 0, 0, 1]
        row = [*scaling, x1, x2, y1, y2, left, right - 1, top, bottom - 1, *_UNBOUNDED]
        return row, (left, right, top, bottom)
    inverse = np.linalg.inv(translation(-0.5, -0.5) @ matrix @ translation(0.5, 0.5))  # of pixel centres
    inverse = inverse / inverse[2, 2]
    size, sides = source[::-1], result[::-1]
    (x1, y1), (x2, y2) = np.floor(layer.bounds[:2]).clip(0, sides), np.ceil(layer.bounds[2:]).clip(0, sides)
    corners = np.array([(x1, y1, 1), (x2, y1, 1), (x2, y2, 1), (x1, y2, 1)]) @ inverse.T
    low, high = np.zeros(2), np.array(size)
    if (corners[:, 2] > _HORIZON).all():
        corners = corners[:, :2] / corners[:, 2:]
        low, high = np.floor(corners.min(0) - 1).clip(0, size), np.ceil(corners.max(0) + 2).clip(0, size)
    left, top, right, bottom = map(int, (*low, *high))
    sampled, inside = (left, right - 1, top, bottom - 1), (0, size[0] - 1, 0, size[1] - 1)
    return [*inverse.ravel(), x1, x2, y1, y2, *sampled, *inside], (left, right, top, bottom)


class DevicePainter:
    """Paints batches on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.resident: ResidentImages | None = None

    def __call__(self, painting: Painting) -> Tensor:
        """Return the images, uint8 (b, h, w, 3) on the device."""
        p = painting.to(self.device)
        pool = p.pixels
        if painting.uploads and self.resident:
            self.resident.receive(painting.uploads)
            pool = self.resident.pixels
        (height, width), count = p.shape, len(p.places) - len(p.partners)
        images = torch.empty((len(p.places), height, width, 3), dtype=torch.uint8, device=self.device)
        step = max(1, _CHUNK_PX // (height * width))
        for part in (slice(k, k + step) for k in range(0, len(images), step)):
            images[part] = _sample(pool, p, part)
        changes = p.changes[..., None, None, None].unbind(1)  # (s, 1, 1, 1) each
        if len(p.partners):
            first, other, share = images[p.partners].float(), images[count:].float(), changes[0][count:]
            images[p.partners] = (first * share + other * (1 - share)).round().to(torch.uint8)
        if p.colours:
            for part in (slice(k, k + step) for k in range(0, count, step)):
                images[part] = _recolour(images[part], [change[part] for change in changes[1:12]])
        return images[:count]


def _sample(pool: Tensor, p: Painting, part: slice) -> Tensor:
    """Return scenes of a painting, float32 (n, h, w, 3) in whole numbers."""
    (height, width), device = p.shape, pool.device
    column = torch.arange(width, device=device, dtype=torch.float32).expand(1, 1, width)
    row = torch.arange(height, device=device, dtype=torch.float32).view(1, height, 1)
    flip_x, flip_y = p.changes[part, 12:, None, None].unbind(1)  # 0 or 1
    column = column + flip_x * (width - 1 - 2 * column)
    row = row + flip_y * (height - 1 - 2 * row)
    shape = len(column), height, width
    # Per pixel: number of the first of four source pixels, pixels of a source row, and the weights of the right and
    # the lower ones. Pixel 0 is gray.
    chosen = [torch.zeros(shape, dtype=kind, device=device) for kind in (torch.int64, torch.int64, torch.float32)]
    chosen.append(chosen[2])
    image = torch.full((*shape, 3), FILL, dtype=torch.float32, device=device)
    for k in range(p.places.shape[1]):
        m = p.maps[part, k, :, None, None].unbind(1)  # (n, 1, 1) each
        x, y = m[0] * column + m[2], m[4] * row + m[5]  # (n, 1, w), (n, h, 1)
        if not p.upright:
            x, y = x + m[1] * row, y + m[3] * column
        if p.bends:
            z = m[6] * column + m[7] * row + m[8]
            z = torch.where(z.abs() < _HORIZON, _HORIZON, z)
            x, y = x / z, y / z
        cover = (column >= m[9]) & (column < m[10]) & (row >= m[11]) & (row < m[12])
        if len(p.outlines):
            cover = cover & ((p.outlines[part] == k + 1) | ~p.pasted[part, k, None, None])
        sampled_x, sampled_y = torch.clamp(x, m[13], m[14]), torch.clamp(y, m[15], m[16])
        left, top = sampled_x.floor(), sampled_y.floor()
        first, stride = p.places[part, k, :, None, None].unbind(1)
        sample = first + top.long() * stride + left.long(), stride, sampled_x - left, sampled_y - top
        if p.upright:
            chosen = [torch.where(cover, new, old) for new, old in zip(sample, chosen, strict=True)]
        else:  # an image's edge is blended with the layers below it
            edge = (1 - (x - torch.clamp(x, m[17], m[18])).abs()) * (1 - (y - torch.clamp(y, m[19], m[20])).abs())
            inside = cover & (x > m[17] - 1) & (x < m[18] + 1) & (y > m[19] - 1) & (y < m[20] + 1)
            weight = torch.where(inside, edge, 0)[..., None]
            new = _interpolate(pool, *sample)
            # Exact for a weight of 1, so that an image does not depend on the others of its batch.
            image = torch.where(weight == 1, new, image + (new - image) * weight).round()
    return _interpolate(pool, *chosen).round() if p.upright else image


def _interpolate(pool: Tensor, pixel: Tensor, stride: Tensor, right: Tensor, down: Tensor) -> Tensor:
    """Bilinear interpolation of four pixels: numbers, strides, and weights (n, h, w) -> float32 (n, h, w, 3)."""

    def across(number: Tensor) -> Tensor:
        left, following = (
            pool.index_select(0, each.view(-1)).view(*each.shape, 3).float() for each in (number, number + 1)
        )
        return left + (following - left) * right[..., None]

    top = across(pixel)
    return top + (across(pixel + stride) - top) * down[..., None]


def _recolour(images: Tensor, change: Sequence[Tensor]) -> Tensor:
    """Change colours as paint.shift_colours does: uint8 (b, h, w, 3) -> float32 in whole numbers, 0 to 255.

    `change` are own, shared and turn (9) of colour_matrices, (b, 1, 1, 1) each.
    """
    values = images.float()
    values = (change[0] * values + change[1] * values.amax(3, keepdim=True)).round().clamp(0, 255)
    red, green, blue = values.tensor_split(3, 3)  # no matrix product: it could be in TF32
    turned = [change[k] * red + change[k + 1] * green + change[k + 2] * blue for k in (2, 5, 8)]
    return torch.cat(turned, 3).round().clamp(0, 255)
