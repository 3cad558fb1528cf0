"""Keeps the memory that a step frees for the next step, where the system would take it back and clear it each time."""

from __future__ import annotations

import ctypes
import os
import platform
import resource

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's names for them, in malloc.h


def keep_freed_memory() -> bool:
    """Tell glibc not to give freed memory back, for the rest of the process; whether it was told so.

    A step on the CPU allocates and frees hundreds of megabytes. glibc returns large blocks to the system, so that
    every page of them is faulted in and cleared again in the next step: a seventh of yolov5n's training time. The
    most memory that the process holds stays the same. A user's own MALLOC_ variables stand, and where the address
    space is limited (ulimit -v) nothing is kept: what is not given back is missing elsewhere.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_TRIM_THRESHOLD, -1) and mallopt(_MMAP_MAX, 0))
