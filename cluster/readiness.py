"""Whether the nodes can run a plan: pure, from what agent/check.sh printed on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.errors import GpusHeldError, NameTakenError, PortTakenError
from cluster.model import Node, Plan
from cluster.runtimes.containers import ARCHITECTURES, short_id


def place(node: Node) -> str:
    """What messages call the machine of a node."""
    return node.name if node.is_machine else "this machine"


def ids(node: Node) -> str:
    """The GPUs of a node, which a job holds alone."""
    return ",".join(str(gpu) for gpu in node.gpus)


def problems(plan: Plan, node: Node, seen: Sequence[str]) -> list[tuple[str, str]]:
    """What stops a launch on one node, as (message, hint)."""
    where, python = place(node), plan.command[0]
    found = []
    for line in seen:
        word, _, text = line.partition(" ")
        if word == "tools":
            why = "process groups need Linux with bash, setsid, flock and base64"
            hint = "install util-linux and coreutils there" if node.is_machine else "use containers: --backend compose"
        elif word == "no_rsync" and plan.is_elsewhere(node):
            why, hint = "rsync is not installed, so the results cannot be fetched", f"on {where}: apt-get install rsync"
        elif word == "run_dir":
            why = f"cannot write to the run directory {text} (no rights, or no room)"
            hint = f"run_dir of {where} in cluster.yaml"
        elif word == "torch" and plan.says_ready:
            why = f"{python} has no torch, so it cannot run a node"
            hint = "in the project's folder: pip install '.[trainer]'"
        elif word == "no_runtime":
            why, hint = f"there is no {text}", f"install it on {where}, or look anew: clusterctl init"
        elif word == "engine":
            why, hint = f"{node.runtime} does not answer: {text}", f"clusterctl doctor --only {where}"
            if "permission denied" in text:
                hint = f"on {where}: sudo usermod -aG {node.runtime} $USER, then log in again"
        elif word == "image" and ARCHITECTURES.get(text.split()[2], text.split()[1]) != text.split()[1]:
            _, made_for, machine = text.split()
            why = f"{plan.image} is an image for {made_for}, and the machine is {machine}"
            hint = f"build one there, or name one for {machine}: --image NAME"
        elif word == "no_way":
            why = f"cannot reach the master at {text}"
            hint = f"open its ports to {where}, or name another address in cluster.yaml: clusterctl doctor"
        elif word == "no_image":
            why, hint = f"no image {plan.image}", f"clusterctl image push {where}   (or launch with --push)"
        elif word == "missing":
            why, hint = f"{text} is not there", bring(node, text)
        elif word == "no_gpu":
            why, hint = f"it has no GPU {text}", f"gpus of {where} in cluster.yaml, or --device cpu"
        else:
            continue
        found.append((f"{where}: {why}", hint))
    return found


def bring(node: Node, path: str) -> str:
    """How a path that is not on a node comes there."""
    if node.runtime == "none" and node.login:
        return "without a container nothing is mounted: the same path must be there, on a common disk or by rsync"
    return f"clusterctl sync {path.removeprefix(node.data_dir)}" if node.login and node.data_dir else ""


def different(plan: Plan, seen: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, str]]:
    """The nodes whose image is not that of the first one in `seen`, by name, as (message, hint)."""
    images = {
        name: line.split()[1].removeprefix("sha256:")  # which podman leaves out
        for name, lines in seen.items()
        for line in lines
        if line.startswith("image ")
    }
    first = next(iter(images.items()), ("", ""))
    return {
        name: (
            f"{name}: its image {plan.image} is {short_id(image)}, that of {first[0]} is {short_id(first[1])}",
            f"clusterctl image push {' '.join(images)}   (or launch with --push)",
        )
        for name, image in images.items()
        if image != first[1]
    }


def refuse_taken(job_id: str, seen: Mapping[str, Sequence[str]]) -> None:
    """Raise NameTakenError where a place (by what messages call it) has a job of this name, or the folder of one."""
    for where, lines in seen.items():
        for line in lines:
            word, _, text = line.partition(" ")
            if word == "exists":
                raise NameTakenError(f"{where}: {text} is there already", "choose another --name, or remove the folder")
            if word == "runs":
                raise name_taken(job_id, where, text)


def name_taken(job_id: str, where: str, what: str) -> NameTakenError:
    """The error for a name in use, whoever has started that job: found by name, the end of one is the end of both."""
    return NameTakenError(
        f"{where}: a job {job_id} is there already: {what}",
        "choose another --name, or stop that one where it was launched; what nobody keeps: clusterctl gc",
    )


def refuse_port(plan: Plan, seen: Mapping[str, Sequence[str]]) -> None:
    """Raise PortTakenError when the master's machine says that another program has its port."""
    master = plan.nodes[0]
    for line in seen[master.name]:
        if line.startswith("port "):
            raise PortTakenError(
                f"{place(master)}: port {plan.master_port} is {line.removeprefix('port ')}",
                "choose another: --master-port auto",
            )


def held(plan: Plan, node: Node, seen: Sequence[str]) -> set[str]:
    """The other jobs that hold GPUs of this node."""
    jobs = set()
    for line in seen:
        if line.startswith("held "):
            _, job, theirs = line.split()
            if job != plan.job_id and set(theirs.split(",")) & set(ids(node).split(",")):
                jobs.add(job)
    return jobs


def held_error(held: Mapping[str, Sequence[str]]) -> GpusHeldError:
    """The error that names, for every node, the jobs that hold its GPUs."""
    jobs = sorted({job for each in held.values() for job in each})
    lines = [f"{name}: its GPUs are held by the job {' and '.join(each)}" for name, each in held.items()]
    return GpusHeldError(
        "\n       ".join(lines),
        f"clusterctl stop {jobs[0]}, other nodes (--only a,b), or wait for it: clusterctl wait {jobs[0]}",
    )
