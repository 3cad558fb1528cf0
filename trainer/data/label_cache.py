"""Keeps a scan for the next start, and for every other process: read once per change, mapped into memory by all.

A cached scan is a folder of .npy files named by what it was read from (paths, sizes and times of pictures and label
files), so that a change is a new name. It appears by a rename, whole or not at all: any number of machines may build
the same one on a shared disk at once, and the first one stays. On one machine, one process builds and others wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trainer.data.faults import Fault
from trainer.data.listing import Listing
from trainer.data.scan import Scan
from trainer.machine_lock import one_per_machine

FOLDER = ".trainer-cache"  # next to data.yaml
_FORMAT = 1  # of the files, and of the rules that a scan follows: another one is another name
_KEPT = 8  # scans of one data set, those used last
_ABANDONED_S = 24 * 3600.0
_ARRAYS = tuple(field.name for field in dataclasses.fields(Scan) if field.name not in ("faults", "folder"))


def cached(listing: Listing, nc: int, build: Callable[[], Scan]) -> Scan:
    """The scan of `listing` with `nc` classes: from the cache, else from `build`, and then cached where possible.

    The cache is next to data.yaml, or the user's own where that folder cannot be written to.
    """
    key, homes = _key(listing, nc), cache_folders(listing.root)
    if found := _find(homes, key):
        return found
    with one_per_machine(homes[0]):
        if found := _find(homes, key):  # made by the one that we waited for
            return found
        made = build()
        for home in homes:
            with contextlib.suppress(OSError):
                _store(made, home, key)
                return load(home / key)
    return made


def load(folder: Path) -> Scan:
    """The scan in `folder`, its arrays mapped into memory; OSError or ValueError if it is not there or damaged."""
    arrays = {}
    for name in _ARRAYS:
        path = folder / f"{name}.npy"
        # There is nothing to map in an array without elements.
        empty = np.load(path, mmap_mode=None, allow_pickle=False) if _is_empty(path) else None
        # As plain arrays: slicing a memmap costs microseconds, and every picture needs several slices.
        mapped = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False)) if empty is None else empty
        arrays[name] = mapped
    faults = [Fault(**row) for row in json.loads((folder / "faults.json").read_text(encoding="utf-8"))]
    return Scan(**arrays, faults=faults, folder=str(folder))


def _is_empty(path: Path) -> bool:
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return 0 in shape or not dtype.itemsize


def _key(listing: Listing, nc: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([_FORMAT, nc, len(listing.pictures)]).encode())
    digest.update(os.fsencode("\0".join(listing.pictures)))
    digest.update(listing.stamps.tobytes())
    return digest.hexdigest()


def cache_folders(root: str) -> list[Path]:
    """The folders that may hold the cache of the data set in `root`, the first choice first."""
    user = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    name = hashlib.blake2b(os.fsencode(root), digest_size=8).hexdigest()
    # Without a write bit it is meant to stay as it is, which would not keep root from writing there.
    writable = os.stat(root).st_mode & 0o222  # noqa: PTH116
    return [*([Path(root, FOLDER)] if writable else []), Path(user, "clusterctl", "labels", name)]


def _find(homes: list[Path], key: str) -> Scan | None:
    for home in homes:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            found = load(home / key)
            with contextlib.suppress(OSError):
                os.utime(home / key)  # it was used: see _tidy
            return found
    return None


def _store(scan: Scan, home: Path, key: str) -> None:
    """Write `scan` as `key` in `home`; OSError where that cannot be."""
    home.mkdir(parents=True, exist_ok=True)
    ignore = home / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n", encoding="utf-8")
    draft = home / f".draft-{uuid.uuid4().hex}"
    draft.mkdir()
    try:
        for name in _ARRAYS:
            with (draft / f"{name}.npy").open("wb") as file:
                np.save(file, np.ascontiguousarray(getattr(scan, name)), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        rows = [dataclasses.asdict(fault) for fault in scan.faults]
        (draft / "faults.json").write_text(json.dumps(rows), encoding="utf-8")
        try:
            draft.rename(home / key)
        except OSError:  # there is one: another machine's, which is as good, or a damaged one
            try:
                load(home / key)
            except (OSError, ValueError, TypeError, KeyError):
                shutil.rmtree(home / key, ignore_errors=True)
                draft.rename(home / key)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    _tidy(home)


def _tidy(home: Path) -> None:
    """Keep the scans used last, and remove what a killed process left behind."""
    with contextlib.suppress(OSError):
        ages = {path: path.stat().st_mtime for path in home.iterdir() if path.is_dir()}
        drafts = [path for path in ages if path.name.startswith(".draft-")]
        scans = sorted((path for path in ages if path not in drafts), key=lambda path: ages[path], reverse=True)
        abandoned = [path for path in drafts if ages[path] < time.time() - _ABANDONED_S]
        for path in abandoned + scans[_KEPT:]:
            shutil.rmtree(path, ignore_errors=True)
