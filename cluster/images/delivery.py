"""Files on their way to nodes: made once, sent to each at its own pace, and on after a broken connection.

What has arrived is kept on the node in `~/.cache/clusterctl/layers-HOSTNAME`: FILE.part until it is whole and its
digest right. Nodes may share a home: each has a folder of its own there, or they would wait for each other's locks.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from cluster import resources
from cluster.errors import ClusterError, LaunchError, UnreachableError
from cluster.model import Node
from cluster.shells import Stream, reach

#: A node that takes nothing for so long is treated as a broken connection.
STALL_S = 60.0
_TRIES = 4
_CHUNK = 1 << 18
#: What compression leaves of a layer, as a guess until it is seen.
_RATIO = 0.5

_DIFFERS = 9


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


class Blob:
    """A file to send: made by `source | packer` once somebody asks for it, and read while it grows.

    `size` is about how many bytes the source gives; `source_digest` is checked when it is not "".
    """

    def __init__(
        self, name: str, size: int, source: Sequence[str], packer: Sequence[str], source_digest: str = ""
    ) -> None:
        self.name = name
        self.digest = ""  # SHA-256 of the whole file, once it is made
        self._expected, self._source, self._packer, self._source_digest = size, source, packer, source_digest
        self._read = self._written = 0
        self._error: Exception | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._file: IO[bytes] | None = None

    @property
    def size(self) -> int:
        """In bytes; an estimate until `digest` is known."""
        if self.digest:
            return self._written
        return max(self._written, int(self._expected * (self._written / self._read if self._read else _RATIO)))

    def chunks(self, offset: int) -> Iterator[bytes]:
        """Everything from `offset` on, waiting for what is not made yet; raises what went wrong with making it."""
        with self._news:
            if self._thread is None:
                self._thread = threading.Thread(target=self._make, daemon=True)
                self._thread.start()
        while data := self._chunk(offset):
            offset += len(data)
            yield data

    def stop(self, error: Exception) -> None:
        """Stop making it; whoever still reads it gets the error."""
        with self._news:
            self._error = self._error or error
            for process in self._processes:
                if process.poll() is None:
                    process.terminate()
            self._news.notify_all()

    def close(self) -> None:
        """Stop making it, and forget it: nobody reads it any more."""
        self.stop(ClusterError(f"{self.name} is no longer wanted"))
        if self._thread is not None:
            self._thread.join()
        if self._file is not None:
            self._file.close()

    def _chunk(self, offset: int) -> bytes:
        with self._news:
            self._news.wait_for(lambda: self._error or self.digest or self._written > offset)
            if self._error is not None:
                raise self._error
        assert self._file is not None
        return os.pread(self._file.fileno(), _CHUNK, offset)

    def _make(self) -> None:
        try:
            folder = Path.home() / ".cache" / "clusterctl"
            folder.mkdir(parents=True, exist_ok=True)
            # It has no name: nothing is left of it, even after kill -9.
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (`close` closes it)
            digest = self._run()
            with self._news:
                self.digest = digest
                self._news.notify_all()
        except (SourceError, ClusterError) as error:
            self.stop(error)
        except OSError as error:
            problem = f"this machine: cannot keep compressed layers in ~/.cache/clusterctl: {error.strerror}"
            self.stop(LaunchError(problem, "df -h ~/.cache"))

    def _run(self) -> str:
        with (
            tempfile.TemporaryFile() as errors,
            self._start(self._source, subprocess.DEVNULL, errors) as source,
            self._start(self._packer, subprocess.PIPE, errors) as packer,
        ):
            feeder = threading.Thread(target=self._feed, args=(source, packer), daemon=True)
            feeder.start()
            try:
                digest = self._store(packer)
            except OSError:  # no room: both would wait for ever for somebody to read
                source.terminate()
                packer.terminate()
                raise
            finally:
                feeder.join()
            if source.wait() or packer.wait():
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().splitlines()
                raise SourceError(said[-1] if said else f"{self._source[0]}: exit {source.returncode}")
        return digest

    def _feed(self, source: subprocess.Popen[bytes], packer: subprocess.Popen[bytes]) -> None:
        digest = hashlib.sha256()
        assert source.stdout is not None
        assert packer.stdin is not None
        with suppress(BrokenPipeError):  # the packer has ended: its exit code says so
            while piece := source.stdout.read(_CHUNK):
                digest.update(piece)
                packer.stdin.write(piece)
                self._read += len(piece)
            if source.wait() == 0 and self._source_digest not in ("", f"sha256:{digest.hexdigest()}"):
                self.stop(SourceError("its content is not what its digest says"))
        with suppress(BrokenPipeError):
            packer.stdin.close()

    def _store(self, packer: subprocess.Popen[bytes]) -> str:
        digest = hashlib.sha256()
        assert self._file is not None
        assert packer.stdout is not None
        while piece := packer.stdout.read(_CHUNK):
            self._file.write(piece)
            digest.update(piece)
            with self._news:
                self._written += len(piece)
                self._news.notify_all()
        return digest.hexdigest()

    def _start(self, argv: Sequence[str], stdin: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        with self._news:
            if self._error is not None:
                raise self._error
            # Their own session: a Ctrl-C in the terminal is for the launcher alone, which then ends them.
            process = subprocess.Popen(argv, stdin=stdin, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
            self._processes.append(process)
            return process


def _script(*words: str) -> list[str]:
    return ["bash", "-c", resources.text("images/common.sh", "images/delivery.sh"), "delivery", *words]


@dataclass
class Delivery:
    """The files of one node: `wire` bytes have been sent, those of broken connections included."""

    node: Node
    blobs: Sequence[Blob]
    show: Show
    wire: int = 0
    _writing_since: float = 0.0
    _arrived: dict[str, int] = field(default_factory=dict)

    def send(self) -> None:
        """Every file, again from where it was when the connection breaks; raises ClusterError when that is no use."""
        for blob in self.blobs:
            for attempt in range(1, _TRIES + 1):
                before = self.wire
                try:
                    if self._send(blob):
                        break
                    problem: ClusterError = LaunchError(
                        f"{self.node.name}: {blob.name} arrives, but not as it was sent"
                    )
                except UnreachableError as error:
                    problem = error
                finally:
                    self._writing_since = 0.0
                if attempt == _TRIES or (attempt > 1 and self.wire == before):
                    raise problem
                self.show.note(f"{problem.message}; trying again from there")
                time.sleep(attempt)

    def stop(self) -> None:
        """Send no more, at once; `send` raises."""
        for blob in self.blobs:
            blob.stop(ClusterError(f"{self.node.name}: interrupted"))
        reach(self.node).close()

    def is_stuck(self) -> bool:
        """Whether the node has taken nothing for STALL_S seconds: `reach(node).close()` makes `send` try again."""
        since = self._writing_since
        return since > 0 and time.monotonic() - since > STALL_S

    def _send(self, blob: Blob) -> bool:
        """Whether the file is there now, as it should be."""
        shell = reach(self.node)
        with shell.stream(_script("receive", blob.name)) as stream:
            answer = stream.stdout.readline().decode().strip()
            if answer == "complete":
                self._arrived[blob.name] = blob.size
                return True
            if not answer.isdigit():
                raise self._refused(stream)
            try:
                self._write(blob, int(answer), stream)
            except OSError:  # the connection broke, which `wait` says, or the program there has ended, and said why
                raise self._refused(stream) from None
            if stream.wait(STALL_S).code:
                raise self._refused(stream)
        kept = shell.run(_script("keep", blob.name, blob.digest), timeout_s=900)
        if kept.code not in (0, _DIFFERS):
            raise LaunchError(f"{self.node.name}: cannot keep the image's layers: {kept.last_line}", "there: df -h ~")
        return kept.code == 0

    def _write(self, blob: Blob, offset: int, stream: Stream) -> None:
        for data in blob.chunks(offset):
            self._writing_since = time.monotonic()
            stream.stdin.write(data)
            self._writing_since = 0.0
            offset += len(data)
            self.wire += len(data)
            self._arrived[blob.name] = offset
            self.show.sent(self.node.name, sum(self._arrived.values()), sum(each.size for each in self.blobs))
        stream.stdin.close()

    def _refused(self, stream: Stream) -> ClusterError:
        said = stream.wait(20).last_line
        return LaunchError(f"{self.node.name}: cannot keep the image's layers: {said}", "there: df -h ~")
