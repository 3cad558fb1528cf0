"""Lock between the processes of a machine."""

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def one_per_machine(folder: Path) -> Iterator[bool]:
    """Hold the machine's lock of `folder`; yield whether another process held it before.

    The lock file is on a local disk, because locks on network disks are unreliable. The kernel releases it when
    the process ends. Its last holder removes it. If the file cannot be locked, the caller continues without a lock.
    """
    name = hashlib.blake2b(os.fsencode(folder), digest_size=8).hexdigest()
    path = Path(tempfile.gettempdir(), f"clusterctl-{os.getuid()}-{name}.lock")
    file, waited = _lock(path)
    try:
        yield waited
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                path.unlink()  # while it is held: who waits for it tries again, with a new file
            os.close(file)


def _lock(path: Path) -> tuple[int | None, bool]:
    """Return the open lock file, and whether another process held it before; None if it cannot be locked."""
    waited = False
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            return None, waited
        try:
            if os.fstat(file).st_uid != os.getuid():  # another user could hold it for ever
                raise PermissionError
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = True
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            os.close(file)
            return None, waited
        if _is_at(path, file):
            return file, waited
        os.close(file)  # the process that held it has removed it


def _is_at(path: Path, file: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(file))
    return False
