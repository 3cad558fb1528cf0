"""The preflight check of a Slurm cluster, on its login node: runtime, image, partitions and their limits. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.agent import scripts
from cluster.backends.slurm import options
from cluster.runtimes import RUNTIMES
from cluster.spec.model import Job


@dataclass(frozen=True)
class Partition:
    """A partition: `gpus` is the maximum over its nodes, `limit_s` its time limit (None: no limit)."""

    name: str
    nodes: int
    gpus: int
    limit_s: int | None
    default: bool = False


def partitions(lines: Sequence[str]) -> dict[str, Partition]:
    """Parse lines of `sinfo --noheader --format '%P|%D|%c|%G|%l'`, one per kind of node, into partitions by name."""
    found: dict[str, Partition] = {}
    for line in lines:
        name, nodes, _, gres, limit = line.split("|")
        default, name = name.endswith("*"), name.rstrip("*")
        gpus = sum(int(count) for count in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", gres))
        known = found.get(name, Partition(name, 0, 0, options.seconds(limit), default))
        found[name] = replace(known, nodes=known.nodes + int(nodes), gpus=max(known.gpus, gpus))
    return found


def check_command(job: Job, *, run_dir: str, new: str = "", name: str = "", needs: Sequence[str] = ()) -> list[str]:
    """Return the command of the preflight check on the login node; see check.sh."""
    assert job.queue is not None
    kind = RUNTIMES[job.queue.login.runtime]
    version = kind.version if kind.is_on_login_node else ()
    where = {"image": kind.image_file(job.image), "run_dir": run_dir, "new": new, "name": name}
    return scripts.command("backends/slurm/check", runtime=kind.name, version=version, needs=tuple(needs), **where)


def problems(job: Job, has: Mapping[str, Sequence[str]], where: str) -> list[tuple[str, str]]:
    """Return (message, hint) pairs that prevent a submission, from the output of check.sh by key."""
    assert job.queue is not None
    given = job.queue.settings
    hints = {
        "no_program": ("{} not found", "set login in cluster.yaml to a login node of the Slurm cluster"),
        "down": ("Slurm does not answer: {}", "check it: scontrol ping"),
        "run_dir": ("cannot write to the run directory {}", "run_dir in cluster.yaml, or --run-dir: a shared folder"),
        "no_runtime": (
            "the runtime {} is not installed",
            "ask the administrator, or set another runtime in cluster.yaml",
        ),
        "no_image": ("no image {}", RUNTIMES[job.queue.login.runtime].image_command(job.image)),
        "missing": ("{} does not exist", ""),
    }
    found = [
        (f"{where}: {message.format(text)}", hint or job.queue.login.hint_for_missing(text))
        for word, (message, hint) in hints.items()
        for text in has.get(word, ())
    ]
    exported = given.get("export", "ALL").split(",")
    if job.secrets and "ALL" not in exported:
        why = f"--set export={given['export']}: the job gets its secrets in its environment"
        found.append((why, f"--set export=ALL,{given['export']}" if exported != ["NONE"] else "omit it"))
    if job.secrets and "stores_env" in has:
        why = "Slurm would store the secrets in its accounting database (AccountingStoreFlags has job_env)"
        found.append((f"{where}: {why}", "omit --env NAME, and let the program read a file that only you can read"))
    found += options.inherited(job, has.get("inherited", ()), where)[0]
    if found:
        return found
    known = partitions(has.get("partition", ()))
    default = [partition.name for partition in known.values() if partition.default]
    for name in given["partition"].split(",") if given.get("partition") else default:
        if name not in known:
            found.append((f"{where}: no partition {name}", f"one of: {', '.join(known)}"))
            continue
        nodes, gpus, limit_s = known[name].nodes, known[name].gpus, known[name].limit_s
        if job.nodes > nodes:
            why = f"partition {name}: it has {nodes} nodes, and --nodes {job.nodes} asks for more"
            found.append((why, "use fewer --nodes"))
        if job.device == "cuda" and job.most_procs > gpus:
            why = f"partition {name}: its nodes have {gpus or 'no'} GPUs, and --gpus {job.most_procs} asks for more"
            found.append((why, "use fewer --gpus, another --partition, or --device cpu"))
        wanted_s = options.seconds(given.get("time", ""))
        if wanted_s and limit_s is not None and wanted_s > limit_s:
            why = f"partition {name}: its time limit is shorter than --time {given['time']}"
            found.append((why, f"use at most {limit_s // 60} minutes"))
    return found
