"""Slurm's queue: the jobs that squeue lists, and what their states mean. Pure."""

import re
from dataclasses import replace
from itertools import accumulate, pairwise

from cluster.backends.batch.queued import EXIT_NOT_SHARED, QueuedJob

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

#: The job states of a job in the queue.
_PENDING = (
    "PENDING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
    "CONFIGURING",
)
#: Those of a job that has nodes, and what to say about it. A job in any other state is over.
_STARTED = {
    **dict.fromkeys(("RUNNING", "SIGNALING", "STAGE_OUT", "COMPLETING"), ""),
    **dict.fromkeys(("SUSPENDED", "STOPPED"), "suspended"),
}
#: Messages for final states of jobs that Slurm has ended. A node's own exit status has precedence.
_ENDS = {
    "TIMEOUT": "it reached its time limit (--time)",
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "out of memory (--set mem=...)",
}
#: What squeue shows in the first seconds, before Slurm has considered the job.
_NO_REASON = ("", "None", "(null)", "N/A")
#: The signal that squeue shows if Slurm could not open the script's output file.
_NO_OUTPUT = "53"


def queued_job(line: str) -> QueuedJob | None:
    """Parse a line of squeue; None if it is empty."""
    ends = [*accumulate(COLUMNS.values(), initial=0)]
    name, number, array, task, state, restarts, code, start, _, reason = (
        line[begin:end].strip() for begin, end in pairwise(ends)
    )
    if not name:
        return None
    state = state.split("+")[0]
    job = QueuedJob(
        f"{array}_{task}" if task.isdigit() else number, state, "lost", requeues=int(restarts or 0)
    )
    if state in _PENDING:
        return replace(job, phase="pending", detail=_pending_reason(state, start, reason))
    if state in _STARTED:
        return replace(job, phase="starting", detail=_STARTED[state])
    if state == "COMPLETED":
        return replace(job, phase="exited", exit_code=0)
    if state == "CANCELLED":
        return replace(job, phase="exited", exit_code=143, detail="cancelled with scancel", is_cancelled=True)
    if state == "FAILED":
        return _failed(job, code)
    return replace(job, exit_code=143, detail=_ENDS.get(state, f"Slurm ended it: {state}"))


def _pending_reason(state: str, start: str, reason: str) -> str:
    """Return `in the queue: Resources; expected start: 2026-11-21T17:02:11`, with the reason that squeue shows."""
    known = "" if reason in _NO_REASON else f": {reason}"
    words = "its nodes are being configured" if state == "CONFIGURING" else f"in the queue{known}"
    has_start = re.match(r"\d{4}-\d\d-\d\dT", start)
    return f"{words}; expected start: {start}" if has_start else words


def _failed(job: QueuedJob, code_and_signal: str) -> QueuedJob:
    """Return a job whose batch script has failed."""
    code, _, signal = code_and_signal.partition(":")
    return replace(
        job,
        phase="exited",
        exit_code=int(code) if code.isdigit() and int(code) else 1,
        detail=f"the batch script exited with {code_and_signal}",
        is_shared=code != str(EXIT_NOT_SHARED) and signal != _NO_OUTPUT,
    )
