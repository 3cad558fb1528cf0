"""Runtimes: how a node enters the container. A new one is a file here, with its shell functions, and a line below.

The interface is in base.py. A runtime without an engine works on the backend slurm only.
"""

from cluster.runtimes.apptainer import ApptainerRuntime
from cluster.runtimes.base import BareRuntime, Runtime
from cluster.runtimes.docker import ContainerRuntime, DockerRuntime, PodmanRuntime
from cluster.runtimes.enroot import EnrootRuntime
from cluster.runtimes.pyxis import PyxisRuntime

#: The runtime of a machine without an engine, and the engine of this machine for `compose` and `docker build`.
BARE = BareRuntime()
DOCKER = DockerRuntime()
#: Every runtime by its name in cluster.yaml.
RUNTIMES: dict[str, Runtime] = {
    runtime.name: runtime
    for runtime in (BARE, DOCKER, PodmanRuntime(), ApptainerRuntime(), PyxisRuntime(), EnrootRuntime())
}
#: The runtimes whose engine keeps images and containers, in the order in which `clusterctl init` tries them.
ENGINES: dict[str, ContainerRuntime] = {
    name: runtime for name, runtime in RUNTIMES.items() if isinstance(runtime, ContainerRuntime)
}

#: The architecture names of docker and podman by Linux' machine names.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

#: Oldest driver per major version of CUDA (NVIDIA, CUDA Compatibility, minor version compatibility).
OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}
#: The remedy for an older driver.
NEWER_DRIVER = "install a newer driver (https://www.nvidia.com/drivers), or use torch for an older CUDA"


def driver_problem(driver: str, cuda: str) -> str:
    """Return why a driver such as 580.82.07 does not support a version of CUDA, or ""."""
    needed = OLDEST_DRIVER.get(cuda.partition(".")[0], 0)
    have = driver.partition(".")[0]
    if not have.isdigit() or int(have) >= needed:
        return ""
    return f"driver {driver} is too old: CUDA {cuda} needs {needed} or newer"


def short_id(image_id: str) -> str:
    """Return the first 12 hex digits of an image's id, as `docker images` does."""
    return image_id.removeprefix("sha256:")[:12]
