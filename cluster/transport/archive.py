"""Extraction of untrusted tar archives, on every supported Python.

tarfile's filter "data" does the same, but Python 3.11.2, which is Debian 12's own, and some releases of 3.10 lack it.
The launcher and the trainer import nothing from each other, so each has this file; a test compares the two.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `clusterctl plan` needs the paths alone
    import tarfile


class RefusedError(ValueError):
    """A member of an archive leads out of the folder, or is neither a file, a folder nor a link."""


def extract(
    archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, prefix: str = ".partial-"
) -> None:
    """Extract a member below `folder`, and give it its name only when it is complete.

    Owners are not restored, nor the mode of a folder. Of the mode of a file its permissions are, without those that the
    umask forbids and the right of others to write. A partial file's name begins with `prefix`.

    Raises:
        RefusedError: The member leads out of `folder`, through its name, a link, or both; or it is a device or a FIFO.
        tarfile.TarError: The archive is damaged.
        OSError: The file cannot be written.
    """
    name = member.name.lstrip("/")
    path = folder / name
    if ".." in name.split("/") or not is_inside(path.parent, folder):
        raise RefusedError(f"{member.name} leads out of the folder")
    if member.isdir():
        if not is_inside(path, folder):
            raise RefusedError(f"{member.name} leads out of the folder")
        path.mkdir(parents=True, exist_ok=True)
        return
    if member.issym() and leads_out(path, folder, member.linkname):
        raise RefusedError(f"{member.name} leads out of the folder: it is a link to {member.linkname}")
    if member.islnk() and not is_inside(folder / member.linkname, folder):
        raise RefusedError(f"{member.name} leads out of the folder: it is a link to {member.linkname}")
    if not (member.isreg() or member.issym() or member.islnk()):
        raise RefusedError(f"{member.name} is a device or a FIFO")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f"{prefix}{secrets.token_hex(8)}"
    try:
        if member.issym():
            partial.symlink_to(member.linkname)
        elif member.islnk():
            os.link(os.path.realpath(folder / member.linkname), partial)
        else:
            _write(archive, member, partial)
        os.utime(partial, ns=(time_ns(member), time_ns(member)), follow_symlinks=False)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def is_inside(path: str | Path, folder: str | Path) -> bool:
    """Return whether a path, with all links followed, is `folder` or below it. It need not exist."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def leads_out(link: str | Path, folder: str | Path, target: str = "") -> bool:
    """Return whether a symbolic link below `folder` leads out, now or if other links in `folder` are changed later.

    `target` is what a link that does not exist yet will have. After the name of a folder, `..` is refused: the folder
    may become a link.
    """
    target = target or str(Path(link).readlink())
    names = [name for name in target.split("/") if name not in ("", ".")]
    while names[:1] == [".."]:
        del names[0]
    return ".." in names or not is_inside(Path(link).parent / target, folder)


def time_ns(member: tarfile.TarInfo) -> int:
    """Return the time of a member in nanoseconds since 1970: tarfile has it as a floating-point number."""
    whole, _, rest = str(member.pax_headers.get("mtime", member.mtime)).partition(".")
    return int(whole) * 10**9 + int(f"{rest:0<9}"[:9])


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    content = archive.extractfile(member)
    assert content is not None  # of a regular file
    with os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, member.mode & 0o775 | 0o600), "wb"
    ) as file:
        shutil.copyfileobj(content, file, 1 << 20)
        if file.tell() != member.size:
            from tarfile import ReadError

            raise ReadError(f"{member.name} is not complete")
