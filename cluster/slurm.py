"""Slurm's answers and options: pure. Its states as phases, the limits of a cluster, and the options of sbatch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cluster import readiness
from cluster.errors import UsageError
from cluster.model import Job, NodeStatus, Phase, Plan

#: The options of sbatch that the launcher sets.
_SET = (
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "job-name",
    "output",
    "error",
    "array",
    "requeue",
    "open-mode",
    "chdir",
    "wrap",
)

#: How a batch script ends when the run directory is not the same folder on every node.
EXIT_NOT_COMMON = 78

#: The columns of `squeue --Format` that are read, and how wide they are asked for: names may hold any separator.
COLUMNS = {
    "Name": 50,
    "JobID": 16,
    "ArrayJobID": 16,
    "ArrayTaskID": 12,
    "State": 18,
    "RestartCnt": 8,
    "exit_code": 12,
    "StartTime": 22,
    "NodeList": 80,
    "Reason": 80,
}
FORMAT = ",".join(f"{name}:{width}" for name, width in COLUMNS.items())

#: Slurm's states of a job, in our phases; what is in none of these lists has ended.
_PHASES: dict[str, Phase] = {
    "PENDING": "pending",
    "REQUEUED": "pending",
    "REQUEUE_HOLD": "pending",
    "REQUEUE_FED": "pending",
    "SPECIAL_EXIT": "pending",
    "RESV_DEL_HOLD": "pending",
    "CONFIGURING": "pending",
    "RUNNING": "starting",
    "SUSPENDED": "starting",
    "STOPPED": "starting",
    "SIGNALING": "starting",
    "STAGE_OUT": "starting",
    "COMPLETING": "starting",
}
#: How the states in which a job has ended are told; the program's own end, where there is one, says more.
_ENDS = {
    "CANCELLED": "cancelled with scancel",
    "TIMEOUT": "its time limit was reached before it had ended (--time)",
    "DEADLINE": "its deadline has passed",
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node did not boot",
    "OUT_OF_MEMORY": "out of memory (--slurm mem=...)",
    "PREEMPTED": "another job took its nodes",
    "REVOKED": "another cluster has started it",
}
CANCELLED = _ENDS["CANCELLED"]
#: Why a job waits, for those of Slurm's words that do not explain themselves.
_REASONS = {
    "Resources": "for free nodes",
    "Priority": "jobs before it",
    "BeginTime": "it may not begin yet",
    "None": "just submitted",
    "QOSMaxJobsPerUserLimit": "as many jobs of yours run as the QOS allows",
    "PartitionTimeLimit": "--time is longer than its partition allows",
    "PartitionNodeLimit": "--nodes is more than its partition has",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved",
    "JobHeldUser": "you hold it: scontrol release",
    "JobHeldAdmin": "an administrator holds it",
}


def checked(options: Mapping[str, str]) -> dict[str, str]:
    """The options for sbatch, by their long names.

    Raises UsageError for an option that the launcher sets, and for a value that is empty or would need quotes. sbatch
    refuses unknown options.
    """
    for name, value in options.items():
        if name in _SET:
            raise UsageError(f"--slurm {name}=...: clusterctl sets it", "use --nodes, --gpus, --name or --run-dir")
        if not re.fullmatch(r"[a-z][a-z-]*", name):
            raise UsageError(f"--slurm {name}: not an option of sbatch", "use its long name: --slurm mem=32G")
        if not value and name != "exclusive":
            raise UsageError(f"--slurm {name}: it has no value", f"for example: --slurm {name}=...")
        if re.search(r"[\x00-\x1f\"'\\`$]", value):
            raise UsageError(f"--slurm {name}={value!r}: it contains a quote, '$' or control character")
    if options.get("time") and seconds(options["time"]) is None:
        raise UsageError(f"--time {options['time']!r}: not a time", "minutes, H:MM:SS or D-HH:MM:SS: --time 8:00:00")
    return dict(options)


def seconds(time: str) -> int | None:
    """The seconds of `90` (minutes), `8:00:00`, `30:00` (minutes, seconds), `1-12` or `1-12:30:00`; else None."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        return None
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1] is not None:
        return days * 86400 + first * 3600 + second * 60 + third
    return first * 3600 + second * 60 + third if match[4] is not None else first * 60 + second


@dataclass(frozen=True)
class Row:
    """A job as `squeue` shows it."""

    job: str
    number: str
    state: str
    restarts: int
    exit_code: str
    start: str
    nodes: str
    reason: str

    @property
    def lasts(self) -> bool:
        """Whether it waits or runs."""
        return self.state in _PHASES


def row(line: str) -> Row | None:
    """The job of a line of squeue, None where the line is empty."""
    values, at = [], 0
    for width in COLUMNS.values():
        values.append(line[at : at + width].strip())
        at += width
    if not values[0]:
        return None
    name, number, array, task, state, restarts, code, start, nodes, reason = values
    number = f"{array}_{task}" if task.isdigit() else number
    return Row(name, number, state.split("+")[0], int(restarts or 0), code, start, nodes, reason)


def statuses(
    plan: Plan, found: Row | None, attempt: int, hosts: Sequence[str], said: Sequence[NodeStatus], error: str = ""
) -> list[NodeStatus]:
    """What each node of the plan's attempt is: what it said itself when it ended, else what Slurm says of the job.

    `attempt` is the one that runs now (0: none yet), `hosts` has the host of each of its nodes, `error` is what the
    batch script complained of.
    """
    left = attempt > plan.attempt or (found is not None and found.restarts >= plan.attempt and waits(found))
    made = []
    for rank, status in enumerate(said):
        where = f"on {hosts[rank]}" if attempt == plan.attempt and rank < len(hosts) else ""
        if status.phase == "exited":
            if not status.exit_code:
                made.append(replace(status, detail=""))
            elif found is not None and found.state == "CANCELLED":
                made.append(replace(status, detail=CANCELLED))
            else:
                made.append(replace(status, where=where))
        elif left:
            made.append(
                NodeStatus(status.node, "lost", detail=f"Slurm has put the job into the queue again {where}".strip())
            )
        elif found is None:
            made.append(NodeStatus(status.node, "lost", detail="Slurm does not know the job any more"))
        elif found.lasts:
            made.append(NodeStatus(status.node, _PHASES[found.state], detail=_waiting(found) or where))
        else:
            made.append(_ended(status.node, found, error or where))
    return made


def waits(found: Row) -> bool:
    """Whether the job is in the queue, or Slurm makes its nodes ready."""
    return _PHASES.get(found.state) == "pending"


def _waiting(found: Row) -> str:
    """`waits for free nodes; Slurm expects the start at 2026-11-21T17:02:11`."""
    if not waits(found):
        return {"SUSPENDED": "suspended", "STOPPED": "suspended"}.get(found.state, "")
    words = f"in the queue: {_REASONS.get(found.reason, found.reason)}"
    if found.state == "CONFIGURING":
        words = "Slurm makes its nodes ready"
    known = re.match(r"\d{4}-\d\d-\d\dT", found.start)
    return f"{words}; Slurm expects its start at {found.start}" if known else words


def _ended(node: str, found: Row, why: str) -> NodeStatus:
    code, _, signal = found.exit_code.partition(":")
    if found.state == "COMPLETED":
        return NodeStatus(node, "exited", 0)
    if found.state in _ENDS:
        return NodeStatus(node, "exited" if found.state == "CANCELLED" else "lost", 143, _ENDS[found.state])
    if signal == "53" or code == str(EXIT_NOT_COMMON):  # 53: Slurm cannot open the output file
        why = f"the run directory must be a folder common to all nodes, and is not: {why or 'not there on the first'}"
    why = why or f"the batch script ended with {found.exit_code}"
    return NodeStatus(node, "exited", int(code) if code.isdigit() and int(code) else 1, why)


@dataclass(frozen=True)
class Partition:
    """What a partition has: `gpus` and `cpus` of its best nodes, `limit_s` of time (None: no limit)."""

    name: str
    nodes: int
    cpus: int
    gpus: int
    limit_s: int | None
    default: bool = False


def partitions(lines: Sequence[str]) -> dict[str, Partition]:
    """By name, from lines of `sinfo --noheader --format '%P|%D|%c|%G|%l'`, one for each kind of node."""
    found: dict[str, Partition] = {}
    for line in lines:
        name, nodes, cpus, gres, limit = line.split("|")
        default, name = name.endswith("*"), name.rstrip("*")
        gpus = sum(int(count) for count in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", gres))
        known = found.get(name, Partition(name, 0, 0, 0, seconds(limit), default))
        found[name] = Partition(
            name,
            known.nodes + int(nodes),
            max(known.cpus, int(cpus.rstrip("+"))),
            max(known.gpus, gpus),
            known.limit_s,
            default,
        )
    return found


def problems(job: Job, has: Mapping[str, Sequence[str]], where: str) -> list[tuple[str, str]]:
    """What stops a submission, as (message, hint), from what agent/slurm_check.sh printed, by its first word."""
    assert job.queue is not None
    asked = job.queue.options
    found = [
        (f"{where}: there is no {name}", "it must be a login node of a Slurm cluster: login in cluster.yaml")
        for name in has.get("no_program", ())
    ]
    found += [(f"{where}: Slurm does not answer: {text}", "scontrol ping") for text in has.get("down", ())]
    found += [
        (f"{where}: cannot write to the run directory {text}", "run_dir in cluster.yaml, or --run-dir: a common folder")
        for text in has.get("run_dir", ())
    ]
    found += [
        (f"{where}: no image {text}", "clusterctl image sif   (makes it of the Docker image)")
        for text in has.get("no_image", ())
    ]
    found += [
        (f"{where}: {text} is not there", readiness.bring(job.queue.login, text)) for text in has.get("missing", ())
    ]
    if found:
        return found
    known = partitions(has.get("partition", ()))
    names = (
        asked.get("partition", "").split(",")
        if asked.get("partition")
        else [p.name for p in known.values() if p.default]
    )
    for name in names:
        if name not in known:
            found.append((f"{where}: no partition {name}", f"one of: {', '.join(known)}"))
            continue
        found += [(f"partition {name}: {what}", hint) for what, hint in _too_much(job, known[name])]
    for option in ("account", "qos"):
        lists = [set(text.split(",")) for text in has.get(option, ()) if text]
        allowed = set().union(*lists)
        if allowed and asked.get(option, next(iter(allowed))) not in allowed:
            found.append((f"{where}: no {option} {asked[option]} for you", f"one of: {', '.join(sorted(allowed))}"))
    return found


def _too_much(job: Job, has: Partition) -> list[tuple[str, str]]:
    assert job.queue is not None
    asked = job.queue.options
    found = []
    if job.nodes > has.nodes:
        found.append((f"it has {has.nodes} nodes, and --nodes {job.nodes} asks for more", "fewer --nodes"))
    if job.device == "cuda" and job.procs_per_node > has.gpus:
        found.append(
            (
                f"its nodes have {has.gpus or 'no'} GPUs, and --gpus {job.procs_per_node} asks for more",
                "fewer --gpus, another --partition, or --device cpu",
            )
        )
    if int(asked.get("cpus-per-task", 0) if asked.get("cpus-per-task", "0").isdigit() else 0) > has.cpus:
        found.append((f"its nodes have {has.cpus} CPUs", "a smaller --slurm cpus-per-task=N"))
    limit = seconds(asked["time"]) if "time" in asked else None
    if limit and has.limit_s is not None and limit > has.limit_s:
        found.append((f"its time limit is shorter than --time {asked['time']}", f"at most {has.limit_s // 60} minutes"))
    return found
