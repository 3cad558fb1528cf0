"""The batch script that a Slurm cluster runs: it needs nothing of ours there, and works when typed by hand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

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

_TEMPLATE = r"""#!/usr/bin/env bash
# The job @name@ on @nodes@ nodes of a Slurm cluster: `sbatch job.sbatch` runs it by itself.
@options@
set -u
run=@run@
nodes=@nodes@ port=@port@ max_restarts=@max_restarts@
restarts=$((${CLUSTER_RESTARTS:-0} + ${SLURM_RESTART_COUNT:-0}))
export CLUSTER_ATTEMPT=$((@attempt@ + restarts))
out="$run/attempt-$CLUSTER_ATTEMPT"
fail() { local code=$1; shift; printf 'error: %s\n' "$*" >&2; exit "$code"; }

# where: the nodes that Slurm gave, the first is the master
[ "$restarts" -le "$max_restarts" ] || fail 75 "it was restarted $max_restarts times (--max-restarts)"
[ -z "${CLUSTER_SUBMITTED:-}" ] || [ -e "$run/submitted" ] || fail @not_common@ "$(hostname): there is no $run"
mkdir -p -- "$out" || fail @not_common@ "$(hostname): cannot make $out"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
[ "${#hosts[@]}" = "$nodes" ] || fail 71 "Slurm gave ${#hosts[@]} nodes (${hosts[*]}), and the job takes $nodes"
echo "$CLUSTER_ATTEMPT ${hosts[*]}" > "$run/attempt"
touch -- "$run/common.$SLURM_JOB_ID"
lacks=$(srun --nodes="$nodes" --ntasks-per-node=1 bash -c '[ -e "$1" ] || hostname' look "$run/common.$SLURM_JOB_ID")
[ -z "$lacks" ] || fail @not_common@ "$run of ${hosts[0]} is another folder than that of" $lacks
export CLUSTER_HOSTS="${hosts[*]}" PET_MASTER_ADDR="${hosts[0]}"

# port: from the job's number, so that jobs which share a node try different ones; another where one is taken
taken() { timeout 1 bash -c ": < /dev/tcp/127.0.0.1/$1" 2>/dev/null || [ -n "$(ss -Hltn "sport = :$1" 2>/dev/null)" ]; }
if [ "$port" -gt 0 ]; then
    ! taken "$port" || fail 71 "${hosts[0]}: port $port is taken: choose another: --master-port auto"
else
    port=$((20000 + SLURM_JOB_ID % 10000))
    for _ in $(seq 20); do taken "$port" || break; port=$((20000 + (port - 19999) % 10000)); done
fi
export PET_MASTER_PORT="$port"

# nodes: one task on each, which runs this script
node=$(cat <<'@end@'
@node@
@end@
)
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
# 75 is "checkpointed, run me again": no reason to end the other nodes before they have said so, too
# (the traps keep this shell, and what it has started within Slurm's reach, where that goes by parents)
task='trap : TERM USR2; bash -c "$1" node; code=$?; [ "$code" = 75 ] || exit "$code"'
tell() {
    local text='read -r pid < "$1/node-$SLURM_NODEID.pid" && kill -s "$2" "$pid"'
    srun --overlap --nodes="$nodes" --ntasks-per-node=1 bash -c "$text" tell "$out" "$1"
}
srun --nodes="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c "$task" task "$node" &
srun=$!
stopped=
trap 'tell USR2' USR2
trap 'stopped=yes; tell TERM' TERM
wait "$srun"
code=$?
while kill -0 "$srun" 2>/dev/null; do  # a signal ends `wait` before srun has ended
    wait "$srun"
    code=$?
done
wait "$srun" 2>/dev/null  # and once more, where both came at once: 127 is "I have told you"
last=$?
[ "$last" = 127 ] || code=$last

# the end: again after a checkpoint, or where a node never said how it ended (7x: it refused to begin)
again=
for rank in $(seq 0 $((nodes - 1))); do
    read -r said _ 2>/dev/null < "$out/node-$rank.exit" || said=nothing
    case $said:$code in
        75:*) again=${again:-75} ;;
        nothing:0 | nothing:7?) ;;
        nothing:*)
            again="nothing from ${hosts[$rank]}"
            # Slurm finds out by itself that a node is dead, and takes another; before that it would give us the same
            [ -n "$stopped" ] || timeout 30 srun --overlap --nodes=1 --ntasks=1 --nodelist="${hosts[$rank]}" true ||
                sleep 900 ;;
    esac
done
# what was cancelled shall not come back
state=$(scontrol show job "$SLURM_JOB_ID" --oneliner | grep -o 'JobState=[A-Z_]*')
if [ -n "$again" ] && [ -z "$stopped" ] && [ "$restarts" -lt "$max_restarts" ] && [ "$state" = JobState=RUNNING ]; then
    echo "attempt $CLUSTER_ATTEMPT ended with $again: again"
    ! scontrol requeue "$SLURM_JOB_ID" || { sleep 600; exit 75; }  # Slurm ends this script in a moment
    echo "Slurm does not requeue it: a new job"
    CLUSTER_RESTARTS=$((restarts + 1)) sbatch --output "$run/slurm.log" "$0" && exit 0
fi
rm -f -- "$run/secrets" "$run/common.$SLURM_JOB_ID"
[ -z "$again" ] || exit 75
exit "$code"
"""

#: What only the node itself knows: its number, the way to its peers, the GPUs that Slurm gave it.
NODE = r"""
export NODE="node-$SLURM_NODEID" PET_NODE_RANK="$SLURM_NODEID"
export PET_LOG_DIR="$CLUSTER_RUN_DIR/attempt-$CLUSTER_ATTEMPT/ranks/$NODE"
where=$(hostname)
read -r -a hosts <<< "$CLUSTER_HOSTS"
peer=${hosts[$((SLURM_NODEID == 0))]:-}
device=lo
if [ -n "$peer" ]; then
    address=$(getent ahosts "$peer" | awk '{ print $1; exit }')
    if [ -z "$address" ]; then echo "error: $where: the name $peer does not resolve" >&2; exit 71; fi
    device=$(ip -o route get "$address" | sed -n 's/.* dev \([^ ]*\) .*/\1/p')
fi
if [ -z "$device" ]; then echo "error: $where: no way to $peer ($address)" >&2; exit 71; fi
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$device}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=$device}"
"""
GPUS = r"""
IFS=, read -r -a gpus <<< "${CUDA_VISIBLE_DEVICES:-}"
if [ "${#gpus[@]}" -lt "$PET_NPROC_PER_NODE" ]; then
    echo "error: $where: Slurm gave ${#gpus[@]} GPUs, and --gpus $PET_NPROC_PER_NODE asks for more" >&2
    exit 71
fi
# an engine is outside of the step's cgroup, in which these count from 0; parts of a GPU (MIG) have names
case $CUDA_VISIBLE_DEVICES in
    *[!0-9,]*) export GIVEN_GPUS="$CUDA_VISIBLE_DEVICES" ;;
    *) export GIVEN_GPUS="${SLURM_STEP_GPUS:-$CUDA_VISIBLE_DEVICES}" ;;
esac
"""
#: Their values are in a file beside the script, or, where somebody typed sbatch, in the environment.
SECRETS = r"""
[ ! -e "$CLUSTER_RUN_DIR/secrets" ] || . "$CLUSTER_RUN_DIR/secrets"
for name in @names@; do
    if [ -z "${!name+set}" ]; then echo "error: the secret $name has no value: export it before sbatch" >&2; exit 71; fi
done
"""


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
    parts = {
        "name": job.name,
        "nodes": str(job.nodes),
        "options": "\n".join([*lines, "#SBATCH --requeue"]),
        "run": shlex.quote(run_dir),
        "port": str(job.port),
        "max_restarts": str(max(0, job.max_restarts - attempt + 1)),
        "attempt": str(attempt),
        "not_common": str(EXIT_NOT_COMMON),
        "end": end,
        "node": node.rstrip("\n"),
    }
    return re.sub(r"@(\w+)@", lambda marker: parts[marker[1]], _TEMPLATE)


def argv(log: str, path: str) -> Sequence[str]:
    """The command that submits; what the batch script itself says goes to `log`."""
    return ("sbatch", "--parsable", "--output", log, path)


def finds(job: Job) -> str:
    """The bash of what only the node knows."""
    text = NODE + (GPUS if job.device == "cuda" else "")
    return text + (SECRETS.replace("@names@", " ".join(job.secrets)) if job.secrets else "")


def _quoted(value: str) -> str:
    return value if re.fullmatch(r"[A-Za-z0-9_./:,=+@%-]+", value) else f'"{value}"'
