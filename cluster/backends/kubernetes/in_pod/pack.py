"""Write files of a folder as a tar archive to standard output. Standard input has one line of JSON.

`folder`; `excluded`: patterns of names, or of paths that begin with `/`; `have`: size and time in nanoseconds of the
files that the reader has, by path; `since`: only files that have changed after this Unix time. Errors are members named
ERROR. The last member is END, because a connection can break off without an error.
"""

from __future__ import annotations

import io
import json
import os
import stat
import sys
import tarfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path


def is_excluded(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches the path, or the last name in it."""
    return any(fnmatch("/" + path if each[0] == "/" else path.rpartition("/")[2], each) for each in patterns)


def files(top: str, excluded: Sequence[str]) -> Iterator[str]:
    """Yield the paths, relative to the folder, of its files and links."""
    for where, folders, names in os.walk(top):
        below = os.path.relpath(where, top)
        paths = {name: os.path.normpath(below + "/" + name) for name in (*folders, *names)}
        folders[:] = sorted(name for name in folders if not is_excluded(paths[name], excluded))
        links = [name for name in folders if Path(where, name).is_symlink()]
        yield from (
            paths[name] for name in sorted((*links, *names)) if not is_excluded(paths[name], excluded)
        )


def add(archive: tarfile.TarFile, name: str, text: str = "") -> None:
    """Add a member that is no file of the folder."""
    member = tarfile.TarInfo(name)
    member.size = len(text.encode())
    archive.addfile(member, io.BytesIO(text.encode()))


def pack(archive: tarfile.TarFile, path: Path, name: str, about: os.stat_result) -> None:
    """Add a file, or a link."""
    member = tarfile.TarInfo("./" + name)
    member.mode = about.st_mode & 0o777
    member.pax_headers = {"mtime": "{}.{:09d}".format(*divmod(about.st_mtime_ns, 10**9))}
    if stat.S_ISLNK(about.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)  # noqa: PTH115 (Python 3.8)
        archive.addfile(member)
        return
    with path.open("rb") as file:
        member.size = os.fstat(file.fileno()).st_size
        archive.addfile(member, file)


def main() -> None:
    """Pack what is asked for."""
    wanted = json.loads(sys.stdin.readline())
    top = wanted["folder"]
    have = wanted["have"]
    since = wanted["since"]
    # unpack.py writes it: the folder has been there for longer than the container.
    sent = Path(top, ".clusterctl-sent")
    if sent.exists():
        since = sent.stat().st_ctime
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name in files(top, wanted["excluded"]):
            path = Path(top, name)
            try:
                about = path.lstat()
                is_same = have.get(name) == [about.st_size, about.st_mtime_ns] or about.st_ctime < since
                if not is_same and (stat.S_ISREG(about.st_mode) or stat.S_ISLNK(about.st_mode)):
                    pack(archive, path, name, about)
            except FileNotFoundError:  # a running job removes files
                continue
            except PermissionError as error:
                add(archive, "ERROR", f"{name}: {error.strerror}")
        add(archive, "END")


if __name__ == "__main__":
    main()
