"""Image cache (`--cache`): decoded training images, in one file per node that its ranks and workers share.

In memory the file is a memfd: the kernel frees it with the last process that has it open, and it does not count
against /dev/shm. Whichever process needs an image first decodes it and stores it there.

On disk all ranks of a node decode the images before the first epoch, because the file must be complete before other
runs find it. A rename creates it atomically; its name is a hash of its sources.
"""

import bisect
import contextlib
import hashlib
import mmap
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.cache.memory import memory_free
from trainer.data.dataset import Dataset, Image, Ints, reduction
from trainer.data.formats.label_cache import cache_folders, new_draft
from trainer.data.progress import bar
from trainer.distributed.comm import World
from trainer.errors import TrainerError

_FORMAT = 1  # version of the file and of the decoding; part of the file's name
_ROUND = 512  # images between two exchanges of the progress
_RESERVED = 0.1  # of the free memory, for everything else
AUTO_SHARE = 0.5  # of the free memory, at most, for images that the user did not ask to keep

Exchange = Callable[[Any], list[Any]]  # all-gather: a value of this rank -> the values of all ranks, by rank


class Layout:
    """The place of each decoded image of a dataset, counted in pixels.

    The size of a reduced image depends on its decoder, which rounds up or down, so a place is an upper bound.
    """

    def __init__(self, dataset: Dataset, min_side: int) -> None:
        """Lay out the images of `dataset`, decoded to at least `min_side` px."""
        self.min_side = min_side
        sizes = _sizes(dataset)
        factors = np.ones(len(dataset), np.int64)
        if getattr(dataset, "decodes_reduced", False):
            factors = np.array(
                [reduction(int(longer), min_side) for longer in sizes.max(1, initial=0)], np.int64
            )
        largest = -(-sizes // factors[:, None])
        self.widest = int(largest.max(initial=0))  # longest side
        # The number of each image's first pixel, then of all pixels.
        self.first = np.concatenate([[0], np.cumsum(largest.prod(1))])

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def nbytes(self) -> int:
        """The bytes of all images."""
        return 3 * int(self.first[-1])

    @property
    def largest_bytes(self) -> int:
        """The bytes of the largest image."""
        return 3 * int(np.diff(self.first).max(initial=0))

    def has_room(self, index: int, image: Image) -> bool:
        """Return whether `image` fits into the place of image `index`."""
        return bool(image.shape[0] * image.shape[1] <= self.first[index + 1] - self.first[index])


def _sizes(dataset: Dataset) -> Ints:
    return np.array([dataset.size(k) for k in range(len(dataset))], np.int64).reshape(-1, 2)


class CachedImages:
    """The images of a dataset from a cache file: a table of shapes (n, 2) int32, 0 for absent ones, then the images."""

    def __init__(self, dataset: Dataset, layout: Layout, path: str, spare: int | None) -> None:
        """Open the file `path`.

        A complete file has `spare` None. To another one, absent images are added when they are needed, as long as
        `spare` bytes of memory stay free; 0 adds all.
        """
        self._dataset = dataset
        self._layout = layout
        self._spare = spare
        self.stores = spare is not None
        self._open(path)

    def _open(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR if self._spare is not None else os.O_RDONLY)
        # A path by descriptor: a memfd has no name, and a draft is renamed.
        self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._bytes = np.frombuffer(mmap.mmap(self._file, 0, access=mmap.ACCESS_READ), np.uint8)
        self._shapes = self._bytes[: 8 * len(self._dataset)].view(np.int32).reshape(-1, 2)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_file", "_bytes", "_shapes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open(state["_path"])

    def image(self, index: int, min_side: int = 0) -> Image:
        """Return the image from the cache if `min_side` is at most the cache's, else from the dataset."""
        if not 0 < min_side <= self._layout.min_side:
            return self._dataset.image(index, min_side)
        height, width = self._shapes[index].tolist()
        if height and width:
            first = _offset(self._layout, index)
            return self._bytes[first : first + height * width * 3].reshape(height, width, 3)
        image = self._dataset.image(index, self._layout.min_side)
        if self.stores and not (self._spare and memory_free() < self._spare + image.nbytes):
            try:
                _put(self._file, self._layout, index, image)
            except OSError as error:  # ENOSPC under strict overcommit
                if not self._spare:
                    what = (
                        f"--cache ram: image {self._dataset.name(index)} cannot be stored: {error.strerror}"
                    )
                    raise TrainerError(what, "use --cache auto or disk") from None
        return image


def _offset(layout: Layout, index: int) -> int:
    """Return the position of an image in the file, behind the table of shapes; for -1 the end of the file."""
    table = -(-8 * len(layout) // mmap.PAGESIZE) * mmap.PAGESIZE
    return table + 3 * int(layout.first[index])


def _put(file: int, layout: Layout, index: int, image: Image) -> None:
    """Write an image into a cache file, then its shape: a process that finds a shape must find the image's bytes.

    An image that needs more room than its size said is left out, and decoded whenever it is needed. Two processes may
    write the same image, which is harmless.
    """
    if layout.has_room(index, image):
        _write(file, np.ascontiguousarray(image).data.cast("B"), _offset(layout, index))
        _write(file, np.array(image.shape[:2], np.int32).data.cast("B"), 8 * index)


def _write(file: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(file, content, offset)
        content = content[written:]
        offset = offset + written


def image_folders(data: str) -> list[Path]:
    """Return the candidate folders of a disk cache for the dataset `data` (--data), in order of preference."""
    path = Path(data)
    return (
        cache_folders(str(path.resolve().parent)) if path.is_file() else cache_folders(str(Path.cwd()))[-1:]
    )


@dataclass(frozen=True)
class _File:
    """A node's cache file as its first rank chose it."""

    node: int
    reason: str  # what is cached where, and why
    path: str = ""  # "": the node has no cache
    draft: str = ""  # where the images are written first, if that is another file
    spare: int | None = None  # as in CachedImages


def cache_images(
    dataset: Dataset,
    layout: Layout,
    kind: str,
    folders: list[Path],
    world: World,
    exchange: Exchange,
    threads: int,
) -> tuple[CachedImages | None, str]:
    """Open this node's cache of kind `ram`, `disk` (in the first of `folders` with space) or `auto`.

    `auto` is in memory if half of the free memory is enough, and None otherwise. Also returns a message that says which
    and why. For `disk`, `threads` of each rank decode the images. A collective: all ranks raise TrainerError if one of
    them fails.
    """
    with contextlib.ExitStack() as stack:

        def create() -> _File | None:
            if world.local_rank:
                return None
            if kind == "disk":
                return _disk_file(dataset, layout, folders, world.node, stack)
            return _memory_file(layout, kind, world.node, stack)

        chosen = [file for file in _on_all(exchange, create) if file]
        mine = next(file for file in chosen if file.node == world.node)
        if any(file.draft for file in chosen):
            _fill(dataset, layout, mine.draft, world, exchange, threads)
        if world.local_rank == 0 and mine.draft:
            os.replace(mine.draft, mine.path)  # noqa: PTH105
        exchange(None)
        images = CachedImages(dataset, layout, mine.path, mine.spare) if mine.path else None
        exchange(None)  # every rank of the node has its own descriptor now
        return images, _summary(chosen)


def _summary(chosen: list[_File]) -> str:
    """Return the reason of all nodes, or of each node if they differ in what they cache."""
    if len({bool(file.path) for file in chosen}) == 1:
        return chosen[0].reason
    return "; ".join(f"node {file.node}: {file.reason}" for file in chosen)


def _on_all(exchange: Exchange, action: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `action` and return the results of all ranks, or raise the first error of any rank on all of them."""
    result = failure = None
    try:
        result = action(*arguments)
    except TrainerError as error:
        failure = error.message, error.hint
    except OSError as error:
        failure = f"--cache: {error.filename or ''}: {error.strerror}", "train with --cache none"
    gathered = exchange((result, failure))
    for _, found in gathered:
        if found:
            raise TrainerError(*found)
    return [each for each, _ in gathered]


def gib(count: int) -> str:
    """Format a number of bytes."""
    return f"{count / 2**30:.{1 if count >= 2**30 else 2}f} GiB"


def _memory_file(layout: Layout, kind: str, node: int, stack: contextlib.ExitStack) -> _File:
    if sys.platform != "linux":
        if kind == "ram":
            raise TrainerError("--cache ram needs Linux", "use --cache disk, or --cache none")
        return _File(node, "images are not cached: in memory only Linux can share them")
    free = memory_free()
    total = _offset(layout, -1)
    need = f"the decoded images need {gib(total)}"
    if kind == "ram" and total > free * (1 - _RESERVED):
        what = f"--cache ram: {need}, {gib(int(free * (1 - _RESERVED)))} of memory is free"
        raise TrainerError(what, "use --cache disk, or --cache none")
    if kind == "auto" and total > free * AUTO_SHARE:
        return _File(node, f"images are not cached: {need}, more than half of the {gib(free)} of free memory")
    file = os.memfd_create("trainer-images", os.MFD_CLOEXEC)
    stack.callback(os.close, file)
    os.ftruncate(file, total)
    spare = int(free * _RESERVED) if kind == "auto" else 0
    return _File(
        node,
        f"images are cached in memory: {need} of {gib(free)} free",
        f"/proc/{os.getpid()}/fd/{file}",
        spare=spare,
    )


def _disk_file(
    dataset: Dataset, layout: Layout, folders: list[Path], node: int, stack: contextlib.ExitStack
) -> _File:
    """Return the cache file, with a new draft if it does not exist, which `stack` removes."""
    name = f"images-{_key(dataset, layout)}"
    total = _offset(layout, -1)
    for folder in folders:
        if (folder / name).is_file() and (folder / name).stat().st_size == total:
            return _File(node, f"images are cached in {folder / name}", str(folder / name))
    refused = []
    for folder in folders:
        try:
            draft = stack.enter_context(new_draft(folder, name))
            free = shutil.disk_usage(folder).free
            if free >= total:
                with draft.open("xb") as file:
                    file.truncate(total)
                return _File(node, f"images are cached in {folder / name}", str(folder / name), str(draft))
            refused.append(f"{folder} has {gib(free)} free")
        except OSError as error:
            refused.append(f"{folder}: {error.strerror}")
    what = f"--cache disk: the decoded images need {gib(total)}; {'; '.join(refused)}"
    hint = "free disk space, set XDG_CACHE_HOME to a folder on another disk, or use --cache none"
    raise TrainerError(what, hint)


def _key(dataset: Dataset, layout: Layout) -> str:
    digest = hashlib.blake2b(f"{_FORMAT} {layout.min_side} {len(dataset)}".encode(), digest_size=16)
    digest.update(_sizes(dataset).tobytes())
    for k in range(len(dataset)):
        name = dataset.name(k)
        digest.update(os.fsencode(name) + b"\0")
        with contextlib.suppress(OSError):  # generated images have no file: their name determines them
            state = os.stat(name)  # noqa: PTH116
            digest.update(f"{state.st_size} {state.st_mtime_ns}".encode())
    return digest.hexdigest()


def _fill(
    dataset: Dataset, layout: Layout, draft: str, world: World, exchange: Exchange, threads: int
) -> None:
    """Decode this rank's part of the images into the file `draft` of its node; "" if that node's file is complete."""
    file = os.open(draft or os.devnull, os.O_RDWR)
    try:
        ranks = exchange(world.node).count(world.node)
        mine = range(world.local_rank, len(dataset), ranks) if draft else range(0)
        decode_all(
            lambda k: _put(file, layout, k, dataset.image(k, layout.min_side)),
            mine,
            len(dataset),
            world,
            exchange,
            threads,
        )
        _on_all(exchange, os.fsync if draft else lambda _: None, file)
    finally:
        os.close(file)


def decode_all(
    put: Callable[[int], object], mine: range, count: int, world: World, exchange: Exchange, threads: int
) -> None:
    """Call `put` for this rank's images `mine` of `count`, in threads. A collective, with a bar on rank 0."""

    def decode(first: int, end: int) -> None:
        list(pool.map(put, mine[bisect.bisect_left(mine, first) : bisect.bisect_left(mine, end)]))

    with ThreadPoolExecutor(threads) as pool, bar(count, "decoding images", world.rank == 0) as update:
        for first in range(0, count, _ROUND):
            end = min(first + _ROUND, count)
            _on_all(exchange, decode, first, end)
            update(completed=end)
