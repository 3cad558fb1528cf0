"""Files of node logs in the run directory: appended to, and read as complete lines."""

import contextlib
import fcntl
import io
import os
from pathlib import Path

from cluster.spec.model import Plan
from cluster.transport import inside

#: Bytes of a log that one poll fetches at most.
CHUNK = 1 << 20


def append(plan: Plan, copy: Path, at: int, chunk: bytes) -> None:
    """Append `chunk`, which starts at offset `at`, to the copy of a log, less what another process has appended.

    Raises OSError, also if the copy has become a link that leads out of the run directory.
    """
    if not chunk:
        return
    with inside.open_file(plan.run_dir, copy, "ab") as file:
        # On a file system without locks, two processes may write a line twice.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        written = file.seek(0, io.SEEK_END) - at
        rest = chunk[written:] if written >= 0 else b""
        try:
            while rest:  # without a buffer: what a full disk did not take is fetched again by the next poll
                rest = rest[os.write(file.fileno(), rest) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(copy)) from error


def content(plan: Plan, copy: Path) -> bytes:
    """Return the copy of a log; empty while there is none. Raises OSError if it leads out of the run directory."""
    with contextlib.suppress(FileNotFoundError), inside.open_file(plan.run_dir, copy) as file:
        return bytes(file.read())
    return b""


class Reader:
    """Reads the growing logs of an attempt as complete lines."""

    def __init__(self, plan: Plan) -> None:
        self._paths = {node.name: Path(plan.attempt_dir, f"{node.name}.log") for node in plan.nodes}
        self._offsets = dict.fromkeys(self._paths, 0)
        self._rest = dict.fromkeys(self._paths, b"")
        self._run_dir = plan.run_dir
        self._unreadable: set[str] = set()

    def lines(self) -> list[tuple[str, str]]:
        """Return (node, line) for each line that has been completed since the last call, in order per node.

        Of a log that leads out of the run directory, the only line says so.
        """
        lines = []
        for node, path in self._paths.items():
            try:
                with inside.open_file(self._run_dir, path) as file:
                    file.seek(self._offsets[node])
                    chunk = file.read()
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in inside.REFUSED:
                    raise
                lines += (
                    []
                    if node in self._unreadable
                    else [(node, f"{path.name} is not read: it {error.strerror}")]
                )
                self._unreadable.add(node)
                continue
            self._offsets[node] += len(chunk)
            *complete, self._rest[node] = (self._rest[node] + chunk).split(b"\n")
            lines += [(node, line.decode(errors="replace").rstrip("\r")) for line in complete]
        return lines
