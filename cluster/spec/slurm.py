"""Slurm: phases of nodes from job states (also lost), limits of partitions, and options of sbatch. Pure."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from cluster import contract
from cluster.agent import scripts
from cluster.errors import UsageError
from cluster.runtimes import RUNTIMES
from cluster.spec.model import Job, NodeStatus, Phase, Plan

_LOGS = "the logs are in the run directory: --run-dir"
#: The options of sbatch that the launcher sets, or that would take a job away from it, and what to use instead.
_REFUSED = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "ignore-pbs"), "use --nodes and --gpus"),
    "array": "use --array",
    "chdir": "use --workdir",
    **dict.fromkeys(("error", "input", "open-mode", "output"), _LOGS),
    **dict.fromkeys(("export-file", "get-user-env"), "use --env"),
    "job-name": "use --name",
    **dict.fromkeys(("no-requeue", "requeue"), "use --max-restarts"),
    "no-kill": "use --max-restarts: a job that loses a node starts again",
    "signal": "use --grace, the time in which the ranks write a checkpoint before the time limit",
    "test-only": "use clusterctl plan",
    **dict.fromkeys(("help", "parsable", "quiet", "usage", "verbose", "version"), "omit it"),
    "wait": "use clusterctl wait",
    "wrap": "use --command",
}
_PLAIN = ("contiguous", "hold", "overcommit", "oversubscribe", "reboot", "spread-job", "use-min-nodes")
#: Options that need no value. A plugin of the site may add others.
FLAGS = (*_PLAIN, "exclusive", "nice", "propagate")
#: The options of variables that have another name: SBATCH_TIMELIMIT is --time.
_OPTIONS = {
    "ARBITRARY_NODELIST": "distribution",
    "ARRAY_INX": "array",
    "BURST_BUFFER": "bb",
    "CPU_FREQ_REQ": "cpu-freq",
    "DEBUG": "verbose",
    "DIST_PLANESIZE": "distribution",
    "EXPORT_ENV": "export",
    "MEM_PER_NODE": "mem",
    "REQ_SWITCH": "switches",
    "TIMELIMIT": "time",
    "WAIT4SWITCH": "switches",
}
#: Options that srun reads from variables, too, but that sbatch does not set for it.
_NOT_PASSED = ("exclusive", "export", "signal", "time")
#: Variables that change only what Slurm's programs print.
_ONLY_PRINTED = ("SLURM_BITSTR_LEN", "SLURM_DEBUG_FLAGS", "SLURM_TIME_FORMAT", "SLURM_TOPO_LEN")

#: Exit code of the batch script if the run directory is not the same folder on all nodes.
EXIT_NOT_SHARED = 78

#: The ends of a node after which agent/batch.sh requeues the job (see RULES in supervisor/restarts.py): its exit code,
#: or no exit code, as after the failure of its host.
ENDED_WITH_CHECKPOINT = str(contract.EXIT_RUN_ME_AGAIN)
ENDED_WITHOUT_CODE = "nothing"

_ONE_CLUSTER = "clusterctl submits to the cluster of the login node only"

#: The columns of `squeue --Format` and their widths. A fixed width, because names may contain any separator.
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

#: The phases of Slurm's job states. A job in any other state is over.
_PENDING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING")
_STARTED = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "COMPLETING")
_PHASES: dict[str, Phase] = {**dict.fromkeys(_PENDING, "pending"), **dict.fromkeys(_STARTED, "starting")}
#: Messages for final states, except COMPLETED, FAILED and CANCELLED. A node's own exit status has precedence.
_ENDS = {
    "TIMEOUT": "it reached its time limit (--time)",
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "out of memory (--set mem=...)",
}
CANCELLED = "cancelled with scancel"


def checked(options: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options for sbatch, by their long names. sbatch itself rejects unknown ones.

    Raises UsageError for an option that the launcher sets, and for a value that needs quotes. An empty value stands for
    an option without one.
    """
    for name, value in options.items():
        if name == "clusters":
            raise UsageError(f"--set clusters={value}: {_ONE_CLUSTER}", "name a login node of that cluster")
        if name in _REFUSED:
            raise UsageError(f"--set {name}=...: clusterctl sets it", _REFUSED[name])
        if not re.fullmatch(r"[a-z][a-z-]*", name):
            raise UsageError(f"--set {name}: not an option of sbatch", "use its long name: --set mem=32G")
        if re.search(r"[\x00-\x1f\"'\\`$]", value):
            raise UsageError(f"--set {name}={value!r}: it contains a quote, '$' or control character")
    if options.get("time") and seconds(options["time"]) is None:
        raise UsageError(
            f"--time {options['time']!r}: not a time limit",
            "use minutes, H:MM:SS or D-HH:MM:SS, for example --time 8:00:00",
        )
    return options


def job_options(job: Job) -> dict[str, str]:
    """Return the job's options for sbatch, which include its GPUs."""
    assert job.queue is not None
    given = dict(job.queue.settings)
    if job.device == "cuda" and not {"gres", "gpus-per-node"} & {*given}:
        given["gpus-per-node"] = str(job.most_procs)
    return given


def variables(given: Mapping[str, str]) -> list[str]:
    """Return the variables in which srun finds these options of its job. sbatch sets them."""
    passed = [option for option in given if option not in _NOT_PASSED]
    names = [option.upper().replace("-", "_") for option in passed]
    names += [name for name, option in _OPTIONS.items() if option in passed]
    return [f"SLURM_{name}" for name in dict.fromkeys(names)]


def inherited(job: Job, lines: Sequence[str], where: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return problems, as (message, hint) pairs, and notes about variables of Slurm's programs on the login node.

    `lines` are `NAME=VALUE`. The scripts of agent/ unset them all, so that only the job's own options count.

    | variable | what the user reads |
    |---|---|
    | SBATCH_X, an option that the job has, or that clusterctl sets | a note, unless the values are equal |
    | SBATCH_X, another option | a problem, because the user may rely on it |
    | SLURM_CLUSTERS, SBATCH_CLUSTERS | a problem, because jobs run on the login node's cluster |
    | SLURM_X, SRUN_X, PMI_X | a note; one for all of them if clusterctl runs in a job of Slurm |
    | SLURM_TIME_FORMAT and its like, SQUEUE_X, SALLOC_X, ... | nothing, because no job depends on them |
    """
    given, found = job_options(job), dict(line.partition("=")[::2] for line in lines)
    outer = found.get("SLURM_JOB_ID")
    wrong, ignored, notes = [], [], []
    for name, value in found.items():
        program, _, rest = name.partition("_")
        option = _OPTIONS.get(rest, rest.lower().replace("_", "-"))
        if program in ("SLURM", "SBATCH") and option == "clusters":
            hint = f"name a login node of {value} in cluster.yaml, or unset {name} there"
            wrong.append((f"{where}: {name}={value} is set, but {_ONE_CLUSTER}", hint))
        elif program == "SBATCH" and outer and "_BIND" in name:
            pass  # Slurm sets these in its jobs
        elif program == "SBATCH" and option in given:
            if given[option] != value and option not in _PLAIN:
                notes.append(f"{where}: ignoring {name}={value}, because the job has {option}={given[option]}")
        elif program == "SBATCH" and option in (*_REFUSED, "export"):
            notes.append(f"{where}: ignoring {name}={value}, because clusterctl sets {option}")
        elif program == "SBATCH":
            hint = f"to ignore it: unset {name} there"
            is_flag = option in _PLAIN or (option in FLAGS and not value)
            use = shlex.quote(option if is_flag else f"{option}={value}")
            hint = f"to use it: --set {use}, or {option} under slurm in cluster.yaml; {hint}"
            wrong.append((f"{where}: {name}={value} is set, but the job has no option {option}", hint))
        elif program in ("SLURM", "SRUN", "PMI") and name not in _ONLY_PRINTED:
            ignored.append(f"{name}={value}")
    if outer:
        notes.append(f"{where}: ignoring the variables of Slurm's job {outer}, in which clusterctl runs")
    elif ignored:
        notes.append(f"{where}: ignoring {', '.join(ignored)}")
    return wrong, notes


def seconds(time: str) -> int | None:
    """Parse `90` (minutes), `8:00:00`, `30:00` (minutes, seconds), `1-12` or `1-12:30:00`; None if invalid."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        return None
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1] is not None:
        return days * 86400 + first * 3600 + second * 60 + third
    return first * 3600 + second * 60 + third if match[4] is not None else first * 60 + second


@dataclass(frozen=True)
class Row:
    """A job in the output of `squeue`."""

    number: str
    state: str
    restarts: int
    exit_code: str
    start: str
    reason: str

    @property
    def is_active(self) -> bool:
        """Whether the job is pending or runs."""
        return self.state in _PHASES


def row(line: str) -> Row | None:
    """Parse a line of squeue; None if it is empty."""
    ends = [*accumulate(COLUMNS.values(), initial=0)]
    name, number, array, task, state, restarts, code, start, _, reason = (
        line[begin:end].strip() for begin, end in pairwise(ends)
    )
    number = f"{array}_{task}" if task.isdigit() else number
    return Row(number, state.split("+")[0], int(restarts or 0), code, start, reason) if name else None


def statuses(
    plan: Plan, found: Row | None, attempt: int, hosts: Sequence[str], own: Sequence[NodeStatus], error: str = ""
) -> list[NodeStatus]:
    """Return the status of each node of the plan's attempt: its own exit status, else the state of the Slurm job.

    `own` has the statuses from the nodes' status files, `attempt` is the running attempt (0: none yet), `hosts` has
    the host of each of its nodes, `error` is an error of the batch script or of srun.
    """
    requeued = is_requeued(plan, found, attempt)
    made = []
    for rank, status in enumerate(own):
        where = f"on {hosts[rank]}" if attempt == plan.attempt and rank < len(hosts) else ""
        if status.phase == "exited":
            if not status.exit_code:
                made.append(replace(status, detail=""))
            elif found is not None and found.state == "CANCELLED":
                made.append(replace(status, detail=CANCELLED, is_cancelled=True))
            else:
                made.append(replace(status, where=where))
        elif requeued:
            made.append(NodeStatus(status.node, "lost", detail=f"Slurm requeued the job {where}".strip()))
        elif found is None:
            made.append(NodeStatus(status.node, "lost", detail="squeue does not list the job"))
        elif found.is_active:
            detail = _pending_reason(found) or "; ".join(filter(None, [where, error]))
            made.append(replace(status, phase=_PHASES[found.state], detail=detail))
        else:
            made.append(_ended(status.node, found, error or where))
    return made


def is_requeued(plan: Plan, found: Row | None, attempt: int) -> bool:
    """Return whether Slurm has requeued the job after the plan's attempt. `attempt` is the running one."""
    return attempt > plan.attempt or (found is not None and found.restarts >= plan.attempt and is_pending(found))


#: What squeue shows in the first seconds, before Slurm has considered the job.
_NO_REASON = ("", "None", "(null)", "N/A")


def is_pending(found: Row) -> bool:
    """Whether the job is in the queue or its nodes are being configured."""
    return found.state in _PENDING


def _pending_reason(found: Row) -> str:
    """Return `in the queue: Resources; expected start: 2026-11-21T17:02:11`, with the reason that squeue shows."""
    if not is_pending(found):
        return {"SUSPENDED": "suspended", "STOPPED": "suspended"}.get(found.state, "")
    reason = "" if found.reason in _NO_REASON else f": {found.reason}"
    words = "its nodes are being configured" if found.state == "CONFIGURING" else f"in the queue{reason}"
    has_start = re.match(r"\d{4}-\d\d-\d\dT", found.start)
    return f"{words}; expected start: {found.start}" if has_start else words


def _ended(node: str, found: Row, why: str) -> NodeStatus:
    code, _, signal = found.exit_code.partition(":")
    if found.state == "COMPLETED":
        return NodeStatus(node, "exited", 0)
    if found.state == "CANCELLED":
        return NodeStatus(node, "exited", 143, CANCELLED, is_cancelled=True)
    if found.state != "FAILED":
        return NodeStatus(node, "lost", 143, _ENDS.get(found.state, f"Slurm ended it: {found.state}"))
    if signal == "53" or code == str(EXIT_NOT_SHARED):  # 53: Slurm cannot open the output file
        why = f"the run directory is not shared by all nodes: {why or 'missing on the first'}"
    why = why or f"the batch script exited with {found.exit_code}"
    return NodeStatus(node, "exited", int(code) if code.isdigit() and int(code) else 1, why)


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
        known = found.get(name, Partition(name, 0, 0, seconds(limit), default))
        found[name] = replace(known, nodes=known.nodes + int(nodes), gpus=max(known.gpus, gpus))
    return found


def check_command(job: Job, *, run_dir: str, new: str = "", name: str = "", needs: Sequence[str] = ()) -> list[str]:
    """Return the command of the preflight check on the login node; see agent/slurm_check.sh."""
    assert job.queue is not None
    kind = RUNTIMES[job.queue.login.runtime]
    version = kind.version if kind.is_on_login_node else ()
    where = {"image": kind.image_file(job.image), "run_dir": run_dir, "new": new, "name": name}
    return scripts.command("slurm_check", runtime=kind.name, version=version, needs=tuple(needs), **where)


def problems(job: Job, has: Mapping[str, Sequence[str]], where: str) -> list[tuple[str, str]]:
    """Return (message, hint) pairs that prevent a submission, from the output of agent/slurm_check.sh by key."""
    assert job.queue is not None
    options = job.queue.settings
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
    exported = options.get("export", "ALL").split(",")
    if job.secrets and "ALL" not in exported:
        why = f"--set export={options['export']}: the job gets its secrets in its environment"
        found.append((why, f"--set export=ALL,{options['export']}" if exported != ["NONE"] else "omit it"))
    if job.secrets and "stores_env" in has:
        why = "Slurm would store the secrets in its accounting database (AccountingStoreFlags has job_env)"
        found.append((f"{where}: {why}", "omit --env NAME, and let the program read a file that only you can read"))
    found += inherited(job, has.get("inherited", ()), where)[0]
    if found:
        return found
    known = partitions(has.get("partition", ()))
    default = [partition.name for partition in known.values() if partition.default]
    for name in options["partition"].split(",") if options.get("partition") else default:
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
        wanted_s = seconds(options.get("time", ""))
        if wanted_s and limit_s is not None and wanted_s > limit_s:
            why = f"partition {name}: its time limit is shorter than --time {options['time']}"
            found.append((why, f"use at most {limit_s // 60} minutes"))
    return found
