"""Copies of folders on the nodes (`clusterctl sync`): compare, send, fetch, with rsync.

The copy of a folder on a node is its mirror, below the node's `data_dir`. rsync compares size and time, or content
with `checksum`. A file gets its name when it is complete.
"""

import os
import posixpath
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, cast

from cluster.agent import scripts
from cluster.errors import ClusterError, UsageError
from cluster.spec.inventory import DATA_DIR
from cluster.spec.model import Machine
from cluster.transport import inside, parallel, reach
from cluster.transport.process import interruptible
from cluster.transport.rsync import EXCLUDED, FROM_NODE, PREFIX, Rsync, at, error_of, no_rsync, reason

#: The state of a mirror: missing, a copy, a link to the shared folder, a link to another folder.
State = Literal["none", "copy", "common", "elsewhere"]
#: A callback with the node's name, the operation, the sent bytes, and the total bytes.
Report = Callable[[str, str, int, int], None]

_SCRIPT = "transport/files.sh"
#: Exit code of the script on a machine without rsync.
_NO_RSYNC = 4


@dataclass(frozen=True)
class Difference:
    """The sorted names of files that exist only here, only on the node, or that differ."""

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    different: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether any file differs."""
        return bool(self.missing or self.extra or self.different)

    def __str__(self) -> str:
        """`2 files missing (a.jpg, b.jpg), 1 different (c.txt)`: counts, and the first three names of each."""
        words: list[str] = []
        kinds = ((self.missing, "missing"), (self.different, "different"), (self.extra, "only there"))
        for names, what in kinds:
            if not names:
                continue
            count = str(len(names))
            if not words:
                count += " file" if len(names) == 1 else " files"
            first = [name if name.isprintable() else ascii(name) for name in names[:3]]
            if len(names) > 3:
                first.append("...")
            words.append(f"{count} {what} ({', '.join(first)})")
        return ", ".join(words)


@dataclass(frozen=True)
class Synced:
    """The result of a transfer with a node: counts, transferred bytes, seconds, and remaining differences."""

    node: str
    how: Literal["rsync", "common", "same"]
    files: int = 0
    bytes: int = 0
    removed: int = 0
    seconds: float = 0.0
    left: Difference = field(default_factory=Difference)


class NoFolderError(ClusterError):
    """The folder to fetch does not exist on the node."""


def command(folder: str, *, delete: bool = False) -> str:
    """Return the command that syncs a folder, for hints."""
    return shlex.join(["clusterctl", "sync", folder, *(["--delete"] if delete else [])])


def with_data_dir(node: Machine) -> Machine:
    """Return the node, with the default `data_dir` if it has none."""
    return node if node.data_dir else replace(node, data_dir=DATA_DIR)


@dataclass(frozen=True)
class _Mirror:
    """The mirror of the path `here` on a node, as `files.sh` prints it; `is_shared`: the node sees the marker file."""

    node: Machine
    here: Path
    state: State
    path: str
    is_shared: bool

    @property
    def is_link(self) -> bool:
        return self.state in ("common", "elsewhere")

    def arguments(self) -> list[str]:
        """Return rsync's source and target. A symbolic link is sent as its target file, one in a folder as a link."""
        if self.here.is_file():
            folder = posixpath.dirname(self.path)
            return ["--copy-links", "--", str(self.here), f"{at(self.node)}{folder}/"]
        return ["--", f"{self.here}/", f"{at(self.node)}{self.path}/"]

    def compare(self, *, checksum: bool) -> tuple[Difference, int]:
        """Return the differences, and the bytes to send."""
        options = ["--dry-run", "--delete", "--executability"]
        if checksum:
            options.append("--checksum")
        run = Rsync(self.node, [*options, *self.arguments()])
        run(f"{self.node.name}: {self.path} cannot be read", f"this machine: {self.here} cannot be read")
        missing = []
        extra = []
        different = []
        size = 0
        for change, length, name in run.changes:
            if change.startswith("*deleting"):
                if not name.endswith("/"):
                    extra.append(name)
                continue
            is_file = change[1] in "fL"
            is_new = change.endswith("+++")
            has_changed = change[0] in "<>c" or change[5] == "p"
            if is_file and is_new:
                missing.append(name)
                size += length
            elif is_file and has_changed:
                different.append(name)
                size += length
        difference = Difference(
            missing=tuple(sorted(missing)), extra=tuple(sorted(extra)), different=tuple(sorted(different))
        )
        return difference, size

    def difference(self, *, checksum: bool) -> Difference:
        """Return the differences. A folder that the node shares has none. Raise ClusterError for any other link."""
        if self.state == "common":
            with _marker(self.here) as marker:
                if not marker or _mirrors(self.node, [self.here], marker)[0].is_shared:
                    return Difference()
        if self.is_link:
            raise self.foreign()
        changes, _ = self.compare(checksum=checksum)
        if changes.different and not checksum:
            # A different time does not mean different content: compare the content then.
            changes, _ = self.compare(checksum=True)
        return changes

    def foreign(self) -> ClusterError:
        """Return the error for a link to a folder that is not this machine's."""
        name = self.node.name
        why = f"{name}: {self.path} is, or is below, a link to a folder that is not this machine's"
        return ClusterError(why, f"remove the link on {name} (see: ls -ld {self.path}), then sync again")


def check(nodes: Sequence[Machine], folders: Sequence[str]) -> None:
    """Raise ClusterError with node, folder and first differing files unless every node has the files that are here.

    Files whose size or time differs are compared by content. Raises UsageError for a missing folder.
    """
    heres = [_here(folder) for folder in folders]

    def compare(node: Machine) -> None:
        wrong = {}
        for mirror in _mirrors(node, heres):
            if difference := mirror.difference(checksum=False):
                what = "does not exist" if mirror.state == "none" else f"differs: {difference}"
                hint = command(str(mirror.here), delete=False)
                if difference.extra:
                    hint += " (with --delete, it also deletes the files that are only there)"
                wrong[mirror.path] = ClusterError(f"{node.name}: {mirror.here} {what}", hint)
        parallel.together(wrong)

    if heres:
        interruptible(lambda: parallel.all_of(_remote(nodes), compare))


def differences(nodes: Sequence[Machine], folder: str) -> dict[str, Difference | ClusterError]:
    """Return how the folder's content differs from each node's mirror, or the error, by node name. Raise UsageError."""
    here = _here(folder)

    def compare(node: Machine) -> Difference:
        (mirror,) = _mirrors(node, [here])
        return mirror.difference(checksum=True)

    return interruptible(lambda: parallel.each(nodes, compare))


def sync(
    nodes: Sequence[Machine],
    folder: str,
    *,
    delete: bool = False,
    checksum: bool = False,
    copy: bool = False,
    report: Report = lambda *_: None,
) -> dict[str, Synced | ClusterError]:
    """Update every node's mirror of a folder or a file; return the result, or the error, by node name.

    `delete` removes files that exist only on the node; otherwise `left` lists them. `checksum` compares by content.
    A folder on a shared disk is linked, not copied, unless `copy`. After an interruption every file is either the old
    or the new one, and the next call continues. Raises UsageError for a missing folder.
    """
    here = _here(folder)
    with _marker(here) as marker:
        one = partial(
            _sync, here=here, marker=marker, delete=delete, checksum=checksum, copy=copy, report=report
        )
        return interruptible(lambda: parallel.each(_remote(nodes), one))


def refuse_missing(folders: Sequence[str]) -> None:
    """Raise UsageError for the first folder that does not exist, before any is sent."""
    for folder in folders:
        _here(folder)


def links_leading_out(folder: str) -> tuple[str, ...]:
    """Return `name -> target` of links that lead out of a folder: nodes get the link without its target."""
    here = _here(folder)
    out = []
    for top, folders, names in os.walk(here):
        folders[:] = [name for name in folders if name not in EXCLUDED]
        for path in (Path(top, name) for name in (*folders, *names)):
            if not path.is_symlink():
                continue
            target = Path(posixpath.normpath(path.parent / path.readlink()))
            if not target.is_relative_to(here):
                out.append(f"{path.relative_to(here)} -> {path.readlink()}")
    return tuple(sorted(out))


def collect(
    node: Machine, remote_folder: str, local_folder: str, exclude: Sequence[str] = (), *, run_dir: str = ""
) -> Synced:
    """Fetch the files of a node's folder that differ here in size or time and match no pattern of `exclude`.

    The patterns are rsync's: `*.tmp` and `ranks` match names at any depth. No local file is removed. `local_folder` is
    `run_dir` (default) or below it. Raises NoFolderError if the folder does not exist, ClusterError naming the node for
    other failures, also if links that lead out of the folder were left out.
    """
    began = time.monotonic()
    source = remote_folder.rstrip("/")
    # Test over the open connection first: most nodes of a job have nothing to fetch.
    if reach(node).run(["test", "-d", source]).code:
        raise NoFolderError(f"{node.name}: {source}: no such folder")
    options = [f"--exclude={pattern}" for pattern in exclude]
    # Files may vanish, because jobs remove some.
    run = fetch(node, source, local_folder, run_dir or local_folder, options, may_vanish=True)
    files = sum(change[1] in "fL" for change, _, _ in run.changes)
    refuse_links(node, source, run.links_out)
    return Synced(node.name, "rsync" if files else "same", files, run.moved, seconds=time.monotonic() - began)


def fetch(
    node: Machine, source: str, target: str, run_dir: str, options: Sequence[str], *, may_vanish: bool = False
) -> Rsync:
    """Copy a node's folder to the folder `target` in `run_dir`, and nowhere else. Return the run of rsync.

    Links that lead out are left out; `links_out` of the run has them. Raises ClusterError, also if `target` leads out.
    """
    inside.check(target, run_dir)
    try:
        Path(target).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(f"this machine: {error.filename} cannot be written: {error.strerror}") from error
    run = Rsync(node, [*FROM_NODE, *options, "--", f"{at(node)}{source}/", f"{os.path.realpath(target)}/"])
    failures = f"this machine: {target} cannot be written", f"{node.name}: {source} cannot be read"
    interruptible(lambda: run(*failures, may_vanish=may_vanish))
    # rsync judges the text of a link. Through another link, the same text may lead out.
    links = [Path(target, name) for change, _, name in run.changes if change[1] == "L"]
    for link in links:
        with suppress(OSError):  # another process has removed or replaced it
            if inside.leads_out(link, run_dir):
                run.links_out[str(link.relative_to(target))] = str(link.readlink())
                link.unlink()
    return run


def refuse_links(node: Machine, source: str, links: Mapping[str, str]) -> None:
    """Raise ClusterError if links of a node's folder were left out."""
    if links:
        name, target = next(iter(links.items()))
        more = f", and {len(links) - 1} more" if len(links) > 1 else ""
        what = f"{node.name}: {source} was not copied completely: {name} -> {target} leads out of the folder{more}"
        raise ClusterError(what, "have the job write a file there, not a link")


def send(node: Machine, file: Path, remote_folder: str) -> None:
    """Send a file of a run directory into a folder of the node. Raise ClusterError naming the node if that fails."""
    inside.check(file, file.parent)
    run = Rsync(node, ["--perms", "--copy-links", "--", str(file), f"{at(node)}{remote_folder}/"])
    failures = f"{node.name}: {remote_folder} cannot be written", f"this machine: {file} cannot be read"
    interruptible(lambda: run(*failures))


def _remote(nodes: Sequence[Machine]) -> list[Machine]:
    """Return the nodes except this machine, each machine once."""
    remote = [node for node in nodes if node.login]
    return list({(node.login, node.data_dir, node.ssh_config): node for node in remote}.values())


def _here(folder: str) -> Path:
    """Return the absolute path of a folder or a file, with its symbolic links. Raise UsageError."""
    path = os.path.abspath(Path(folder).expanduser())  # noqa: PTH100 (resolve() would follow links)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UsageError(f"this machine: {path!a} is not a UTF-8 name", "rename the folder") from None
    if path == "/":
        raise UsageError("this machine: / cannot be synced", "name a folder below it: clusterctl sync ./data")
    if not Path(path).is_dir() and not Path(path).is_file():
        raise UsageError(f"this machine: {folder}: no such file or folder")
    return Path(path)


@contextmanager
def _marker(here: Path) -> Iterator[str]:
    """Create a temporary file in the folder, which a node with the same shared folder sees; "" if not writable."""
    folder = here.parent if here.is_file() else here
    name = f"{PREFIX}{os.urandom(8).hex()}"
    file = folder / name
    try:
        file.touch()
    except OSError:
        name = ""
    try:
        yield name
    finally:
        with suppress(OSError):
            file.unlink()


def _mirrors(node: Machine, heres: Sequence[Path], marker: str = "") -> list[_Mirror]:
    words = ["state", node.data_dir.rstrip("/"), marker, *map(str, heres)]
    done = reach(node).run(scripts.bash(_SCRIPT, *words))
    if done.code == _NO_RSYNC:
        raise no_rsync(node.name)
    if done.code:
        raise ClusterError(f"{node.name}: {node.data_dir} cannot be read: {reason(done.err)}")
    fields = done.out.split("\0")[:-1]
    states = fields[0::3]
    paths = fields[1::3]
    seen_markers = fields[2::3]
    answers = zip(heres, states, paths, seen_markers, strict=True)
    return [_Mirror(node, here, cast(State, state), path, bool(seen)) for here, state, path, seen in answers]


def _sync(
    node: Machine, here: Path, marker: str, delete: bool, checksum: bool, copy: bool, report: Report
) -> Synced:
    began = time.monotonic()
    report(node.name, "comparing", 0, 0)
    mirror = _mirrors(node, [here], marker)[0]
    unwritable = f"{node.name}: {mirror.path} cannot be written"
    if mirror.is_shared and not copy and mirror.state != "copy":
        if mirror.state != "common":
            _run_on(node, scripts.bash(_SCRIPT, "link", str(here), mirror.path), unwritable)
        return Synced(node.name, "common", seconds=time.monotonic() - began)
    if mirror.is_link and copy:
        # Remove the mirror only if it is a link; never remove its target.
        unlinked = reach(node).run(scripts.bash(_SCRIPT, "unlink", mirror.path))
        if not unlinked.code:
            mirror = _mirrors(node, [here], marker)[0]
    if mirror.is_link:
        raise mirror.foreign()
    if mirror.state == "none":
        folder = posixpath.dirname(mirror.path) if here.is_file() else mirror.path
        _run_on(node, ["mkdir", "-p", "--", folder], unwritable)
    difference, size = mirror.compare(checksum=checksum)
    removed = len(difference.extra) if delete else 0
    left = Difference() if delete else Difference(extra=difference.extra)
    files = len(difference.missing) + len(difference.different)
    if not files and not removed:
        return Synced(node.name, "same", seconds=time.monotonic() - began, left=left)
    options = ["--perms"]
    if checksum:
        options.append("--checksum")
    if delete:
        options.append("--delete")
    words = [*options, *mirror.arguments()]
    run = Rsync(node, words, lambda sent: report(node.name, "sending", min(sent, size), size))
    run(unwritable, f"this machine: {here} cannot be read")
    return Synced(node.name, "rsync", files, run.moved, removed, time.monotonic() - began, left)


def _run_on(node: Machine, argv: Sequence[str], failed: str) -> None:
    done = reach(node).run(argv)
    if done.code:
        raise error_of(failed, done.err)
