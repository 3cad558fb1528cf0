"""No container: the agent runs where the node's script does."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.model import Job, Mount, Node


class NoRuntime:
    """The interpreter of the job, as it is."""

    name = "none"
    inside = True
    engine = ""

    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def gpus(self, node: Node) -> tuple[int, ...]:
        """As the machine counts them."""
        return node.gpus
