"""Slurm's queue: the job that squeue lists, and the statuses of its nodes. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from cluster import contract
from cluster.spec.model import Plan
from cluster.spec.node_status import NodeStatus, Phase

#: Exit code of the batch script if the run directory is not the same folder on all nodes.
EXIT_NOT_SHARED = 78

#: The ends of a node after which job.sh requeues the job (see RULES in supervisor/restarts.py): its exit code,
#: or no exit code, as after the failure of its host.
ENDED_WITH_CHECKPOINT = str(contract.EXIT_RUN_ME_AGAIN)
ENDED_WITHOUT_CODE = "nothing"

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
