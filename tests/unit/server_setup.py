"""The last module that the server of trainer_process.py imports; it changes the server for tests."""

import errno
import gc
from multiprocessing import forkserver, reduction
from types import SimpleNamespace


def _receive(sock: object, size: int) -> list[int]:
    """Receive a client's file descriptors; a client that was killed before it sent them does not end the server."""
    try:
        return reduction.recvfds(sock, size)
    except EOFError:
        raise OSError(errno.ECONNABORTED, "the client has ended") from None  # which the server ignores


# A trainer has a server of its own, but in tests one server is shared, and some of its clients are killed.
forkserver.reduction = SimpleNamespace(**vars(reduction) | {"recvfds": _receive})  # type: ignore[attr-defined]
gc.freeze()  # every collection of a forked process would visit what was imported before
