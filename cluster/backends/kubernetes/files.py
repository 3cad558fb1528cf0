"""Files of a job's pods: tar archives through `kubectl exec`, here and there written and read by Python.

A container that runs a job has Python, but not always tar or rsync. The end of a stream proves nothing, since kubectl
also ends with 0 if the kubelet dies: each archive ends with a member END.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO

from cluster.agent import scripts
from cluster.backends.kubernetes.kubectl import Kubectl
from cluster.errors import ClusterError, LaunchError, UnreachableError
from cluster.transport import inside
from cluster.transport.archive import RefusedError, extract, time_ns
from cluster.transport.rsync import EXCLUDED, PREFIX

#: Where the volume with the files of the launching machine is mounted in the init container, and what says that all are
#: there.
INPUTS = "/inputs"
COMPLETE = f"{INPUTS}/.complete"
#: The init container that waits for them.
RECEIVER = "files"
_CHUNK = 1 << 20
#: How long kubectl may take to end once its stream has ended.
_END_S = 30.0
_AGAIN = "repeat the command: it fetches only what is missing"


@dataclass(frozen=True)
class Part:
    """Files that travel: those of the folder `source`, or that file, as `target` below INPUTS; or a kept archive."""

    source: str
    target: str = ""
    is_archive: bool = False

    @property
    def size(self) -> int:
        """The bytes of its files."""
        statuses = (_status(Path(path)) for path, _ in self._members())
        return sum(status.st_size for status in statuses if status is not None)

    def add_to(self, archive: tarfile.TarFile) -> None:
        """Add its files to an archive. Raises LaunchError for a file that cannot be read."""
        if not self.is_archive:
            for path, name in self._members():
                _add(archive, path, name)
            return
        try:
            with tarfile.open(self.source) as kept:
                for member in kept:
                    content = kept.extractfile(member) if member.isreg() else None
                    archive.addfile(member, content)
        except FileNotFoundError as error:
            raise LaunchError(f"this machine: {self.source} does not exist any more") from error

    def _members(self) -> Iterator[tuple[str, str]]:
        """Yield path and name in the archive of each file, link and folder."""
        if not Path(self.source).is_dir():
            yield self.source, self.target
            return
        for where, folders, names in os.walk(self.source):
            folders[:] = sorted(name for name in folders if name not in EXCLUDED)
            below = os.path.normpath(f"{self.target}/{os.path.relpath(where, self.source)}")
            yield where, below
            links = [name for name in folders if Path(where, name).is_symlink()]
            for name in sorted((*links, *names)):
                yield f"{where}/{name}", f"{below}/{name}"


def keep(folder: str, names: Iterable[str], target: str, file: Path) -> Part:
    """Write files of a folder to an archive, as they are now. Raises LaunchError for a file that cannot be read."""
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as archive:
        _add(archive, folder, target)
        for name in names:
            _add(archive, f"{folder}/{name}", f"{target}/{name}")
    return Part(str(file), is_archive=True)


def send(
    kubectl: Kubectl,
    pod: str,
    python: str,
    parts: Sequence[Part],
    sent: Callable[[int], None],
    kept: Sequence[str] = (),
) -> int:
    """Unpack files into the waiting init container of a pod, which then ends. Return their number.

    `sent` is called with the bytes so far. `kept` are the last arguments of in_pod/unpack.py, for a folder that
    outlives the pod. Raises ClusterError; the container then still waits.
    """
    argv = [python, "-c", scripts.text("backends/kubernetes/in_pod/unpack.py"), INPUTS, COMPLETE, *kept]
    with kubectl.piped(pod, argv, container=RECEIVER) as process:
        with suppress(BrokenPipeError):  # what it says of the reason comes below
            counted = _Counted(process.stdin, sent)
            with tarfile.open(fileobj=counted, mode="w|", format=tarfile.PAX_FORMAT) as archive:
                for part in parts:
                    part.add_to(archive)
                archive.addfile(tarfile.TarInfo("END"))
            process.stdin.close()
        answer = process.stdout.read().decode(errors="replace")
        error = process.end(_END_S)
    match = re.search(r"^unpacked (\d+) True$", answer, re.MULTILINE)
    if not match:
        raise error or UnreachableError(f"{pod}: the connection broke while files were sent")
    return int(match[1])


def fetch(
    kubectl: Kubectl,
    pod: str,
    python: str,
    source: str,
    target: str,
    *,
    excluded: Sequence[str] = (),
    since: float = 0.0,
    compare: str = "",
    run_dir: str = "",
) -> int:
    """Copy the files of a pod's folder that differ here in size or time to the folder `target`; return their number.

    The patterns of `excluded` match names at any depth, or paths if they begin with `/`. Files that have not changed
    since the Unix time `since`, or that are the same in the folder `compare`, are not copied either. No local file is
    removed. A folder that does not exist there is no error. `target` is the run directory `run_dir` (default) or below
    it. Raises ClusterError; the files that are complete are kept.
    """
    inside.check(target, run_dir or target)
    top = Path(target)
    asked = {"folder": source, "excluded": [*excluded, *EXCLUDED], "have": _have(top), "since": since}
    argv = [python, "-c", scripts.text("backends/kubernetes/in_pod/pack.py")]
    count = 0
    complete = False
    errors = []
    with kubectl.piped(pod, argv) as process:
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(asked).encode() + b"\n")
                process.stdin.close()
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                for member in archive:
                    if member.name == "END":
                        complete = True
                        continue
                    if member.name == "ERROR":
                        errors.append(_content(archive, member).read().decode(errors="replace"))
                        continue
                    if _is_excluded(member.name, excluded):  # its container was asked not to send it
                        continue
                    if compare and _is_same(Path(compare, member.name), member):
                        continue
                    try:
                        extract(archive, member, top, PREFIX)
                        count += 1
                    except RefusedError as error:
                        errors.append(str(error))
            while process.stdout.read(_CHUNK):  # the padding of the archive
                pass
        except tarfile.TarError:
            complete = False
        except OSError as error:
            why = f"this machine: {error.filename or target} cannot be written: {error.strerror}"
            raise ClusterError(why) from error
        error_there = process.end(_END_S)
    if not complete:
        broken = f"{pod}: the connection broke while {source} was fetched"
        raise error_there or UnreachableError(broken, _AGAIN)
    if errors:
        more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
        raise ClusterError(f"{pod}: {source} was not copied completely: {errors[0]}{more}")
    return count


def _is_excluded(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches a path in the archive or a folder on the way to it, as in in_pod/pack.py."""
    path = PurePosixPath(name)
    for above in (path, *path.parents):
        whole = f"/{above}"
        last = whole.rpartition("/")[2]
        if any(fnmatch(whole if pattern[0] == "/" else last, pattern) for pattern in patterns):
            return True
    return False


def _have(top: Path) -> dict[str, list[int]]:
    """Return size and time of the files below a folder, by path."""
    have = {}
    for where, _, names in os.walk(top):
        for path in (Path(where, name) for name in names):
            status = _status(path)
            if status is not None:
                have[path.relative_to(top).as_posix()] = [status.st_size, status.st_mtime_ns]
    return have


def _status(path: Path) -> os.stat_result | None:
    """Return the status of a file, or of a link itself; None if there is none."""
    with suppress(OSError):
        return path.lstat()
    return None


#: tarfile has times as floating-point numbers, which at present are multiples of 238 ns.
_TIME_ERROR_NS = 1000


def _is_same(path: Path, member: tarfile.TarInfo) -> bool:
    """Return whether a file here has the time and size of a member, or a link its target."""
    if member.issym():
        return path.is_symlink() and str(path.readlink()) == member.linkname
    status = _status(path)
    if status is None or status.st_size != member.size:
        return False
    return abs(status.st_mtime_ns - time_ns(member)) < _TIME_ERROR_NS


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = archive.extractfile(member)
    assert content is not None  # of a regular file
    return content


def _add(archive: tarfile.TarFile, path: str, name: str) -> None:
    """Add a file, link or folder of this machine. The user of the pod, who unpacks it, may read and write it."""
    try:
        member = archive.gettarinfo(path, name)
    except FileNotFoundError:  # another program removes files
        return
    except OSError as error:
        raise LaunchError(f"this machine: {path} cannot be read: {error.strerror}") from error
    if member is None:  # a socket
        return
    is_sent = member.isfile() or member.isdir() or member.issym() or member.islnk()
    if not is_sent:
        return
    if member.islnk():  # a second name of a file: its content travels again
        member.type = tarfile.REGTYPE
        member.linkname = ""
        member.size = Path(path).stat().st_size
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    owner_mode = 0o700 if member.isdir() else 0o600
    member.mode = member.mode & 0o775 | owner_mode
    if not member.isfile():
        archive.addfile(member)
        return
    try:
        with Path(path).open("rb") as file:
            archive.addfile(member, file)
    except BrokenPipeError:
        raise
    except OSError as error:  # also if it has become shorter
        raise LaunchError(f"this machine: {path} cannot be read: {error.strerror or error}") from error


class _Counted(io.RawIOBase):
    """A pipe that counts what is written."""

    def __init__(self, pipe: IO[bytes], sent: Callable[[int], None]) -> None:
        self._pipe = pipe
        self._sent = sent
        self._bytes = 0

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self._pipe.write(data)
        self._bytes += len(data)
        self._sent(self._bytes)
        return len(data)
