"""Runtimes docker and podman: one container per node, on the host network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster import contract
from cluster.agent import scripts
from cluster.runtimes import engine_options
from cluster.runtimes.base import Runtime

if TYPE_CHECKING:
    from cluster.spec.model import Gpu, Job, Node
    from cluster.spec.mount import Mount

#: A new line in a Go template.
_NEW_LINE = '{{"\\n"}}'


class ContainerRuntime(Runtime):
    """An engine with Docker's command line; the engines differ in their Go templates and in a few options.

    `page` says how to install it. The templates print facts: `info` those named `engine_...`, `image_facts` those of
    images/engine.sh (with `version` and with `info`). `options` are for `run`, and `gpu_device` is the kind of a GPU's
    CDI device ("": the engine takes `--gpus`). It unpacks zstd since the version `zstd_since`. `rootless_network`:
    without root, its containers may not be reachable for peers.
    """

    takes_run_options = True
    script = "runtimes/docker.sh"
    page: str
    info: str
    image_facts: tuple[str, str]
    options: tuple[str, ...] = ()
    gpu_device = ""
    zstd_since: tuple[int, ...] = ()
    rootless_network = False

    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """Return `docker run --network host --ipc host ...`; it forwards signals to the agent."""
        words = [self.name, "run", "--rm", "--init", scripts.OPTIONS]
        words += ["--stop-timeout", str(math.ceil(job.grace_s))]
        words += ["--label", f"{contract.JOB_ID}={job.name}"]
        words += ["--network", "host", "--ipc", "host", "--pull", "never", *self.options]
        if job.device != "cpu" and node.gpus:
            words += self.gpu_words(node.gpus)
        for mount in mounts:
            fields = ["type=bind", f"source={mount.source}", f"target={mount.target}"]
            words += ["--mount", scripts.csv([*fields, "readonly"] if mount.read_only else fields)]
        if job.workdir:
            words += ["--workdir", job.workdir]
        for name in names:
            words += ["--env", name]
        return (*words, *engine_options.words(job.run_options), job.image)

    def exec(self, job: Job, node: Node, mounts: Sequence[Mount], *, tty: bool) -> tuple[str, ...]:
        """Return `docker exec` with the name that runtimes/docker.sh gives the container."""
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
        if self.gpu_device:
            return [word for gpu in gpus for word in ("--device", f"{self.gpu_device}={gpu}")]
        devices = ",".join(map(str, gpus))
        return ["--gpus", f'"device={devices}"']  # the quotes are docker's CSV


class DockerRuntime(ContainerRuntime):
    """Docker Engine."""

    name = engine = "docker"
    page = "https://docs.docker.com/engine/install/"
    _runtimes = "engine_runtimes={{range $name, $_ := .Runtimes}}{{$name}} {{end}}"
    info = _NEW_LINE.join(
        ("engine_version={{.ServerVersion}}", "engine_security={{.SecurityOptions}}", _runtimes)
    )
    _driver = "driver {{.Driver}} {{json .DriverStatus}}"
    _root = "root {{.DockerRootDir}}"
    _store = ("platform {{.OSType}}/{{.Architecture}}", _driver, _root)
    image_facts = ("version {{.Server.Version}}", _NEW_LINE.join(_store))
    options = ("--log-driver", "none")
    zstd_since = (23,)
    rootless_network = True


class PodmanRuntime(ContainerRuntime):
    """Podman, with the GPUs as CDI devices."""

    name = engine = "podman"
    page = "https://podman.io/docs/installation"
    _security = "engine_security={{if .Host.Security.Rootless}}rootless{{end}}"
    info = _NEW_LINE.join(("engine_version={{.Version.Version}}", _security))
    _store = ("platform {{.Host.OS}}/{{.Host.Arch}}", "root {{.Store.GraphRoot}}")
    image_facts = ("version {{.Client.Version}}", _NEW_LINE.join(_store))
    gpu_device = "nvidia.com/gpu"
