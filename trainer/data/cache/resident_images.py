"""Decoded training images that stay on the training device (`--cache`), each from the batch that first needs it.

Every image has a fixed place in the pool, a tensor on the device. A dataloader worker that packs a batch adds the
images that are not on the device yet, whole, and claims them in a table that the rank's processes share. Later batches
then rely on it, even before that batch arrives: a rank paints its batches in the order of their numbers. Batches that
were prefetched and dropped, for example when a run goes back to a checkpoint, count for nothing, because another pass
has other numbers.
"""

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.batch import FILL, BatchData, empty_images
from trainer.data.cache.image_cache import AUTO_SHARE, Layout, gib
from trainer.data.cache.memory import memory_free
from trainer.data.dataset import Dataset, Image
from trainer.errors import TrainerError

PASS = 2**32  # the batches of pass p have the numbers p * PASS, p * PASS + 1, ...; p counts from 1
# States of an image; others are the number of the batch that takes it to the device.
_ABSENT = 0
_ON_DEVICE = 1
_SETTLED = 3  # steps after which training has allocated its memory: gradients, momentum, workspaces


@dataclass
class Uploads(BatchData):
    """Images that travel to the device with a batch."""

    images: Tensor  # int64 (u, 2): the image's number, and its pixels
    pixels: Tensor  # uint8 (p, 3): the pixels of all of them


class ResidentTable:
    """Which images are on a rank's device, and their decoded sizes, in memory that the rank and its workers share."""

    def __init__(self, dataset: Dataset, layout: Layout) -> None:
        self._dataset = dataset
        self._layout = layout
        file = os.memfd_create("trainer-residents", os.MFD_CLOEXEC)
        os.ftruncate(file, 8 * (1 + 2 * len(layout)))
        self._open(file)

    def _open(self, file: int) -> None:
        self._file = file
        self._path = f"/proc/{os.getpid()}/fd/{file}"
        # int64: whether the pool is open; the images' states (n,); their sizes (n,) as height << 32 | width, or 0.
        # Each value is one aligned word, so that no process reads a half of it.
        words = np.frombuffer(mmap.mmap(file, 0), np.int64)
        self._is_open, self._states, self._sizes = np.split(words, [1, 1 + len(self._layout)])

    def __getstate__(self) -> dict[str, Any]:
        return {k: self.__dict__[k] for k in ("_dataset", "_layout", "_path")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open(os.open(state["_path"], os.O_RDWR))

    @property
    def is_open(self) -> bool:
        """Whether batches may use the pool."""
        return bool(self._is_open[0])

    def open(self) -> None:
        """Let batches use the pool from now on."""
        self._is_open[0] = 1

    def first_pixel(self, index: int) -> int:
        """Return the number of image `index`'s first pixel in the pool."""
        return 1 + int(self._layout.first[index])

    def size(self, index: int) -> tuple[int, int]:
        """Return the decoded (height, width) of an image, (0, 0) if it has not been decoded yet."""
        return divmod(int(self._sizes[index]), 2**32)

    def uploads(self, needed: Iterable[int], number: int, image_of: Callable[[int], Image]) -> Uploads:
        """Return the images that batch `number` takes to the device, of those that it needs. All then have a size."""
        wanted = np.fromiter(needed, np.int64)
        states = self._states[wanted]
        earlier = (states >= number // PASS * PASS) & (states < number)
        mine = wanted[~(earlier | (states == _ON_DEVICE))]
        self._states[mine] = number  # before decoding, which takes long: other workers need the same images
        images = [self.checked(index, image_of(index)) for index in mine.tolist()]
        for index in wanted[
            self._sizes[wanted] == 0
        ].tolist():  # claimed by a batch that is still being packed
            self.checked(index, image_of(index))
        counts = [image.shape[0] * image.shape[1] for image in images]
        pixels = torch.empty((0, 3), dtype=torch.uint8)
        if images:
            pixels = empty_images((sum(counts), 3))
            np.concatenate([image.reshape(-1, 3) for image in images], out=pixels.numpy())
        return Uploads(torch.from_numpy(np.column_stack([mine, np.array(counts, np.int64)])), pixels)

    def checked(self, index: int, image: Image) -> Image:
        """Record the size of a decoded image; raise TrainerError if it has no place or is not the size it was."""
        size = image.shape[:2]
        before = self.size(index)
        if not self._layout.has_room(index, image) or before not in ((0, 0), size):
            height, width = before if any(before) else self._dataset.size(index)
            raise TrainerError(
                f"{self._dataset.name(index)}: decoded to {size[1]} x {size[0]} px, but it had {width} x {height} px "
                "when training started",
                "do not change images during a training; start the command again",
            )
        self._sizes[index] = size[0] << 32 | size[1]
        return image

    def mark(self, indices: Sequence[int]) -> None:
        """Record that images are on the device."""
        self._states[list(indices)] = _ON_DEVICE


class ResidentImages:
    """The pool of decoded images on the training device, in the training process."""

    pixels: Tensor  # uint8 (p, 3), once the pool is open; pixel 0 is gray

    def __init__(
        self,
        dataset: Dataset,
        layout: Layout,
        device: torch.device,
        *,
        largest_batch: int,
        local_size: int,
        refused: Callable[[str], None],
    ) -> None:
        """Plan the pool; nothing is allocated before `open`.

        `largest_batch` is in pixels, and `local_size` the number of ranks on this node. `refused` gets a message if
        there turns out to be no room.
        """
        self.table = ResidentTable(dataset, layout)
        self._layout = layout
        self._device = device
        self._largest = largest_batch
        self._local_size = local_size
        self._refused = refused
        self._seen = 0
        self._steps = 0
        self._is_decided = False

    def free(self) -> int:
        """Return the bytes that are free on the device beside what the largest batch of the training takes."""
        if self._device.type != "cuda":
            return memory_free() // self._local_size
        free, _ = torch.cuda.mem_get_info(self._device)
        if not self._seen:
            return int(free)
        peak = torch.cuda.max_memory_reserved(self._device)
        growth = max(1.0, self._largest / self._seen)  # --multi-scale and --rect: batches of several sizes
        return int(free + torch.cuda.memory_reserved(self._device) - peak * growth)

    def may_fit(self) -> bool:
        """Return whether the images need at most half of the free memory."""
        return self._layout.nbytes <= self.free() * AUTO_SHARE

    @property
    def need(self) -> str:
        """What the images need, and what is free."""
        return f"decoded they need {gib(self._layout.nbytes)} of {gib(max(0, self.free()))} free"

    def step_done(self, batch_pixels: int) -> None:
        """Count a training step; after the first ones, open the pool if there is room beside the training."""
        self._seen = max(self._seen, batch_pixels)
        self._steps = self._steps + 1
        if self._steps == _SETTLED:
            self.open()

    def open(self) -> None:
        """Allocate the pool and let batches use it, or say why not."""
        if self._is_decided:
            return
        self._is_decided = True
        pixels = self._allocate() if self.may_fit() else None
        if pixels is None:
            self._refused(f"images do not stay on {self._device} beside the training: {self.need}")
            return
        self.pixels = pixels
        self.pixels[0] = FILL
        self.table.open()

    def _allocate(self) -> Tensor | None:
        # A sample also reads the pixels to its right and below, with a weight of 0 at the source's edges.
        count = 1 + int(self._layout.first[-1]) + self._layout.widest + 1
        try:
            return torch.empty((count, 3), dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:  # free, but not in one piece
            return None

    @property
    def is_open(self) -> bool:
        """Whether the pool is allocated."""
        return self.table.is_open

    def receive(self, uploads: Uploads) -> None:
        """Copy a batch's images to their places; from pinned memory the host does not wait."""
        begin = 0
        rows = uploads.images.tolist()
        for index, count in rows:
            place = self.table.first_pixel(index)
            part = uploads.pixels[begin : begin + count]
            self.pixels[place : place + count].copy_(part, non_blocking=True)
            begin += count
        self.table.mark([index for index, _ in rows])

    def put(self, index: int, image: Image) -> None:
        """Copy one decoded image to its place; the host waits."""
        image = self.table.checked(index, image)
        place = self.table.first_pixel(index)
        flat = torch.from_numpy(np.array(image).reshape(-1, 3))
        self.pixels[place : place + len(flat)] = flat
        self.table.mark([index])
