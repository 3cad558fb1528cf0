"""Files from here to a node and back: rsync where both sides have it, else a tar stream through the shell.

Either way a file appears under its name only when it is whole, names are data (never text of a program), and what had
arrived before a transfer broke is not sent again.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Literal

from cluster import resources
from cluster.errors import ClusterError, LaunchError, UnreachableError
from cluster.manifest import OURS
from cluster.model import Node
from cluster.shells import Stream, reach
from cluster.shells.openssh import destination, remote_shell

How = Literal["rsync", "tar"]

#: Told the bytes that a transfer has done so far.
Report = Callable[[int], None]

#: One tar archive: what it holds appears together, and a broken transfer goes on after the last whole one.
_ARCHIVE_BYTES = 256 << 20
_ARCHIVE_FILES = 5000
_CHUNK = 1 << 20
_END_S = 600.0
#: rsync: some files vanished, or changed, while they were read (what a running job's folder does).
_RSYNC_VANISHED = 24
#: rsync: something else than rsync spoke first, such as a ~/.bashrc that prints. A tar stream passes all the same.
_RSYNC_GREETED = 2
#: rsync and ssh: the connection, not a file, is what failed.
_RSYNC_BROKEN = (10, 12, 30, 35, 255)

_HINTS = {
    "No space left on device": "make room there, or choose another data_dir in the inventory; what has arrived stays",
    "Permission denied": "choose a data_dir in the inventory that the login may write to",
}


@dataclass
class Stop:
    """Ends the transfers that were given it, from another thread."""

    asked: bool = False
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def now(self) -> None:
        """End what runs; what would start is refused."""
        with self._lock:
            self.asked = True
            for process in self._running:
                process.terminate()

    def check(self, node: Node) -> None:
        """Raises LaunchError when it was asked to end."""
        if self.asked:
            raise LaunchError(f"{node.name}: stopped")

    def run(self, node: Node, argv: Sequence[str], stdin: bytes, on_line: Callable[[str], None]) -> tuple[int, str]:
        """The exit code and stderr of a program of this machine; its lines (also those that end in CR) as they come."""
        with self._lock:
            self.check(node)
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
            )
            self._running.add(process)
        assert process.stdin
        assert process.stdout
        assert process.stderr
        errors = bytearray()
        drain = threading.Thread(target=_drain, args=(process.stderr, errors), daemon=True)
        feed = threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True)
        try:
            drain.start()
            feed.start()
            for line in _lines(process.stdout):
                on_line(line)
            code = process.wait()
            drain.join()
            feed.join()
        finally:
            with self._lock:
                self._running.discard(process)
            if process.poll() is None:
                process.terminate()
                process.wait()
            process.stdout.close()
        self.check(node)
        return code, errors.decode(errors="replace")


class _Broken(Exception):
    """The other side stopped reading; its exit code says why."""


class _Counted(io.RawIOBase):
    """The input of a stream, counted; a failing write is not mistaken for a failing read of the file being sent."""

    def __init__(self, stream: Stream, sent: Callable[[int], None]) -> None:
        self._stream, self._sent = stream, sent

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            self._stream.stdin.write(data)
        except (OSError, EOFError) as error:
            raise _Broken from error
        self._sent(len(data))
        return len(data)


def send(
    node: Node,
    root: Path,
    sizes: Mapping[str, int],
    target: str,
    beside: str,
    *,
    follow: bool = False,
    stop: Stop,
    report: Report,
) -> tuple[int, How]:
    """Bring the files of `root` with the names in `sizes` (in bytes) into the node's folder `target`.

    `beside` is a folder of the node on the same file system, for what is unfinished. Every named file is sent, also one
    that looks the same; `follow` sends what a link leads to instead of the link. Returns the bytes that travelled, and
    how. Raises ClusterError that begins with the node's name.
    """
    done = reach(node).run(_script("prepare", target, beside))
    if done.code:
        raise _cannot_write(node, target, done.err)
    if done.out.strip() == "rsync" and _rsync_here():
        options = ["--ignore-times", f"--temp-dir={beside}/tmp", f"--partial-dir={beside}/partial"]
        options += ["--copy-links" if follow else "--links"]
        ends = [f"{root}/", _there(node, f"{target}/")]
        code, errors, moved = _rsync(node, options, ends, sizes, stop, report, "sent")
        if not code:
            return moved, "rsync"
        if code != _RSYNC_GREETED:
            raise _cannot_write(node, target, errors)
    moved = 0
    for names in _archives(sizes):
        moved += _send_archive(node, root, names, target, beside, follow, stop, partial(_after, report, moved))
    return moved, "tar"


def fetch(node: Node, source: str, sizes: Mapping[str, int], root: Path, *, rsync: bool, stop: Stop) -> tuple[int, How]:
    """Bring the files of the node's folder `source` with the names in `sizes` to `root` on this machine.

    `rsync` says whether the node has it. A file that vanishes meanwhile is left out. As `send` otherwise.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(f"this machine: {error.filename} cannot be written: {error.strerror}") from error
    if rsync and _rsync_here():
        ends = [_there(node, f"{source}/"), f"{root}/"]
        code, errors, moved = _rsync(node, ["--ignore-times", "--links"], ends, sizes, stop, lambda _: None, "received")
        if code in (0, _RSYNC_VANISHED):
            return moved, "rsync"
        if code != _RSYNC_GREETED:
            raise ClusterError(f"{node.name}: {source} cannot be fetched to {root}: {why(errors)}")
    return _fetch_archive(node, source, set(sizes), root, stop), "tar"


def why(errors: str) -> str:
    """What a program's stderr says, in the system's words: `No space left on device` of rsync, mkdir and tar alike."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    # Where rsync says itself what failed, that goes before the words of the ssh and of the login shell under it.
    for line in sorted(lines, key=lambda line: not line.startswith("rsync: [")):
        found = re.search(r": ([A-Z][A-Za-z' -]+?)(?: \(\d+\))?$", line)
        if found and not found[1].startswith(("Exiting", "Error is not")):
            return found[1]
    return lines[-1] if lines else "it ended without a word"


def _script(*words: str) -> list[str]:
    return ["bash", "-c", resources.text("transfer.sh"), "transfer", *words]


def _cannot_write(node: Node, target: str, errors: str) -> ClusterError:
    reason = why(errors)
    return ClusterError(f"{node.name}: {target} cannot be written: {reason}", _HINTS.get(reason, ""))


def _rsync_here() -> bool:
    return bool(shutil.which("rsync") and shutil.which("ssh"))


def _there(node: Node, path: str) -> str:
    return f"{destination(node)}:{path}" if node.login else path


def _rsync(
    node: Node,
    options: Sequence[str],
    ends: Sequence[str],
    sizes: Mapping[str, int],
    stop: Stop,
    report: Report,
    way: Literal["sent", "received"],
) -> tuple[int, str, int]:
    """The exit code, stderr and bytes that travelled."""
    moved = 0

    def read(line: str) -> None:
        nonlocal moved
        if found := re.match(r"\s*(\d+)\s+\d+%", line):
            report(int(found[1]))
        elif found := re.match(rf"Total bytes {way}: (\d+)", line):
            moved = int(found[1])

    argv = ["rsync", "--perms", "--times", "--omit-dir-times", "--protect-args", "--timeout=120"]
    argv += ["--from0", "--files-from=-", "--info=progress2", "--no-human-readable", "--stats", "--outbuf=L"]
    argv += [*options, *(["-e", remote_shell(node)] if node.login else []), "--", *ends]
    code, errors = stop.run(node, argv, _names(sizes), read)
    if code in _RSYNC_BROKEN and "failed" not in errors:
        raise UnreachableError(
            f"{node.name}: the connection broke: {why(errors)}", "the same command goes on from there"
        )
    return code, errors, moved


def _names(names: Iterator[str] | Sequence[str] | Mapping[str, int]) -> bytes:
    # "./" keeps a name that begins with a dash, or with rsync's or tar's own marks, a name.
    return b"".join(b"./" + os.fsencode(name) + b"\0" for name in names)


def _archives(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and (total + size > _ARCHIVE_BYTES or len(names) == _ARCHIVE_FILES):
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names


def _send_archive(
    node: Node, root: Path, names: Sequence[str], target: str, beside: str, follow: bool, stop: Stop, report: Report
) -> int:
    moved = 0

    def sent(count: int) -> None:
        nonlocal moved
        stop.check(node)
        moved += count
        report(moved)

    stop.check(node)
    with reach(node).stream(_script("unpack", target, beside)) as stream:
        try:
            # GNU's format keeps names as the bytes they are.
            with tarfile.open(mode="w|", fileobj=_Counted(stream, sent), format=tarfile.GNU_FORMAT) as archive:
                for name in names:
                    _add(archive, root, name, follow)
        except _Broken:
            pass
        except OSError as error:
            raise ClusterError(
                f"this machine: {error.filename or root} cannot be read: {error.strerror or error}",
                "does something write to it? then try again when it has ended",
            ) from error
        with suppress(OSError, EOFError):
            stream.stdin.close()
        done = stream.wait(_END_S)
    stop.check(node)
    if done.code:
        raise _cannot_write(node, target, done.err)
    return moved


def _after(report: Report, before: int, now: int) -> None:
    report(before + now)


def _add(archive: tarfile.TarFile, root: Path, name: str, follow: bool) -> None:
    path = root / name
    info = tarfile.TarInfo(f"./{name}")
    if path.is_symlink() and not follow:
        info.type, info.linkname = tarfile.SYMTYPE, str(path.readlink())
        archive.addfile(info)
        return
    with path.open("rb") as file:
        seen = os.fstat(file.fileno())
        info.size, info.mtime, info.mode = seen.st_size, int(seen.st_mtime), seen.st_mode & 0o777
        archive.addfile(info, file)


def _fetch_archive(node: Node, source: str, names: set[str], root: Path, stop: Stop) -> int:
    moved = 0
    stop.check(node)
    with reach(node).stream(_script("pack", source)) as stream:
        try:
            stream.stdin.write(_names(sorted(names)))
            stream.stdin.close()
        except (OSError, EOFError):
            pass
        try:
            with tarfile.open(mode="r|", fileobj=stream.stdout, errorlevel=1) as archive:
                for member in archive:
                    stop.check(node)
                    name = member.name.removeprefix("./")
                    if name in names and (member.isreg() or member.issym()):  # the node names nothing else
                        _put(archive.extractfile(member) if member.isreg() else None, member, root / name)
                        moved += member.size
        except tarfile.TarError as error:
            done = stream.wait(_END_S)
            raise ClusterError(
                f"{node.name}: {source} cannot be fetched: {why(done.err) if done.code else error}"
            ) from error
        done = stream.wait(_END_S)
    if done.code:
        raise ClusterError(f"{node.name}: {source} cannot be fetched: {why(done.err)}")
    return moved


def _put(file: IO[bytes] | None, member: tarfile.TarInfo, path: Path) -> None:
    unfinished = path.with_name(f"{OURS}{secrets.token_hex(6)}")
    mtime_ns = round(member.mtime * 1e9)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if file is None:
            unfinished.symlink_to(member.linkname)
        else:
            with unfinished.open("xb") as out:
                shutil.copyfileobj(file, out, _CHUNK)
            unfinished.chmod(member.mode & 0o777)
            os.utime(unfinished, ns=(mtime_ns, mtime_ns))
        unfinished.replace(path)
    except OSError as error:
        if not error.filename and not error.strerror:
            raise  # the connection, not the disk
        raise ClusterError(f"this machine: {path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


def _drain(file: IO[bytes], into: bytearray) -> None:
    while chunk := file.read(1 << 16):
        into += chunk
    file.close()


def _feed(file: IO[bytes], data: bytes) -> None:
    with suppress(BrokenPipeError):
        file.write(data)
    with suppress(BrokenPipeError):
        file.close()


def _lines(file: IO[bytes]) -> Iterator[str]:
    line = bytearray()
    while chunk := os.read(file.fileno(), 1 << 16):
        *whole, line[:] = re.split(rb"[\r\n]", bytes(line) + chunk)
        yield from (each.decode(errors="replace") for each in whole)
