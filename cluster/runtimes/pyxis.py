"""Pyxis and enroot, NVIDIA's plugin for Slurm: a job step of its own per node enters the container."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.model import Job, Mount, Node
from cluster.quoting import OPTIONS


class PyxisRuntime:
    """Only within a job of Slurm; `image` is what `--container-image` takes: REGISTRY#NAME:TAG, or a .sqsh file."""

    name = "pyxis"
    inside = False
    engine = ""

    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """`srun --container-image ...` on this node, within the job's own step; variables by name."""
        words = ["srun", "--overlap", "--nodes=1", "--ntasks=1", OPTIONS, f"--container-image={job.image}"]
        words += ["--no-container-mount-home", f"--container-env={','.join(names)}"]
        sources = [f"{mount.source}:{mount.target}" + (":ro" if mount.read_only else "") for mount in mounts]
        if sources:
            words.append(f"--container-mounts={','.join(sources)}")
        if job.workdir:
            words.append(f"--container-workdir={job.workdir}")
        return tuple(words)

    def gpus(self, node: Node) -> tuple[int, ...]:
        """As the machine counts them."""
        return node.gpus
