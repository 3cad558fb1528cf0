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
    the process ends. If the file cannot be locked, the caller continues without a lock.
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
            if os.fstat(file).st_uid != os.getuid():  # another user could hold it for ever
                raise PermissionError
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_EX)
            waited = True
        except OSError:
            pass
        yield waited
    finally:
        os.close(file)
