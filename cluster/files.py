"""Folders of this machine on the nodes, through rsync: compare, send, fetch.

The copy of a folder on a node is its mirror, below the node's `data_dir`. rsync compares size and time, or content with
`checksum`. A file appears under its name when it is complete.
"""

from __future__ import annotations

import os
import posixpath
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal, cast

from rich.filesize import decimal

from cluster import fanout, resources
from cluster.errors import ClusterError, UsageError
from cluster.inventory import DATA_DIR
from cluster.model import Node
from cluster.rsync import LEFT_OUT, OURS, VANISHED, Rsync, at, error_of, interruptible, reason
from cluster.shells import reach

#: The state of a mirror: absent, a copy, a link to the shared folder, a link to another folder.
State = Literal["none", "copy", "common", "elsewhere"]
#: Called with a node's name, the operation, the bytes that were sent, and the bytes to send.
Report = Callable[[str, str, int, int], None]

#: Exit code of files.sh on a machine without rsync.
_NO_RSYNC = 4


@dataclass(frozen=True)
class Difference:
    """The sorted names of files that are only here, only on the node, or not the same."""

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    different: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self.missing or self.extra or self.different)

    def __str__(self) -> str:
        """`2 files missing (a.jpg, b.jpg), 1 different (c.txt)`: counts, and the first three names of each."""
        words: list[str] = []
        for names, what in ((self.missing, "missing"), (self.different, "different"), (self.extra, "only there")):
            if names:
                files = "" if words else ("file " if len(names) == 1 else "files ")
                words.append(f"{len(names)} {files}{what} ({first_names(names)})")
        return ", ".join(words)


@dataclass(frozen=True)
class Synced:
    """The result of a transfer with one node: counts, bytes over the network, seconds, and what still differs."""

    node: str
    how: Literal["rsync", "common", "same"]
    files: int = 0
    bytes: int = 0
    removed: int = 0
    seconds: float = 0.0
    left: Difference = field(default_factory=Difference)


class NoFolderError(ClusterError):
    """The folder to fetch does not exist on the node."""


def mirror(node: Node, path: str) -> str:
    """The path on the node of an absolute path of this machine; the same path if the node is this machine."""
    return f"{node.data_dir}{path}" if node.login else path


def command(folder: str, *, delete: bool = False) -> str:
    """The command that syncs a folder, for hints."""
    return shlex.join(["clusterctl", "sync", folder, *(["--delete"] if delete else [])])


def with_data_dir(node: Node) -> Node:
    """The node, with the default `data_dir` where it has none."""
    return node if node.data_dir else replace(node, data_dir=DATA_DIR)


def first_names(names: Sequence[str]) -> str:
    """The first three, printable, and `...` when there are more."""
    return ", ".join([_printable(name) for name in names[:3]] + (["..."] if len(names) > 3 else []))


def _printable(name: str) -> str:
    return name if name.isprintable() else ascii(name)


@dataclass(frozen=True)
class _Here:
    """A folder or a file of this machine, as an absolute path. Links in the path stay: programs get this path."""

    path: str
    is_file: bool

    def source(self) -> str:
        """The folder that rsync reads from."""
        return f"{posixpath.dirname(self.path) if self.is_file else self.path}/"

    def target(self, mirror: str) -> str:
        """The folder that rsync writes to."""
        return f"{posixpath.dirname(mirror) if self.is_file else mirror}/"

    def options(self) -> list[str]:
        """What limits rsync to the file. A link that is synced by its name is sent as the file it leads to."""
        return ["--files-from=-", "--from0", "--copy-links"] if self.is_file else []

    def stdin(self) -> str:
        """The name for `--files-from`; `./` keeps a name that begins with a dash or a semicolon a name."""
        name = os.fsencode(posixpath.basename(self.path)).decode("ascii", "surrogateescape")
        return f"./{name}\0" if self.is_file else ""


@dataclass(frozen=True)
class _Seen:
    """The state of one mirror, as `files.sh` prints it; `is_shared`: the node sees this machine's marker file."""

    state: State
    mirror: str
    free: int
    is_shared: bool


@dataclass
class _Compared:
    """How a mirror differs, and the bytes of what is missing and of all that is to be sent."""

    difference: Difference
    missing_bytes: int
    bytes: int


def check(nodes: Sequence[Node], folders: Sequence[str]) -> None:
    """Return when every node has the files that are here, by size and time, else by content.

    Raises ClusterError naming node, folder and first differing files; UsageError for a folder that is not here.
    """
    heres = [_here(folder) for folder in folders]

    def compare(node: Node) -> None:
        wrong = []
        for here, seen in zip(heres, _look(node, heres), strict=True):
            difference = _difference(node, here, seen, checksum=False)
            if difference:
                what = "is not there" if seen.state == "none" else f"differs: {difference}"
                wrong.append((f"{node.name}: {here.path} {what}", command(here.path, delete=bool(difference.extra))))
        if wrong:
            hints = list(dict.fromkeys(hint for _, hint in wrong))
            raise ClusterError("\n       ".join(line for line, _ in wrong), "\n      ".join(hints))

    if heres:
        interruptible(lambda: fanout.all_of(_remote(nodes), compare))


def differences(nodes: Sequence[Node], folder: str) -> dict[str, Difference | ClusterError]:
    """How the content of each node's mirror differs from the folder here, by node, or why it cannot be compared.

    Raises UsageError for a folder that is not here.
    """
    here = _here(folder)
    return interruptible(
        lambda: fanout.each(nodes, lambda node: _difference(node, here, _look(node, [here])[0], checksum=True))
    )


def sync(
    nodes: Sequence[Node],
    folder: str,
    *,
    delete: bool = False,
    checksum: bool = False,
    copy: bool = False,
    report: Report = lambda *_: None,
) -> dict[str, Synced | ClusterError]:
    """Make every node's mirror of a folder or a file equal to what is here; the result, or the error, of each node.

    `delete` removes files that are only on the node; otherwise they stay and are in `left`. `checksum` compares by
    content. A folder that the node sees under the same path is linked, not copied, unless `copy`. After an interruption
    every file is the old or the new one, and the next call continues. Raises UsageError for a folder that is not here.
    """
    here = _here(folder)
    with _marker(here) as marker:
        return interruptible(
            lambda: fanout.each(_remote(nodes), lambda node: _sync(node, here, marker, delete, checksum, copy, report))
        )


def refuse_missing(folders: Sequence[str]) -> None:
    """Raise UsageError for the first folder that does not exist, before any is sent."""
    for folder in folders:
        _here(folder)


def links_leading_out(folder: str) -> tuple[str, ...]:
    """`name -> target` of the links in a folder whose target is outside: a node has the link and not its target."""
    here, out = _here(folder), []
    for top, folders, names in os.walk(here.path):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        for path in (Path(top, name) for name in (*folders, *names)):
            if path.is_symlink():
                target = posixpath.normpath(posixpath.join(top, path.readlink()))
                if target != here.path and not target.startswith(f"{here.path}/"):
                    out.append(f"{path.relative_to(here.path)} -> {path.readlink()}")
    return tuple(sorted(out))


def collect(node: Node, remote_folder: str, local_folder: str, exclude: Sequence[str] = ()) -> Synced:
    """Fetch the files of a node's folder that differ by size or time here and match no pattern of `exclude`.

    The patterns are rsync's: `*.tmp` and `ranks` match names at any depth. Nothing here is removed. Raises ClusterError
    naming the node, NoFolderError if there is no such folder.
    """
    began = time.monotonic()
    source = remote_folder.rstrip("/")
    # Through the connection that is kept: most nodes of a job have nothing to fetch.
    if reach(node).run(["test", "-d", source]).code:
        raise NoFolderError(f"{node.name}: {source}: no such folder")
    try:
        Path(local_folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(f"this machine: {error.filename} cannot be written: {error.strerror}") from error
    options = ["--perms", *(f"--exclude={pattern}" for pattern in exclude)]
    run = Rsync(node, [*options, "--", f"{at(node)}{source}/", f"{local_folder}/"])
    interruptible(run)
    if run.code != VANISHED:  # a running job removes files
        run.refuse_failure(f"this machine: {local_folder} cannot be written", f"{node.name}: {source} cannot be read")
    files = [change for change, _, _ in run.changes if change[1] in "fL"]
    return Synced(node.name, "rsync" if files else "same", len(files), run.moved, seconds=time.monotonic() - began)


def place(node: Node, file: Path, remote_folder: str) -> None:
    """Send a file of this machine into a folder of the node, under its own name.

    Raises ClusterError naming the node when it cannot be written there.
    """
    run = Rsync(node, ["--perms", "--copy-links", "--", str(file), f"{at(node)}{remote_folder}/"])
    interruptible(run)
    run.refuse_failure(f"{node.name}: {remote_folder} cannot be written", f"this machine: {file} cannot be read")


def _remote(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that are not this machine, each machine once."""
    return list({(node.login, node.data_dir, node.ssh_config): node for node in nodes if node.login}.values())


def _here(folder: str) -> _Here:
    path = os.path.abspath(Path(folder).expanduser())  # noqa: PTH100 (resolve() would follow links)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UsageError(f"this machine: {path!a} is not a UTF-8 name", "rename the folder") from None
    if path == "/":
        raise UsageError("this machine: / is not a folder to sync", "name one below it: clusterctl sync ./data")
    if not Path(path).is_dir() and not Path(path).is_file():
        raise UsageError(f"this machine: {folder}: no such file or folder")
    return _Here(path, Path(path).is_file())


@contextmanager
def _marker(here: _Here) -> Iterator[str]:
    """The name of a file that is in the folder meanwhile: a node that sees it sees this folder. "" if not writable."""
    file = Path(here.source(), f"{OURS}{os.urandom(8).hex()}")
    name = file.name
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


def _look(node: Node, heres: Sequence[_Here], marker: str = "") -> list[_Seen]:
    if not PurePosixPath(node.data_dir).is_absolute() and not node.data_dir.startswith("~/"):
        raise UsageError(
            f"{node.name}: data_dir {node.data_dir!r} is not an absolute path", "clusterctl init, or set it there"
        )
    done = reach(node).run(_script("state", node.data_dir.rstrip("/"), marker, *(here.path for here in heres)))
    if done.code == _NO_RSYNC:
        raise ClusterError(f"{node.name}: rsync is not installed", f"on {node.name}: sudo apt-get install rsync")
    if done.code:
        raise ClusterError(f"{node.name}: {node.data_dir} cannot be read: {reason(done.err)}")
    fields = done.out.split("\0")[:-1]
    rows = [fields[first : first + 4] for first in range(0, len(fields), 4)]
    return [_Seen(cast(State, state), mirror, int(free or 0), bool(seen)) for state, mirror, free, seen in rows]


def _difference(node: Node, here: _Here, seen: _Seen, *, checksum: bool) -> Difference:
    if seen.state == "common":
        with _marker(here) as marker:
            if not marker or _look(node, [here], marker)[0].is_shared:
                return Difference()
    if seen.state in ("common", "elsewhere"):
        raise _elsewhere(node, seen)
    found = _compare(node, here, seen.mirror, checksum=checksum).difference
    # Another time is no other content: where the time differs, the content decides.
    return _compare(node, here, seen.mirror, checksum=True).difference if found.different and not checksum else found


def _compare(node: Node, here: _Here, mirror: str, *, checksum: bool) -> _Compared:
    options = ["--dry-run", "--executability", *(["--checksum"] if checksum else []), *here.options()]
    options += [] if here.is_file else ["--delete"]
    run = Rsync(node, [*options, "--", here.source(), f"{at(node)}{here.target(mirror)}"], here.stdin())
    run()
    run.refuse_failure(f"{node.name}: {mirror} cannot be read", f"this machine: {here.path} cannot be read")
    missing, extra, different = {}, {}, {}
    for change, size, name in run.changes:
        if change.startswith("*deleting"):
            if not name.endswith("/"):
                extra[name] = size
        elif change[1] in "fL" and change.endswith("+++"):
            missing[name] = size
        elif change[1] in "fL" and (change[0] in "<>c" or change[5] == "p"):
            different[name] = size
    difference = Difference(*(tuple(sorted(each)) for each in (missing, extra, different)))
    return _Compared(difference, sum(missing.values()), sum(missing.values()) + sum(different.values()))


def _elsewhere(node: Node, seen: _Seen) -> ClusterError:
    return ClusterError(
        f"{node.name}: {seen.mirror} is, or stands behind, a link to a folder that is not this machine's",
        f"remove the link on {node.name} (see: ls -ld {seen.mirror}), then sync again",
    )


def _sync(node: Node, here: _Here, marker: str, delete: bool, checksum: bool, copy: bool, report: Report) -> Synced:
    began = time.monotonic()
    report(node.name, "comparing", 0, 0)
    seen = _look(node, [here], marker)[0]
    if seen.is_shared and not copy and seen.state != "copy":
        if seen.state != "common":
            _run_on(node, _script("link", here.path, seen.mirror), f"{seen.mirror} cannot be written")
        return Synced(node.name, "common", seconds=time.monotonic() - began)
    if seen.state in ("common", "elsewhere"):
        # Only the mirror, and only if it is a link: never what is behind it.
        if copy and not reach(node).run(_script("unlink", seen.mirror)).code:
            seen = _look(node, [here], marker)[0]
        if seen.state in ("common", "elsewhere"):
            raise _elsewhere(node, seen)
    if seen.state == "none":
        _run_on(node, ["mkdir", "-p", "--", here.target(seen.mirror)], f"{seen.mirror} cannot be written")
    found = _compare(node, here, seen.mirror, checksum=checksum)
    difference = found.difference
    blocking = () if delete else _blocking(difference)
    if blocking:
        raise ClusterError(
            f"{node.name}: {seen.mirror} has a file where a folder must be, or a folder where a file must be: "
            f"{first_names(blocking)}",
            f"{command(here.path, delete=True)} removes what is only there",
        )
    if found.missing_bytes > seen.free:
        raise ClusterError(
            f"{node.name}: {seen.mirror} needs {decimal(found.missing_bytes)} and its disk has "
            f"{decimal(seen.free)} free",
            f"free disk space on {node.name}, or choose another data_dir in the inventory",
        )
    removed = len(difference.extra) if delete else 0
    left = Difference() if delete else Difference(extra=difference.extra)
    files = len(difference.missing) + len(difference.different)
    if not files and not removed:
        return Synced(node.name, "same", seconds=time.monotonic() - began, left=left)
    options = ["--perms", *(["--checksum"] if checksum else []), *(["--delete"] if delete else []), *here.options()]
    run = Rsync(
        node,
        [*options, "--", here.source(), f"{at(node)}{here.target(seen.mirror)}"],
        here.stdin(),
        lambda sent: report(node.name, "sending", min(sent, found.bytes), found.bytes),
    )
    run()
    run.refuse_failure(f"{node.name}: {seen.mirror} cannot be written", f"this machine: {here.path} cannot be read")
    return Synced(node.name, "rsync", files, run.moved, removed, time.monotonic() - began, left)


def _blocking(difference: Difference) -> tuple[str, ...]:
    """The extra names that are a file where a folder must be, or are in a folder where a file must be."""
    wanted = {*difference.missing, *difference.different}
    folders = {str(parent) for name in wanted for parent in PurePosixPath(name).parents}
    return tuple(
        name
        for name in difference.extra
        if name in folders or not wanted.isdisjoint(map(str, PurePosixPath(name).parents))
    )


def _run_on(node: Node, argv: Sequence[str], failed: str) -> None:
    done = reach(node).run(argv)
    if done.code:
        raise error_of(f"{node.name}: {failed}", done.err)
