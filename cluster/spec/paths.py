"""Paths of the launching machine. Pure."""

import posixpath


def absolute(path: str, cwd: str) -> str:
    """Return a path without `.` and `..`; a relative one is below the folder `cwd`."""
    return posixpath.normpath(posixpath.join(cwd, path))
