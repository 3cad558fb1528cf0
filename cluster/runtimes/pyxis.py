"""Runtime pyxis: NVIDIA's plugin for Slurm and enroot; a job step per node enters the container."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.agent import scripts
from cluster.runtimes.base import Runtime

if TYPE_CHECKING:
    from cluster.spec.model import Job, Node
    from cluster.spec.mount import Mount


class PyxisRuntime(Runtime):
    """`srun --container-image`. The image is REGISTRY#NAME:TAG, or a .sqsh file."""

    name = "pyxis"
    takes_names = is_on_login_node = True
    script = "runtimes/pyxis.sh"
    version = (
        "sh",
        "-c",
        "srun --help | grep -q -- --container-image && echo pyxis: srun has --container-image",
    )

    def image_command(self, file: str = "") -> str:
        """Return the command that makes the image file."""
        return f"enroot import {f'--output {file} ' if file else ''}docker://NAME:TAG"

    def image_file(self, image: str) -> str:
        """Return a path that Pyxis does not take for a name in a registry: `/a.sqsh`, `./a.sqsh` for `a.sqsh`."""
        if image.startswith(("/", "./", "../")):
            return image
        return f"./{image}" if image.endswith(".sqsh") and "://" not in image and "#" not in image else ""

    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """Return `srun --container-image ...` for this node."""
        image = self.image_file(job.image) or job.image
        words = [
            "srun",
            "--overlap",
            "--nodes=1",
            "--ntasks=1",
            scripts.OPTIONS,
            f"--container-image={image}",
        ]
        words.append("--no-container-mount-home")
        sources = [f"{mount.source}:{mount.target}" + (":ro" if mount.read_only else "") for mount in mounts]
        if sources:
            words.append(f"--container-mounts={','.join(sources)}")
        if job.workdir:
            words.append(f"--container-workdir={job.workdir}")
        return tuple(words)
