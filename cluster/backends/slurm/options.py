"""Options of sbatch, and the variables from which Slurm's programs read options. Pure."""

import re
import shlex
from collections.abc import Mapping, Sequence

from cluster.errors import UsageError
from cluster.spec.model import Job

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

_ONE_CLUSTER = "clusterctl submits to the cluster of the login node only"


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
    given = job_options(job)
    values = dict(line.partition("=")[::2] for line in lines)
    outer = values.get("SLURM_JOB_ID")
    wrong = []
    ignored = []
    notes = []
    for name, value in values.items():
        program, _, rest = name.partition("_")
        option = _OPTIONS.get(rest, rest.lower().replace("_", "-"))
        if program in ("SLURM", "SBATCH") and option == "clusters":
            hint = f"name a login node of {value} in cluster.yaml, or unset {name} there"
            wrong.append((f"{where}: {name}={value} is set, but {_ONE_CLUSTER}", hint))
        elif program == "SBATCH" and outer and "_BIND" in name:
            pass  # Slurm sets these in its jobs
        elif program == "SBATCH" and option in given:
            if given[option] != value and option not in _PLAIN:
                notes.append(
                    f"{where}: ignoring {name}={value}, because the job has {option}={given[option]}"
                )
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
