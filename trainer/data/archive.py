"""Unpacks an archive from a stranger: files and folders below one folder, nothing else."""

from __future__ import annotations

import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from trainer.errors import TrainerError
from trainer.progress import track

_RATIO = 100  # pictures hardly shrink, labels by ten: more is made to fill the disk
_SMALL = 1 << 30  # bytes that any archive may become
_BLOCK = 1 << 20


def unpack(archive: Path, folder: Path, named: str) -> None:
    """Unpack a .zip, .tar or .tar.gz into the new folder `folder`.

    TrainerError, which calls the archive `named`, for one that is damaged, would write outside of `folder`, holds
    links or devices, or would become implausibly large or larger than the disk.
    """
    try:
        with _open(archive) as members:
            _write(members, archive, folder, named)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise TrainerError(f"{named}: cannot be unpacked: {error}", "it must be a whole .zip or .tar.gz") from error
    except OSError as error:
        raise TrainerError(f"{named}: cannot be unpacked to {folder}: {error}", "see the disk") from error


class _Zip:
    """The members of a zip archive: (name, kind, size in bytes, how to read it)."""

    def __init__(self, file: zipfile.ZipFile) -> None:
        self._file = file
        self.members = [(info.filename, self._kind(info), info.file_size, info) for info in file.infolist()]

    @staticmethod
    def _kind(info: zipfile.ZipInfo) -> str:
        mode = info.external_attr >> 16
        plain = not stat.S_IFMT(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode)
        return "other" if not plain else "folder" if info.is_dir() else "file"

    def read(self, member: Any) -> IO[bytes]:
        return self._file.open(member)


class _Tar:
    """The same of a tar archive."""

    def __init__(self, file: tarfile.TarFile) -> None:
        self._file = file
        self.members = [(info.name, self._kind(info), info.size, info) for info in file.getmembers()]

    @staticmethod
    def _kind(info: tarfile.TarInfo) -> str:
        return "folder" if info.isdir() else "file" if info.isreg() else "other"

    def read(self, member: Any) -> IO[bytes]:
        stream = self._file.extractfile(member)
        assert stream  # it is a file
        return stream


@contextmanager
def _open(archive: Path) -> Iterator[_Zip | _Tar]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            yield _Zip(packed)
    else:
        with tarfile.open(archive, "r:*") as tape:
            yield _Tar(tape)


def _write(packed: _Zip | _Tar, archive: Path, folder: Path, named: str) -> None:
    for name, kind, _, _ in packed.members:
        parts = PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
            raise TrainerError(f"{named}: {name!r} would be written outside of its folder", "do not trust this archive")
        if kind == "other":
            raise TrainerError(f"{named}: {name!r} is a link or a device", "pack it again with plain files only")
    total = sum(size for _, _, size, _ in packed.members)
    if total > max(_SMALL, _RATIO * archive.stat().st_size):
        raise TrainerError(
            f"{named}: {archive.stat().st_size} bytes would become {total}", "no pictures can be packed so densely"
        )
    folder.mkdir(parents=True)
    free = shutil.disk_usage(folder).free
    if total > free:
        raise TrainerError(f"{named}: needs {total >> 20} MiB, {folder} has {free >> 20} MiB free", "make room there")
    for name, kind, size, member in track(packed.members, len(packed.members), "unpacking"):
        path = folder / name
        if kind == "folder":
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with packed.read(member) as source, path.open("wb") as target:
            while block := source.read(_BLOCK):
                size -= len(block)
                if size < 0:
                    raise TrainerError(f"{named}: {name!r} is larger than it says", "do not trust this archive")
                target.write(block)
