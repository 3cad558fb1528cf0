"""Runtimes docker and podman: one container per node, on the host network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster import contract
from cluster.agent import scripts
from cluster.runtimes.base import Runtime

if TYPE_CHECKING:
    from cluster.spec.model import Gpu, Job, Mount, Node


class ContainerRuntime(Runtime):
    """An engine with Docker's command line. The engines differ in their Go templates and in the options for GPUs."""

    script = "runtimes/docker.sh"

    def __init__(self, program: str, page: str, *, info: Sequence[str], label: str, gpu: str = "") -> None:
        """`info` is for `info --format`, `label` for `ps --format`; `gpu` is the device of a GPU, {} its id."""
        self.name = self.engine = program
        #: The page that says how to install it.
        self.page = page
        #: The Go template of the facts `engine_version=`, `engine_security=` and others, one per line.
        self.info = '{{"\\n"}}'.join(info)
        #: The Go template of a container's label CLUSTER_JOB_ID.
        self.label = label
        self._gpu = gpu

    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """Return `docker run --network host --ipc host ...`; it forwards signals to the agent."""
        words = [self.name, "run", "--rm", "--init", scripts.OPTIONS]
        words += ["--stop-timeout", str(math.ceil(job.grace_s))]
        words += ["--name", f"{job.name}-{node.name}", "--label", f"{contract.JOB_ID}={job.name}"]
        words += ["--network", "host", "--ipc", "host"]
        words += ["--pull", "never", "--log-driver", "none"] if self.name == "docker" else ["--pull", "never"]
        if job.device != "cpu" and node.gpus:
            words += self.gpu_words(node.gpus)
        for mount in mounts:
            fields = ["type=bind", f"source={mount.source}", f"target={mount.target}"]
            words += ["--mount", scripts.csv([*fields, "readonly"] if mount.read_only else fields)]
        if job.workdir:
            words += ["--workdir", job.workdir]
        for name in names:
            words += ["--env", name]
        return (*words, job.image)

    def exec(self, job: Job, node: Node, mounts: Sequence[Mount], *, tty: bool) -> tuple[str, ...]:
        """Return `docker exec`."""
        return (self.name, "exec", "--interactive", *(["--tty"] if tty else []), f"{job.name}-{node.name}")

    def check(self, image: str, *command: str) -> tuple[str, ...]:
        """Return `docker run --entrypoint COMMAND ...`."""
        first, *more = command
        return (self.name, "run", "--rm", "--pull", "never", "--entrypoint", first, image, *more)

    def gpus(self, node: Node) -> tuple[int, ...]:
        """Return ids from 0: a container numbers its GPUs from 0."""
        return tuple(range(len(node.gpus)))

    def gpu_words(self, gpus: Sequence[Gpu]) -> list[str]:
        """Return the options that give a container these GPUs of the host."""
        if self._gpu:
            return [word for gpu in gpus for word in ("--device", self._gpu.format(gpu))]
        return ["--gpus", '"device=' + ",".join(str(gpu) for gpu in gpus) + '"']  # the quotes are docker's CSV


DOCKER = ContainerRuntime(
    "docker",
    "https://docs.docker.com/engine/install/",
    info=(
        "engine_version={{.ServerVersion}}",
        "engine_security={{.SecurityOptions}}",
        "engine_runtimes={{range $name, $_ := .Runtimes}}{{$name}} {{end}}",
    ),
    label='{{.Label "CLUSTER_JOB_ID"}}',
)
PODMAN = ContainerRuntime(
    "podman",
    "https://podman.io/docs/installation",
    info=("engine_version={{.Version.Version}}", "engine_security={{if .Host.Security.Rootless}}rootless{{end}}"),
    label='{{index .Labels "CLUSTER_JOB_ID"}}',
    gpu="nvidia.com/gpu={}",
)
