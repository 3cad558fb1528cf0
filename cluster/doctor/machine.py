"""Judges what is true of a machine by itself: its disk, memory, limits, clock, user, and what earlier jobs left."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from cluster.doctor.findings import Finding, Level, Seen, typed_on
from cluster.doctor.probe import Facts
from cluster.model import Node

_GB_KB = 1 << 20
#: A torch loader's batches go through /dev/shm: 16 pictures of 640 px are 80 MB, several wait per rank.
SHM_NEEDED_KB, SHM_GOOD_KB = _GB_KB // 4, _GB_KB
DISK_NEEDED_KB, DISK_GOOD_KB = _GB_KB, 5 * _GB_KB
INODES_NEEDED = 1000
FILES_GOOD = 4096
CLOCK_S = 2.0


def _each(seen: Seen, judge: Callable[[Node, Facts], Finding]) -> list[Finding]:
    return [judge(node, seen.facts[node.name]) for node in seen.nodes]


def shm(seen: Seen) -> list[Finding]:
    """/dev/shm holds the batches of the loaders' workers: containers see the machine's (--ipc host)."""

    def judge(node: Node, facts: Facts) -> Finding:
        left, total = facts.number("shm_kb"), facts.number("shm_kb", 1)
        if left is None or total is None:
            fix = typed_on(node, facts, "mount -t tmpfs -o size=8g tmpfs /dev/shm", root=True)
            return Finding("shm", node.name, "failure", "there is no /dev/shm", fix)
        fix = typed_on(node, facts, f"mount -o remount,size={_half_memory_gb(facts)}g /dev/shm", root=True)
        size = f"/dev/shm has {_size(left)} free of {_size(total)}"
        if left < SHM_NEEDED_KB:
            if total >= SHM_GOOD_KB:
                fix = f"see what fills it: {typed_on(node, facts, 'ls -lhS /dev/shm')}"
            return Finding("shm", node.name, "failure", f"{size}: loaders' workers end with 'bus error'", fix)
        if left < SHM_GOOD_KB:
            return Finding("shm", node.name, "warning", f"{size}: enough for few workers", fix)
        return Finding("shm", node.name, "ok", "/dev/shm has room")

    return _each(seen, judge)


def limits(seen: Seen) -> list[Finding]:
    """Open files for workers and connections; locked memory where there is InfiniBand."""

    def judge(node: Node, facts: Facts) -> Finding:
        files, locked = facts.number("nofile"), facts.text("memlock_kb")
        user = facts.text("user")
        if files is not None and files < FILES_GOOD:
            fix = typed_on(node, facts, f"echo '{user} - nofile 65536' >> /etc/security/limits.conf")
            why = f"{files} open files: too few for many workers"
            return Finding("limits", node.name, "warning", why, f"as root: {fix}")
        if facts.every("infiniband") and locked != "unlimited" and node.runtime == "none":
            fix = typed_on(node, facts, f"echo '{user} - memlock unlimited' >> /etc/security/limits.conf")
            why = f"InfiniBand, but {locked} kB of locked memory"
            return Finding("limits", node.name, "warning", why, f"as root: {fix}")
        return Finding("limits", node.name, "ok", "open files and locked memory suffice")

    return _each(seen, judge)


def disk(seen: Seen) -> list[Finding]:
    """Room for checkpoints and logs in run_dir, and for layers where the engine keeps them."""

    def judge(node: Node, facts: Facts) -> Finding:
        folder = facts.text("run_dir")
        room = f"make room (see {typed_on(node, facts, 'df -h')}), or in cluster.yaml, {node.name}: run_dir: ..."
        prune = f"remove images that nobody uses: {typed_on(node, facts, f'{node.runtime} image prune')}"
        places = (
            (f"{folder} (run_dir)", facts.number("run_disk_kb"), room),
            (f"{facts.text('engine_root')} (images)", facts.number("engine_disk_kb"), prune),
        )
        levels: tuple[tuple[Level, int], ...] = (("failure", DISK_NEEDED_KB), ("warning", DISK_GOOD_KB))
        for level, least in levels:
            for place, left, fix in places:
                if left is not None and left < least:
                    return Finding("disk", node.name, level, f"{_size(left)} free for {place}", fix)
        inodes = facts.number("run_inodes")
        # some file systems count no inodes and say 0 of 0
        if inodes is not None and facts.number("run_inodes", 1) and inodes < INODES_NEEDED:
            return Finding("disk", node.name, "failure", f"only {inodes} more files fit for {folder}", room)
        return Finding("disk", node.name, "ok", "has room")

    return _each(seen, judge)


def run_dir(seen: Seen) -> list[Finding]:
    """A file was written where the job's folder will be."""

    def judge(node: Node, facts: Facts) -> Finding:
        folder = facts.text("run_dir")
        if why := facts.text("unwritable"):
            make = typed_on(node, facts, f"install -d -o {facts.text('user')} {folder}", root=True)
            if "space" in why or "quota" in why.lower():
                make = f"make room: {typed_on(node, facts, f'df -h {folder}')}"
            return Finding("run_dir", node.name, "failure", f"{folder} cannot be written: {why}", make)
        return Finding("run_dir", node.name, "ok", f"{folder} is writable")

    return _each(seen, judge)


def user(seen: Seen) -> list[Finding]:
    """One user id everywhere, so that files of a common folder belong to one user."""
    uids = {node.name: seen.facts[node.name].text("uid") for node in seen.nodes}
    usual = max(uids.values(), key=list(uids.values()).count, default="")

    def judge(node: Node, facts: Facts) -> Finding:
        shown = f"{facts.text('user')} ({facts.text('uid')})"
        if uids[node.name] != usual:
            fix = f"log in as the same user everywhere (the user id is made by: useradd -u {usual} ...)"
            why = f"{shown}, elsewhere the user id is {usual}: files of a common folder belong to strangers"
            return Finding("user", node.name, "warning", why, fix)
        return Finding("user", node.name, "ok", shown)

    return _each(seen, judge)


def clock(seen: Seen) -> list[Finding]:
    """Clocks agree with the nodes' and this machine's median: the first error of a job is found by its time."""
    middle = statistics.median([0.0, *seen.clock_s.values()])

    def judge(node: Node, facts: Facts) -> Finding:
        off_s = seen.clock_s.get(node.name, middle) - middle
        if abs(off_s) > CLOCK_S:
            fix = typed_on(node, facts, "timedatectl set-ntp true", root=True)
            if not facts.has("systemd"):
                fix = typed_on(node, facts, "chronyd -q 'server pool.ntp.org iburst'", root=True)
            if facts.every("wsl_networking"):
                fix = typed_on(node, facts, "hwclock -s", root=True)
            way = "ahead of" if off_s > 0 else "behind"
            why = f"{abs(off_s):.0f} s {way} the others: the wrong error is taken for the first"
            return Finding("clock", node.name, "failure", why, fix)
        return Finding("clock", node.name, "ok", f"agrees within {CLOCK_S:g} s")

    return _each(seen, judge)


def leftovers(seen: Seen) -> list[Finding]:
    """Containers and processes of our jobs, apart from jobs that are known to run."""

    def judge(node: Node, facts: Facts) -> Finding:
        jobs = [job for job, _ in facts.pairs("container")] + list(facts.every("process"))
        found = list(dict.fromkeys(jobs))
        left = [job for job in found if job not in seen.jobs]
        if left:
            why = f"something is left of {', '.join(left)}"
            return Finding("leftovers", node.name, "warning", why, "clusterctl gc")
        running = [job for job in found if job in seen.jobs]
        return Finding("leftovers", node.name, "ok", f"{', '.join(running)} runs" if running else "none")

    return _each(seen, judge)


def _half_memory_gb(facts: Facts) -> int:
    return max(1, (facts.number("memory_kb") or 0) // 2 // _GB_KB)


def _size(kilobytes: int) -> str:
    if kilobytes < _GB_KB:
        return f"{kilobytes / 1024:.0f} MB"
    return f"{kilobytes / _GB_KB:.1f} GB"
