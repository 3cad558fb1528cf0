"""Unpacks an untrusted archive: regular files and folders below one folder, nothing else."""

from __future__ import annotations

import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from trainer.errors import TrainerError
from trainer.progress import track

_Archive: TypeAlias = "zipfile.ZipFile | tarfile.TarFile"
_RATIO = 100  # images hardly shrink, labels by ten: a higher ratio is made to fill the disk
_SMALL = 1 << 30  # bytes that any archive may become


def unpack(archive: Path, folder: Path, named: str) -> None:
    """Unpack a .zip, .tar or .tar.gz into the new folder `folder`.

    TrainerError, which calls the archive `named`, for one that is damaged, would write outside of `folder`, holds
    links or devices, or would become implausibly large or larger than the disk.
    """
    try:
        opener: Callable[[Path], _Archive] = zipfile.ZipFile if zipfile.is_zipfile(archive) else tarfile.open
        with opener(archive) as packed:
            members = _members(packed)
            _check(members, archive.stat().st_size, folder, named)
            for *_, member in track(members, len(members), "unpacking"):
                packed.extract(member, folder)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, RuntimeError, ValueError) as error:
        raise TrainerError(f"{named}: cannot be unpacked: {error}", "it must be a whole .zip or .tar.gz") from error
    except OSError as error:
        raise TrainerError(f"{named}: cannot be unpacked to {folder}: {error}", "see the disk") from error


def _members(packed: _Archive) -> list[tuple[str, int, bool, Any]]:
    """The members: name, size in bytes, whether it is a regular file or a folder, and the member itself."""
    if isinstance(packed, zipfile.ZipFile):
        plain = (0, stat.S_IFREG, stat.S_IFDIR)
        return [(m.filename, m.file_size, stat.S_IFMT(m.external_attr >> 16) in plain, m) for m in packed.infolist()]
    packed.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.10.12, 3.11.4 and later
    for member in packed.getmembers():
        member.mode = 0o755 if member.isdir() else 0o644
    return [(m.name, m.size, m.isreg() or m.isdir(), m) for m in packed.getmembers()]


def _check(members: list[tuple[str, int, bool, Any]], size: int, folder: Path, named: str) -> None:
    """Refuse what the extraction cannot be trusted with, also where tarfile has no filter, and create the folder."""
    for name, _, is_plain, _ in members:
        if name.startswith("/") or ".." in PurePosixPath(name.replace("\\", "/")).parts:
            raise TrainerError(f"{named}: {name!r} would be written outside of its folder", "do not trust this archive")
        if not is_plain:
            raise TrainerError(f"{named}: {name!r} is a link or a device", "pack it again with plain files only")
    total = sum(size for _, size, _, _ in members)
    if total > max(_SMALL, _RATIO * size):
        raise TrainerError(f"{named}: {size} bytes would become {total}", "no pictures can be packed so densely")
    folder.mkdir(parents=True)
    free = shutil.disk_usage(folder).free
    if total > free:
        raise TrainerError(f"{named}: needs {total >> 20} MiB, {folder} has {free >> 20} MiB free", "make room there")
