"""The status of a job: its state in one word, why, and since when. What users see of it is put in words here."""

from __future__ import annotations

from typing import NamedTuple

from cluster.backends import BACKENDS
from cluster.errors import ClusterError, with_hint
from cluster.spec.model import JobRecord
from cluster.store import JobStore, Seen
from cluster.supervisor import job_state, report
from cluster.supervisor.job_state import JobView

#: The state of a job whose nodes, cluster or queue do not answer.
UNREACHABLE = "unreachable"


class JobStatus(NamedTuple):
    """A job as one poll found it.

    Its `state` is done, failed, stopped, queued, starting, joining, running or unreachable. `reason` says what a queued
    job waits for, or why an unreachable one does not answer, and `hint` what to do. `last` is what was seen of it last.
    `is_readable`: the record fits this version of the program.
    """

    record: JobRecord
    state: str
    view: JobView
    reason: str = ""
    hint: str = ""
    last: Seen | None = None
    is_readable: bool = True

    @property
    def since(self) -> float | None:
        """The Unix time since which it has this state; None if that is not known."""
        if self.record.outcome:
            return self.record.ended_at or None
        if self.last is None:
            return None
        return self.last.at if self.state == UNREACHABLE else self.last.since

    @property
    def last_state(self) -> str:
        """The state in which an unreachable job was seen last; "" if it was never seen, and for other jobs."""
        return self.last.state if self.state == UNREACHABLE and self.last is not None else ""

    @property
    def why(self) -> str:
        """Its reason and the hint in one line."""
        return with_hint(self.reason, self.hint) if self.reason else ""

    @property
    def problem(self) -> str:
        """Why a job that has not ended waits or does not answer; "" if it does neither."""
        return "" if self.record.outcome else self.why

    @property
    def nodes(self) -> int | str:
        """The number of its nodes; while they join or run, also how many are ready: `1/2`."""
        count = len(self.record.plan.nodes)
        return (
            f"{self.view.ready_count}/{count}" if self.state in ("starting", "joining", "running") else count
        )

    def words(self, now: float) -> str:
        """Format its state: `running`, or `unreachable for 3 min 05 s; running before`."""
        if not self.last_state or self.since is None:
            return self.state
        return f"{self.state} for {report.seconds(max(0.0, now - self.since))}; {self.last_state} before"


def observed(record: JobRecord, records: JobStore, state: str, view: JobView) -> JobStatus:
    """Return the status of a job whose nodes have been polled, with the reason why it waits or does not answer."""
    reason = ""
    if state == "queued":
        reason = job_state.waits_for(view)
    elif state == UNREACHABLE:
        reason = job_state.silence(view)
    return JobStatus(record, state, view, reason, last=records.seen(record))


def unreachable(
    record: JobRecord, records: JobStore, error: Exception, view: JobView | None = None
) -> JobStatus:
    """Return what is known of a job that could not be polled; `view` is an earlier one."""
    is_known = isinstance(error, ClusterError)
    text = str(error) if is_known else f"its state cannot be read: {type(error).__name__}: {error}"
    hint = error.hint if isinstance(error, ClusterError) else ""
    state = record.outcome or UNREACHABLE
    view = view or job_state.start(record.plan, record.created_at)
    return JobStatus(record, state, view, text, hint, records.seen(record), is_known)


def remember(record: JobRecord, records: JobStore, state: str, view: JobView) -> None:
    """Keep the state of a job whose nodes have answered."""
    if state in ("queued", "starting", "joining", "running"):
        records.see(record, state, {node.name: node.phase for node in view.nodes})


def state(record: JobRecord, view: JobView, now: float) -> str:
    """Return the state of a job whose nodes have been polled: only what was seen, not what may be."""
    verdict = job_state.judge(view, now, record.plan.job.rendezvous_timeout_s)
    if record.outcome or verdict in ("done", "failed"):
        return record.outcome or verdict
    if any(node.status.silent for node in view.nodes):
        return UNREACHABLE
    if verdict in ("joined", "stalled"):
        return "running"
    if job_state.is_queued(view) and BACKENDS[record.plan.backend].machines == "assigned":
        return "queued"
    return (
        "joining" if any(node.phase in ("joining", "ready", "exited") for node in view.nodes) else "starting"
    )
