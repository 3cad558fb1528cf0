"""Runtimes of Slurm clusters: apptainer (formerly Singularity), pyxis and enroot, on the host's network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.agent import scripts
from cluster.runtimes.base import Runtime

if TYPE_CHECKING:
    from cluster.spec.model import Job, Mount, Node

_CLEAN = ("--cleanenv", "--no-home", "--no-mount", "cwd")


class ApptainerRuntime(Runtime):
    """A SIF file without a daemon, with a clean environment and without the home folder."""

    name = "apptainer"
    image_is_file = takes_names = True
    image_from = "clusterctl image sif"
    script = "runtimes/apptainer.sh"
    version = ("apptainer", "--version")

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


class PyxisRuntime(Runtime):
    """NVIDIA's plugin for Slurm: a job step per node, whose image is REGISTRY#NAME:TAG or a .sqsh file."""

    name = "pyxis"
    takes_names = True
    image_from = "enroot import docker://NAME:TAG"
    script = "runtimes/pyxis.sh"
    version = ("sh", "-c", "srun --help | grep -q -- --container-image && echo pyxis: srun has --container-image")

    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """Return `srun --container-image ...` for this node."""
        words = ["srun", "--overlap", "--nodes=1", "--ntasks=1", scripts.OPTIONS, f"--container-image={job.image}"]
        words.append("--no-container-mount-home")
        sources = [f"{mount.source}:{mount.target}" + (":ro" if mount.read_only else "") for mount in mounts]
        if sources:
            words.append(f"--container-mounts={','.join(sources)}")
        if job.workdir:
            words.append(f"--container-workdir={job.workdir}")
        return tuple(words)


class EnrootRuntime(Runtime):
    """A read-only .sqsh file without Pyxis, which needs squashfuse and fuse-overlayfs on the nodes."""

    name = "enroot"
    image_is_file = takes_names = True
    image_from = "enroot import --output FILE.sqsh dockerd://IMAGE"
    script = "runtimes/enroot.sh"
    version = ("enroot", "version")

    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """Return `enroot start --mount SOURCE:TARGET:none:OPTIONS ...`.

        Enroot has no option for the working directory: a shell in the container changes to it.
        """
        words = ["enroot", "start", scripts.OPTIONS]
        if job.device == "cuda" or (job.device == "any" and node.gpus):
            # These enable enroot's hook for NVIDIA GPUs. CUDA_VISIBLE_DEVICES selects among them.
            words += ["--env", "NVIDIA_VISIBLE_DEVICES=all", "--env", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"]
        for mount in mounts:
            options = "x-create=auto,rbind" + (",ro" if mount.read_only else "")
            words += ["--mount", f"{mount.source}:{mount.target}:none:{options}"]
        words.append(job.image)
        return (*words, "sh", "-c", 'cd -- "$0" && exec "$@"', job.workdir) if job.workdir else tuple(words)

    def exec(self, job: Job, node: Node, mounts: Sequence[Mount], *, tty: bool) -> tuple[str, ...]:
        """Return `enroot exec PID`."""
        return ("enroot", "exec", scripts.OPTIONS)

    def check(self, image: str, *command: str) -> tuple[str, ...]:
        """Return `enroot start`."""
        return ("enroot", "start", image, *command)
