"""The node script: the one text that every backend runs on a node, and the only place that quotes for a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from cluster import contract
from cluster.model import Job, Node

_TEMPLATE = r"""#!/usr/bin/env bash
# Node @rank@ of @nodes@ of the job @job_id@, attempt @attempt@.
set -u
@prologue@
# exports: torchrun reads each of its options from PET_*
@exports@
cores=$(nproc) && threads=$((cores / (PET_NPROC_PER_NODE * CLUSTER_NODES_ON_HOST)))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 1 ? threads : 1))}"

# log: everything to the run directory, and to the screen what is meant for people
out="$CLUSTER_RUN_DIR/attempt-$CLUSTER_ATTEMPT"
mkdir -p -- "$out/ranks" || exit 73
rm -f -- "$out/$NODE.exit" && printf '%s\n' "$$" > "$out/$NODE.pid" || exit 73
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
run=
trap 'kill -TERM $run 2>/dev/null' INT TERM
@body@ &
run=$!
wait "$run"
code=$?
while kill -0 "$run" 2>/dev/null; do  # a signal ends `wait` before the program has ended
    wait "$run"
    code=$?
done

# epilogue: the log is whole before the exit code says so
kill "$probe" 2>/dev/null
exec >&- 2>&-
for _ in $(seq 20); do kill -0 "$tee" 2>/dev/null && sleep 0.1; done
printf '%d %s\n' "$code" "$(date +%s.%N)" > "$out/$NODE.exit.tmp" && mv -- "$out/$NODE.exit.tmp" "$out/$NODE.exit"
exit "$code"
"""


def exports(values: Mapping[str, str]) -> str:
    """One `export NAME=value` line each, in the given order, quoted for any POSIX shell."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items())


def environment(
    job: Job, node: Node, rank: int, *, attempt: int, run_dir: str, master: tuple[str, int]
) -> dict[str, str]:
    """The contract's variables for one node; only NODE, the rank, the log folder and the GPUs differ between nodes."""
    values = {
        "NODE": node.name,
        "PET_NNODES": str(job.nodes),
        "PET_NODE_RANK": str(rank),
        "PET_NPROC_PER_NODE": str(job.procs_per_node),
        "PET_MASTER_ADDR": master[0],
        "PET_MASTER_PORT": str(master[1]),
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ID": job.name,
        "PET_LOG_DIR": f"{run_dir}/attempt-{attempt}/ranks/{node.name}",
        "PET_REDIRECTS": "3",
        "PET_TEE": "3",
        "PYTHONUNBUFFERED": "1",
        contract.JOB_ID: job.name,
        contract.ATTEMPT: str(attempt),
        contract.RUN_DIR: run_dir,
    }
    if job.device == "cuda":
        values["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in node.gpus)
    elif job.device == "cpu":
        values["CUDA_VISIBLE_DEVICES"] = ""
    return values


def render(
    job: Job,
    node: Node,
    rank: int,
    *,
    attempt: int,
    run_dir: str,
    master: tuple[str, int],
    nodes_on_host: int,
    body: Sequence[str],
    extra: Mapping[str, str],
) -> str:
    """The whole script of one node.

    `run_dir` is the job's folder as the node sees it. `extra` are the backend's own variables: the user's `job.env`
    wins over them, the contract's win over both.
    """
    values = {
        **extra,
        **job.env,
        **environment(job, node, rank, attempt=attempt, run_dir=run_dir, master=master),
        contract.NODES_ON_HOST: str(nodes_on_host),
    }
    parts = {
        "rank": str(rank),
        "nodes": str(job.nodes),
        "job_id": job.name,
        "attempt": str(attempt),
        "prologue": f"cd -- {shlex.quote(job.workdir)} || exit 72\n" if job.workdir else "",
        "exports": exports(values),
        "body": shlex.join(body),
    }
    # One pass over the template, so that a value which looks like a marker stays a value.
    return re.sub(r"@(\w+)@", lambda marker: parts[marker[1]], _TEMPLATE)
