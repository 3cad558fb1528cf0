"""Memory: the trainer's out-of-memory error with its hint, and glibc's allocator settings."""

import ctypes
import os
import platform
import resource

import torch

OUT_OF_MEMORY = "out of memory"  # how messages of it begin
HINT = "use a smaller --batch, --imgsz or --cfg, or --precision bf16"
# The last is from CUDA's libraries.
_MESSAGES = ("can't allocate memory", "not enough memory", OUT_OF_MEMORY, "status_alloc_failed")
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Keep freed memory in the process (glibc); return whether the setting was made.

    A step on the CPU allocates and frees hundreds of megabytes. By default glibc returns large blocks to the system,
    which clears every page again in the next step: a seventh of yolov5n's training time. Peak memory does not change.
    MALLOC_ variables of the user take precedence, and a limited address space (ulimit -v) keeps the default.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_TRIM_THRESHOLD, -1) and mallopt(_MMAP_MAX, 0))


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Return whether an allocation failed, in host memory or on a GPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(message in str(error).lower() for message in _MESSAGES)


def reserved(device: torch.device) -> int:
    """Return the bytes that torch has reserved on a GPU, as `nvidia-smi` shows without CUDA's own; 0 on the CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
