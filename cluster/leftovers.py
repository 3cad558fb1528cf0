"""What jobs have left on machines, found without a record: by containers' labels and processes' environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster import fanout, looks, readiness, resources
from cluster.errors import ClusterError, UnreachableError
from cluster.model import Node
from cluster.shells import reach


@dataclass(frozen=True)
class Present:
    """A job on one machine: `runs` while its node script does, which ends by itself or by `clusterctl stop`."""

    node: str
    job: str
    runs: bool
    processes: int
    containers: int


def look(nodes: Sequence[Node]) -> dict[str, list[Present] | ClusterError]:
    """The jobs of which something is on each machine, by the node's name."""
    return fanout.each(nodes, _look)


def remove(node: Node, job: str) -> None:
    """End and remove everything of a job on one machine; raises ClusterError for what stays."""
    left = looks.stop(reach(node), job, 0, ("docker", "podman"), timeout_s=60)
    if left:
        raise ClusterError(
            f"{readiness.place(node)}: {left} of {job} do not end",
            "look at the engine with clusterctl doctor, or end them as root there",
        )


def _look(node: Node) -> list[Present]:
    done = reach(node).run(["bash", "-c", resources.text("agent/orphans.sh"), "orphans"], timeout_s=60)
    if done.code:
        raise UnreachableError(f"{readiness.place(node)}: {done.last_line}")
    kinds: dict[str, list[str]] = {}
    for line in done.out.splitlines():
        kind, job, _ = line.split(" ", 2)
        kinds.setdefault(job, []).append(kind)
    return [
        Present(readiness.place(node), job, "script" in found, found.count("process"), found.count("container"))
        for job, found in sorted(kinds.items())
    ]
