"""Standard output and standard error of a program: what happens when they cannot be written any more.

The launcher and the trainer have the same file, because neither imports the other.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

#: Ctrl-C ends the reader of a pipe as well (`launch | tee log`). Its signal, not the closed pipe, decides then.
_SIGNAL_S = 0.2
_is_closed = _is_outlived = False


def take() -> None:
    """From now on a closed pipe is a closed terminal: the first write that fails sends this process SIGHUP.

    So does a write to a full disk, with a sentence on stderr. What is printed after that is lost, and with SIGHUP
    ignored (nohup) the program runs on. A stream that was closed before the start (`>&-`) is /dev/null.
    """
    with suppress(OSError):
        while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(opened)
    for name, number in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name) or io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
        raw = _OutputFile(number, "w", closefd=False)
        wrapped = io.TextIOWrapper(
            raw if before.write_through else io.BufferedWriter(raw),
            before.encoding,
            before.errors,
            line_buffering=before.line_buffering,
            write_through=before.write_through,
        )
        setattr(sys, name, wrapped)


def outlive() -> None:
    """From now on a stream that cannot be written is only discarded: what the program does is more than its output."""
    global _is_outlived
    _is_outlived = True


def is_closed() -> bool:
    """Return whether this process got SIGHUP because a stream could not be written."""
    return _is_closed


def flush() -> None:
    """Write what is buffered. Python would end with `Exception ignored` if that failed at its exit."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(KeyboardInterrupt, SystemExit, OSError, ValueError):
            stream.flush()


class _OutputFile(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        """Write to the file, or discard the data if it cannot be written."""
        try:
            return super().write(data)
        except OSError as error:
            _lose(self.fileno(), error)
            return len(memoryview(data))


def _lose(number: int, error: OSError) -> None:
    global _is_closed
    if error.errno in (errno.EPIPE, errno.EIO):
        time.sleep(_SIGNAL_S)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
    if error.errno not in (errno.EPIPE, errno.EIO) and number == 1:
        with suppress(OSError):
            os.write(2, f"error: standard output cannot be written: {error.strerror}\n".encode())
    if not (_is_closed or _is_outlived or signal.getsignal(signal.SIGHUP) == signal.SIG_IGN):
        _is_closed = True
        signal.raise_signal(signal.SIGHUP)
