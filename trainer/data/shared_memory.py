"""How many worker processes the machine's shared memory has room for."""

from __future__ import annotations

import shutil
from pathlib import Path

PREFETCH = 3  # batches that each worker makes ahead, where there is room
_FOLDER = Path("/dev/shm")
_IN_HAND = 2  # batches of a rank that are neither made nor used up, but on their way
_USABLE = 0.45  # of what is free now: while a model is validated, the next training batches wait there, too


def room() -> int | None:
    """Bytes of /dev/shm, where workers hand their batches over, that may be used; None where it has no limit."""
    return int(shutil.disk_usage(_FOLDER).free * _USABLE) if _FOLDER.is_dir() else None


def fit_workers(workers: int, batch_bytes: int, local_size: int, bytes_free: int | None) -> tuple[int, int, str]:
    """(workers of each rank, batches that each makes ahead, what to tell the user if that is less than wanted).

    Workers that fill /dev/shm die of "Bus error", so fewer of them are started; first they make fewer batches ahead.
    """
    if not workers or bytes_free is None:
        return workers, PREFETCH, ""
    batches = bytes_free // (local_size * batch_bytes) - _IN_HAND
    for ahead in range(PREFETCH, 0, -1):
        if workers * ahead <= batches:
            return workers, ahead, ""
    fewer = max(0, batches)
    needed = (workers + _IN_HAND) * local_size * batch_bytes
    return (
        fewer,
        1,
        f"/dev/shm has room for {bytes_free >> 20} MiB, {workers} workers on each of {local_size} ranks need "
        f"{(needed >> 20) + 1} MiB: going on with {fewer}. Give a container more with --shm-size=8g or --ipc=host",
    )
