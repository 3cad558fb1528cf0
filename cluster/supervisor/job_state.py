"""State of a job: which nodes have joined or are lost for good, whether it still runs, and which node failed first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.agent.app.node_agent.events import (
    Checkpoint,
    Done,
    Event,
    Heartbeat,
    Joining,
    Metric,
    Progress,
    Ready,
    SettingUp,
)
from cluster.spec.model import Plan
from cluster.spec.node_status import NodeStatus, Phase
from cluster.spec.status import RankUsage

Verdict = Literal["waiting", "joined", "late", "stalled", "failed", "done"]

#: How long a machine that the monitor calls lost may still return: its nodes may be running well.
RETURN_S = 60.0
#: A job that made a step within this time runs on all its nodes, because a step needs all ranks. It is half of the time
#: after which the monitor calls a machine lost, so a dead machine gets no benefit from the last step before its end.
_STEPPING_S = 4.0

#: Ranks whose program has ended have at least this time to exit.
_LEAST_LEAVE_S = 10.0

#: A phase changes only to a later one, because squeue's answer may be old, unless the node starts over.
_ORDER: dict[Phase, int] = {
    "pending": 0,
    "starting": 1,
    "setup": 2,
    "joining": 3,
    "ready": 4,
    "exited": 5,
    "lost": 5,
}


@dataclass
class NodeView:
    """A node as the user sees it: its last status, and what its events and the polls before add to that.

    `phase` may be ahead of the phase in `status`, because events in the log arrive first. `since` is the time at which
    it began, `note` describes it. `reached` is set once the node connected to the master. How a node ended stays in
    `status`, see `_kept`.
    `unanswered_since` is the time from which the machine's silence counts as a failure, and None while it answers.
    `left_at` is the time at which the programs of all its ranks had ended, and None before.
    """

    status: NodeStatus
    phase: Phase = "pending"
    since: float = 0.0
    note: str = ""
    reached: bool = False
    progress: Progress | None = None
    left_at: float | None = None
    unanswered_since: float | None = None

    @property
    def name(self) -> str:
        """The name of the node."""
        return self.status.node

    @property
    def has_ended(self) -> bool:
        """Whether it runs no longer, as far as is known."""
        return self.phase in ("exited", "lost")

    @property
    def shown_note(self) -> str:
        """Why its machine does not answer, or else what describes its phase."""
        return self.status.silent or self.note

    @property
    def ranks(self) -> tuple[RankUsage, ...]:
        """What each of its ranks uses; empty while that is not known."""
        return self.status.usage.ranks if self.status.usage else ()


@dataclass
class JobView:
    """The observed state of an attempt.

    `joined_after_s` is the duration of the rendezvous, `timeout_from` the time from which its timeout counts, and
    `progress_at` the time of the last step. `metrics` has the metric event of each epoch. `done_at` is the time at
    which rank 0 said that the job is done, None before and while it reports more progress.
    """

    nodes: list[NodeView]
    says_ready: bool = True
    started: float = 0.0
    joined_after_s: float | None = None
    ready: Ready | None = None
    progress: Progress | None = None
    metrics: list[Metric] = field(default_factory=list)
    done: Done | None = None
    done_at: float | None = None
    progress_at: float | None = None
    timeout_from: float = 0.0

    @property
    def metric(self) -> Metric | None:
        """The newest metric event."""
        return self.metrics[-1] if self.metrics else None

    @property
    def current_progress(self) -> Progress | None:
        """The last step of a job that is not done; None also before its first step."""
        return None if self.done else self.progress

    @property
    def has_gpus(self) -> bool:
        """Whether a rank uses a GPU, as far as its samples show."""
        return any(rank.gpu is not None for node in self.nodes for rank in node.ranks)

    @property
    def ready_count(self) -> int:
        """The number of nodes that are ready or have succeeded."""
        return sum(node.phase == "ready" or _succeeded(node) for node in self.nodes)

    def note_joined(self, now: float) -> None:
        """Set the duration of the rendezvous, if it has just ended."""
        if self.joined_after_s is None and self.ready_count == len(self.nodes):
            self.joined_after_s = now - self.started


def start(plan: Plan, now: float) -> JobView:
    """Return the view before the first poll."""
    nodes = [NodeView(NodeStatus(node.name, "pending"), since=now) for node in plan.nodes]
    return JobView(nodes, plan.job.says_ready, now, timeout_from=now)


def fold(
    view: JobView,
    statuses: Sequence[NodeStatus],
    events: Iterable[Event],
    now: float,
    patience_s: float = RETURN_S,
) -> JobView:
    """Update the view after a poll, and return it: one status per node, in order, and the events from their logs.

    A node whose machine does not answer is lost after `patience_s` more, counted from the job's last step.
    """
    for event in events:
        # The node's clock, within limits, so that `attach` shows the same durations as `launch`.
        at = min(max(now if event.time is None else event.time, view.started), now)
        _fold_event(view, event, at)
        if isinstance(event, Ready | Progress | Metric | Checkpoint):
            view.done_at = None
        if isinstance(event, Done) and event.node == 0:
            view.done_at = now
        if isinstance(event, Progress | Metric | Checkpoint):
            # Not `at`: a long log is read in parts, and later parts may have newer events.
            view.progress_at = now
        view.note_joined(at)
    has_joined = view.joined_after_s is not None
    is_stepping = has_joined and view.progress_at is not None and now - view.progress_at < _STEPPING_S
    for node, status in zip(view.nodes, statuses, strict=True):
        if status.phase != "lost" or not status.silent:
            if node.phase == "lost" and node.unanswered_since is not None:
                node.phase = "ready" if has_joined else "starting"
                node.since = now
                node.note = ""
            node.unanswered_since = None
        elif node.unanswered_since is None or is_stepping:
            node.unanswered_since = now
        if node.unanswered_since is not None and (is_stepping or now - node.unanswered_since < patience_s):
            node.status = replace(node.status, silent=status.silent)
        else:
            _fold_status(node, status, now)
    in_queue = all(node.phase == "pending" for node in view.nodes)
    if in_queue or any(node.phase == "setup" for node in view.nodes):
        view.timeout_from = now
    view.note_joined(now)
    return view


def judge(
    view: JobView,
    now: float,
    rendezvous_timeout_s: float,
    stall_timeout_s: float = 0.0,
    grace_s: float = math.inf,
) -> Verdict:
    """Return the job's verdict.

    `late`: the rendezvous has lasted longer than `rendezvous_timeout_s`, not counting time in a queue.
    `stalled`: the job has made steps, but none for `stall_timeout_s` (0: never), or the agents of all nodes that still
    run report a stall. `done`: all nodes have exited with 0, or those that have not are overdue, see `overdue`.
    """
    if failing(view):
        return "failed"
    if all(_succeeded(node) for node in view.nodes):
        return "done"
    if any(node.status.silent for node in view.nodes):  # its log has not been read, so its state is unknown
        return "waiting" if view.joined_after_s is None else "joined"
    if overdue(view, now, grace_s):
        return "done"
    if view.joined_after_s is not None:
        if _over_since(view) is not None:
            return "joined"
        if all(node.status.stall or _succeeded(node) for node in view.nodes):
            return "stalled"
        idle_s = now - view.progress_at if view.progress_at is not None else 0.0
        return "stalled" if stall_timeout_s and idle_s > stall_timeout_s else "joined"
    return "late" if now - view.timeout_from > rendezvous_timeout_s else "waiting"


def is_queued(view: JobView) -> bool:
    """Return whether a node waits for a machine, and none has run."""
    return all(node.phase == "pending" for node in view.nodes) and any(
        not node.status.where for node in view.nodes
    )


def waits_for(view: JobView) -> str:
    """Return why a node has no machine yet, in the scheduler's words; "" if it has not said so."""
    return next(
        (node.note for node in view.nodes if node.phase == "pending" and node.note and not node.status.where),
        "",
    )


def silence(view: JobView) -> str:
    """Return which nodes do not answer, and why; "" if all answer."""
    silent_nodes: dict[str, list[str]] = {}
    for node in view.nodes:
        if node.status.silent:
            silent_nodes.setdefault(node.status.silent, []).append(node.name)
    if len(silent_nodes) == 1 and len(view.nodes) == sum(map(len, silent_nodes.values())):
        return next(iter(silent_nodes))
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in silent_nodes.items())


def overdue(view: JobView, now: float, grace_s: float) -> list[NodeView]:
    """Return the nodes that have not exited although the job has been done for `grace_s`, and some seconds at least.

    It is done when rank 0 has said so, or the programs of all ranks have ended well.
    """
    since = _over_since(view)
    if since is None or now - since <= max(grace_s, _LEAST_LEAVE_S):
        return []
    return [node for node in view.nodes if not _succeeded(node)]


def _over_since(view: JobView) -> float | None:
    """Return the time from which the job is done, or None."""
    if view.done_at is not None:
        return view.done_at
    times = [node.left_at for node in view.nodes if not _succeeded(node)]
    known = [at for at in times if at is not None]
    return max(known) if known and len(known) == len(times) else None


def failing(view: JobView) -> list[NodeView]:
    """Return the nodes that failed, first failure first. Nodes with only secondary failures come last."""
    bad = [node for node in view.nodes if node.has_ended and not _succeeded(node)]
    return sorted(bad, key=lambda node: (is_secondary(node), _failed_at(node)))


def is_secondary(node: NodeView) -> bool:
    """Return whether a node failed only because its ranks lost their peers."""
    return bool(node.status.failure and node.status.failure.secondary)


def missing(view: JobView) -> list[NodeView]:
    """Return the nodes that did not reach the master, or else all that are not ready."""
    late = [node for node in view.nodes if node.phase != "ready" and not _succeeded(node)]
    return [node for node in late if not node.reached] or late


def _failed_at(node: NodeView) -> float:
    if node.phase == "lost":  # the time is unknown; it counts as the first
        return 0.0
    failure = node.status.failure
    ended_at = node.status.ended_at
    if failure is not None and failure.time is not None:
        return failure.time
    return ended_at if ended_at is not None else math.inf


def _succeeded(node: NodeView) -> bool:
    return node.phase == "exited" and node.status.exit_code == 0


def _fold_status(node: NodeView, status: NodeStatus, now: float) -> None:
    node.status = _kept(node, status)
    node.left_at = (node.left_at or now) if status.leaving else None
    if status.phase in ("exited", "lost"):
        if node.phase != status.phase:
            detail = status.detail or (f"exit {status.exit_code}" if status.phase == "exited" else "")
            node.phase = status.phase
            node.since = now
            node.note = "; ".join(filter(None, (detail, status.where)))
    elif _ORDER[status.phase] > _ORDER[node.phase] or (status.starts_over and status.phase != node.phase):
        node.phase = status.phase
        node.since = now
        node.note = status.detail
        node.reached = node.reached and not status.starts_over
    elif status.detail and (status.phase != "pending" or node.phase == "pending"):
        node.note = status.detail  # a queue's answer is older than the node's own


def _kept(node: NodeView, status: NodeStatus) -> NodeStatus:
    """Return a new status, with what the last one knew better: lines that its log lacks, and how the node ended."""
    last = node.status
    status = replace(status, lost=status.lost or last.lost)
    has_ended_otherwise = status.phase in ("exited", "lost") and status.phase != node.phase
    if not node.has_ended or has_ended_otherwise:
        return status
    return replace(
        status,
        exit_code=last.exit_code,
        ended_at=last.ended_at,
        failure=last.failure,
        where=last.where,
        is_final=last.is_final,
        is_cancelled=last.is_cancelled,
    )


def _fold_event(view: JobView, event: Event, now: float) -> None:
    if isinstance(event, Heartbeat) and view.progress_at is not None:
        # Heartbeats also count validation batches, which print no progress event.
        view.progress_at = max(view.progress_at, now - (event.idle_s or 0.0))
    if event.node is not None and event.node < len(view.nodes):
        _fold_node_event(view.nodes[event.node], event, now, ready_on_port=not view.says_ready)
    if isinstance(event, Ready):
        view.ready = view.ready or event
    elif isinstance(event, Progress) and event.node == 0:
        view.progress = event
    elif isinstance(event, Metric):
        view.metrics.append(event)
    elif isinstance(event, Done):
        view.done = event


def _fold_node_event(node: NodeView, event: Event, now: float, *, ready_on_port: bool) -> None:
    if isinstance(event, Progress):
        node.progress = event
    elif isinstance(event, Ready):
        ranks = "" if event.local_world_size is None else event.local_world_size
        _advance(node, "ready", now, f"{event.device or ''} x {ranks}".strip(" x"))
    elif isinstance(event, SettingUp):
        _advance(node, "setup", now, "")
    elif isinstance(event, Joining):
        _fold_joining(node, event, now, ready_on_port=ready_on_port)


def _fold_joining(node: NodeView, event: Joining, now: float, *, ready_on_port: bool) -> None:
    master = event.master or "the master"
    if not event.reachable:
        _advance(node, "joining", now, f"cannot reach {master}" + (f": {event.why}" if event.why else ""))
    elif ready_on_port:
        node.reached = True
        _advance(node, "ready", now, f"ranks started, {master} is reachable")
    elif event.listening:
        node.reached = True
        _advance(node, "joining", now, f"reached {master}")
    else:  # rank 0 has not opened the port yet
        note = node.note if node.phase != "pending" else ""  # where a batch system runs the node
        _advance(node, "joining", now, f"{master} does not listen yet: {event.why}" if event.why else note)


def _advance(node: NodeView, phase: Phase, now: float, note: str) -> None:
    if _ORDER[phase] < _ORDER[node.phase]:
        return
    if node.phase != phase:
        node.since = now
    node.phase = phase
    node.note = note
