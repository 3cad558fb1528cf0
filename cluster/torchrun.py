"""What torchrun is told on a node: its command line, the same on all, and its options, which it reads from `PET_*`."""

from __future__ import annotations

from collections.abc import Sequence

from cluster import contract
from cluster.model import Job, Node


def command(job: Job) -> tuple[str, ...]:
    """`python -m torch.distributed.run ...`: the `torchrun` script may belong to another interpreter."""
    # torchrun fills `${local_rank}` into the program's arguments and takes `$$` for `$`, so `$` is doubled for it.
    return (job.python, "-m", "torch.distributed.run", *(word.replace("$", "$$") for word in job.command))


def environment(
    job: Job, node: Node, rank: int, *, attempt: int, run_dir: str, master: tuple[str, int], gpus: Sequence[int]
) -> dict[str, str]:
    """The contract's variables for one node; only NODE, the rank, the log folder and the GPUs differ between nodes.

    `gpus` are the ids as the program sees them.
    """
    values = {
        "NODE": node.name,
        "PET_NNODES": str(job.nodes),
        "PET_NODE_RANK": str(rank),
        "PET_NPROC_PER_NODE": str(job.procs_per_node),
        "PET_MASTER_ADDR": master[0],
        "PET_MASTER_PORT": str(master[1]),
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ID": job.name,
        "PET_LOG_DIR": f"{run_dir}/attempt-{attempt}/ranks/{node.name}",
        "PET_REDIRECTS": "3",
        "PET_TEE": "3",
        "PYTHONUNBUFFERED": "1",
        contract.JOB_ID: job.name,
        contract.ATTEMPT: str(attempt),
        contract.RUN_DIR: run_dir,
    }
    if job.device == "cpu":
        values["CUDA_VISIBLE_DEVICES"] = ""
    elif job.device == "cuda" or gpus:
        # CUDA counts the fastest first where it is not told to count as nvidia-smi does, which our ids are from.
        values |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpus)}
    return values
