"""Files of a run directory, which jobs and nodes write: read and written only if they are physically inside of it.

A job, or the administrator of a node, can put a symbolic link, a FIFO or a device in the place of any file or folder. A
link within the run directory is followed. One that leads out would show a private file of this machine to the readers
of the job's report, or have it overwritten.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from pathlib import Path
from typing import IO, Any, Literal

from cluster.errors import ClusterError
from cluster.transport.archive import is_inside, leads_out

__all__ = ["REFUSED", "check", "is_inside", "leads_out", "open_file"]

#: The error numbers of what `open_file` refuses: a path that leads out, no regular file, a socket.
REFUSED = (errno.ELOOP, errno.EINVAL, errno.ENXIO)
#: How a folder on the way to a file is opened: not even its names are read.
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
_FLAGS = {
    "rb": os.O_RDONLY,
    "wb": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}


def check(path: str | Path, folder: str | Path) -> None:
    """Raise ClusterError if a path leads out of `folder`, before it is written by another program, or sent."""
    if not is_inside(path, folder):
        hint = f"a link on the way leads elsewhere: remove it (readlink -f {shlex.quote(str(path))})"
        raise ClusterError(f"this machine: {path} leads out of {folder}", hint)


def open_file(folder: str | Path, name: str | Path, mode: Literal["rb", "wb", "ab", "xb"] = "rb") -> IO[Any]:
    """Open the regular file `name` below `folder`, with a path that is absolute or relative to it.

    Other modes than "rb" create a missing file.

    Raises OSError, with the reason, if there is no such file, or if it is outside of `folder`, or no regular file. A
    link that is changed at the same time cannot lead out: the path is resolved first, and then opened without links.
    """
    path = os.path.realpath(Path(folder, name))
    top = os.path.realpath(folder)
    if not Path(path).is_relative_to(top):
        raise OSError(errno.ELOOP, f"leads out of {folder}", str(Path(folder, name)))
    *folders, last = Path(path).relative_to(top).parts or (".",)
    at = os.open(top, _FOLDER)
    try:
        for part in folders:
            below = os.open(part, _FOLDER, dir_fd=at)
            os.close(at)
            at = below
        # O_NONBLOCK: to open a FIFO would wait for its other end.
        flags = _FLAGS[mode] | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        opened = os.open(last, flags, 0o666, dir_fd=at)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(Path(folder, name))) from error
    finally:
        os.close(at)
    mode_of = os.fstat(opened).st_mode
    if not stat.S_ISREG(mode_of):
        os.close(opened)
        if stat.S_ISDIR(mode_of):
            raise IsADirectoryError(errno.EISDIR, "is a folder", str(Path(folder, name)))
        raise OSError(errno.EINVAL, "is no regular file", str(Path(folder, name)))
    return os.fdopen(opened, mode)
