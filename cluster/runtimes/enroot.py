"""Runtime enroot: NVIDIA's unprivileged containers without Pyxis; it starts a .sqsh file with the host's network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.agent import scripts
from cluster.runtimes.base import Runtime

if TYPE_CHECKING:
    from cluster.spec.model import Job, Node
    from cluster.spec.mount import Mount


class EnrootRuntime(Runtime):
    """`enroot start` on a read-only squashfs file, which needs squashfuse and fuse-overlayfs on the nodes."""

    name = "enroot"
    image_is_file = takes_names = True
    script = "runtimes/enroot.sh"
    version = ("enroot", "version")

    def image_command(self, file: str = "") -> str:
        """Return the command that makes the image file."""
        return f"enroot import --output {file or 'FILE.sqsh'} dockerd://IMAGE"

    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """Return `enroot start --mount SOURCE:TARGET:none:OPTIONS ...`.

        Enroot has no option for the working directory: a shell in the container changes to it.
        """
        words = ["enroot", "start", scripts.OPTIONS]
        if job.device == "cuda" or (job.device == "any" and node.gpus):
            # These enable enroot's hook for NVIDIA GPUs. CUDA_VISIBLE_DEVICES selects among them.
            words += [
                "--env",
                "NVIDIA_VISIBLE_DEVICES=all",
                "--env",
                "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            ]
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
