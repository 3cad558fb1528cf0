"""The monitor of an attempt: polls its nodes and reads their logs, until the job has ended or must be restarted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from cluster.agent.app.node_agent.events import Event
from cluster.backends import BACKENDS, log_files, logs
from cluster.backends.awake_clock import AwakeClock
from cluster.errors import UnreachableError
from cluster.spec.model import JobRecord
from cluster.store import JobStore
from cluster.supervisor import job_state, job_status, report
from cluster.supervisor.display import Display
from cluster.supervisor.job_state import JobView, Verdict

POLL_S = 0.4
#: How long to wait for the first failure when only its consequences are known.
_FIRST_FAILURE_S = 4.0
#: How many polls in a row may fail.
_MAX_UNREACHABLE = 5
#: How many of a node's last lines are kept. They must hold the tracebacks of all its ranks.
_TAIL = 400


class AttemptMonitor:
    """Polls an attempt's node states and logs. `verdict` and `view` are from the last poll."""

    def __init__(self, record: JobRecord) -> None:
        self.plan = record.plan
        self.verdict: Verdict = "waiting"
        self.view = job_state.start(record.plan, record.created_at)
        #: The last lines of each node's log.
        self.tails: dict[str, deque[str]] = {node.name: deque(maxlen=_TAIL) for node in record.plan.nodes}
        self._reader = log_files.Reader(record.plan)

    def step(
        self, now: float, *, everything: bool = False, patience_s: float = job_state.RETURN_S
    ) -> list[tuple[str, str]]:
        """Poll once and return the program's new lines, with `everything` also the agent's.

        `patience_s` is passed to `fold`.
        """
        # States before logs: the log of an exited node is then complete.
        statuses = BACKENDS[self.plan.backend].observe(self.plan)
        events, texts = self.read(everything=everything)
        self.view = job_state.fold(self.view, statuses, events, now, patience_s)
        return texts

    def read(self, *, everything: bool = False) -> tuple[list[Event], list[tuple[str, str]]]:
        """Return the events and lines added to the local logs since the last call, without polling."""
        events = []
        texts = []
        for node, line in self._reader.lines():
            event = logs.event(line)
            if event is not None:
                events.append(event)
            else:
                self.tails[node].append(line)
                if everything or not line.startswith(logs.AGENT_PREFIX):
                    texts.append((node, line))
        return events, texts


def follow(
    record: JobRecord,
    show: Display,
    patience_s: Callable[[JobView], float] = lambda _: job_state.RETURN_S,
    *,
    tends: bool = False,
    records: JobStore | None = None,
) -> AttemptMonitor:
    """Poll an attempt until it is done, failed, stalled or late for the rendezvous. Stop nothing.

    The job's supervisor `tends` an attempt that waits for its machines. `records` keep the state that was seen last.
    Timeouts exclude the time in which this process was suspended. `patience_s` returns how long a machine that does not
    answer may stay silent (see `fold`).
    """
    plan = record.plan
    attempt = AttemptMonitor(record)
    show.begin(plan)
    unreachable = 0
    clock = AwakeClock()
    while True:
        now = clock()
        before = _unanswered(attempt.view)
        try:
            for text in BACKENDS[plan.backend].tend(record) if tends else ():
                show.note(text)
            lines = attempt.step(now, patience_s=patience_s(attempt.view) if before else job_state.RETURN_S)
            unreachable = 0
        except UnreachableError:
            unreachable += 1
            if unreachable == _MAX_UNREACHABLE:
                raise
            lines = []
        job = record.job
        verdict = job_state.judge(
            attempt.view, now, plan.job.rendezvous_timeout_s, job.stall_timeout_s, job.grace_s
        )
        attempt.verdict = verdict
        if records is not None and not unreachable:
            job_status.remember(record, records, job_status.state(record, attempt.view, now), attempt.view)
        if verdict == "failed":
            if job_state.failing(attempt.view)[0].phase != "lost":
                # The first failure makes the other nodes fail within moments. Poll again, in case one of those was
                # observed before it.
                time.sleep(2 * POLL_S)
                lines += attempt.step(clock())
                while _is_secondary(attempt.view) and clock() - now < _FIRST_FAILURE_S:
                    time.sleep(POLL_S)
                    lines += attempt.step(clock())
            lines = _before_tracebacks(lines)  # the report prints the first failure's traceback
        show.show(attempt.view, lines)
        for node in job_state.overdue(attempt.view, now, job.grace_s) if verdict == "done" else ():
            show.note(report.overdue(node))
        if verdict in ("done", "failed", "late", "stalled"):
            return attempt
        _note_silence(show, before, attempt.view)
        time.sleep(POLL_S)


def _unanswered(view: JobView) -> list[str]:
    return [node.name for node in view.nodes if node.unanswered_since is not None]


def _note_silence(show: Display, before: Sequence[str], view: JobView) -> None:
    """Say that machines have stopped answering, or that they answer again."""
    silent = _unanswered(view)
    if before and not silent:
        show.note("the machines answer again; the job kept running")
    elif len(silent) > len(before):
        is_all = len(silent) == len(view.nodes)
        who = "no machine answers; the network of this machine may be down"
        who = who if is_all else f"no answer from {', '.join(silent)}"
        show.note(f"{who}: waiting")


def _is_secondary(view: JobView) -> bool:
    """Return whether all known failures are consequences of one not yet observed."""
    return job_state.is_secondary(job_state.failing(view)[0]) and not any(
        node.status.silent for node in view.nodes
    )


def _before_tracebacks(lines: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the lines that each node wrote before its first traceback."""
    ended: set[str] = set()
    kept = []
    for node, text in lines:
        if "Traceback (most recent call last)" in text:
            ended.add(node)
        if node not in ended:
            kept.append((node, text))
    return kept
