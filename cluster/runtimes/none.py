"""No container: the node script runs torchrun where it stands (also inside a container that compose made)."""

from __future__ import annotations

from cluster.model import Job


class NoRuntime:
    """The interpreter of the job, as it is."""

    def run(self, job: Job) -> tuple[str, ...]:
        """`python -m torch.distributed.run ...`: the `torchrun` script may belong to another interpreter."""
        # torchrun fills `${local_rank}` into the program's arguments and takes `$$` for `$`, so `$` is doubled for it.
        return (job.python, "-m", "torch.distributed.run", *(word.replace("$", "$$") for word in job.command))
