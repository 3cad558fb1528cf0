"""No container: the node script runs torchrun where it stands (also inside a container that compose made)."""

from __future__ import annotations

from cluster.model import Job


class NoRuntime:
    """The interpreter of the job, as it is."""

    def run(self, job: Job) -> tuple[str, ...]:
        """`python -m torch.distributed.run ...`: the `torchrun` script may belong to another interpreter."""
        return (job.python, "-m", "torch.distributed.run", *job.command)
