"""The most memory that this process and those that it started have held."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

import torch


def host_bytes() -> int:
    """Peak resident bytes of this process and all of its descendants that live, its loading workers among them.

    Pages that several of them share are counted in each, as `ps` does. Where there is no /proc, of this process alone.
    """
    parents: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # it has ended meanwhile, or is the kernel's own
            lines = (line.split() for line in (folder / "status").read_text(encoding="utf-8").splitlines())
            fields = {words[0]: words[1] for words in lines if len(words) > 1}
            parents[int(folder.name)] = int(fields["PPid:"])
            peaks[int(folder.name)] = int(fields["VmHWM:"]) * 1024
    own = os.getpid()
    if own not in peaks:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    family = {own}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(peaks.get(pid, 0) for pid in family)


def device_bytes(device: torch.device) -> int | None:
    """Peak bytes that torch has reserved on the device, so that no other program could have them; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
