"""Free memory of this machine, within the limits of the control groups that this process is in."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
# Per version of control groups: the mount of the memory controller, the files with a group's limit and use, and the
# name in memory.stat of the file cache that the kernel gives up first.
_VERSIONS = {
    2: ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def memory_free(root: Path = _ROOT) -> int:
    """Return the bytes of memory that this process and others can still take; `root` is the file system's."""
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    for group, version, limit in _limits(root):
        _, _, used, cache = _VERSIONS[version]
        with contextlib.suppress(OSError, ValueError):
            taken = int((group / used).read_text(encoding="ascii"))
            counts = dict(
                line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines()
            )
            free = min(free, limit - taken + int(counts.get(cache, 0)))
    return max(0, free)


@functools.cache
def _limits(root: Path) -> list[tuple[Path, int, int]]:
    """Return (folder, version, bytes) of each group with a limit: a Slurm job's is several levels above the process."""
    found = []
    for group, version in _groups(root):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            found.append((group, version, int((group / _VERSIONS[version][1]).read_text(encoding="ascii"))))
    return found


def _groups(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder and version of this process's group and of those above it.

    A container may see its own group as the root of the mount, under a path that only the host has.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        mount = root / _VERSIONS[version][0]
        parts = Path(path.lstrip("/")).parts
        yield from ((mount.joinpath(*parts[:count]), version) for count in range(len(parts), -1, -1))
