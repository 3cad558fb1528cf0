"""No container: the node script runs torchrun where it stands (also inside a container that compose made)."""

from __future__ import annotations

from collections.abc import Sequence

from cluster import torchrun
from cluster.model import Job, Mount, Node


class NoRuntime:
    """The interpreter of the job, as it is."""

    inside = True
    setup = ""

    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """torchrun as it is."""
        return torchrun.command(job)

    def gpus(self, node: Node) -> tuple[int, ...]:
        """As the machine counts them."""
        return node.gpus

    def stop(self, job_id: str, grace_s: int) -> str:
        """Processes are found and ended without us."""
        return ""
