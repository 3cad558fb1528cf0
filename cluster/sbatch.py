"""The batch script that a Slurm cluster runs: it needs nothing of ours there, and works when typed by hand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from cluster import resources
from cluster.errors import UsageError
from cluster.model import Job

#: The options of sbatch that a user may give; those that say how many of what are the job's own.
OPTIONS = (
    "account",
    "begin",
    "comment",
    "constraint",
    "cpus-per-gpu",
    "cpus-per-task",
    "dependency",
    "exclude",
    "exclusive",
    "gpus-per-node",
    "gres",
    "licenses",
    "mail-type",
    "mail-user",
    "mem",
    "mem-per-cpu",
    "mem-per-gpu",
    "nice",
    "nodelist",
    "partition",
    "prefer",
    "priority",
    "qos",
    "reservation",
    "signal",
    "switches",
    "time",
    "tmp",
    "wckey",
)
_OURS = ("nodes", "ntasks", "ntasks-per-node", "job-name", "output", "error", "array", "requeue", "open-mode", "chdir")

#: How long before the end of the time limit the ranks are told to write a checkpoint; submitit's 90 s, too. The batch
#: script alone gets it (B), and passes it on to the ranks: of all that runs on a node they alone outlive it.
_SIGNAL = "B:USR2@90"
_END = "END_OF_NODE_SCRIPT"

#: How a batch script ends when the run directory is not the same folder on every node.
EXIT_NOT_COMMON = 78


def checked(options: Mapping[str, str]) -> dict[str, str]:
    """The options for sbatch, by their long names; raises UsageError for what is none or is the job's own."""
    for name, value in options.items():
        if name in _OURS:
            raise UsageError(
                f"--slurm {name}=...: that is the job's own", "--nodes, --gpus, --name and --run-dir say it"
            )
        if name not in OPTIONS:
            raise UsageError(f"--slurm {name}: no option of sbatch that is known here", f"one of: {', '.join(OPTIONS)}")
        if not value and name != "exclusive":
            raise UsageError(f"--slurm {name}: it has no value", f"for example: --slurm {name}=...")
        if re.search(r"[\x00-\x1f\"'\\`$]", value):
            raise UsageError(f"--slurm {name}={value!r}: there is a quote, '$' or control character in it")
    if options.get("time") and seconds(options["time"]) is None:
        raise UsageError(f"--time {options['time']!r}: not a time", "minutes, H:MM:SS or D-HH:MM:SS: --time 8:00:00")
    return dict(options)


def seconds(time: str) -> int | None:
    """What Slurm means by `90` (minutes), `8:00:00`, `30:00` (minutes, seconds), `1-12` or `1-12:30:00`; else None."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        return None
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1] is not None:
        return days * 86400 + first * 3600 + second * 60 + third
    return first * 3600 + second * 60 + third if match[4] is not None else first * 60 + second


def render(job: Job, node: str, *, run_dir: str, attempt: int) -> str:
    """The whole script; `node` is what each node runs, `attempt` the first one that it makes."""
    assert job.queue is not None
    options = {"job-name": job.name, "nodes": str(job.nodes), "ntasks-per-node": "1"}
    if job.device == "cuda" and not {"gres", "gpus-per-node"} & {*job.queue.options}:
        options["gpus-per-node"] = str(job.procs_per_node)
    options |= {"signal": _SIGNAL, "open-mode": "append", **job.queue.options}
    lines = [f"#SBATCH --{name}" + (f"={_quoted(value)}" if value else "") for name, value in options.items()]
    end = _END
    while end in node:
        end += "_"
    head = f"""#!/usr/bin/env bash
# The job {job.name} on {job.nodes} nodes of a Slurm cluster. `sbatch job.sbatch` runs it, with agent.py beside it.
"""
    values = {
        "run": run_dir,
        "nodes": str(job.nodes),
        "port": str(job.port),
        "max_restarts": str(max(0, job.max_restarts - attempt + 1)),
        "first_attempt": str(attempt),
    }
    head += "\n".join([*lines, "#SBATCH --requeue", *(f"{name}={shlex.quote(text)}" for name, text in values.items())])
    return f"{head}\nnode=$(cat <<'{end}'\n{node}{end}\n)\n\n" + resources.text("agent/batch.sh")


def argv(log: str, path: str) -> Sequence[str]:
    """The command that submits; what the batch script itself says goes to `log`."""
    return ("sbatch", "--parsable", "--output", log, path)


def _quoted(value: str) -> str:
    return value if re.fullmatch(r"[A-Za-z0-9_./:,=+@%-]+", value) else f'"{value}"'
