"""Orphans: jobs on machines, found by container labels and process environments instead of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.agent import scripts
from cluster.backends import monitor
from cluster.errors import ClusterError, UnreachableError
from cluster.runtimes import ENGINES
from cluster.spec.model import Node
from cluster.transport import parallel, reach


@dataclass(frozen=True)
class Orphan:
    """A job on one machine; `runs` while its node script runs, so that it is no orphan."""

    node: str
    job: str
    runs: bool
    processes: int
    containers: int


def find(nodes: Sequence[Node]) -> dict[str, list[Orphan] | ClusterError]:
    """Return the jobs with a process or container on each machine, by the node's name."""
    return parallel.each(nodes, _find)


def remove(node: Node, job: str) -> None:
    """Kill a job's processes and remove its containers on a machine. Raises ClusterError if some remain."""
    monitor.stop(reach(node), node, job, 0, tuple(ENGINES), timeout_s=60)


def _find(node: Node) -> list[Orphan]:
    done = reach(node).run(scripts.command("orphans", *ENGINES), timeout_s=60)
    if done.code:
        raise UnreachableError(f"{node.display_name}: {done.last_line}")
    kinds: dict[str, list[str]] = {}
    for line in done.out.splitlines():
        kind, job, _ = line.split(" ", 2)
        kinds.setdefault(job, []).append(kind)
    return [
        Orphan(node.display_name, job, "script" in found, found.count("process"), found.count("container"))
        for job, found in sorted(kinds.items())
    ]
