"""Apptainer (and Singularity, its former name): the SIF file of the image, an ordinary user's process, no daemon."""

from __future__ import annotations

from collections.abc import Sequence

from cluster import quoting
from cluster.model import Job, Mount, Node


class ApptainerRuntime:
    """One container per node, which sees the network and the shared memory of its machine."""

    name = "apptainer"
    inside = False
    engine = ""

    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """`apptainer run` with a clean environment and no home; with `--nv` where GPUs are asked for.

        Without `--no-eval` it would take the variables for shell text. agent/node.sh exports the `names` for it.
        """
        words = ["apptainer", "--silent", "run", "--no-eval", "--cleanenv", "--no-home", "--no-mount", "cwd"]
        if job.device == "cuda" or (job.device == "any" and node.gpus):
            words.append("--nv")
        for mount in mounts:
            fields = ["type=bind", f"source={mount.source}", f"destination={mount.target}"]
            words += ["--mount", quoting.csv([*fields, "ro"] if mount.read_only else fields)]
        return (*words, "--pwd", job.workdir or "/", job.image)

    def gpus(self, node: Node) -> tuple[int, ...]:
        """As the machine counts them."""
        return node.gpus
