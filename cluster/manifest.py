"""What a folder holds: every file's size and content hash by its relative path, and how two such lists differ.

A hash is remembered with the file's size, time and inode, so that only what changed is read again.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import posixpath
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from cluster.errors import ClusterError, UsageError

#: A file, an executable file, a symbolic link. Folders, sockets and devices are not content.
Kind = Literal["f", "x", "l"]

#: Caches that programs write beside data and code: they belong to one machine and are never part of a folder.
LEFT_OUT = (".trainer-cache", "__pycache__")
#: Our own marker files and unfinished transfers begin with this.
OURS = ".clusterctl-"
#: A folder with this file holds jobs' results: it grows with every job, and is no part of what jobs are given.
RUNS_MARK = ".clusterctl-runs"

_CHUNK = 1 << 20
#: A file changed so shortly before it was read might have been changed once more within the clock's resolution.
_SETTLED_NS = 2_000_000_000


class Entry(NamedTuple):
    """What a file is: equal entries are equal files. The digest of a link is that of its target's text."""

    kind: Kind
    size: int
    digest: str


class Stamp(NamedTuple):
    """What is seen of a file without reading it; `target` is a link's text."""

    kind: Kind
    size: int
    mtime_ns: int
    inode: int
    target: str = ""


Manifest = Mapping[str, Entry]
Listing = Mapping[str, Stamp]
#: What is remembered: a file's stamp and the digest it had then.
Known = Mapping[str, tuple[Stamp, str]]


@dataclass(frozen=True)
class Difference:
    """Names of files that are only here, only there, or not the same; each sorted."""

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


def compare(here: Manifest, there: Manifest) -> Difference:
    """How the folder there differs from the one here."""
    return Difference(
        missing=tuple(sorted(here.keys() - there.keys())),
        extra=tuple(sorted(there.keys() - here.keys())),
        different=tuple(sorted(name for name in here.keys() & there.keys() if here[name] != there[name])),
    )


def digest(manifest: Manifest) -> str:
    """One hash of everything: equal exactly when the manifests are."""
    total = hashlib.sha256()
    for name in sorted(manifest):
        entry = manifest[name]
        total.update(f"{entry.kind} {entry.size} {entry.digest} ".encode() + os.fsencode(name) + b"\0")
    return total.hexdigest()


def in_the_way(difference: Difference) -> tuple[str, ...]:
    """The extra names that are a file where a folder must be, or stand in a folder where a file must be."""
    wanted = {*difference.missing, *difference.different}
    folders = {parent for name in wanted for parent in _parents(name)}
    return tuple(name for name in difference.extra if name in folders or not wanted.isdisjoint(_parents(name)))


def space_needed(difference: Difference, here: Manifest, there: Manifest) -> int:
    """Bytes that must be free for the transfer: a changed file stands beside its old self until it is whole."""
    changed = [(here[name].size, there[name].size) for name in difference.different]
    growth = sum(max(0, new - old) for new, old in changed)
    return sum(here[name].size for name in difference.missing) + growth + max((new for new, _ in changed), default=0)


def leading_out(listing: Listing, folder: str) -> tuple[str, ...]:
    """`name -> target` of the links whose target is outside of the folder: it will not be on the nodes."""
    out = []
    for name, stamp in sorted(listing.items()):
        if stamp.kind == "l":
            target = posixpath.normpath(posixpath.join(folder, posixpath.dirname(name), stamp.target))
            if target != folder and not target.startswith(f"{folder}/"):
                out.append(f"{name} -> {stamp.target}")
    return tuple(out)


def excluded(name: str, patterns: Sequence[str]) -> bool:
    """Whether a relative path, or one of the folders and names in it, matches one of the patterns (`*.pt`, `ranks`)."""
    parts = [name, *_parents(name), *name.split("/")]
    return any(fnmatch.fnmatchcase(part, pattern) for part in parts for pattern in patterns)


def first_names(names: Sequence[str]) -> str:
    """The first three, printable, and `...` when there are more."""
    return ", ".join([printable(name) for name in names[:3]] + (["..."] if len(names) > 3 else []))


def printable(name: str) -> str:
    """A file name that cannot disturb a terminal: as it is, or quoted with escapes."""
    return name if name.isprintable() else ascii(name)


def parse_listing(raw: bytes) -> dict[str, Stamp]:
    r"""What `find -printf '%y\t%m\t%s\t%T@\t%i\t%p\0%l\0'` printed, by the path without its `./`."""
    fields = raw.split(b"\0")
    listing: dict[str, Stamp] = {}
    for head, target in zip(fields[0:-1:2], fields[1:-1:2], strict=True):
        letter, mode, size, mtime, inode, path = head.split(b"\t", 5)
        seconds, _, fraction = mtime.partition(b".")
        mtime_ns = int(seconds) * 1_000_000_000 + int(fraction[:9].ljust(9, b"0"))
        kind: Kind = "l" if letter == b"l" else "x" if int(mode, 8) & stat.S_IXUSR else "f"
        listing[os.fsdecode(path).removeprefix("./")] = Stamp(
            kind, int(size), mtime_ns, int(inode), os.fsdecode(target)
        )
    return listing


def parse_sums(raw: bytes) -> dict[str, str]:
    """What `sha256sum -z` printed, by the path without its `./`."""
    return {os.fsdecode(line[66:]).removeprefix("./"): line[:64].decode() for line in raw.split(b"\0") if line}


def pack(known: Known) -> bytes:
    """The remembered hashes as bytes, for `unpack`."""
    lines = [
        f"{stamp.kind}\t{stamp.size}\t{stamp.mtime_ns}\t{stamp.inode}\t{found}\t".encode() + os.fsencode(name)
        for name, (stamp, found) in known.items()
        if stamp.kind != "l"
    ]
    return zlib.compress(b"\0".join(lines), 1)


def unpack(raw: bytes) -> Known:
    """The remembered hashes; none when the bytes are damaged, since everything can be read again."""
    try:
        lines = zlib.decompress(raw).split(b"\0") if raw else []
        known: dict[str, tuple[Stamp, str]] = {}
        for line in lines:
            if line:
                kind, size, mtime_ns, inode, found, name = line.split(b"\t", 5)
                letter: Kind = "x" if kind == b"x" else "f"
                known[os.fsdecode(name)] = Stamp(letter, int(size), int(mtime_ns), int(inode)), found.decode()
        return known
    except (zlib.error, ValueError):
        return {}


def remembered(listing: Listing, known: Known) -> dict[str, str]:
    """The digests of the listed files that are as they were when they were read, and of all links."""
    found: dict[str, str] = {}
    for name, stamp in listing.items():
        if stamp.kind == "l":
            found[name] = hashlib.sha256(os.fsencode(stamp.target)).hexdigest()
        elif name in known and known[name][0] == stamp:
            found[name] = known[name][1]
    return found


def manifest_of(listing: Listing, digests: Mapping[str, str]) -> dict[str, Entry]:
    """The manifest, from what was listed and what was read."""
    return {name: Entry(stamp.kind, stamp.size, digests[name]) for name, stamp in listing.items()}


def listing_here(root: Path, only: str = "") -> dict[str, Stamp]:
    """The files under a folder of this machine, or its file `only`; raises UsageError naming what is unreadable."""
    try:
        if only:
            return {only: _stamp(root / only, (root / only).stat())}
        return dict(_walk(root, ""))
    except OSError as error:
        raise UsageError(f"this machine: {error.filename} cannot be read: {error.strerror}") from error


def read_here(
    root: Path, listing: Listing, cache: Path, *, fresh: bool = False, read: Callable[[int], None] = lambda _: None
) -> dict[str, Entry]:
    """The manifest of a folder of this machine; `fresh` reads every file, else only those that `cache` does not know.

    `read` is told the bytes as they are read. Raises UsageError naming a file that cannot be read.
    """
    began_ns = time.time_ns()
    digests = remembered(listing, {} if fresh else _load(cache))
    unread = [name for name in listing if name not in digests]
    if unread:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            digests.update(zip(unread, pool.map(lambda name: _hash(root / name, read), unread), strict=True))
    if unread or fresh:
        settled = began_ns - _SETTLED_NS
        _save(cache, {name: (stamp, digests[name]) for name, stamp in listing.items() if stamp.mtime_ns < settled})
    return manifest_of(listing, digests)


def cache_of(path: str) -> Path:
    """Where the hashes of a folder are remembered, in the user's cache folder (XDG)."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "clusterctl" / "manifests" / key(path)


def key(path: str) -> str:
    """A file name that stands for an absolute path."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def _parents(name: str) -> Iterator[str]:
    end = name.rfind("/")
    while end > 0:
        yield name[:end]
        end = name.rfind("/", 0, end)


def _walk(folder: Path, prefix: str) -> Iterator[tuple[str, Stamp]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in LEFT_OUT or entry.name.startswith(OURS):
                continue
            name = f"{prefix}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                if Path(entry.path, RUNS_MARK).exists():
                    continue
                yield from _walk(Path(entry.path), f"{name}/")
            elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                yield name, _stamp(Path(entry.path), entry.stat(follow_symlinks=False))


def _stamp(path: Path, seen: os.stat_result) -> Stamp:
    if stat.S_ISLNK(seen.st_mode):
        return Stamp("l", seen.st_size, seen.st_mtime_ns, seen.st_ino, str(path.readlink()))
    return Stamp("x" if seen.st_mode & stat.S_IXUSR else "f", seen.st_size, seen.st_mtime_ns, seen.st_ino)


def _hash(path: Path, read: Callable[[int], None]) -> str:
    total = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                total.update(chunk)
                read(len(chunk))
    except OSError as error:
        raise UsageError(f"this machine: {path} cannot be read: {error.strerror}") from error
    return total.hexdigest()


def _load(cache: Path) -> Known:
    try:
        return unpack(cache.read_bytes())
    except OSError:
        return {}


def _save(cache: Path, known: Known) -> None:
    # threads of one process may save at once
    partial = cache.with_name(f"{cache.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(pack(known))
        partial.replace(cache)
    except OSError as error:
        raise ClusterError(f"this machine: {cache} cannot be written: {error.strerror}") from error
