"""Runtimes: how a node enters the container. A new one is a file here, with its shell functions, and a line below.

The interface is in base.py. A runtime without an engine works on the backend slurm only.
"""

from cluster.runtimes.apptainer import ApptainerRuntime
from cluster.runtimes.base import BareRuntime, Runtime
from cluster.runtimes.docker import DOCKER, PODMAN, ContainerRuntime
from cluster.runtimes.enroot import EnrootRuntime
from cluster.runtimes.pyxis import PyxisRuntime

#: Every runtime by its name in cluster.yaml.
RUNTIMES: dict[str, Runtime] = {
    each.name: each for each in (BareRuntime(), DOCKER, PODMAN, ApptainerRuntime(), PyxisRuntime(), EnrootRuntime())
}
#: The runtimes whose engine keeps images and containers, in the order in which `clusterctl init` tries them.
ENGINES: dict[str, ContainerRuntime] = {
    name: each for name, each in RUNTIMES.items() if isinstance(each, ContainerRuntime)
}

#: The architecture names of docker and podman by Linux' machine names.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def short_id(image_id: str) -> str:
    """Return the first 12 hex digits of an image's id, as `docker images` does."""
    return image_id.removeprefix("sha256:")[:12]
