"""The end of a job: its nodes are stopped, its results copied, its outcome recorded and its report written."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

from cluster.backends import BACKENDS
from cluster.errors import ClusterError
from cluster.spec.model import JobRecord
from cluster.store import JobStore, Outcome
from cluster.supervisor import report, webhook
from cluster.supervisor.attempt_monitor import POLL_S, AttemptMonitor
from cluster.supervisor.job_state import JobView, Verdict
from cluster.transport.waits import waiting

#: Time between SIGTERM and SIGKILL after a failure: the ranks have nothing left to save.
FAILED_GRACE_S = 0.5
#: How long `stop` waits for the end of the job's supervisor, which copies results.
_SUPERVISOR_END_S = 30.0


def finish(attempt: AttemptMonitor, records: JobStore) -> tuple[Outcome, list[str]]:
    """Clean up after a job, collect its results and record its outcome. Return it, and a sentence for each failure."""
    is_new = False
    try:
        is_new = _record_end(attempt, records)  # first, because Ctrl-C may interrupt the copy
    finally:  # also if the record cannot be written
        try:
            record = records.load(attempt.plan.job_id)
            # After `stop` the ranks may still be writing a checkpoint.
            failed_s = record.stop_grace_s if record.outcome == "stopped" else FAILED_GRACE_S
            is_over = attempt.verdict == "done" and all(node.phase == "exited" for node in attempt.view.nodes)
            problems = clean_up(record, grace_s=0.0 if is_over else failed_s, records=records)
            problems += BACKENDS[attempt.plan.backend].collect(attempt.plan)
        finally:
            posted = _post_end(attempt) if is_new else []
    problems += posted
    record = records.load(attempt.plan.job_id)
    return record.outcome or "failed", problems + _write_page(record, attempt.view)


def record_outcome(attempt: AttemptMonitor, records: JobStore) -> list[str]:
    """Record the outcome of a job's last attempt, and report it to the webhook. Return a sentence for each failure."""
    return _post_end(attempt) if _record_end(attempt, records) else []


def _record_end(attempt: AttemptMonitor, records: JobStore) -> bool:
    """Record the outcome of a job's last attempt. Return whether none was recorded."""
    view = attempt.view
    verdict = attempt.verdict
    cause = report.cause(view, verdict)
    exit_code = report.exit_code(view, verdict)
    return records.end(attempt.plan.job_id, _outcome(verdict), cause, exit_code)


def _post_end(attempt: AttemptMonitor) -> list[str]:
    return webhook.post(attempt.plan, _outcome(attempt.verdict), report.cause(attempt.view, attempt.verdict))


def _outcome(verdict: Verdict) -> Literal["done", "failed"]:
    return "done" if verdict == "done" else "failed"


def stop(job_id: str, records: JobStore, grace_s: float | None = None) -> tuple[JobRecord, list[str]]:
    """Stop a job on every node, wait until it ends, and collect its results. Safe to repeat.

    Ranks that have not ended `grace_s` after SIGTERM are killed; None: after the time that the job was launched with.
    A second call with a shorter time shortens a stop that is under way. If the job has ended and nothing of it is left
    on the machines, only its results are collected. Return the record, and one sentence for each result that could not
    be collected.
    """
    record = records.load(job_id)
    try:
        if not record.is_cleared:
            cancel(record, records, grace_s=record.job.grace_s if grace_s is None else grace_s)
    finally:  # also if a machine is unreachable
        problems = _await_supervisor(job_id, records) + BACKENDS[record.plan.backend].collect(record.plan)
    record = records.load(job_id)
    return record, problems + _write_page(record)


def await_results(job_id: str, records: JobStore) -> None:
    """Wait until a supervisor in the background, which records a job's outcome first, has copied the results."""
    while (supervisor := records.supervisor_of(job_id)) and supervisor.in_background and supervisor.is_here:
        time.sleep(POLL_S / 4)


def _await_supervisor(job_id: str, records: JobStore) -> list[str]:
    """Wait until the supervisor in the background exits with the job. Return a sentence if it has not."""
    until = time.monotonic() + _SUPERVISOR_END_S
    with waiting(f"the supervisor of {job_id} to copy its results", _SUPERVISOR_END_S):
        while (supervisor := records.supervisor_of(job_id)) and supervisor.in_background:
            if not supervisor.is_here or time.monotonic() > until:
                return [f"its supervisor is still ending: {supervisor}"]
            time.sleep(POLL_S / 4)
    return []


def _write_page(record: JobRecord, view: JobView | None = None) -> list[str]:
    if not Path(record.plan.run_dir).is_dir():  # the job ended before it had files
        return []
    from cluster.supervisor import page  # slow to import for `plan`

    try:
        page.write(record, view)
    except OSError as error:
        return [f"not written: {page.NAME}: {error.strerror}"]
    except Exception as error:  # the job has ended, and its exit code must not depend on its report
        return [f"not written: {page.NAME}: {type(error).__name__}: {error}"]
    return []


def cancel(record: JobRecord, records: JobStore, *, grace_s: float) -> None:
    """Record that the job was stopped, then stop its nodes, even if the record cannot be written.

    The record comes first, so that a supervisor does not restart the job.
    """
    try:
        records.end(record.plan.job_id, "stopped", grace_s=grace_s)
    finally:
        record = records.load(record.plan.job_id)
        _cancel_all(record, grace_s)
    records.clear(record)


def clean_up(record: JobRecord, grace_s: float, records: JobStore | None = None) -> list[str]:
    """Remove what the job left on its nodes. Return one sentence for each failure.

    With `records`, a job that has ended is recorded as cleared.
    """
    try:
        _cancel_all(record, grace_s)
        if records is not None and record.outcome:
            records.clear(record)
    except ClusterError as error:
        return [f"not cleaned up: {error.message}\nhint: when the machine answers again: clusterctl gc"]
    return []


def _cancel_all(record: JobRecord, grace_s: float) -> None:
    """Stop the job on the nodes of all its attempts."""
    plan = replace(record.plan, nodes=(*record.plan.nodes, *record.retired))
    BACKENDS[plan.backend].cancel(plan, grace_s=grace_s)
