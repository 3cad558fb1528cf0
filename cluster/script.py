"""The node script: the one text that every backend runs on a node."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from cluster import contract, quoting, torchrun
from cluster.model import Job, Mount, Node
from cluster.runtimes import Runtime

_TEMPLATE = r"""#!/usr/bin/env bash
# Node @rank@ of @nodes@ of the job @job_id@, attempt @attempt@.
set -u
@prologue@
# exports: torchrun reads each of its options from PET_*
@exports@
@secrets@# USR2 asks the ranks for a checkpoint and their end; torchrun and the pipes of the log would die of it
trap '' USR2
told=
ranks() {
    local file
    told=yes
    for file in $(grep -lzxs "CLUSTER_JOB_ID=$CLUSTER_JOB_ID" /proc/[0-9]*/environ); do
        file=${file#/proc/}
        ! grep -qzs '^LOCAL_RANK=' "/proc/$file" || kill -s USR2 "${file%/environ}" 2>/dev/null
    done
}
cores=$(nproc) && threads=$((cores / (PET_NPROC_PER_NODE * CLUSTER_NODES_ON_HOST)))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 1 ? threads : 1))}"

# log: everything to the run directory, and to the screen what is meant for people
out="$CLUSTER_RUN_DIR/attempt-$CLUSTER_ATTEMPT"
mkdir -p -- "$out/ranks" || exit 73
rm -f -- "$out/$NODE.exit" && printf '%s\n' "$$" > "$out/$NODE.pid" || exit 73
before=$(cat -- "$out/$NODE.log" 2>/dev/null | wc -c)  # of a run that somebody starts once more by hand
exec > >(trap '' INT TERM; tee -a -- "$out/$NODE.log" | sed -u '/::cluster /d') 2>&1
tee=$!

# joining: torchrun is silent while it waits, so this says whether the master's port answers
event() {
    printf '::cluster {"event":"joining","node":%d,"time":%s,"master":"%s:%d","reachable":%s,"why":"%s"}\n' \
        "$PET_NODE_RANK" "$(date +%s.%N)" "$PET_MASTER_ADDR" "$PET_MASTER_PORT" "$1" "$2"
}
probe() {
    local why said= tries=0
    while ! why=$(timeout 5 bash -c ': < "/dev/tcp/$PET_MASTER_ADDR/$PET_MASTER_PORT"' 2>&1); do
        why=${why%%$'\n'*} why=${why##*: } why=${why//[\"\\]/}
        why=${why:-no answer within 5 s} tries=$((tries + 1))
        # The master needs seconds to start, so the first refusals mean nothing.
        if [ "$tries" -gt 8 ] && [ "$why" != "$said" ]; then event false "$why"; said=$why; fi
        sleep 0.5
    done
    event true ""
}
probe &
probe=$!

# body
@setup@run=
trap 'kill -TERM $run 2>/dev/null' INT TERM
@body@ &
run=$!
trap ranks USR2
wait "$run"
code=$?
while kill -0 "$run" 2>/dev/null; do  # a signal ends `wait` before the program has ended
    wait "$run"
    code=$?
done
wait "$run" 2>/dev/null  # and once more, where both came at once: 127 is "I have told you"
last=$?
[ "$last" = 127 ] || code=$last

# epilogue: the log is whole before the exit code says so
kill "$probe" 2>/dev/null
exec >&- 2>&-
for _ in $(seq 20); do kill -0 "$tee" 2>/dev/null && sleep 0.1; done
# torchrun says 1 for whatever its ranks ended with; and what was told to end shall go on later
[ -z "$told" ] || [ "$code" = 0 ] || code=75
! tail -c "+$((before + 1))" -- "$out/$NODE.log" | grep -qs '::cluster {"event":"failed".*"exit_code":75' || code=75
printf '%d %s\n' "$code" "$(date +%s.%N)" > "$out/$NODE.exit.tmp" && mv -- "$out/$NODE.exit.tmp" "$out/$NODE.exit" \
    || rm -f -- "$out/$NODE.exit.tmp"
exit "$code"
"""


#: gloo and NCCL guess a device, and take docker0 or lo: the one that carries this node's address is known.
_DEVICE = r"""
case $NODE_ADDRESS in
    127.*|::1) device=lo ;;
    *)
        device=$(ip -o addr show to "$NODE_ADDRESS" | awk '{ print $2; exit }')
        [ -n "$device" ] || device=$(ip -o route get "$PET_MASTER_ADDR" | sed -n 's/.* dev \([^ ]*\) .*/\1/p')
        ;;
esac
if [ -z "$device" ]; then echo "$NODE: no network device has the address $NODE_ADDRESS" >&2; exit 71; fi
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$device}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=$device}"
"""
#: Values that stand in no plan: written beside the script for its owner's eyes, and gone once they are read.
_SECRETS = r"""
out="$CLUSTER_RUN_DIR/attempt-$CLUSTER_ATTEMPT"
. "$out/$NODE.secrets" && rm -f -- "$out/$NODE.secrets" || exit 73
"""


def render(
    job: Job,
    node: Node,
    rank: int,
    *,
    attempt: int,
    run_dir: str,
    master: tuple[str, int],
    nodes_on_host: int,
    runtime: Runtime,
    mounts: Sequence[Mount] = (),
    extra: Mapping[str, str],
    finds_device: bool = False,
    finds: str = "",
    found: Collection[str] = (),
) -> str:
    """The whole script of one node.

    `run_dir` is the job's folder as the node sees it. `extra` are the backend's own variables: the user's `job.env`
    wins over them, the contract's win over both. `finds_device`: the network device is looked up on the node.
    `finds` is bash that sets the variables `found`, which only the node knows.
    """
    values = {
        **extra,
        **job.env,
        **torchrun.environment(
            job, node, rank, attempt=attempt, run_dir=run_dir, master=master, gpus=runtime.gpus(node)
        ),
        contract.NODES_ON_HOST: str(nodes_on_host),
        contract.GLOBAL_WORLD_SIZE: str(job.world_size),
    }
    if finds_device:
        values["NODE_ADDRESS"] = node.address
    values = {name: value for name, value in values.items() if name not in found}
    names = [
        *values,
        *found,
        "OMP_NUM_THREADS",
        *(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if finds_device else ()),
    ]
    body = runtime.run(job, node, mounts, list(dict.fromkeys([*names, *job.secrets])))
    parts = {
        "rank": str(rank) if "NODE" not in found else "n",
        "nodes": str(job.nodes),
        "job_id": job.name,
        "attempt": str(attempt),
        "prologue": f"{quoting.line(['cd', '--', job.workdir])} || exit 72\n" if job.workdir and runtime.inside else "",
        "exports": quoting.exports(values) + (_DEVICE.rstrip() if finds_device else "") + finds.rstrip(),
        "secrets": _SECRETS.strip() + "\n" if job.secrets and not finds else "",
        "setup": runtime.setup,
        "body": quoting.line(body),
    }
    # One pass over the template, so that a value which looks like a marker stays a value.
    return re.sub(r"@(\w+)@", lambda marker: parts[marker[1]], _TEMPLATE)
