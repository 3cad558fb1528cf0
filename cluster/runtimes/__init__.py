"""How to enter the place where the program runs: one file and one line of this table per runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cluster.model import Job, Mount, Node
from cluster.runtimes import apptainer, containers, none, pyxis


class Runtime(Protocol):
    """Spells command lines and does nothing else."""

    @property
    def name(self) -> str:
        """Its name in `cluster.yaml`, and in agent/node.sh, which finds the options that depend on the machine."""
        ...

    @property
    def inside(self) -> bool:
        """Whether the node's script is itself where the program runs."""
        ...

    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """The words before the agent's command; the program gets the variables `names`.

        The word `quoting.OPTIONS` is where the options of the node go.
        """
        ...

    def gpus(self, node: Node) -> tuple[int, ...]:
        """The node's GPUs as the program sees them: a container counts those it was given from 0."""
        ...

    @property
    def engine(self) -> str:
        """The program that keeps its containers after the node's script has ended; "" where none does."""
        ...


RUNTIMES: dict[str, Runtime] = {
    "none": none.NoRuntime(),
    "docker": containers.ContainerRuntime("docker"),
    "podman": containers.ContainerRuntime("podman"),
    "apptainer": apptainer.ApptainerRuntime(),
    "pyxis": pyxis.PyxisRuntime(),
}
