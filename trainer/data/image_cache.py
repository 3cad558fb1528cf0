"""Image cache (`--cache`): decoded training images in one file per node, shared by its ranks and workers.

`ram` is a memfd: the kernel frees it with the last process that has it open, and it does not count against /dev/shm.
`disk` is a file whose name is a hash of its sources; a rename creates it atomically. All ranks of a node fill it
together.
"""

import contextlib
import hashlib
import mmap
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.dataset import Dataset, Image, Pixels, reduction
from trainer.data.label_cache import cache_folders, new_draft
from trainer.data.progress import bar
from trainer.distributed.comm import World
from trainer.errors import TrainerError

_FORMAT = 1  # version of the file and of the decoding; part of the file's name
_ROUND = 512  # images of a node between two exchanges of the progress
_RESERVED = 0.1  # of the free memory, for everything else

Exchange = Callable[[Any], list[Any]]  # all-gather: a value of this rank -> the values of all ranks, by rank


class _Layout:
    """Layout of the file: a table of shapes (n, 2) int32, then the images."""

    def __init__(self, dataset: Dataset, min_side: int) -> None:
        sizes = np.array([dataset.size(k) for k in range(len(dataset))], np.int64).reshape(-1, 2)
        factors = np.array([reduction(int(longer), min_side) for longer in sizes.max(1, initial=0)], np.int64)
        self.sizes, self.min_side = sizes, min_side
        self.room = (-(-sizes // factors[:, None])).prod(1) * 3  # bytes reserved for each image
        table = -(-8 * len(sizes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.offsets = table + np.concatenate([[0], np.cumsum(self.room)])
        self.total = int(self.offsets[-1])


def largest_bytes(dataset: Dataset, min_side: int) -> int:
    """Return the bytes of the largest image of `dataset`, decoded to at least `min_side` px."""
    return int(_Layout(dataset, min_side).room.max(initial=0))


class CachedImages:
    """The images of `dataset`, decoded to at least `min_side` px, from the cache file."""

    def __init__(self, dataset: Dataset, min_side: int, path: str) -> None:
        self._dataset, self._min_side = dataset, min_side
        layout = _Layout(dataset, min_side)
        self._offsets, self.widest = layout.offsets, int(layout.sizes.max(initial=0))
        self._open(path)

    def _open(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY)
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
        height, width = self._shapes[index].tolist()
        if not height or not 0 < min_side <= self._min_side:
            return self._dataset.image(index, min_side)
        first = int(self._offsets[index])
        return self._bytes[first : first + height * width * 3].reshape(height, width, 3)

    @property
    def is_complete(self) -> bool:
        """Whether the cache has all images."""
        return bool(self._shapes.all())

    def pixels(self) -> Pixels:
        """Return the pixels of all images, uint8 (p, 3), read-only; `first_pixel` finds an image in them."""
        return self._bytes[self._offsets[0] :].reshape(-1, 3)

    def first_pixel(self, index: int) -> int:
        """Return the number of image `index`'s first pixel in `pixels`."""
        return int(self._offsets[index] - self._offsets[0]) // 3


def image_folders(data: str) -> list[Path]:
    """Return the candidate folders of a disk cache for the dataset `data` (--data), in order of preference."""
    path = Path(data)
    return cache_folders(str(path.resolve().parent)) if path.is_file() else cache_folders(str(Path.cwd()))[-1:]


def cache_images(
    dataset: Dataset, min_side: int, kind: str, folders: list[Path], world: World, exchange: Exchange, threads: int
) -> CachedImages:
    """Decode the images of `dataset` once per node, into memory (`ram`) or the first of `folders` with space (`disk`).

    A collective: all ranks raise TrainerError if one of them fails. `threads` of each rank decode.
    """
    layout = _Layout(dataset, min_side)
    with contextlib.ExitStack() as stack:

        def create() -> tuple[int, str | None, str | None]:
            final = draft = None
            if world.local_rank == 0 and kind == "ram":
                file = _memory_file(layout.total)
                stack.callback(os.close, file)  # every rank of the node has its own descriptor then
                draft = f"/proc/{os.getpid()}/fd/{file}"
            elif world.local_rank == 0:
                final, draft = _disk_file(dataset, layout, folders, stack)
            return world.node, final, draft

        files = _on_all(exchange, create)
        final, draft = next((f, d) for node, f, d in files if node == world.node and (f or d))
        if any(d for *_, d in files):
            _fill(dataset, layout, draft, world, [node for node, *_ in files].count(world.node), exchange, threads)
        if world.local_rank == 0 and final and draft:
            os.replace(draft, final)  # noqa: PTH105
        exchange(None)
        images = CachedImages(dataset, min_side, final or draft or "")
        exchange(None)
        return images


def _on_all(exchange: Exchange, action: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `action` and return the results of all ranks, or raise the first error of any rank on all of them."""
    result = failure = None
    try:
        result = action(*arguments)
    except TrainerError as error:
        failure = error.message, error.hint
    except OSError as error:
        failure = f"--cache: {error.filename or ''}: {error.strerror}", "train without --cache"
    gathered = exchange((result, failure))
    for _, found in gathered:
        if found:
            raise TrainerError(*found)
    return [each for each, _ in gathered]


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _memory_file(total: int) -> int:
    free = int(memory_free() * (1 - _RESERVED))
    if total > free:
        what = f"--cache ram: the decoded images need {_gib(total)}, {_gib(free)} of memory is free"
        raise TrainerError(what, "use --cache disk, or train without --cache")
    file = os.memfd_create("trainer-images", os.MFD_CLOEXEC)
    os.ftruncate(file, total)
    return file


def memory_free() -> int:
    """Return the bytes of free memory, within the limit of the cgroup."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="ascii"))  # "max": ValueError
        free = min(free, limit - int((group / "memory.current").read_text(encoding="ascii")))
    return free


def _disk_file(
    dataset: Dataset, layout: _Layout, folders: list[Path], stack: contextlib.ExitStack
) -> tuple[str, str | None]:
    """Return the cache file's path, and that of a new draft if it does not exist; `stack` removes the draft."""
    name = f"images-{_key(dataset, layout)}"
    for folder in folders:
        if (folder / name).is_file() and (folder / name).stat().st_size == layout.total:
            return str(folder / name), None
    refused = []
    for folder in folders:
        try:
            draft = stack.enter_context(new_draft(folder, name))
            free = shutil.disk_usage(folder).free
            if free >= layout.total:
                with draft.open("xb") as file:
                    file.truncate(layout.total)
                return str(folder / name), str(draft)
            refused.append(f"{folder} has {_gib(free)} free")
        except OSError as error:
            refused.append(f"{folder}: {error.strerror}")
    what = f"--cache disk: the decoded images need {_gib(layout.total)}; {'; '.join(refused)}"
    hint = "free disk space, set XDG_CACHE_HOME to a folder on another disk, or train without --cache"
    raise TrainerError(what, hint)


def _key(dataset: Dataset, layout: _Layout) -> str:
    digest = hashlib.blake2b(f"{_FORMAT} {layout.min_side} {len(dataset)}".encode(), digest_size=16)
    digest.update(layout.sizes.tobytes())
    for k in range(len(dataset)):
        name = dataset.name(k)
        digest.update(os.fsencode(name) + b"\0")
        with contextlib.suppress(OSError):  # generated images have no file: their name determines them
            state = os.stat(name)  # noqa: PTH116
            digest.update(f"{state.st_size} {state.st_mtime_ns}".encode())
    return digest.hexdigest()


def _fill(
    dataset: Dataset, layout: _Layout, draft: str | None, world: World, ranks: int, exchange: Exchange, threads: int
) -> None:
    """Decode this rank's part of the images into the file `draft` of its node with `ranks`; None if it is complete."""

    def put(k: int) -> None:
        image = dataset.image(k, layout.min_side)
        if image.nbytes <= layout.room[k]:  # else the dataset ignores min_side, and its images are not cached
            _write(file, np.ascontiguousarray(image).tobytes(), int(layout.offsets[k]))
            _write(file, np.array(image.shape[:2], np.int32).tobytes(), 8 * k)

    def decode(first: int, end: int) -> None:
        list(pool.map(put, range(first + world.local_rank, end, ranks) if draft else ()))
        if draft and end == len(dataset):
            os.fsync(file)

    file = os.open(draft or os.devnull, os.O_RDWR)
    try:
        with ThreadPoolExecutor(threads) as pool, bar(len(dataset), "decoding images", world.rank == 0) as update:
            for first in range(0, len(dataset), _ROUND):
                end = min(first + _ROUND, len(dataset))
                _on_all(exchange, decode, first, end)
                update(completed=end)
    finally:
        os.close(file)


def _write(file: int, content: bytes, offset: int) -> None:
    while content:
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written
