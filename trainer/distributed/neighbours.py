"""The ranks of each machine, and a piece of memory that the ranks of a machine share."""

import mmap
import os
import secrets
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.distributed import comm

_WIDTH = 64  # bytes of a text
_MEMORY = Path("/dev/shm")


class SharedTexts:
    """Short texts in memory, by number. A text that another rank is writing may be read half old, half new."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def private(cls, count: int) -> "SharedTexts":
        """Return memory of this process alone."""
        return cls(mmap.mmap(-1, count * _WIDTH))

    def __getitem__(self, number: int) -> str:
        """Return a text, "" before it is written."""
        return self._memory[number * _WIDTH : (number + 1) * _WIDTH].rstrip(b"\0").decode(errors="replace")

    def __setitem__(self, number: int, text: str) -> None:
        """Write a text. Raise ValueError if it is longer than 64 bytes."""
        data = text.encode()
        if len(data) > _WIDTH:
            raise ValueError(f"{text!r}: {len(data)} bytes, at most {_WIDTH} fit")
        self._memory[number * _WIDTH : (number + 1) * _WIDTH] = data.ljust(_WIDTH, b"\0")


@dataclass(frozen=True)
class Neighbours:
    """The ranks of each machine, in order, and the `texts` that this machine's ranks share."""

    machines: tuple[tuple[int, ...], ...]
    texts: SharedTexts

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the machine of a rank."""
        return next(ranks for ranks in self.machines if rank in ranks)


def apart(size: int, texts: int) -> Neighbours:
    """Return `size` ranks that share no memory."""
    return Neighbours(tuple((rank,) for rank in range(size)), SharedTexts.private(texts))


def find(world: comm.World, texts: int) -> Neighbours:
    """Find out which ranks share memory, and share `texts` texts with them. A collective.

    Ranks of one machine in different containers may share none; each of these counts as a separate machine.
    """
    if not comm.is_distributed():
        return apart(world.size, texts)
    folder = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
    path = folder / f"trainer-{comm.broadcast(secrets.token_hex(8))}"
    size = texts * _WIDTH
    identity = (str(world.rank), 0, 0)
    shared = SharedTexts.private(texts)
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(number, 0, size)  # a full /dev/shm is an error here, and a SIGBUS later
            shared = SharedTexts(mmap.mmap(number, size))
            found = os.fstat(number)
            identity = (socket.gethostname(), found.st_dev, found.st_ino)
        finally:
            os.close(number)
    except OSError:
        pass
    identities: Sequence[tuple[str, int, int]] = comm.all_gather(identity)
    path.unlink(missing_ok=True)  # all ranks have opened it
    machines: dict[tuple[str, int, int], list[int]] = {}
    for rank, each in enumerate(identities):
        machines.setdefault(each, []).append(rank)
    return Neighbours(tuple(map(tuple, machines.values())), shared)
