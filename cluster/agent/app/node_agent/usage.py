"""CPU, memory and GPU use of the ranks, and out-of-memory kills, from /proc, cgroups and nvidia-smi."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
import time
from subprocess import DEVNULL, PIPE

from .ranks import Rank
from .settings import HEARTBEAT_S, Fields


class Usage:
    """CPU, memory and GPU use of the node's ranks, sampled at every heartbeat."""

    def __init__(self, ranks: list[Rank], ended: threading.Event) -> None:
        self._ranks = ranks
        self._at = time.monotonic()
        self._before: dict[int, tuple[float, float, int]] = {}
        self._gpus: list[Fields] | None = []
        self._visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self._ended = ended
        #: Cores that the ranks use: with their child processes, by the child processes alone, and by each rank alone.
        self.cpu = 0.0
        self.children_cpu = 0.0
        self.own_cpu: dict[int, float] = {}
        #: Bytes that the ranks and their child processes have read and written since the last sample.
        self.io_bytes = 0
        if self._visible:
            threading.Thread(target=self._watch_gpus, daemon=True).start()

    def _watch_gpus(self) -> None:
        while True:
            self._gpus = query_gpus(self._visible)
            if self._ended.wait(HEARTBEAT_S):
                return

    @property
    def gpus_are_active(self) -> bool:
        """Whether a GPU computes, or may compute because nvidia-smi does not report it."""
        return self._gpus is None or any(gpu["use"] is None or gpu["use"] > 0 for gpu in self._gpus)

    def sample(self) -> Fields:
        """Return the field `usage` of the status, and set the attributes."""
        now = time.monotonic()
        elapsed = max(0.1, now - self._at)
        self._at = now
        rows: list[Fields] = []
        gpus = self._gpus or []
        self.cpu = self.children_cpu = 0.0
        self.io_bytes = 0
        for rank in self._ranks:
            if rank.code is not None:
                continue
            own, children, memory, io_bytes = resources(rank.process.pid)
            own_before, children_before, io_before = self._before.get(rank.number, (0.0, 0.0, 0))
            self._before[rank.number] = own, children, io_bytes
            self.own_cpu[rank.number] = max(0.0, own - own_before) / elapsed
            self.children_cpu += max(0.0, children - children_before) / elapsed
            self.io_bytes += max(0, io_bytes - io_before)
            cores = max(0.0, own + children - own_before - children_before) / elapsed
            self.cpu += cores
            gpu = gpus[rank.local_rank % len(gpus)] if gpus else {}
            rows.append(dict(gpu, rank=rank.number, cpu=round(cores, 2), rss=memory))
        with open("/proc/meminfo") as file:
            sizes = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+)", file.read(), re.MULTILINE))
        host = {"free": int(sizes["MemAvailable"]) << 10, "total": int(sizes["MemTotal"]) << 10}
        return {"ranks": rows, "host": host}


def query_gpus(visible: str) -> list[Fields] | None:
    """Return the use of the GPUs in CUDA_VISIBLE_DEVICES, in its order; None if nvidia-smi does not answer.

    `use` (in percent), memory (bytes) and `temperature` (°C) are None if the GPU does not report them, as a MIG device.
    """
    units = {"use": 1, "memory": 1 << 20, "memory_total": 1 << 20, "temperature": 1}
    query = ["nvidia-smi", "--query-gpu=index,uuid,utilization.gpu,memory.used,memory.total,temperature.gpu"]
    query += ["--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, stdout=PIPE, stderr=DEVNULL, timeout=10, check=True)
        found: dict[str, Fields] = {}
        for line in done.stdout.decode().splitlines():
            index, uuid, *values = [field.strip() for field in line.split(",")]
            numbers = {
                key: int(value) * units[key] if value.isdigit() else None for key, value in zip(units, values)
            }
            found[index] = found[uuid] = dict({"gpu": index}, **numbers)
        if any(len(row) <= len(units) for row in found.values()):
            return None
        return [found.get(name) or dict(dict.fromkeys(units), gpu=name) for name in visible.split(",")]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def resources(pid: int) -> tuple[float, float, int, int]:
    """Return what a process and its descendants use.

    CPU seconds of the process, CPU seconds of its descendants, resident memory in bytes, and bytes read and written.
    """
    ticks = []
    pages = 0
    io_bytes = 0
    for process in descendants(pid):
        with contextlib.suppress(OSError), open("/proc/%d/stat" % process, "rb") as file:
            values = file.read().rpartition(b")")[2].split()
            ticks.append(int(values[11]) + int(values[12]))
            pages += int(values[21])
        with contextlib.suppress(OSError), open(
            "/proc/%d/io" % process
        ) as file:  # of files and pipes, not of sockets
            io_bytes += sum(int(size) for size in re.findall(r"^[rw]char: (\d+)", file.read(), re.MULTILINE))
    hertz = os.sysconf("SC_CLK_TCK")
    return sum(ticks[:1]) / hertz, sum(ticks[1:]) / hertz, pages * os.sysconf("SC_PAGE_SIZE"), io_bytes


def descendants(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir("/proc/%d/task" % parent):
                with open("/proc/%d/task/%s/children" % (parent, thread)) as file:
                    found += [int(child) for child in file.read().split()]
    return found


def count_memory_kills() -> int:
    """Return the number of out-of-memory kills in this node's control group, or 0 if it cannot be read."""
    files = [
        "/sys/fs/cgroup/memory.events",
        "/sys/fs/cgroup/memory/memory.oom_control",
    ]  # of a container: v2, v1
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                files.append("/sys/fs/cgroup{}/memory.events".format(path.rstrip("/")))
            elif "memory" in controllers.split(","):
                files.append("/sys/fs/cgroup/memory{}/memory.oom_control".format(path.rstrip("/")))
    total = 0
    for name in files:
        with contextlib.suppress(OSError), open(name) as file:
            found = re.search(r"^oom_kill (\d+)", file.read(), re.MULTILINE)
            total = max(total, int(found.group(1)) if found else 0)
    return total
