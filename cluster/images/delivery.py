"""Image layers on their way to nodes: compressed once on this machine, and sent to every node with rsync."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Protocol

from cluster.errors import ClusterError, UnreachableError
from cluster.model import Node
from cluster.rsync import Rsync, at, error_of, started

_TRIES = 4
_CHUNK = 1 << 18


class Show(Protocol):
    """Draws a push."""

    def note(self, text: str) -> None:
        """One plain sentence."""
        ...

    def sent(self, node: str, done: int, total: int) -> None:
        """How many of a node's bytes have arrived; `total` is an estimate while they are still being compressed."""
        ...


class SourceError(Exception):
    """What should be sent cannot be read."""


@contextmanager
def folder_here() -> Iterator[Path]:
    """The folder of the compressed files on this machine. The last push that uses it removes all files."""
    folder = Path.home() / ".cache" / "clusterctl" / "layers"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError as error:
        raise ClusterError(f"this machine: {folder} cannot be written: {error.strerror}", "df -h ~/.cache") from error
    try:
        yield folder
    finally:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for file in folder.iterdir():
                file.unlink()
        os.close(lock)


@dataclass
class Blob:
    """A file to send: the output of `source | packer`. The SHA-256 of the source is checked if it is not "".

    `size` in bytes is an estimate until the file is complete. `unwanted` stops its compression.
    """

    file: Path
    size: int
    source: Sequence[str]
    packer: Sequence[str]
    source_digest: str
    unwanted: threading.Event
    made: Future[None] = field(default_factory=Future)

    def make(self) -> None:
        """Write the file, unless another push has. Raises SourceError, and ClusterError naming a full disk."""
        if not self.file.exists():
            try:
                self._write()
            except OSError as error:
                raise error_of(self._failed, f": {error.strerror}") from error
        self.size = self.file.stat().st_size

    @property
    def _failed(self) -> str:
        return f"this machine: {self.file.parent} cannot be written"

    def _write(self) -> None:
        digest = hashlib.sha256()
        with (
            tempfile.NamedTemporaryFile(dir=self.file.parent, delete=False) as packed,
            tempfile.TemporaryFile() as errors,
            started(self.source, stdin=DEVNULL, stdout=PIPE, stderr=errors) as source,
            started(self.packer, stdin=PIPE, stdout=packed, stderr=errors) as packer,
        ):
            assert source.stdout
            assert packer.stdin
            with suppress(BrokenPipeError), packer.stdin:
                while not self.unwanted.is_set() and (piece := source.stdout.read(_CHUNK)):
                    digest.update(piece)
                    packer.stdin.write(piece)
            if self.unwanted.is_set():
                raise ClusterError(f"{self.file.name} is not needed")
            failed = packer.wait() or source.wait()
            errors.seek(0)
            said = errors.read().decode(errors="replace")
            if packer.returncode:
                raise error_of(self._failed, said)
            if failed:
                raise SourceError((said.strip().splitlines() or [f"{self.source[0]}: exit {failed}"])[-1])
            if self.source_digest not in ("", f"sha256:{digest.hexdigest()}"):
                raise SourceError("its content is not what its digest says")
        Path(packed.name).rename(self.file)


def send(node: Node, folder: str, blobs: Sequence[Blob], show: Show) -> int:
    """Send files into a folder of the node, each when it is complete here. Continue where a connection broke.

    Return the bytes over the network, without those of a transfer that broke. Raises ClusterError, and SourceError.
    """
    moved = before = 0

    def report(sent: int) -> None:
        show.sent(node.name, before + sent, sum(blob.size for blob in blobs))

    for blob in blobs:
        blob.made.result()
        for attempt in range(1, _TRIES + 1):
            run = Rsync(node, ["--", str(blob.file), f"{at(node)}{folder}/"], sent=report)
            run()
            try:
                run.refuse_failure(
                    f"{node.name}: {folder} cannot be written", f"this machine: {blob.file} cannot be read"
                )
                break
            except UnreachableError as error:
                if attempt == _TRIES:
                    raise
                show.note(f"{error.message}; trying again from there")
                time.sleep(1)
        moved += run.moved
        before += blob.size
    return moved
