"""The script of a node: its variables and its command, then agent/node.sh, which is the same on every node."""

from __future__ import annotations

from collections.abc import Sequence

from cluster import contract, quoting, resources, torchrun
from cluster.model import Job, Mount, Node
from cluster.runtimes import Runtime

#: Set on the node: what the agent adds itself, and so what a container that gets variables by name must get as well.
_SET_ON_NODE = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def render(
    job: Job,
    node: Node,
    rank: int,
    *,
    attempt: int,
    run_dir: str,
    agent: str,
    master: tuple[str, int],
    nodes_on_host: int,
    runtime: Runtime,
    mounts: Sequence[Mount] = (),
) -> str:
    """The whole script of one node whose rank is known.

    `run_dir` is the job's folder and `agent` the agent's file, as the program sees them. The user's `job.env` does not
    override the contract's variables.
    """
    values = {
        **job.env,
        contract.NODE: node.name,
        "PET_NODE_RANK": str(rank),
        **torchrun.shared_environment(job, attempt=attempt, run_dir=run_dir, master=master),
        contract.NODES_ON_HOST: str(nodes_on_host),
        contract.NODE_ADDRESS: node.address,
        **torchrun.gpu_environment(job, runtime.gpus(node)),
    }
    head = f"# Node {rank} of {job.nodes} of the job {job.name}, attempt {attempt}.\n"
    return "#!/usr/bin/env bash\n" + head + _script(job, node, values, "", (), agent, runtime, mounts)


def render_in_batch(
    job: Job, login: Node, *, run_dir: str, agent: str, runtime: Runtime, mounts: Sequence[Mount]
) -> str:
    """The script of every node of a Slurm job, which finds its rank, its master and its GPUs in the environment."""
    found: tuple[str, ...] = (
        contract.NODE,
        "PET_NODE_RANK",
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
        contract.ATTEMPT,
        contract.HOSTS,
    )
    values = {
        **job.env,
        **torchrun.shared_environment(job, attempt=0, run_dir=run_dir, master=("", 0)),
        contract.NODES_ON_HOST: "1",
        **torchrun.gpu_environment(job, ()),
    }
    if job.device == "cuda":
        found += ("CUDA_VISIBLE_DEVICES",)
    values = {name: value for name, value in values.items() if name not in found}
    finds = f"device={job.device}\n" + resources.text("agent/slurm_node.sh")
    return f"# A node of the job {job.name}.\n" + _script(job, login, values, finds, found, agent, runtime, mounts)


def _script(
    job: Job,
    node: Node,
    values: dict[str, str],
    finds: str,
    found: Sequence[str],
    agent: str,
    runtime: Runtime,
    mounts: Sequence[Mount],
) -> str:
    names = list(dict.fromkeys([*values, *found, *_SET_ON_NODE, *job.secrets]))
    words = [*runtime.run(job, node, mounts, names), *torchrun.command(job, agent)]
    enter, arguments = words[:0], words
    if quoting.OPTIONS in words:
        at = words.index(quoting.OPTIONS)
        enter, arguments = words[:at], words[at + 1 :]
    text = "set -u\n" + quoting.exports(values) + "\n" + finds
    if job.workdir and runtime.inside:
        text += f"{quoting.line(['cd', '--', job.workdir])} || exit 72\n"
    text += f"runtime={runtime.name}\n" + (f"names=({quoting.line(names)})\n" if runtime.name == "apptainer" else "")
    text += f"enter=({quoting.line(enter)})\narguments=({quoting.line(arguments)})\n\n"
    return text + resources.text("agent/node.sh")
