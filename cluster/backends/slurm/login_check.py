"""The preflight check of a Slurm cluster, on its login node: secrets, partitions and their limits. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.backends.batch import login_check
from cluster.backends.batch.login_check import Problem
from cluster.backends.slurm import options
from cluster.spec.counts import counted
from cluster.spec.model import Job

TITLE = "Slurm"
PING = "scontrol ping"
PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo")


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
    by_name: dict[str, Partition] = {}
    for line in lines:
        name, nodes, _, gres, limit = line.split("|")
        default = name.endswith("*")
        name = name.rstrip("*")
        gpus = sum(int(count) for count in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", gres))
        known = by_name.get(name, Partition(name, 0, 0, options.seconds(limit), default))
        by_name[name] = replace(known, nodes=known.nodes + int(nodes), gpus=max(known.gpus, gpus))
    return by_name


def command(job: Job, *, run_dir: str, new: str = "", name: str = "", needs: Sequence[str] = ()) -> list[str]:
    """Return the command of the preflight check on the login node."""
    return login_check.command(
        job, "slurm", TITLE, PROGRAMS, run_dir=run_dir, new=new, name=name, needs=needs
    )


def problems(job: Job, has: Mapping[str, Sequence[str]], where: str) -> list[Problem]:
    """Return the problems that prevent a submission, from the output of the preflight check by key."""
    inherited, _ = options.inherited(job, has.get("inherited", ()), where)
    wrong = [*login_check.problems(job, has, where, TITLE, PING), *_secrets(job, has, where), *inherited]
    return wrong or _limits(job, partitions(has.get("partition", ())), where)


def _secrets(job: Job, has: Mapping[str, Sequence[str]], where: str) -> list[Problem]:
    """Return why the job would not get its secrets, or why others could read them."""
    assert job.queue is not None
    wrong = []
    export = job.queue.settings.get("export", "ALL")
    exported = export.split(",")
    if job.secrets and "ALL" not in exported:
        why = f"--set export={export}: the job gets its secrets in its environment"
        wrong.append((why, f"--set export=ALL,{export}" if exported != ["NONE"] else "omit it"))
    if job.secrets and "stores_env" in has:
        why = "Slurm would store the secrets in its accounting database (AccountingStoreFlags has job_env)"
        wrong.append(
            (f"{where}: {why}", "omit --env NAME, and let the program read a file that only you can read")
        )
    return wrong


def _limits(job: Job, known: Mapping[str, Partition], where: str) -> list[Problem]:
    """Return what the job asks for and its partitions do not have."""
    assert job.queue is not None
    wrong = []
    given = job.queue.settings
    time = given.get("time", "")
    wanted_s = options.seconds(time)
    default = [partition.name for partition in known.values() if partition.default]
    for name in given["partition"].split(",") if given.get("partition") else default:
        partition = known.get(name)
        if partition is None:
            wrong.append((f"{where}: no partition {name}", f"one of: {', '.join(known)}"))
            continue
        if job.nodes > partition.nodes:
            why = f"partition {name}: it has {counted(partition.nodes, 'node')}, but --nodes is {job.nodes}"
            wrong.append((why, "use fewer --nodes"))
        if job.device == "cuda" and job.most_procs > partition.gpus:
            gpus = partition.gpus or "no"
            why = f"partition {name}: its nodes have {gpus} GPUs, but --gpus is {job.most_procs}"
            wrong.append((why, "use fewer --gpus, another --partition, or --device cpu"))
        if wanted_s and partition.limit_s is not None and wanted_s > partition.limit_s:
            why = f"partition {name}: its time limit is shorter than --time {time}"
            wrong.append((why, f"use at most {partition.limit_s // 60} minutes"))
    return wrong
