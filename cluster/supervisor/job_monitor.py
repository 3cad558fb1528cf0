"""The monitor of jobs: polls many of them once, or one of them over all its attempts. It decides nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from cluster.agent.app.node_agent.events import Metric
from cluster.backends import BACKENDS
from cluster.spec.model import JobRecord
from cluster.spec.node_status import NodeStatus
from cluster.store import JobStore
from cluster.supervisor import job_state, job_status
from cluster.supervisor.attempt_monitor import AttemptMonitor
from cluster.supervisor.job_state import JobView
from cluster.supervisor.job_status import JobStatus
from cluster.transport import parallel


def poll(record: JobRecord, records: JobStore) -> JobStatus:
    """Poll a job once. The view comes from the agents' status files, which hold only the last metric event.

    A job whose attempt has failed is running while its supervisor or a queue may restart it. The record returned has
    the attempt that a queue has started meanwhile. Raises UnreachableError if no node answers.
    """
    statuses = BACKENDS[record.plan.backend].observe(record.plan) if _has_nodes(record, records) else None
    status = _status(record, records, statuses)
    return status if isinstance(status, JobStatus) else poll(status, records)


def poll_all(each: Sequence[JobRecord], records: JobStore) -> list[JobStatus]:
    """Poll jobs with as few commands as possible: one for each machine, scheduler or cluster. Never raises.

    A job whose nodes do not answer is unreachable, and so is one whose record this version cannot use.
    """
    polled: dict[int, JobStatus] = {}
    again: dict[int, JobRecord] = {}
    answers = _observe_all(each, records)
    for index, (record, answer) in enumerate(zip(each, answers, strict=True)):
        try:
            if isinstance(answer, Exception):
                raise answer
            status = _status(record, records, answer)
        except Exception as error:  # one job hides no other
            status = job_status.unreachable(record, records, error)
        if isinstance(status, JobStatus):
            polled[index] = status
        else:
            again[index] = status
    if again:
        polled |= dict(zip(again, poll_all([*again.values()], records), strict=True))
    return [polled[index] for index in range(len(each))]


#: The statuses of a job's nodes, why they are not known, or None for a job without nodes to poll.
_Answer = Sequence[NodeStatus] | Exception | None


def _observe_all(each: Sequence[JobRecord], records: JobStore) -> list[_Answer]:
    """Ask the backends of these jobs for the statuses of their nodes, at the same time."""
    made: list[_Answer] = [None] * len(each)
    of_backend: dict[str, list[int]] = {}
    for index, record in enumerate(each):
        try:
            if _has_nodes(record, records):
                of_backend.setdefault(record.plan.backend, []).append(index)
        except Exception as error:  # its lock cannot be read
            made[index] = error

    def observe(name: str) -> None:
        chosen = of_backend[name]
        try:
            answers = BACKENDS[name].observe_all([each[index].plan for index in chosen])
        except Exception as error:
            answers = [error] * len(chosen)  # type: ignore[list-item]
            if len(chosen) > 1:  # what only one of them has caused
                answers = [answer for index in chosen for answer in _observe_all([each[index]], records)]  # type: ignore[misc]
        for index, answer in zip(chosen, answers, strict=True):
            made[index] = answer

    parallel.each([*of_backend], observe)
    return made


def _status(
    record: JobRecord, records: JobStore, statuses: Sequence[NodeStatus] | None
) -> JobStatus | JobRecord:
    """Return a job as these statuses show it, or its record with the newer attempt that has to be polled.

    None: there are no nodes to poll, because the job has ended or is being started.
    """
    now = time.time()
    view = job_state.start(record.plan, record.created_at)
    if statuses is None:
        return JobStatus(record, record.outcome or "starting", view, last=records.seen(record))
    view = job_state.fold(view, statuses, [event for status in statuses for event in status.events], now)
    decided = _decided(record, records, view)
    if decided is not None and decided is not record:
        return decided
    state = "running" if decided is None else job_status.state(record, view, now)
    job_status.remember(record, records, state, view)
    return job_status.observed(record, records, state, view)


def _decided(record: JobRecord, records: JobStore, view: JobView) -> JobRecord | None:
    """Return the record, with the attempt that a queue has started after a failed one, if no supervisor records it.

    None: the attempt has failed, and its supervisor or the queue may still restart the job.
    """
    if record.outcome or not job_state.failing(view):
        return record
    if records.supervisor_of(record.plan.job_id):
        return None
    plan = BACKENDS[record.plan.backend].newest(record.plan)
    if plan is None or plan == record.plan:
        return record if plan else None
    with suppress(OSError):  # the poll says so, which copies the logs into it
        Path(plan.attempt_dir).mkdir(parents=True, exist_ok=True)
    return replace(record, plan=plan)


def _has_nodes(record: JobRecord, records: JobStore) -> bool:
    """Return whether there are nodes to poll. A node that has not been started yet would look lost."""
    if record.outcome:
        return Path(record.plan.attempt_dir).exists()
    return not is_being_started(record, records)


def is_being_started(record: JobRecord, records: JobStore) -> bool:
    """Return whether a process is starting the nodes of the newest attempt, and has not been killed meanwhile."""
    return bool(record.start_lock and records.supervisor_of(record.start_lock))


class JobMonitor:
    """Polls a job over all its attempts, without deciding anything. `attempt` follows the newest one."""

    def __init__(self, job_id: str, records: JobStore) -> None:
        self._records = records
        self.record = records.load(job_id)
        self.attempt = AttemptMonitor(self.record)
        self._is_undecided = False

    @property
    def view(self) -> JobView:
        """The view of the newest attempt, from the last poll."""
        return self.attempt.view

    def step(self, *, everything: bool = False) -> list[tuple[str, str]]:
        """Poll once and return the program's new lines, as `AttemptMonitor.step` does. Raises UnreachableError."""
        record = self._records.load(self.record.plan.job_id)
        # The queue has started an attempt that is not recorded yet.
        if record.plan.attempt < self.record.plan.attempt and not record.outcome:
            record = replace(record, plan=self.record.plan)
        lines = self._begin(record, everything=everything)
        self._is_undecided = False
        if _has_nodes(record, self._records):
            lines += self.attempt.step(time.time(), everything=everything)
            decided = _decided(record, self._records, self.view)
            self._is_undecided = decided is None
            job_status.remember(record, self._records, self.state, self.view)
            if decided is not None and decided is not record:
                lines += self._begin(decided, everything=everything) + self.step(everything=everything)
        return lines

    def _begin(self, record: JobRecord, *, everything: bool) -> list[tuple[str, str]]:
        """Turn to the record's attempt, if it is a new one. Return the rest of the lines of the last one."""
        lines: list[tuple[str, str]] = []
        if record.plan.attempt != self.record.plan.attempt:
            events, lines = self.attempt.read(everything=everything)
            metrics = [*self.view.metrics, *(event for event in events if isinstance(event, Metric))]
            self.attempt = AttemptMonitor(record)
            self.view.metrics = metrics
        self.record = record
        return lines

    @property
    def state(self) -> str:
        """The job's state at the last poll, as `poll` returns it."""
        if not self.record.outcome and not _has_nodes(self.record, self._records):
            return "starting"
        return "running" if self._is_undecided else job_status.state(self.record, self.view, time.time())

    @property
    def has_ended(self) -> bool:
        """Whether all nodes had ended at the last poll, and no process restarts them."""
        if self.record.outcome and not _has_nodes(self.record, self._records):
            return True
        return not self._is_undecided and all(node.phase in ("exited", "lost") for node in self.view.nodes)
