"""Apptainer (and Singularity, its former name): the SIF file of the image, an ordinary user's process, no daemon."""

from __future__ import annotations

from collections.abc import Sequence

from cluster import quoting, torchrun
from cluster.model import Job, Mount, Node

#: Gives the container the variables that are named (`$1` of them), and nothing else of the environment: no value is on
#: a command line. The rest is the command.
_ENTER = """
count=$1; shift
for name in "${@:1:$count}"; do [ -z "${!name+set}" ] || export "APPTAINERENV_$name=${!name}"; done
shift "$count"; exec "$@"
"""


class ApptainerRuntime:
    """One container per node, which sees the network and the shared memory of its machine."""

    inside = False
    setup = ""

    def run(self, job: Job, node: Node, mounts: Sequence[Mount], names: Sequence[str]) -> tuple[str, ...]:
        """`apptainer run` with a clean environment and no home; with `--nv` where GPUs are asked for.

        Without `--no-eval` it would take the variables for shell text.
        """
        words = ["bash", "-c", _ENTER, "enter", str(len(names)), *names]
        words += ["apptainer", "--silent", "run", "--no-eval", "--cleanenv", "--no-home", "--no-mount", "cwd"]
        if job.device == "cuda" or (job.device == "any" and node.gpus):
            words.append("--nv")
        for mount in mounts:
            fields = ["type=bind", f"source={mount.source}", f"destination={mount.target}"]
            words += ["--mount", quoting.csv([*fields, "ro"] if mount.read_only else fields)]
        words += ["--pwd", job.workdir or "/"]
        return (*words, job.image, *torchrun.command(job))

    def gpus(self, node: Node) -> tuple[int, ...]:
        """As the machine counts them."""
        return node.gpus

    def stop(self, job_id: str, grace_s: int) -> str:
        """Its processes are the machine's, and are found and ended without us."""
        return ""
