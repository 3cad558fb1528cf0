"""The agent's command line, which is the same on all nodes, and its variables: torchrun's options, as `PET_*`."""

from __future__ import annotations

from collections.abc import Sequence

from cluster import contract
from cluster.model import Job


def command(job: Job, agent: str) -> tuple[str, ...]:
    """`python3 AGENT -m trainer train ...`, for the agent at the path `agent` on the node."""
    return (job.python, agent, *job.command)


def shared_environment(job: Job, *, attempt: int, run_dir: str, master: tuple[str, int]) -> dict[str, str]:
    """The contract's variables that all nodes have in common; `run_dir` is the job's folder as the nodes see it."""
    values = {
        "PET_NNODES": str(job.nodes),
        "PET_NPROC_PER_NODE": str(job.procs_per_node),
        "PET_MASTER_ADDR": master[0],
        "PET_MASTER_PORT": str(master[1]),
        contract.JOB_ID: job.name,
        contract.ATTEMPT: str(attempt),
        contract.RUN_DIR: run_dir,
        contract.GLOBAL_WORLD_SIZE: str(job.world_size),
    }
    if job.secrets:
        values[contract.SECRETS] = ",".join(job.secrets)
    return values


def gpu_environment(job: Job, gpus: Sequence[int]) -> dict[str, str]:
    """The variables that give a node its `gpus`, the ids as the program sees them."""
    if job.device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    if job.device == "cuda" or gpus:
        # CUDA counts the fastest first by default. The ids are those of nvidia-smi.
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpus)}
    return {}
