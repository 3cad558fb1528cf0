"""Interface of a runtime: how a node enters the container."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.spec.model import Gpu, Job, Node
    from cluster.spec.mount import Mount


class Runtime(ABC):
    """The command lines of one container runtime. Pure."""

    #: The name in `cluster.yaml`.
    name: str
    #: Whether the program runs without a container, as a child of the node's script.
    inside = False
    #: The engine whose containers may outlive the node's script, or "". A runtime without one needs the backend slurm.
    engine = ""
    #: Whether it takes the options of `docker run` that a job adds.
    takes_run_options = False
    #: Whether the image is a file on the shared disk.
    image_is_file = False
    #: Whether its script needs `names`, the variables that the container gets.
    takes_names = False
    #: The file of its shell functions, or "". agent/node.sh calls them if they exist: `image_id` prints the image's ID,
    #: `prepare` sets `options` on the machine, `signal_pid` prints the pid that gets the signals. After the exit code
    #: `start_failure` without a started agent, the node's script tries once more. agent/exec.sh calls `prepare_exec`.
    script = ""
    #: The command that prints the version on a node of Slurm, and fails if the runtime is not installed; engines report
    #: their own.
    version: tuple[str, ...] = ()
    #: Whether that command also tells on the login node if the cluster has the runtime.
    is_on_login_node = False

    @abstractmethod
    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """Return the words before the agent's command; `names` are the variables that the container gets.

        agent/node.sh inserts the machine's options at the word `scripts.OPTIONS`.
        """

    def exec(self, job: Job, node: Node, mounts: Sequence[Mount], *, tty: bool) -> tuple[str, ...]:
        """Return the words before a command that runs in the container of a running node.

        By default the command gets its own container, with the same image and mounts. agent/exec.sh inserts the
        machine's options at the word `scripts.OPTIONS`.
        """
        return self.run(job, node, mounts, ())

    def check(self, image: str, *command: str) -> tuple[str, ...]:
        """Return the words that run a command in the image without mounts, for checks; () if a check cannot run it."""
        return ()

    def image_file(self, image: str) -> str:
        """Return the path of an image that is a file on the shared disk, or ""."""
        return image if self.image_is_file else ""

    def image_command(self, file: str = "") -> str:
        """Return the command that makes the image `file`, or "" if an engine keeps the images."""
        return ""

    def gpus(self, node: Node) -> tuple[Gpu, ...]:
        """Return the ids of the node's GPUs in the container: by default the same as on the host."""
        return node.gpus


class BareRuntime(Runtime):
    """The Python interpreter of the job, without a container."""

    name = "none"
    inside = True

    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """Return no words."""
        return ()

    def check(self, image: str, *command: str) -> tuple[str, ...]:
        """Return the command."""
        return command
