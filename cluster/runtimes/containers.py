"""Docker and podman: one container per node, on the machine's own network, no value on a command line."""

from __future__ import annotations

from collections.abc import Sequence

from cluster import contract, quoting
from cluster.model import Job, Mount, Node

#: What Linux and the engines call the same processors.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def short_id(image_id: str) -> str:
    """The first 12 hex digits of an image's id, as the engines themselves show it."""
    return image_id.removeprefix("sha256:")[:12]


class ContainerRuntime:
    """`program` is docker or podman, which take the same words here except for GPUs."""

    inside = False

    def __init__(self, program: str) -> None:
        self.name = self.engine = program

    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """`docker run --network host --ipc host ...`, variables by name, ended by the signals that the script gets."""
        words = [self.name, "run", "--rm", "--init", quoting.OPTIONS]
        words += ["--name", f"{job.name}-{node.name}", "--label", f"{contract.JOB_ID}={job.name}"]
        words += ["--network", "host", "--ipc", "host"]
        words += ["--pull", "never", "--log-driver", "none"] if self.name == "docker" else ["--pull", "never"]
        if job.device != "cpu" and node.gpus:
            words += self._gpu_words(node)
        for mount in mounts:
            fields = ["type=bind", f"source={mount.source}", f"target={mount.target}"]
            words += ["--mount", quoting.csv([*fields, "readonly"] if mount.read_only else fields)]
        if job.workdir:
            words += ["--workdir", job.workdir]
        for name in names:
            words += ["--env", name]
        return (*words, job.image)

    def gpus(self, node: Node) -> tuple[int, ...]:
        """From 0: the container sees no others."""
        return tuple(range(len(node.gpus)))

    def _gpu_words(self, node: Node) -> list[str]:
        if self.name == "podman":
            return [word for gpu in node.gpus for word in ("--device", f"nvidia.com/gpu={gpu}")]
        return ["--gpus", '"device=' + ",".join(str(gpu) for gpu in node.gpus) + '"']  # the quotes are docker's CSV
