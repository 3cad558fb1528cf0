"""How to enter the place where the program runs: one file and one line of this table per runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cluster.model import Job, Mount, Node
from cluster.runtimes import apptainer, containers, none, pyxis


class Runtime(Protocol):
    """Spells command lines and does nothing else."""

    @property
    def inside(self) -> bool:
        """Whether the node's script is itself where the program runs."""
        ...

    @property
    def setup(self) -> str:
        """Bash that runs on the node before the command; the array `options` that it sets is put into the command."""
        ...

    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """The command that starts torchrun on one node; torchrun's options come from the variables `names`."""
        ...

    def gpus(self, node: Node) -> tuple[int, ...]:
        """The node's GPUs as the program sees them: a container counts those it was given from 0."""
        ...

    def stop(self, job_id: str, grace_s: int) -> str:
        """Bash that removes whatever of a job the runtime still holds, and prints what it could not remove."""
        ...


RUNTIMES: dict[str, Runtime] = {
    "none": none.NoRuntime(),
    "docker": containers.ContainerRuntime("docker"),
    "podman": containers.ContainerRuntime("podman"),
    "apptainer": apptainer.ApptainerRuntime(),
    "pyxis": pyxis.PyxisRuntime(),
}
