"""The same files on every node: a folder of this machine has a mirror on each, compared by content, brought up to date.

What runs on a node is bash, find, sha256sum and tar, so that a node needs no Python. Beside the mirrors, in
`<data_dir>/.clusterctl/`, each folder's hashes are kept with size, time and inode: what did not change is not read
again.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal, TypeVar, cast

from rich.filesize import decimal

from cluster import fanout, manifest, resources, transfer
from cluster.errors import ClusterError, UsageError
from cluster.inventory import DATA_DIR
from cluster.manifest import LEFT_OUT, OURS, Difference, Entry, Listing, Manifest
from cluster.model import Node
from cluster.shells import Shell, close_all, reach

T = TypeVar("T")

#: What a mirror is: nothing yet, a copy, a link to the common folder, a link to something else.
State = Literal["none", "copy", "common", "elsewhere"]
#: Told a node's name ("" is this machine), what is done there, and of how many bytes in all how many are.
Report = Callable[[str, str, int, int], None]

#: The names that `files.sh` leaves out.
_NAMES_LEFT_OUT = " ".join((*LEFT_OUT, f"{OURS}*"))


@dataclass(frozen=True)
class Synced:
    """What was done to one node: files and bytes that travelled, files removed, seconds, and what still differs."""

    node: str
    how: Literal["rsync", "tar", "common", "same"]
    files: int = 0
    bytes: int = 0
    removed: int = 0
    seconds: float = 0.0
    left: Difference = field(default_factory=Difference)


@dataclass(frozen=True)
class _Seen:
    """The state of one path on one node, as `files.sh` prints it."""

    state: State
    mirror: str
    keep: str
    free: int
    listing: str
    kept_listing: str
    kept_content: str
    marked: bool

    def holds(self, content: str) -> bool:
        """Whether it is known, without reading a file, to have this content."""
        return (
            self.state == "copy"
            and bool(self.listing)
            and (self.listing, content)
            == (
                self.kept_listing,
                self.kept_content,
            )
        )


@dataclass(frozen=True)
class _Here:
    """A folder of this machine, or one file of it (`only`): absolute path, the folder it is read from, its files."""

    path: str
    root: Path
    only: str
    listing: Listing
    entries: Manifest
    content: str


def mirror(node: Node, path: str) -> str:
    """Where an absolute path of this machine is on the node: below `data_dir`; itself if the node is this machine."""
    return f"{node.data_dir}{path}" if node.login else path


def command(folder: str, *, delete: bool = False) -> str:
    """What to type to sync a folder, for hints."""
    return shlex.join(["clusterctl", "sync", folder, *(["--delete"] if delete else [])])


def with_data_dir(node: Node) -> Node:
    """The node, with the default `data_dir` where it names none."""
    return node if node.data_dir else replace(node, data_dir=DATA_DIR)


def differences(nodes: Sequence[Node], folder: str, *, fresh: bool = False) -> dict[str, Difference | ClusterError]:
    """How each node's mirror differs from the folder here, by the node's name, or why it cannot be looked at.

    A common folder never differs. What did not change is not read; `fresh` reads everything on both sides. Raises
    UsageError for a folder that is not here.
    """
    here = _read(folder, fresh)
    return fanout.each(nodes, lambda node: _difference(node, here, fresh))


def check(nodes: Sequence[Node], folders: Sequence[str]) -> None:
    """Returns when every node has what is here; raises ClusterError naming node, folder and first differing files.

    One command per node where nothing changed since the last sync.
    """
    heres = [_read(folder) for folder in folders]

    def look(node: Node) -> None:
        wrong = []
        for here, seen in zip(heres, _look(node, [here.path for here in heres]), strict=True):
            if seen.holds(here.content):
                continue
            difference = _difference(node, here, seen=seen)
            if difference:
                what = "is not there" if seen.state == "none" else f"differs: {difference}"
                wrong.append((f"{node.name}: {here.path} {what}", command(here.path, delete=bool(difference.extra))))
        if wrong:
            hints = list(dict.fromkeys(hint for _, hint in wrong))
            raise ClusterError("\n       ".join(line for line, _ in wrong), "\n      ".join(hints))

    if heres:
        fanout.all_of(_remote(nodes), look)


class NoFolderError(ClusterError):
    """A node has not the folder that was to be brought here."""


def sync(
    nodes: Sequence[Node],
    folder: str,
    *,
    delete: bool = False,
    fresh: bool = False,
    copy: bool = False,
    report: Report = lambda *_: None,
) -> dict[str, Synced | ClusterError]:
    """Bring every node's mirror of a folder, or of one file, to what is here; by node, what was done or why it was not.

    `delete` removes files that are only there, else they stay and are in `left`. `fresh` reads everything on both sides
    again. A folder that the node sees under the same path is linked to, not copied, unless `copy`. Interrupted, every
    file is the old or the new one, and the next call goes on. Raises UsageError for a folder that cannot be read here.
    """
    here = _read(folder, fresh, report)
    with _marker(here) as marker:
        return _interruptible(
            lambda stop: fanout.each(
                _remote(nodes), lambda node: _sync(node, here, delete, fresh, copy, marker, stop, report)
            )
        )


def refuse_missing(folders: Sequence[str]) -> None:
    """Raise UsageError for the first of them that is not there, before any is sent."""
    for folder in folders:
        _place(folder)


def links_leading_out(folder: str) -> tuple[str, ...]:
    """`name -> target` of the links in a folder whose target is outside of it, and so not brought by its sync."""
    path, root, only = _place(folder)
    return manifest.leading_out(manifest.listing_here(root, only), path)


def collect(
    node: Node,
    remote_folder: str,
    local_folder: str,
    exclude: Sequence[str] = (),
) -> Synced:
    """Bring the files of a node's folder here, except those that are here already (size and time) or match `exclude`.

    `exclude` holds patterns for relative paths and for names in them (`*.tmp`, `ranks`). A file appears when it is
    whole; nothing here is removed. Raises ClusterError naming the node, NoFolderError when there is no such folder.
    """
    began = time.monotonic()
    source = remote_folder.rstrip("/")
    shell = reach(node)
    probe = shell.run(_script("source", source))
    if probe.code:
        raise NoFolderError(f"{node.name}: {source}: no such folder")
    listing, _, _ = _list(node, shell, source, "")
    root = Path(local_folder)
    wanted = {
        name: stamp.size
        for name, stamp in listing.items()
        if not manifest.excluded(name, exclude) and not _is_here(root / name, stamp)
    }
    if not wanted:
        return Synced(node.name, "same", seconds=time.monotonic() - began)
    moved, how = _interruptible(
        lambda stop: transfer.fetch(node, source, wanted, root, rsync=bool(probe.out.strip()), stop=stop)
    )
    return Synced(node.name, how, len(wanted), moved, seconds=time.monotonic() - began)


def place(node: Node, file: Path, remote_folder: str) -> None:
    """Put a file of this machine into a folder of the node under its own name, where it appears when it is whole.

    Raises ClusterError naming the node when it cannot be written there.
    """
    beside = f"{remote_folder.rstrip('/')}/{OURS}{secrets.token_hex(4)}"
    sizes = {file.name: file.stat().st_size}
    send = partial(transfer.send, node, file.parent, sizes, remote_folder.rstrip("/"), beside, follow=True)
    try:
        _interruptible(lambda stop: send(stop=stop, report=lambda _: None))
    finally:
        with suppress(ClusterError):
            reach(node).run(["rm", "-rf", "--", beside])


def _remote(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that are not this machine, each machine once."""
    return list({(node.login, node.data_dir, node.ssh_config): node for node in nodes if node.login}.values())


def _place(folder: str) -> tuple[str, Path, str]:
    # Not resolved: a link in it stays, since this is the path that programs are given.
    path = os.path.abspath(Path(folder).expanduser())  # noqa: PTH100
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UsageError(f"this machine: {path!a} is not a UTF-8 name", "rename the folder") from None
    if path == "/":
        raise UsageError("this machine: / is not a folder to sync", "name one below it: clusterctl sync ./data")
    if os.path.isdir(path):  # noqa: PTH112
        return path, Path(path), ""
    if os.path.isfile(path):  # noqa: PTH113
        return path, Path(path).parent, Path(path).name
    raise UsageError(f"this machine: {folder}: no such file or folder")


def _read(folder: str, fresh: bool = False, report: Report = lambda *_: None) -> _Here:
    path, root, only = _place(folder)
    listing = manifest.listing_here(root, only)
    total = sum(stamp.size for stamp in listing.values())
    done, lock = 0, threading.Lock()

    def read(count: int) -> None:
        nonlocal done
        with lock:
            done += count
        report("", "reading", done, total)

    entries = manifest.read_here(root, listing, manifest.cache_of(path), fresh=fresh, read=read)
    return _Here(path, root, only, listing, entries, manifest.digest(entries))


@contextmanager
def _marker(here: _Here) -> Iterator[str]:
    """The name of a file that is in the folder meanwhile: who sees it there sees this folder. "" where none can be."""
    name = f"{OURS}{secrets.token_hex(8)}"
    file = here.root / name
    try:
        file.touch()
    except OSError:
        name = ""
    try:
        yield name
    finally:
        with suppress(OSError):
            file.unlink()


def _script(*words: str) -> list[str]:
    return ["bash", "-c", resources.text("files.sh"), "files", *words]


def _look(node: Node, paths: Sequence[str], marker: str = "") -> list[_Seen]:
    if not PurePosixPath(node.data_dir).is_absolute() and not node.data_dir.startswith("~/"):
        raise UsageError(
            f"{node.name}: data_dir {node.data_dir!r} is not an absolute path", "clusterctl init, or set it there"
        )
    arguments = [word for path in paths for word in (path, manifest.key(path))]
    words = [node.data_dir.rstrip("/"), marker, _NAMES_LEFT_OUT, *arguments]
    done = reach(node).run(_script("state", *words), timeout_s=600.0)
    if done.code:
        raise ClusterError(f"{node.name}: {node.data_dir} cannot be looked at: {transfer.why(done.err)}")
    fields = done.out.split("\0")[:-1]
    rows = [fields[first : first + 8] for first in range(0, len(fields), 8)]
    return [
        _Seen(cast(State, state), mirror, keep, int(free or 0), listing, kept_listing, kept_content, bool(marked))
        for state, mirror, keep, free, listing, kept_listing, kept_content, marked in rows
    ]


def _difference(node: Node, here: _Here, fresh: bool = False, seen: _Seen | None = None) -> Difference:
    seen = seen or _look(node, [here.path])[0]
    if seen.holds(here.content) and not fresh:
        return Difference()
    if seen.state == "common":
        with _marker(here) as marker:
            marked = not marker or _look(node, [here.path], marker)[0].marked
        if marked:
            return Difference()
    if seen.state in ("common", "elsewhere"):
        raise _elsewhere(node, seen)
    return manifest.compare(here.entries, _there(node, seen, fresh))


def _elsewhere(node: Node, seen: _Seen) -> ClusterError:
    return ClusterError(
        f"{node.name}: {seen.mirror} is, or stands behind, a link to a folder that is not this machine's",
        f"remove the link on {node.name} (see: ls -ld {seen.mirror}), then sync again",
    )


def _sync(
    node: Node,
    here: _Here,
    delete: bool,
    fresh: bool,
    copy: bool,
    marker: str,
    stop: transfer.Stop,
    report: Report,
) -> Synced:
    began = time.monotonic()
    shell = reach(node)
    report(node.name, "comparing", 0, 0)
    seen = _look(node, [here.path], marker)[0]
    if seen.marked and not copy and seen.state != "copy":
        if seen.state != "common":
            _run(node, shell, _script("link", here.path, seen.mirror), f"{seen.mirror} cannot be made")
        return Synced(node.name, "common", seconds=time.monotonic() - began)
    if seen.state in ("common", "elsewhere"):
        # Only the mirror itself, and only when it is a link: never what stands behind it.
        if not copy or shell.run(_script("unlink", seen.mirror)).code:
            raise _elsewhere(node, seen)
        seen = _look(node, [here.path], marker)[0]
        if seen.state in ("common", "elsewhere"):
            raise _elsewhere(node, seen)
    if seen.holds(here.content) and not fresh:
        return Synced(node.name, "same", seconds=time.monotonic() - began)
    there = _there(node, seen, fresh)
    difference = manifest.compare(here.entries, there)
    blocking = () if delete else manifest.in_the_way(difference)
    if blocking:
        raise ClusterError(
            f"{node.name}: {seen.mirror} has a file where a folder must be, or the other way round: "
            f"{manifest.first_names(blocking)}",
            f"{command(here.path, delete=True)} removes what is only there",
        )
    removed = difference.extra if delete else ()
    top = seen.mirror if not here.only else seen.mirror.rpartition("/")[0]
    if removed:
        names = b"".join(b"./" + os.fsencode(name) + b"\0" for name in removed)
        _run(node, shell, _script("remove", top), f"{top}: files cannot be removed", names)
        seen = _look(node, [here.path])[0]
    wanted = {name: here.entries[name].size for name in sorted({*difference.missing, *difference.different})}
    needed = manifest.space_needed(difference, here.entries, there)
    if needed > seen.free:
        raise ClusterError(
            f"{node.name}: {seen.mirror} needs {decimal(needed)} and its disk has {decimal(seen.free)} free",
            f"make room on {node.name}, or choose another data_dir in the inventory",
        )
    moved = 0
    how: Literal["rsync", "tar", "same"] = "same"
    if wanted:
        total = sum(wanted.values())
        moved, how = transfer.send(
            node,
            here.root,
            wanted,
            top,
            seen.keep,
            follow=bool(here.only),
            stop=stop,
            report=lambda now: report(node.name, "sending", min(now, total), total),
        )
    elif not here.only:
        _run(node, shell, ["mkdir", "-p", "--", seen.mirror], f"{seen.mirror} cannot be written")
    left = difference
    if wanted or removed:
        report(node.name, "checking", 0, 0)
        seen = _look(node, [here.path])[0]
        left = manifest.compare(here.entries, _there(node, seen, False))
    if left.missing or left.different:
        raise ClusterError(
            f"{node.name}: {here.path} differs after it was sent: {left}",
            f"does something write to it? {command(here.path)}",
        )
    return Synced(node.name, how, len(wanted), moved, len(removed), time.monotonic() - began, left)


def _there(node: Node, seen: _Seen, fresh: bool) -> dict[str, Entry]:
    """The manifest of a mirror; what was read for it is kept there."""
    if seen.state == "none":
        return {}
    shell = reach(node)
    listing, known, raw = _list(node, shell, seen.mirror, seen.keep)
    digests = manifest.remembered(listing, {} if fresh else known)
    unread = [name for name in listing if name not in digests]
    if unread:
        names = b"".join(b"./" + os.fsencode(name) + b"\0" for name in unread)
        sums = _read_all(node, shell, _script("hash", seen.mirror), names, seen.mirror)
        digests.update(manifest.parse_sums(sums))
        if lost := [name for name in unread if name not in digests]:
            raise ClusterError(f"{node.name}: {seen.mirror}/{manifest.printable(lost[0])} vanished while it was read")
    entries = manifest.manifest_of(listing, digests)
    content = manifest.digest(entries)
    if unread or (raw, content) != (seen.kept_listing, seen.kept_content):
        kept = manifest.pack({name: (stamp, digests[name]) for name, stamp in listing.items()})
        # A cache: where it cannot be written, the next comparison reads again.
        shell.run(_script("keep", seen.keep, raw, content), stdin=kept, timeout_s=600.0)
    return entries


def _list(node: Node, shell: Shell, folder: str, keep: str) -> tuple[Listing, manifest.Known, str]:
    """What is in a node's folder, what was kept of it, and the listing's digest as `files.sh` computes it."""
    raw = _read_all(node, shell, _script("list", folder, keep, _NAMES_LEFT_OUT), b"", folder)
    head, _, rest = raw.partition(b"\n")
    kept = int(head)
    listing = zlib.decompress(rest[kept:], wbits=31)
    return (
        manifest.parse_listing(listing),
        manifest.unpack(rest[:kept]),
        hashlib.sha256(listing).hexdigest(),
    )


def _read_all(node: Node, shell: Shell, argv: Sequence[str], data: bytes, folder: str) -> bytes:
    with shell.stream(argv) as stream:
        with suppress(OSError, EOFError):
            stream.stdin.write(data)
            stream.stdin.close()
        out: bytes = stream.stdout.read()
        done = stream.wait(60.0)
    if done.code:
        raise ClusterError(f"{node.name}: {folder} cannot be read: {transfer.why(done.err)}")
    return out


def _run(node: Node, shell: Shell, argv: Sequence[str], failed: str, data: bytes = b"") -> None:
    done = shell.run(argv, stdin=data, timeout_s=600.0)
    if done.code:
        raise ClusterError(f"{node.name}: {failed}: {transfer.why(done.err)}")


def _is_here(path: Path, stamp: manifest.Stamp) -> bool:
    try:
        seen = path.lstat()
        if stamp.kind == "l":
            return path.is_symlink() and str(path.readlink()) == stamp.target
    except OSError:
        return False
    # A tar stream keeps a time to less than a microsecond.
    return not path.is_symlink() and seen.st_size == stamp.size and abs(seen.st_mtime_ns - stamp.mtime_ns) < 1000


def _interruptible(work: Callable[[transfer.Stop], T]) -> T:
    """What `work` returns; Ctrl-C ends its transfers at once, waits for it, and goes on as KeyboardInterrupt."""
    stop = transfer.Stop()
    outcome: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work(stop))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
    except BaseException:
        stop.now()
        close_all()  # a command that a worker waits for ends with its connection
        thread.join(10)
        raise
    if failed:
        raise failed[0]
    return outcome[0]
