"""Label cache: each scan is one memory-mapped file, shared by all processes and later starts.

A file's name is a hash of the paths, sizes and times of images and label files. A rename creates it atomically. On one
node, one process builds it while the others wait. The states of the images are in a file beside it, so that a changed
label does not decode them again.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.cache_folders import of_node, of_user
from trainer.config.faults import Fault
from trainer.data.formats.listing import Listing
from trainer.data.formats.scan import Scan, scan
from trainer.data.images.image_check import decode_images, read_headers
from trainer.data.images.image_file import ImageState
from trainer.distributed.machine_lock import one_per_machine

FOLDER = ".trainer-cache"  # next to data.yaml
_FORMAT = 5  # version of the file and of the scan's checks; part of the hash
_IMAGES = f"images-{_FORMAT}.json"  # the state of each image that was decoded, whatever its split and labels
_KEPT = 8  # newest scans of a dataset
_ABANDONED_S = 24 * 3600.0
_ARRAYS = tuple(field.name for field in dataclasses.fields(Scan) if field.name not in ("faults", "file"))


def cached_scan(listing: Listing, nc: int, extra: int | None, *, decode: bool = True) -> Scan:
    """Return `scan` of the same arguments from the cache, or make it and cache it if possible.

    Without `decode`, only the headers of the images are read.
    """
    folders = cache_folders(listing.root)
    digest = hashlib.blake2b(
        json.dumps([_FORMAT, nc, extra, decode, len(listing.images)]).encode(), digest_size=16
    )
    digest.update(os.fsencode("\0".join(listing.images)))
    digest.update(listing.stamps.tobytes())
    name = f"labels-{digest.hexdigest()}"
    with one_per_machine(folders[0]):
        for folder in folders:
            with contextlib.suppress(Exception):  # torch.load raises many types for a damaged file
                return load(folder / name)
        states = _decoded(listing, folders) if decode else read_headers(listing.image_files())
        built = scan(listing, states, nc, extra)
        is_final = all(state.is_final for state in states)
        if not (is_final and len(built.paths)):  # torch maps no empty arrays
            return built
        for folder in folders:
            with contextlib.suppress(OSError, RuntimeError):  # torch.save raises RuntimeError on a full disk
                _store(built, folder, name)
                return load(folder / name)
    return built


def _decoded(listing: Listing, folders: list[Path]) -> list[ImageState]:
    """Return the states of all images; only those that were not decoded before, or have changed, are decoded."""
    known = _known(folders)
    files = listing.image_files()
    stamps = listing.stamps[:, :2].tolist()
    missing = [k for k, name in enumerate(listing.images) if known.get(name, [[]])[0] != stamps[k]]
    for k, state in zip(missing, decode_images([files[k] for k in missing]), strict=True):
        known[listing.images[k]] = [stamps[k], state]
    states = [known[name][1] for name in listing.images]
    if missing:
        listed = set(listing.images)
        existing = set()
        for name in known:
            if name in listed or os.path.exists(os.path.join(listing.root, name)):  # noqa: PTH110, PTH118
                existing.add(name)
        rows = {
            name: [stamp, dataclasses.asdict(state)]
            for name, (stamp, state) in known.items()
            if name in existing and state.is_final
        }
        for folder in folders:
            with contextlib.suppress(OSError):
                with new_draft(folder, _IMAGES) as draft:
                    draft.write_text(json.dumps(rows), encoding="utf-8")
                    draft.replace(folder / _IMAGES)
                break
    return states


def _known(folders: list[Path]) -> dict[str, list[Any]]:
    """Return [stamp, state] of each image that was decoded before."""
    for folder in folders:
        with contextlib.suppress(
            OSError, ValueError, TypeError, AttributeError
        ):  # no such file, or a damaged one
            rows = json.loads((folder / _IMAGES).read_text(encoding="utf-8"))
            return {name: [stamp, ImageState(**state)] for name, (stamp, state) in rows.items()}
    return {}


def load(path: Path) -> Scan:
    """Return the scan in `path` with memory-mapped arrays."""
    content = torch.load(path, mmap=True, weights_only=True)
    arrays = {name: content[name].numpy() for name in _ARRAYS}
    arrays["paths"] = arrays["paths"].view(f"S{arrays['paths'].shape[1]}")[:, 0]
    for array in arrays.values():
        array.flags.writeable = False
    return Scan(**arrays, faults=[Fault(*row) for row in content["faults"]], file=str(path))


def _store(scan: Scan, folder: Path, name: str) -> None:
    arrays = {name: np.ascontiguousarray(getattr(scan, name)) for name in _ARRAYS}
    arrays["paths"] = arrays["paths"].view(np.uint8).reshape(len(scan.paths), -1)  # torch has no strings
    content = {name: torch.from_numpy(array) for name, array in arrays.items()}
    with new_draft(folder, name) as draft:
        with draft.open("wb") as file:  # torch accepts no name that begins with a dot
            torch.save({**content, "faults": [dataclasses.astuple(fault) for fault in scan.faults]}, file)
        draft.replace(folder / name)
    with contextlib.suppress(OSError):  # another node removes them, too
        newest_last = sorted(folder.glob("labels-*"), key=lambda path: path.stat().st_mtime_ns)
        for path in newest_last[:-_KEPT]:
            path.unlink()


@contextlib.contextmanager
def new_draft(folder: Path, name: str) -> Iterator[Path]:
    """Yield a new path in the cache folder `folder`, and remove it on exit; remove old drafts of killed processes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    for path in folder.glob(".draft-*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - _ABANDONED_S:
                path.unlink()
    draft = folder / f".draft-{name}-{uuid.uuid4().hex}"
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def cache_folders(root: str) -> list[Path]:
    """Return the candidate cache folders of the dataset in `root`, in order of preference.

    In a job, the node's cache folder outlives the container.
    """
    name = hashlib.blake2b(os.fsencode(root), digest_size=8).hexdigest()
    # Check the write bits: os.access() is always true for root.
    writable = os.stat(root).st_mode & 0o222  # noqa: PTH116
    beside = [Path(root, FOLDER)] if writable else []
    in_job = [folder / "labels" / name] if (folder := of_node()) else []
    return [*beside, *in_job, of_user() / "clusterctl" / "labels" / name]
