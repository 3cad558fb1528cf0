"""Painting on the training device: the recipes of a batch become its images in one Triton kernel (paint_kernel.py).

A dataloader worker packs the recipes as a `Painting`, with the visible parts of their sources unless these stay on the
device (resident_images.py). The training process copies it there and launches the kernel, and waits for neither.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.data.augment.paint import fill_outline
from trainer.data.augment.recipe import HORIZON, Layer, Recipe, colour_matrices, is_upright, span, translation
from trainer.data.batch import FILL, BatchData, empty_images
from trainer.data.cache.resident_images import ResidentImages, ResidentTable, Uploads
from trainer.data.dataset import Image, Pixels
from trainer.errors import TrainerError

_UNBOUNDED = (-np.inf, np.inf, -np.inf, np.inf)
_NO_MASK = -1
# Rows and columns of a program: two pixels per thread, so that a GPU has room for many threads.
_BLOCK = (8, 32)
# The interpreter's time is that of the operations, however many pixels they have.
_INTERPRETED_BLOCK = (64, 64)

Box = tuple[int, int, int, int]  # x1, x2, y1, y2


@dataclass
class Painting(BatchData):
    """The images of a batch before they are painted.

    `table` has these tables one after the other, so that they travel in one copy; `tables` returns them. Layers are
    numbered through the batch, the lower ones of a scene first.
    - ranges int64 (images, 3): the first layer of the image's scene, of its second scene (mixup), and the end of both
    - places int64 (layers, 3): the number in the pool of the pixel that is the source's origin; the pixels of a row of
      the source; the first byte in `masks` of the layer's outline, which is a mask of the painted area; -1 without one
    - changes float32 (images, 14): the share of the first scene, which is 1 without mixup; own, shared and turn (9) of
      colour_matrices; whether the image is flipped left to right, and upside down
    - maps float32 (layers, 21): the matrix from result to source by rows (9); the painted area x1, x2, y1, y2 of the
      result; the packed area of the source; the area of the source, unbounded if the layer is upright
    - masks uint8 (m,): 1 within the outlines
    """

    shape: tuple[int, int]
    images: int
    layers: int
    pixels: Tensor  # uint8 (p, 3): the pool, gray at first; empty with `uploads`
    table: Tensor  # uint8 (t,)
    uploads: Uploads | None = None  # if the pool is the resident one: the images that it lacks

    def to(self, device: torch.device) -> "Painting":
        """Return the same painting on a device; from pinned memory the host does not wait."""
        pixels = self.pixels.to(device, non_blocking=True)
        table = self.table.to(device, non_blocking=True)
        return replace(self, pixels=pixels, table=table)

    def tables(self) -> list[Tensor]:
        """Return ranges, places, changes, maps and masks, as views of `table`."""
        sizes = [24 * self.images, 24 * self.layers, 56 * self.images, 84 * self.layers]  # bytes
        mask_bytes = len(self.table) - sum(sizes)
        parts = torch.split(self.table, [*sizes, mask_bytes])
        kinds = (torch.int64, torch.int64, torch.float32, torch.float32, torch.uint8)
        return [part.view(kind) for part, kind in zip(parts, kinds, strict=True)]


class _Packer:
    """The layers of a batch, one after the other."""

    def __init__(
        self, shape: tuple[int, int], image_of: Callable[[int], Image], resident: ResidentTable | None
    ) -> None:
        self._shape = shape
        self._image_of = image_of
        self._resident = resident
        self.places: list[tuple[int, int, int]] = []
        self.maps: list[list[float]] = []
        self.masks: list[Pixels] = []
        self.parts: list[Image] = [np.full((1, 1, 3), FILL, np.uint8)]
        self._pixels = 1
        self._mask_bytes = 0
        self._widest = 0

    def add(self, layer: Layer) -> None:
        """Append a layer, unless only its bounds are in the result."""
        index = layer.tile.index
        resident = self._resident
        size = resident.size(index) if resident else self._image_of(index).shape[:2]
        row, (left, right, top, bottom) = _map(layer, size, self._shape)
        if left >= right or top >= bottom:
            return
        if resident:
            origin = resident.first_pixel(index)
            stride = size[1]
        else:
            stride = right - left
            origin = self._pixels - top * stride - left
            self._pixels += (bottom - top) * stride
            self._widest = max(self._widest, stride)
            self.parts.append(self._image_of(index)[top:bottom, left:right])
        self.places.append((origin, stride, _NO_MASK if layer.outline is None else self._mask_bytes))
        self.maps.append(row)
        if layer.outline is not None:
            x1, x2, y1, y2 = map(int, row[9:13])
            mask = np.zeros((y2 - y1, x2 - x1), np.uint8)
            fill_outline(mask, layer.outline - (x1, y1), 1)
            self.masks.append(mask.ravel())
            self._mask_bytes += mask.size

    def pool(self) -> Tensor:
        """Return the visible parts of the sources, uint8 (p, 3); empty if they are resident."""
        if self._resident:
            return torch.empty((0, 3), dtype=torch.uint8)
        # A sample also reads the pixels to its right and below, with a weight of 0 at the source's edges.
        pixels = empty_images((self._pixels + self._widest + 1, 3))
        np.concatenate([part.reshape(-1, 3) for part in self.parts], out=pixels[: self._pixels].numpy())
        pixels[self._pixels :] = 0
        return pixels


def pack(
    recipes: Sequence[Recipe],
    image_of: Callable[[int], Image],
    resident: ResidentTable | None = None,
    number: int = 0,
) -> Painting:
    """Return the painting of `recipes` of one shape, with the visible parts of the sources.

    With the table of the resident images, the sources are in the pool on the device, and the painting takes those that
    are absent there with it; it is batch `number`.
    """
    shape = recipes[0].height, recipes[0].width
    uploads = None
    if resident:
        layers = [layer for recipe in recipes for scene in recipe.scenes for layer in scene]
        sources = dict.fromkeys(layer.tile.index for layer in layers)
        uploads = resident.uploads(sources, number, image_of)
    packer = _Packer(shape, image_of, resident)
    ranges = []
    for recipe in recipes:
        bounds = [len(packer.maps)]
        for layers in recipe.scenes:
            for layer in layers:
                packer.add(layer)
            bounds.append(len(packer.maps))
        ranges.append([*bounds, bounds[-1]][:3])
    tables: list[npt.NDArray[Any]] = [
        np.array(ranges, np.int64),
        np.array(packer.places, np.int64),
        np.array([_changes(recipe) for recipe in recipes], np.float32),
        np.array(packer.maps, np.float32),
        *packer.masks,
    ]
    in_bytes = [table.reshape(-1).view(np.uint8) for table in tables]
    packed = empty_images((sum(map(len, in_bytes)),))
    np.concatenate(in_bytes, out=packed.numpy())
    return Painting(shape, len(recipes), len(packer.maps), packer.pool(), packed, uploads)


def _changes(recipe: Recipe) -> list[float]:
    own, shared, turn = colour_matrices(recipe.colours or (0.0, 0.0, 0.0))
    turned = np.eye(3) if turn is None else turn
    return [recipe.share, own, shared, *turned.ravel().tolist(), *recipe.flips]


def _map(layer: Layer, source: tuple[int, int], result: tuple[int, int]) -> tuple[list[float], Box]:
    """Return a layer's row of `maps`, and the part of the source (left, right, top, bottom) that it samples.

    `source` and `result` are sizes (h, w).
    """
    matrix = layer.matrix(*source)
    if is_upright(matrix) and layer.outline is None:  # an outline's mask has the size of the layer's bounds
        (scale_x, _, x), (_, scale_y, y), _ = matrix.tolist()
        left, right, x1, x2 = span(source[1], scale_x, x, result[1])
        top, bottom, y1, y2 = span(source[0], scale_y, y, result[0])
        a = (right - left) / (x2 - x1)
        b = (bottom - top) / (y2 - y1)
        scaling = [a, 0, (0.5 - x1) * a - 0.5 + left, 0, b, (0.5 - y1) * b - 0.5 + top, 0, 0, 1]
        painted = max(0, x1), min(x2, result[1]), max(0, y1), min(y2, result[0])
        row = [*scaling, *painted, left, right - 1, top, bottom - 1, *_UNBOUNDED]
        return row, (left, right, top, bottom)
    inverse = np.linalg.inv(translation(-0.5, -0.5) @ matrix @ translation(0.5, 0.5))  # of pixel centres
    inverse = inverse / inverse[2, 2]
    size = source[::-1]
    sides = result[::-1]
    x1, y1 = np.floor(layer.bounds[:2]).clip(0, sides)
    x2, y2 = np.ceil(layer.bounds[2:]).clip(0, sides)
    corners = np.array([(x1, y1, 1), (x2, y1, 1), (x2, y2, 1), (x1, y2, 1)]) @ inverse.T
    low = np.zeros(2)
    high = np.array(size)
    if (corners[:, 2] > HORIZON).all():
        corners = corners[:, :2] / corners[:, 2:]
        low = np.floor(corners.min(0) - 1).clip(0, size)
        high = np.ceil(corners.max(0) + 2).clip(0, size)
    left, top, right, bottom = map(int, (*low, *high))
    sampled = (left, right - 1, top, bottom - 1)
    inside = (0, size[0] - 1, 0, size[1] - 1)
    return [*inverse.ravel(), x1, x2, y1, y2, *sampled, *inside], (left, right, top, bottom)


_BLANK = Recipe(1, 1, [[]], 1.0, None, (False, False), np.zeros((0, 5), np.float32))


class DevicePainter:
    """Paints batches on a GPU, or on the CPU in Triton's interpreter."""

    def __init__(self, device: torch.device) -> None:
        """Compile the kernel, and paint an image with it; raise TrainerError if that fails."""
        self.device = device
        self.resident: ResidentImages | None = None
        self._is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if device.type != "cuda" and not self._is_interpreted:
            what = f"--augment-on device: the device is {device}, and the kernel that paints the images needs a GPU"
            hint = "use --augment-on workers; to test, TRITON_INTERPRET=1 runs the kernel on a CPU"
            raise TrainerError(what, hint)
        try:
            # triton is optional, and slow to import.
            from trainer.data.augment.paint_kernel import paint_batch

            self._kernel: Any = paint_batch
            blank = pack([_BLANK], lambda _: np.zeros((0, 0, 3), np.uint8))
            pixel = self(blank).flatten().tolist()
        # Of any type: Triton runs a C compiler and ptxas, writes a cache, loads a driver.
        except Exception as error:
            reason = " ".join(str(error).split())
            what = f"images cannot be painted on {device}: {type(error).__name__}: {reason}"
            needed = "triton, a C compiler, Python's headers and a writable TRITON_CACHE_DIR"
            raise TrainerError(what, f"use --augment-on workers, or provide {needed}") from error
        gray = 3 * [FILL]
        if pixel != gray:
            raise TrainerError(f"images cannot be painted on {device}: a blank pixel is {pixel}, not {gray}")

    def __call__(self, painting: Painting) -> Tensor:
        """Return the images, uint8 (b, h, w, 3) on the device."""
        on_device = painting.to(self.device)
        pool = on_device.pixels
        if painting.uploads and self.resident:
            self.resident.receive(painting.uploads)
            pool = self.resident.pixels
        height, width = painting.shape
        images = torch.empty((painting.images, height, width, 3), dtype=torch.uint8, device=self.device)
        rows, columns = _INTERPRETED_BLOCK if self._is_interpreted else _BLOCK
        grid = -(-width // columns), -(-height // rows), painting.images
        # Triton launches on the current GPU. Without contraction to fused operations, every GPU has the same rounding.
        on_gpu = self.device.type == "cuda"
        with torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext():
            arguments = (images, pool, *on_device.tables(), height, width)
            self._kernel[grid](*arguments, ROWS=rows, COLUMNS=columns, num_warps=4, enable_fp_fusion=False)
        return images


def choose_painter(augment_on: str, device: torch.device) -> tuple[DevicePainter | None, str]:
    """Return the painter for --augment-on, None for the workers, and a note if auto cannot use the GPU.

    Raise TrainerError if `augment_on` is `device` and the device cannot paint.
    """
    if augment_on == "workers" or (augment_on == "auto" and device.type != "cuda"):
        return None, ""
    try:
        return DevicePainter(device), ""
    except TrainerError as error:
        if augment_on == "device":
            raise
        return None, f"{error.message}; the dataloader workers paint them"
