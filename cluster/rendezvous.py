"""Whether all nodes have met: `judge` decides from what was seen, `fold` turns events and statuses into that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cluster import contract, logs
from cluster.logs import Event
from cluster.model import NodeStatus, Phase, Plan

Verdict = Literal["waiting", "met", "late", "stalled", "failed", "done"]

#: A phase never goes back to an earlier one, except to lost or exited.
_ORDER: dict[Phase, int] = {"pending": 0, "starting": 1, "joining": 2, "ready": 3, "exited": 4, "lost": 4}


@dataclass(frozen=True)
class NodeView:
    """One node as the user sees it; `since` is the clock time at which the phase began.

    `note` describes the phase. `failure` is the first failure among the node's ranks (see NodeStatus).
    """

    name: str
    phase: Phase = "pending"
    since: float = 0.0
    note: str = ""
    exit_code: int | None = None
    ended_at: float | None = None
    reached: bool = False
    silent: str = ""
    progress: Event | None = None
    failure: Mapping[str, Any] | None = None
    where: str = ""


@dataclass(frozen=True)
class JobView:
    """Everything seen of a job so far."""

    nodes: tuple[NodeView, ...]
    says_ready: bool = True
    started: float = 0.0
    met_after_s: float | None = None
    ready: Event | None = None
    progress: Event | None = None
    metric: Event | None = None
    done: Event | None = None
    moved_at: float | None = None
    began: float = 0.0

    @property
    def ready_count(self) -> int:
        """How many nodes are ready, or have been and ended well."""
        return sum(node.phase == "ready" or _ended_well(node) for node in self.nodes)


def start(plan: Plan, now: float) -> JobView:
    """The view before anything was seen."""
    return JobView(tuple(NodeView(node.name, since=now) for node in plan.nodes), plan.says_ready, now, began=now)


def fold(
    view: JobView,
    statuses: Sequence[NodeStatus],
    events: Iterable[Event],
    now: float,
) -> JobView:
    """The view after what a backend saw (one status per node, in order) and the events of the nodes' logs."""
    for event in events:
        # By the node's own clock where it is plausible, so that a launcher that attaches later tells the same times.
        at = min(max(float(event.get("time", now)), view.started), now)
        view = _fold_event(view, event, at)
        if event["event"] in (contract.PROGRESS, contract.METRIC, contract.CHECKPOINT):
            # Not `at`: of a long log whose beginning has just been read nobody knows the end yet.
            view = replace(view, moved_at=now)
        if view.met_after_s is None and view.ready_count == len(view.nodes):
            view = replace(view, met_after_s=at - view.started)
    nodes = tuple(_fold_status(node, status, now) for node, status in zip(view.nodes, statuses, strict=True))
    view = replace(view, nodes=nodes)
    if all(node.phase == "pending" for node in nodes):  # in a queue; nobody can come late yet
        view = replace(view, began=now)
    if view.met_after_s is None and view.ready_count == len(nodes):
        view = replace(view, met_after_s=now - view.started)
    return view


def judge(view: JobView, now: float, timeout_s: float, stall_timeout_s: float = 0.0) -> Verdict:
    """What the view means: `late` is a rendezvous that has lasted longer than `timeout_s`, time in a queue aside.

    `stalled` is a job that has made steps and then none for `stall_timeout_s` (0: never).
    """
    if failing(view):
        return "failed"
    if all(_ended_well(node) for node in view.nodes):
        return "done"
    if view.met_after_s is not None:
        still_s = now - view.moved_at if view.moved_at is not None else 0.0
        return "stalled" if stall_timeout_s and still_s > stall_timeout_s else "met"
    if any(node.silent for node in view.nodes):  # it may have met others long ago; its machine decides, or is lost
        return "waiting"
    return "late" if now - view.began > timeout_s else "waiting"


def failing(view: JobView) -> list[NodeView]:
    """The nodes that failed, first failure first: it is the cause, and the others mostly its consequence.

    A node whose ranks only lost their peers comes last, whenever it failed.
    """
    bad = [node for node in view.nodes if node.phase == "lost" or (node.phase == "exited" and node.exit_code != 0)]
    return sorted(bad, key=lambda node: (is_secondary(node), _failed_at(node)))


def is_secondary(node: NodeView) -> bool:
    """Whether a node failed only because another one did."""
    return bool(node.failure and node.failure.get("secondary"))


def missing(view: JobView) -> list[NodeView]:
    """The nodes that the others wait for: those that never reached the master, else all that are not ready."""
    late = [node for node in view.nodes if node.phase != "ready" and not _ended_well(node)]
    return [node for node in late if not node.reached] or late


def _failed_at(node: NodeView) -> float:
    if node.phase == "lost":  # nothing could report when: so it comes first
        return 0.0
    if node.failure is not None:
        return float(node.failure["time"])
    return node.ended_at if node.ended_at is not None else float("inf")


def _ended_well(node: NodeView) -> bool:
    return node.phase == "exited" and node.exit_code == 0


def found_again(view: JobView, now: float) -> JobView:
    """The view when nodes that were taken for lost answer again: their program has gone on meanwhile."""
    phase: Phase = "starting" if view.met_after_s is None else "ready"

    def back(node: NodeView) -> NodeView:
        return replace(node, phase=phase, since=now, note="", silent="") if node.phase == "lost" else node

    return replace(view, nodes=tuple(map(back, view.nodes)))


def _fold_status(node: NodeView, status: NodeStatus, now: float) -> NodeView:
    if node.silent != status.silent:
        node = replace(node, silent=status.silent)
    if status.phase in ("exited", "lost"):
        if node.phase == status.phase:
            return node
        said = [text for text in (status.detail, status.where) if text]
        note = "; ".join(said) or (f"exit {status.exit_code}" if status.phase == "exited" else "")
        ended = replace(node, phase=status.phase, since=now, exit_code=status.exit_code, ended_at=status.ended_at)
        return replace(ended, note=note, where=status.where, failure=status.failure)
    if _ORDER[status.phase] > _ORDER[node.phase]:
        return replace(node, phase=status.phase, since=now, note=status.detail)
    return replace(node, note=status.detail) if status.detail else node


def _fold_event(view: JobView, event: Event, now: float) -> JobView:
    kind = event["event"]
    if kind == contract.HEARTBEAT and view.moved_at is not None:
        # also steps that make no progress event: the batches of a validation
        view = replace(view, moved_at=max(view.moved_at, now - logs.number(event, "idle_s")))
    index = event.get("node")
    if isinstance(index, int) and 0 <= index < len(view.nodes):
        node = _node_heard(view.nodes[index], event, now, ready_on_port=not view.says_ready)
        view = replace(view, nodes=(*view.nodes[:index], node, *view.nodes[index + 1 :]))
    if kind == contract.READY and view.ready is None:
        return replace(view, ready=event)
    if kind == contract.PROGRESS and index == 0:
        return replace(view, progress=event)
    if kind == contract.METRIC:
        return replace(view, metric=event)
    if kind == contract.DONE:
        return replace(view, done=event)
    return view


def _node_heard(node: NodeView, event: Event, now: float, *, ready_on_port: bool) -> NodeView:
    kind = event["event"]
    if kind == contract.PROGRESS:
        return replace(node, progress=event)
    if kind == contract.READY:
        return _advanced(
            node, "ready", now, f"{event.get('device', '')} x {event.get('local_world_size', '')}".strip(" x")
        )
    if kind != contract.JOINING:
        return node
    master, why = event.get("master", "the master"), event.get("why")
    if not event.get("reachable"):
        return _advanced(node, "joining", now, f"cannot reach {master}: {why}")
    if ready_on_port:
        return _advanced(replace(node, reached=True), "ready", now, f"its ranks run, {master} is reachable")
    held = node.note if node.phase != "pending" else ""  # where it runs
    if not event.get("listening"):  # the master's rank 0 has not started to listen
        return _advanced(node, "joining", now, f"{master} does not listen yet: {why}" if why else held)
    return _advanced(replace(node, reached=True), "joining", now, f"reached {master}")


def _advanced(node: NodeView, phase: Phase, now: float, note: str) -> NodeView:
    if _ORDER[phase] < _ORDER[node.phase]:
        return node
    return replace(node, phase=phase, since=node.since if node.phase == phase else now, note=note)
