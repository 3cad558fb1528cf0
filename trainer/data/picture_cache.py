"""Decoded training pictures in one file per machine, for all of its ranks and their workers (`--cache`).

`ram` is a file without a name in the machine's memory: it is gone with the last process that has it open, however
that ends, and does not count against the size of /dev/shm. `disk` is a file named by what it was made from, so that a
change is a new name; it appears by a rename, whole or not at all. All ranks that see the same file fill it together.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.dataset import Dataset, Image, reduction
from trainer.data.label_cache import cache_folders
from trainer.dist import World
from trainer.errors import TrainerError
from trainer.progress import bar

_FORMAT = 1  # of the file, and of how pictures are decoded: another one is another name
_SLICE_S = 1.0  # of work between two looks at how far the others are
_CHUNK = 16  # pictures of each thread between two looks at the clock
_ABANDONED_S = 24 * 3600.0
_SPARED = 0.1  # of the machine's memory that is left for everything else

Exchange = Callable[[Any], list[Any]]  # a value of this rank for those of all ranks, in their order


class _Layout:
    """Where each picture stands in the file: first a table of shapes (n, 2) int32, then the pictures."""

    def __init__(self, dataset: Dataset, min_side: int) -> None:
        sizes = np.array([dataset.size(k) for k in range(len(dataset))], np.int64).reshape(-1, 2)
        factors = np.array([reduction(int(longer), min_side) for longer in sizes.max(1, initial=0)], np.int64)
        self.sizes, self.min_side = sizes, min_side
        self.room = (-(-sizes // factors[:, None])).prod(1) * 3  # bytes of each
        table = -(-8 * len(sizes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.offsets = table + np.concatenate([[0], np.cumsum(self.room)])
        self.total = int(self.offsets[-1])


class CachedPictures:
    """`dataset`, with pictures decoded to no less than `min_side` px from a file."""

    def __init__(self, dataset: Dataset, min_side: int, path: str) -> None:
        self._dataset, self._min_side = dataset, min_side
        self.names, self.flips = dataset.names, dataset.flips
        self.name, self.size = dataset.name, dataset.size
        self.labels, self.segments = dataset.labels, dataset.segments
        self._offsets = _Layout(dataset, min_side).offsets
        self._open(path)

    def _open(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY)
        # By this process's own number for it: the file may have no name, or get another one.
        self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._bytes = np.frombuffer(mmap.mmap(self._file, 0, access=mmap.ACCESS_READ), np.uint8)
        self._shapes = self._bytes[: 8 * len(self._dataset)].view(np.int32).reshape(-1, 2)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_file", "_bytes", "_shapes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open(state["_path"])

    def __len__(self) -> int:
        return len(self._dataset)

    def image(self, index: int, min_side: int = 0) -> Image:
        """As the data set's, but always decoded for the cache's `min_side`, where a smaller one is asked for."""
        height, width = self._shapes[index].tolist()
        if not height or not 0 < min_side <= self._min_side:
            return self._dataset.image(index, min_side)
        first = int(self._offsets[index])
        return self._bytes[first : first + height * width * 3].reshape(height, width, 3)


def picture_folders(data: str) -> list[Path]:
    """The folders that may hold the pictures of the data set `data` (--data), the first choice first."""
    path = Path(data)
    return cache_folders(str(path.resolve().parent)) if path.is_file() else cache_folders(str(Path.cwd()))[-1:]


@dataclass(frozen=True)
class _Offer:
    """A file that the first rank of a machine has made, or found."""

    node: int
    path: str
    final: str  # its name once it is whole; "" for one in memory
    whole: bool


def cache_pictures(
    dataset: Dataset,
    min_side: int,
    kind: str,
    homes: list[Path],
    world: World,
    exchange: Exchange,
    threads: int,
) -> CachedPictures:
    """`dataset` with its pictures decoded once, in memory (`ram`) or in the first of `homes` with room (`disk`).

    To be called by all ranks at once, which `exchange` connects; each decodes with `threads` threads. All raise
    TrainerError if one of them cannot go on.
    """
    layout, offer, kept = _Layout(dataset, min_side), None, -1
    try:
        error: Exception | None = None
        if world.local_rank == 0:
            try:
                if kind == "ram":
                    kept = _memory_file(layout.total)
                    offer = _Offer(world.node, f"/proc/{os.getpid()}/fd/{kept}", "", False)
                else:
                    offer = _disk_file(dataset, min_side, homes, layout, world.node)
            except (TrainerError, OSError) as found:
                error = found
        offers = [o for o in _agreed(exchange, offer, error) if o]
        # On a shared disk all machines see all files: they use the first one together.
        seen = [o for o in offers if (o.node == world.node if kind == "ram" else _sees(o, homes))]
        mine = next((o for o in seen if o.whole), seen[0])
        _fill(dataset, layout, mine, world.rank, exchange, threads)
        if offer == mine and mine.final and not mine.whole:
            os.replace(mine.path, mine.final)  # noqa: PTH105
        _agreed(exchange)
        pictures = CachedPictures(dataset, min_side, mine.final or mine.path)
        _agreed(exchange)
        return pictures
    finally:
        if kept >= 0:
            os.close(kept)  # all ranks have it open by now
        if offer and offer.final and not offer.whole:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(offer.path)  # noqa: PTH108


def _sees(offer: _Offer, homes: list[Path]) -> bool:
    return Path(offer.path).parent in homes and Path(offer.path).exists()


def _agreed(exchange: Exchange, value: Any = None, error: Exception | None = None) -> list[Any]:
    """All ranks' values; the first error that one of them has, raised on all."""
    if isinstance(error, OSError):
        error = TrainerError(f"--cache: {error.filename or ''}: {error.strerror}", "train without --cache")
    told = (error.message, error.hint) if isinstance(error, TrainerError) else None
    answers = exchange((value, told))
    for _, found in answers:
        if found:
            raise TrainerError(*found)
    return [answer for answer, _ in answers]


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _memory_file(total: int) -> int:
    free = int(memory_free() * (1 - _SPARED))
    if total > free:
        raise TrainerError(
            f"--cache ram: the decoded pictures need {_gib(total)}, {_gib(free)} of memory is free",
            "use --cache disk, or train without",
        )
    file = os.memfd_create("trainer-pictures", os.MFD_CLOEXEC)
    os.ftruncate(file, total)
    return file


def memory_free() -> int:
    """Bytes of memory that this process could still take, within the limits of its container."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="ascii"))  # "max": ValueError
        free = min(free, limit - int((group / "memory.current").read_text(encoding="ascii")))
    return free


def _disk_file(dataset: Dataset, min_side: int, homes: list[Path], layout: _Layout, node: int) -> _Offer:
    name = f"pictures-{_key(dataset, min_side, layout)}"
    for home in homes:
        if (home / name).is_file() and (home / name).stat().st_size == layout.total:
            return _Offer(node, str(home / name), str(home / name), True)
    refused = []
    for home in homes:
        try:
            home.mkdir(parents=True, exist_ok=True)
            _tidy(home)
            free = shutil.disk_usage(home).free
            if free < layout.total:
                refused.append(f"{home} has {_gib(free)} free")
                continue
            draft = home / f".draft-{name}-{uuid.uuid4().hex}"
            with draft.open("xb") as file:
                file.truncate(layout.total)
            return _Offer(node, str(draft), str(home / name), False)
        except OSError as error:
            refused.append(f"{home}: {error.strerror}")
    raise TrainerError(
        f"--cache disk: the decoded pictures need {_gib(layout.total)}; {'; '.join(refused)}",
        "make room, set XDG_CACHE_HOME to a folder on another disk, or train without --cache",
    )


def _key(dataset: Dataset, min_side: int, layout: _Layout) -> str:
    digest = hashlib.blake2b(f"{_FORMAT} {min_side} {len(dataset)}".encode(), digest_size=16)
    digest.update(layout.sizes.tobytes())
    for k in range(len(dataset)):
        name = dataset.name(k)
        digest.update(os.fsencode(name) + b"\0")
        with contextlib.suppress(OSError):  # pictures that are in no file follow from their names
            state = os.stat(name)  # noqa: PTH116
            digest.update(f"{state.st_size} {state.st_mtime_ns}".encode())
    return digest.hexdigest()


def _tidy(home: Path) -> None:
    """Remove what a killed process left behind."""
    for path in home.glob(".draft-pictures-*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - _ABANDONED_S:
                path.unlink()


def _fill(dataset: Dataset, layout: _Layout, offer: _Offer, rank: int, exchange: Exchange, threads: int) -> None:
    """Decode this rank's part of the pictures into the file that it shares with others."""
    users = _agreed(exchange, offer.path)
    number = users[:rank].count(offer.path)
    todo = [] if offer.whole else list(range(number, len(dataset), users.count(offer.path)))
    file = os.open(offer.path, os.O_RDONLY if offer.whole else os.O_RDWR)

    def put(k: int) -> None:
        picture = dataset.image(k, layout.min_side)
        if picture.nbytes <= layout.room[k]:  # else a reader that does not shrink: it is left to itself
            _write(file, np.ascontiguousarray(picture).tobytes(), int(layout.offsets[k]))
            _write(file, np.array(picture.shape[:2], np.int32).tobytes(), 8 * k)

    try:
        shown = rank == 0 and not offer.whole
        with ThreadPoolExecutor(threads) as pool, bar(len(dataset), "decoding pictures", shown) as move:
            done, others = 0, True
            while others or done < len(todo):
                error: Exception | None = None
                end = time.monotonic() + _SLICE_S
                while done < len(todo) and time.monotonic() < end and not error:
                    part = todo[done : done + _CHUNK * threads]
                    try:
                        list(pool.map(put, part))
                    except (TrainerError, OSError) as found:
                        error = found
                    done += len(part)
                if done == len(todo) and not offer.whole:
                    os.fsync(file)
                states = _agreed(exchange, (offer.path, done, len(todo)), error)
                move(completed=sum(count for path, count, _ in states if path == offer.path))
                others = any(count < total for _, count, total in states)
    finally:
        os.close(file)


def _write(file: int, content: bytes, offset: int) -> None:
    while content:
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written
