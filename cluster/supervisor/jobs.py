"""Started jobs: follow one to its end, query its state, stop it, clean up after it."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from cluster.agent.app.node_agent.events import Event, Metric
from cluster.backends import BACKENDS, log_files, logs
from cluster.backends.awake_clock import AwakeClock
from cluster.errors import ClusterError, UnreachableError, with_hint
from cluster.spec.model import JobRecord, Plan
from cluster.spec.node_status import NodeStatus
from cluster.store import JobStore, Outcome, Seen
from cluster.supervisor import job_state, report
from cluster.supervisor.job_state import JobView, Verdict
from cluster.transport import parallel
from cluster.transport.waits import waiting

POLL_S = 0.4
#: Time between SIGTERM and SIGKILL after a failure: the ranks have nothing left to save.
FAILED_GRACE_S = 0.5
#: How long to wait for the first failure when only its consequences are known.
_FIRST_FAILURE_S = 4.0
#: How many polls in a row may fail.
_MAX_UNREACHABLE = 5
#: How long `stop` waits for the end of the job's supervisor, which copies results.
_SUPERVISOR_END_S = 30.0
#: How many of a node's last lines are kept. They must hold the tracebacks of all its ranks.
_TAIL = 400
#: A URL, which may contain a secret: it is read from the environment only, and never printed.
_WEBHOOK = "CLUSTERCTL_WEBHOOK"
_WEBHOOK_TIMEOUT_S = 10.0


class Display:
    """Draws nothing. The displays of jobs derive from it."""

    def begin(self, plan: Plan) -> None:
        """Prepare for a new attempt."""

    def show(self, view: JobView, lines: Sequence[tuple[str, str]]) -> None:
        """Draw the view, and the new log lines as (node, text) pairs."""

    def note(self, text: str) -> None:
        """Print one sentence for the user."""


class Follower:
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
        events, texts = [], []
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
) -> Follower:
    """Poll an attempt until it is done, failed, stalled or late for the rendezvous. Stop nothing.

    The job's supervisor `tends` an attempt that waits for its machines. `records` keep the state that was seen last.
    Timeouts exclude the time in which this process was suspended. `patience_s` returns how long a machine that does not
    answer may stay silent (see `fold`).
    """
    plan = record.plan
    follower = Follower(record)
    show.begin(plan)
    unreachable = 0
    clock = AwakeClock()
    while True:
        now = clock()
        before = _unanswered(follower.view)
        try:
            for text in BACKENDS[plan.backend].tend(record) if tends else ():
                show.note(text)
            lines = follower.step(now, patience_s=patience_s(follower.view) if before else job_state.RETURN_S)
            unreachable = 0
        except UnreachableError:
            unreachable += 1
            if unreachable == _MAX_UNREACHABLE:
                raise
            lines = []
        job = record.job
        verdict = job_state.judge(follower.view, now, plan.job.timeout_s, job.stall_timeout_s, job.grace_s)
        follower.verdict = verdict
        if records is not None and not unreachable:
            _see(record, records, _state(record, follower.view, now), follower.view)
        if verdict == "failed":
            if job_state.failing(follower.view)[0].phase != "lost":
                # The first failure makes the other nodes fail within moments. Poll again, in case one of those was
                # observed before it.
                time.sleep(2 * POLL_S)
                lines += follower.step(clock())
                while _is_secondary(follower.view) and clock() - now < _FIRST_FAILURE_S:
                    time.sleep(POLL_S)
                    lines += follower.step(clock())
            lines = _before_tracebacks(lines)  # the report prints the first failure's traceback
        show.show(follower.view, lines)
        for node in job_state.overdue(follower.view, now, job.grace_s) if verdict == "done" else ():
            show.note(report.overdue(node))
        if verdict in ("done", "failed", "late", "stalled"):
            return follower
        _note_silence(show, before, follower.view)
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
    return job_state.is_secondary(job_state.failing(view)[0]) and not any(node.silent for node in view.nodes)


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


class Polled(NamedTuple):
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

    def words(self, now: float) -> str:
        """Format its state: `running`, or `unreachable for 3 min 05 s; running before`."""
        if not self.last_state or self.since is None:
            return self.state
        return f"{self.state} for {report.seconds(max(0.0, now - self.since))}; {self.last_state} before"


#: The state of a job whose nodes, cluster or queue do not answer.
UNREACHABLE = "unreachable"


def poll(record: JobRecord, records: JobStore) -> Polled:
    """Poll a job once. The view comes from the agents' status files, which hold only the last metric event.

    A job whose attempt has failed is running while its supervisor or a queue may restart it. The record returned has
    the attempt that a queue has started meanwhile. Raises UnreachableError if no node answers.
    """
    statuses = BACKENDS[record.plan.backend].observe(record.plan) if _has_nodes(record, records) else None
    polled = _polled(record, records, statuses)
    return polled if isinstance(polled, Polled) else poll(polled, records)


def poll_all(each: Sequence[JobRecord], records: JobStore) -> list[Polled]:
    """Poll jobs with as few commands as possible: one for each machine, scheduler or cluster. Never raises.

    A job whose nodes do not answer is unreachable, and so is one whose record this version cannot use.
    """
    found: dict[int, Polled] = {}
    again: dict[int, JobRecord] = {}
    answers = _observe_all(each, records)
    for index, (record, answer) in enumerate(zip(each, answers, strict=True)):
        try:
            if isinstance(answer, Exception):
                raise answer
            polled = _polled(record, records, answer)
        except Exception as error:  # one job hides no other
            polled = unreachable(record, records, error)
        if isinstance(polled, Polled):
            found[index] = polled
        else:
            again[index] = polled
    if again:
        found |= dict(zip(again, poll_all([*again.values()], records), strict=True))
    return [found[index] for index in range(len(each))]


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


def _polled(record: JobRecord, records: JobStore, statuses: Sequence[NodeStatus] | None) -> Polled | JobRecord:
    """Return a job as these statuses show it, or its record with the newer attempt that has to be polled.

    None: there are no nodes to poll, because the job has ended or is being started.
    """
    now = time.time()
    view = job_state.start(record.plan, record.created_at)
    if statuses is None:
        return Polled(record, record.outcome or "starting", view, last=records.seen(record))
    view = job_state.fold(view, statuses, [event for status in statuses for event in status.events], now)
    decided = _decided(record, records, view)
    if decided is not None and decided is not record:
        return decided
    state = "running" if decided is None else _state(record, view, now)
    _see(record, records, state, view)
    reason = {"queued": job_state.waits_for, UNREACHABLE: job_state.silence}.get(state, lambda _: "")(view)
    return Polled(record, state, view, reason, last=records.seen(record))


def unreachable(record: JobRecord, records: JobStore, error: Exception, view: JobView | None = None) -> Polled:
    """Return what is known of a job that could not be polled; `view` is an earlier one."""
    is_known = isinstance(error, ClusterError)
    text = str(error) if is_known else f"its state cannot be read: {type(error).__name__}: {error}"
    hint = error.hint if isinstance(error, ClusterError) else ""
    state, view = record.outcome or UNREACHABLE, view or job_state.start(record.plan, record.created_at)
    return Polled(record, state, view, text, hint, records.seen(record), is_known)


def _see(record: JobRecord, records: JobStore, state: str, view: JobView) -> None:
    """Keep the state of a job whose nodes have answered."""
    if state in ("queued", "starting", "joining", "running"):
        records.see(record, state, {node.name: node.phase for node in view.nodes})


def _decided(record: JobRecord, records: JobStore, view: JobView) -> JobRecord | None:
    """Return the record, with the attempt that a queue has started after a failed one, if no supervisor records it.

    None: the attempt has failed, and its supervisor or the queue may still restart the job.
    """
    if record.outcome or not job_state.failing(view):
        return record
    if records.watcher(record.plan.job_id):
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
    return bool(record.start_lock and records.watcher(record.start_lock))


def _state(record: JobRecord, view: JobView, now: float) -> str:
    """Return the state of a job whose nodes have been polled: only what was seen, not what may be."""
    verdict = job_state.judge(view, now, record.plan.job.timeout_s)
    if record.outcome or verdict in ("done", "failed"):
        return record.outcome or verdict
    if any(node.silent for node in view.nodes):
        return UNREACHABLE
    if verdict in ("joined", "stalled"):
        return "running"
    if job_state.is_queued(view) and BACKENDS[record.plan.backend].machines == "assigned":
        return "queued"
    return "joining" if any(node.phase in ("joining", "ready", "exited") for node in view.nodes) else "starting"


class Observer:
    """Polls a job over all its attempts, without deciding anything. `follower` follows the newest one."""

    def __init__(self, job_id: str, records: JobStore) -> None:
        self._records = records
        self.record = records.load(job_id)
        self.follower = Follower(self.record)
        self._is_undecided = False

    @property
    def view(self) -> JobView:
        """The view of the newest attempt, from the last poll."""
        return self.follower.view

    def step(self, *, everything: bool = False) -> list[tuple[str, str]]:
        """Poll once and return the program's new lines, as `Follower.step` does. Raises UnreachableError."""
        record = self._records.load(self.record.plan.job_id)
        if record.plan.attempt < self.record.plan.attempt and not record.outcome:  # the queue's, not recorded yet
            record = replace(record, plan=self.record.plan)
        lines, self._is_undecided = self._begin(record, everything=everything), False
        if _has_nodes(record, self._records):
            lines += self.follower.step(time.time(), everything=everything)
            decided = _decided(record, self._records, self.view)
            self._is_undecided = decided is None
            _see(record, self._records, self.state, self.view)
            if decided is not None and decided is not record:
                lines += self._begin(decided, everything=everything) + self.step(everything=everything)
        return lines

    def _begin(self, record: JobRecord, *, everything: bool) -> list[tuple[str, str]]:
        """Turn to the record's attempt, if it is a new one. Return the rest of the lines of the last one."""
        lines: list[tuple[str, str]] = []
        if record.plan.attempt != self.record.plan.attempt:
            events, lines = self.follower.read(everything=everything)
            metrics = [*self.view.metrics, *(event for event in events if isinstance(event, Metric))]
            self.follower = Follower(record)
            self.view.metrics = metrics
        self.record = record
        return lines

    @property
    def state(self) -> str:
        """The job's state at the last poll, as `poll` returns it."""
        if not self.record.outcome and not _has_nodes(self.record, self._records):
            return "starting"
        return "running" if self._is_undecided else _state(self.record, self.view, time.time())

    @property
    def has_ended(self) -> bool:
        """Whether all nodes had ended at the last poll, and no process restarts them."""
        if self.record.outcome and not _has_nodes(self.record, self._records):
            return True
        return not self._is_undecided and all(node.phase in ("exited", "lost") for node in self.view.nodes)


def finish(follower: Follower, records: JobStore) -> tuple[Outcome, list[str]]:
    """Clean up after a job, collect its results and record its outcome. Return it, and a sentence for each failure."""
    is_new = False
    try:
        is_new = _record_end(follower, records)  # first, because Ctrl-C may interrupt the copy
    finally:  # also if the record cannot be written
        try:
            record = records.load(follower.plan.job_id)
            # After `stop` the ranks may still be writing a checkpoint.
            failed_s = record.stop_grace_s if record.outcome == "stopped" else FAILED_GRACE_S
            is_over = follower.verdict == "done" and all(node.phase == "exited" for node in follower.view.nodes)
            problems = clean_up(record, grace_s=0.0 if is_over else failed_s, records=records)
            problems += BACKENDS[follower.plan.backend].collect(follower.plan)
        finally:
            posted = _post_end(follower) if is_new else []
    problems += posted
    record = records.load(follower.plan.job_id)
    return record.outcome or "failed", problems + _write_page(record, follower.view)


def record_outcome(follower: Follower, records: JobStore) -> list[str]:
    """Record the outcome of a job's last attempt, and report it to the webhook. Return a sentence for each failure."""
    return _post_end(follower) if _record_end(follower, records) else []


def _record_end(follower: Follower, records: JobStore) -> bool:
    """Record the outcome of a job's last attempt. Return whether none was recorded."""
    view, verdict = follower.view, follower.verdict
    cause, exit_code = report.cause(view, verdict), report.exit_code(view, verdict)
    return records.end(follower.plan.job_id, _outcome(verdict), cause, exit_code)


def _post_end(follower: Follower) -> list[str]:
    return post_webhook(follower.plan, _outcome(follower.verdict), report.cause(follower.view, follower.verdict))


def _outcome(verdict: Verdict) -> Literal["done", "failed"]:
    return "done" if verdict == "done" else "failed"


def post_webhook(plan: Plan, event: Literal["done", "failed", "stopped", "restarted"], detail: str) -> list[str]:
    """Post an event as JSON, if CLUSTERCTL_WEBHOOK is set. Return a sentence if it could not be sent.

    Slack and Mattermost show its field `text`.
    """
    url = os.environ.get(_WEBHOOK, "")
    if not url:
        return []
    import http.client  # 12 ms that `plan` must not spend
    import urllib.request

    if not url.startswith(("http://", "https://")):
        return [f"{_WEBHOOK}: expected a URL with http:// or https://; not sent: {event}"]
    text = f"{plan.job_id}: {event}" + (f": {detail}" if detail else "")
    fields = {"text": text, "job": plan.job_id, "event": event, "attempt": plan.attempt, "detail": detail}
    headers = {"Content-Type": "application/json", "User-Agent": "clusterctl"}
    try:
        request = urllib.request.Request(url, json.dumps(fields).encode(), headers)
        with urllib.request.urlopen(request, timeout=_WEBHOOK_TIMEOUT_S):
            return []
    except (OSError, ValueError, http.client.HTTPException) as error:
        return [f"{_WEBHOOK}: not sent: {event}: {getattr(error, 'reason', None) or type(error).__name__}"]


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
    while (watcher := records.watcher(job_id)) and watcher.in_background and watcher.is_here:
        time.sleep(POLL_S / 4)


def _await_supervisor(job_id: str, records: JobStore) -> list[str]:
    """Wait until the supervisor in the background exits with the job. Return a sentence if it has not."""
    until = time.monotonic() + _SUPERVISOR_END_S
    with waiting(f"the supervisor of {job_id} to copy its results", _SUPERVISOR_END_S):
        while (watcher := records.watcher(job_id)) and watcher.in_background:
            if not watcher.is_here or time.monotonic() > until:
                return [f"its supervisor is still ending: {watcher}"]
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
