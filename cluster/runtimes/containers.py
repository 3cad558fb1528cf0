"""Docker and podman: one container per node, on the machine's own network, no value on a command line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from cluster import contract, quoting, torchrun
from cluster.model import Job, Mount, Node

#: RDMA and NCCL want memory that stays in place, which only an engine that may raise limits (bit 24) can give.
_LIMITS = """
[ ! -d /dev/infiniband ] || options+=(--device /dev/infiniband)
rights=$(sed -n 's/^CapBnd:[[:space:]]*//p' /proc/self/status)
if [ -z "$rootless" ] && [ $((0x${rights:-0} >> 24 & 1)) = 1 ]; then
    options+=(--ulimit memlock=-1 --ulimit stack=67108864)
fi
"""
#: GPUs that are known on the node alone, where a scheduler gives them; inside they count from 0.
_GIVEN = """
if [ -n "${GIVEN_GPUS:-}" ]; then
    IFS=, read -r -a gpus <<< "$GIVEN_GPUS"
    %s
    CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((${#gpus[@]} - 1)))
fi
"""
#: In a rootless engine root inside is the caller outside, so files belong to the caller without our doing.
_SETUP = {
    "docker": """
options=(--user "$(id -u):$(id -g)") rootless=
case $(docker info --format '{{.SecurityOptions}}' 2>/dev/null) in
    *rootless*) rootless=yes options=(--user 0:0) ;;
esac
"""
    + _LIMITS.lstrip()
    + _GIVEN.lstrip() % 'options+=(--gpus "\\"device=$GIVEN_GPUS\\"")',
    "podman": """
options=(--user "$(id -u):$(id -g)") rootless=
[ "$(id -u)" = 0 ] || { rootless=yes; options+=(--userns keep-id); }
"""
    + _LIMITS.lstrip()
    + _GIVEN.lstrip() % 'for gpu in "${gpus[@]}"; do options+=(--device "nvidia.com/gpu=$gpu"); done',
}


#: What Linux and the engines call the same processors.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def short_id(image_id: str) -> str:
    """The first 12 hex digits of an image's id, as the engines themselves show it."""
    return image_id.removeprefix("sha256:")[:12]


class ContainerRuntime:
    """`program` is docker or podman, which take the same words here except for GPUs."""

    inside = False

    def __init__(self, program: str) -> None:
        self._program = program
        self.setup = _SETUP[program].lstrip()

    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """`docker run --network host --ipc host ...`, variables by name, ended by the signals that the script gets."""
        words = [self._program, "run", "--rm", "--init", quoting.OPTIONS]
        words += ["--name", f"{job.name}-{node.name}", "--label", f"{contract.JOB_ID}={job.name}"]
        words += ["--network", "host", "--ipc", "host"]
        words += ["--pull", "never", "--log-driver", "none"] if self._program == "docker" else ["--pull", "never"]
        if job.device != "cpu" and node.gpus:
            words += self._gpu_words(node)
        for mount in mounts:
            fields = ["type=bind", f"source={mount.source}", f"target={mount.target}"]
            words += ["--mount", quoting.csv([*fields, "readonly"] if mount.read_only else fields)]
        if job.workdir:
            words += ["--workdir", job.workdir]
        for name in names:
            words += ["--env", name]
        return (*words, job.image, *torchrun.command(job))

    def gpus(self, node: Node) -> tuple[int, ...]:
        """From 0: the container sees no others."""
        return tuple(range(len(node.gpus)))

    def stop(self, job_id: str, grace_s: int) -> str:
        """Stops and removes every container that carries the job's label."""
        listed = shlex.join([self._program, "ps", "-aq", "--filter", f"label={contract.JOB_ID}={job_id}"])
        return f"""
left=$({listed})
[ -z "$left" ] || {self._program} stop -t {grace_s} $left >/dev/null 2>&1
left=$({listed})
[ -z "$left" ] || {self._program} rm -f $left >/dev/null 2>&1
# a container that ends by itself (--rm) is still listed for a moment
for _ in $(seq 20); do left=$({listed}); [ -n "$left" ] || break; sleep 0.5; done
for container in $left; do echo "container $container"; done
"""

    def _gpu_words(self, node: Node) -> list[str]:
        if self._program == "podman":
            return [word for gpu in node.gpus for word in ("--device", f"nvidia.com/gpu={gpu}")]
        return ["--gpus", '"device=' + ",".join(str(gpu) for gpu in node.gpus) + '"']  # the quotes are docker's CSV
