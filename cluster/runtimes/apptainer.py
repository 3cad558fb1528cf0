"""Runtime apptainer (formerly Singularity): runs a SIF file without a daemon, with the host's network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.agent import scripts
from cluster.runtimes.base import Runtime

if TYPE_CHECKING:
    from cluster.spec.model import Job, Node
    from cluster.spec.mount import Mount

_CLEAN = ("--cleanenv", "--no-home", "--no-mount", "cwd")


class ApptainerRuntime(Runtime):
    """Apptainer with a clean environment and without the home folder."""

    name = "apptainer"
    image_is_file = takes_names = True
    script = "runtimes/apptainer.sh"
    version = ("apptainer", "--version")

    def image_command(self, file: str = "") -> str:
        """Return the command that makes the image file."""
        return f"clusterctl image sif {file}".rstrip()

    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """Return `apptainer run`, with `--nv` for GPUs.

        `--no-eval` keeps Apptainer from evaluating the variables as shell code.
        """
        words = ["apptainer", "--silent", "run", "--no-eval", *_CLEAN]
        if job.device == "cuda" or (job.device == "any" and node.gpus):
            words.append("--nv")
        for mount in mounts:
            fields = ["type=bind", f"source={mount.source}", f"destination={mount.target}"]
            words += ["--mount", scripts.csv([*fields, "ro"] if mount.read_only else fields)]
        return (*words, "--pwd", job.workdir or "/", job.image)

    def exec(self, job: Job, node: Node, mounts: Sequence[Mount], *, tty: bool) -> tuple[str, ...]:
        """Return `apptainer exec` with the options of `run`."""
        return tuple("exec" if word == "run" else word for word in self.run(job, node, mounts, ()))

    def check(self, image: str, *command: str) -> tuple[str, ...]:
        """Return `apptainer exec`."""
        return ("apptainer", "--silent", "exec", *_CLEAN, image, *command)
