"""Lets one process of a machine do what others then find done."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def one_per_machine(folder: Path) -> Iterator[bool]:
    """Let one process of this machine work on `folder` at a time; tells whether another one did until now.

    The lock is on the machine's own disk, as locks of a network's are not to be relied on, and the kernel holds it:
    it ends with its process, however that ends. Where there can be no lock, all go on at once.
    """
    name = hashlib.blake2b(os.fsencode(folder), digest_size=8).hexdigest()
    path = Path(tempfile.gettempdir(), f"clusterctl-{os.getuid()}-{name}.lock")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield False
        return
    try:
        waited = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_EX)
            waited = True
        except OSError:
            pass
        yield waited
    finally:
        os.close(file)
