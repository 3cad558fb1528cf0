"""Polls the pods of an attempt: what Kubernetes says of each, then what the agent in each says.

One request lists all pods. Each agent is polled in a thread of its own, so that a machine that hangs delays no other.
"""

import base64
import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster import contract
from cluster.agent import scripts
from cluster.backends import log_files
from cluster.backends.awake_clock import AwakeClock
from cluster.backends.kubernetes import manifests, waiting
from cluster.backends.kubernetes.kubectl import ContainerEndedError, Kubectl, NotFoundError
from cluster.backends.node_monitor import HEARTBEAT_TIMEOUT_S, LOST_AFTER_S
from cluster.errors import ClusterError
from cluster.spec import node_status
from cluster.spec.model import Plan
from cluster.spec.node_status import NodeStatus
from cluster.spec.status import parse

#: The least time between two requests for the list of pods.
INTERVAL_S = 1.0
#: How long a poll waits for the agents that have not answered; their threads continue.
_WAIT_S = 2.0
#: Limit of a poll of one agent, and of one that did not answer the last time.
_TIMEOUT_S = 10.0
_SILENT_TIMEOUT_S = 4.0
#: After this time without an answer, the status says so.
_ANNOUNCED_S = 2 * INTERVAL_S
#: A kubelet that has not ended a container so long after its grace period has missed that the pod was deleted.
MISSED_S = 10.0
#: How often the last part of the log of a container that has ended is asked for.
_LOG_TRIES = 3


class PodMonitor:
    """What is known of one node's pod: its agent's answers, and how long it has been silent."""

    def __init__(self, plan: Plan, rank: int, *, is_again: bool = False) -> None:
        """`is_again`: an earlier pod of this name was given up. Its log is not continued."""
        self.name = plan.nodes[rank].name
        self.pod = manifests.pod_of(plan, plan.nodes[rank])
        self.image = plan.job.image
        #: The last answer of its agent, None before the first.
        self.answer: NodeStatus | None = None
        self.error: ClusterError | None = None
        #: The last description of the pod, and its machine.
        self.uid = ""
        self.host = ""
        #: Whether its whole log is in the copy.
        self.is_complete = False
        self._is_over = False
        #: The grace period of its deletion (0: it is not deleted), and since when it has had that one.
        self._grace_s = 0
        self._deleted_at = 0.0
        self._plan = plan
        #: Where the log of this pod begins in the copy.
        self._begin = self._copied if is_again else 0
        self._clock = AwakeClock()
        self._answered_at = self._polled_at = self._clock()
        #: The last heartbeat, by the clock of its machine, and when it was first seen here.
        self._heartbeat = 0.0
        self._heartbeat_at = self._clock()
        self._thread: threading.Thread | None = None
        self._log_tries = 0

    @property
    def silent_s(self) -> float:
        """The awake seconds since the agent last answered a poll; 0 while it answers."""
        return self._clock() - self._answered_at if self.error is not None else 0.0

    @property
    def is_silent(self) -> bool:
        """Whether the machine of the pod has not answered for so long that it counts as lost."""
        return self.silent_s > LOST_AFTER_S

    @property
    def has_ended(self) -> bool:
        """Whether its ranks have exited, or its container can no longer be asked."""
        if self._is_over or self.error is not None:
            return True
        return self.answer is not None and self.answer.phase == "exited"

    def misses_deletion(self, state: waiting.PodState) -> bool:
        """Return whether its kubelet answers, but has not ended the container in the grace period that it got last."""
        is_ending = state.deleted and state.runs
        if not is_ending or self.error is not None:
            self._grace_s = 0
        elif state.grace_s != self._grace_s:
            self._grace_s = state.grace_s
            self._deleted_at = self._clock()
        if self._grace_s <= 1:  # it is not deleted, or there is no shorter grace period to ask for
            return False
        return self._clock() - self._deleted_at > self._grace_s + MISSED_S

    def start(self, kubectl: Kubectl) -> None:
        """Start a poll of the agent, unless one is running."""
        if self._is_asking:
            return
        if self.error is None:
            self._answered_at = self._clock()  # time between two polls is no silence
        self._thread = threading.Thread(target=self._run, args=(kubectl,), daemon=True)
        self._thread.start()

    def wait(self, until: float) -> None:
        """Wait for the poll that is running, until a time of `time.monotonic`."""
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))

    def status(self, state: waiting.PodState) -> NodeStatus:
        """Return the node's status while its container runs, by its agent's last answer."""
        answer = self.answer
        if answer is not None and 0 < (answer.ended_at or 0) < state.started_at:
            answer = None  # it is an earlier job's, kept by a volume
        status = replace(answer or NodeStatus(self.name, "starting"), where=state.host)
        if status.phase in ("exited", "lost"):
            return status
        machine = f"its machine {state.host}"
        if self.error is not None and self.silent_s > _ANNOUNCED_S:
            if state.host_is_silent and self.is_silent:  # Kubernetes says so, too
                return NodeStatus(self.name, "lost", detail=f"{machine} is lost: it is NotReady")
            why = f"{machine} has not answered for {self.silent_s:.0f} s: {self.error.message}"
            if self.is_silent:
                return NodeStatus(self.name, "lost", detail=why, silent=why)
            return replace(status, silent=why)
        if self.error is None and self._is_asking:  # its kubelet may hang
            waited_s = self._clock() - self._answered_at
            if waited_s > _ANNOUNCED_S:
                return replace(status, silent=f"{machine} has not answered for {waited_s:.0f} s")
        frozen_s = self._polled_at - self._heartbeat_at
        if self.answer is not None and frozen_s > HEARTBEAT_TIMEOUT_S:
            return NodeStatus(self.name, "lost", detail=f"no heartbeat of its agent for {frozen_s:.0f} s")
        return status

    def complete_log(self, kubectl: Kubectl) -> None:
        """Append what is missing of the log of a container that has ended."""
        if self.is_complete or self._log_tries == _LOG_TRIES:
            return
        self._log_tries += 1
        try:
            text = kubectl.text("logs", self.pod, "--container=node")
        except NotFoundError:
            self.is_complete = True
            return
        except ClusterError:
            return
        copied = log_files.content(self._plan, self._copy)[self._begin :]
        event_mark = contract.EVENT_MARK.encode()
        # The container's output is the log without events.
        output = b"".join(line for line in copied.splitlines(keepends=True) if event_mark not in line)
        last_output = output[-4096:]
        missing = text.encode()
        if last_output in missing:
            missing = missing[missing.find(last_output) + len(last_output) :]
        log_files.append(self._plan, self._copy, self._copied, missing)
        self.is_complete = True

    def explained(self, status: NodeStatus) -> NodeStatus:
        """Return the status of a container that ended before its agent said anything, with the last line it printed."""
        if status.phase != "exited" or not status.exit_code or self.answer is not None:
            return status
        text = log_files.content(self._plan, self._copy).decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            return status
        return replace(status, detail=f"{status.detail}: {lines[-1]}")

    @property
    def _is_asking(self) -> bool:
        """Whether a poll of the agent is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def _copy(self) -> Path:
        return Path(self._plan.attempt_dir, f"{self.name}.log")

    @property
    def _copied(self) -> int:
        """The size of the copy of its log."""
        return self._copy.stat().st_size if self._copy.exists() else 0

    def _run(self, kubectl: Kubectl) -> None:
        try:
            answer = self._ask(kubectl)
        except ContainerEndedError:  # since the pods were listed
            self._is_over = True
            return
        except ClusterError as error:
            self.error = error
            return
        self._polled_at = self._answered_at = self._clock()
        if answer.heartbeat != self._heartbeat:
            self._heartbeat = answer.heartbeat
            self._heartbeat_at = self._polled_at
        self.answer = answer
        self.error = None

    def _ask(self, kubectl: Kubectl) -> NodeStatus:
        run_dir = self._plan.dir_on(self._plan.nodes[0].machine)
        node_path = f"{run_dir}/attempt-{self._plan.attempt}/{self.name}"
        copied = self._copied
        script = scripts.text("backends/kubernetes/in_pod/poll.py")
        arguments = [node_path, str(copied - self._begin), str(log_files.CHUNK)]
        argv = [self._plan.job.python, "-c", script, *arguments]
        timeout_s = _SILENT_TIMEOUT_S if self.error else _TIMEOUT_S
        done = kubectl.exec(self.pod, argv, timeout_s=timeout_s)
        try:
            answer: Mapping[str, Any] = json.loads(done.out)
            agent = parse(answer["status"])
            chunk = base64.b64decode(answer["log"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ClusterError(f"its container did not answer: {done.last_line}") from error
        with contextlib.suppress(FileNotFoundError):  # the record of the job was removed
            log_files.append(self._plan, self._copy, copied, chunk)
        if len(chunk) == log_files.CHUNK:  # a node counts as exited once its whole log has been fetched
            return NodeStatus(self.name, "starting", events=agent.events or ())
        status = node_status.from_agent(self.name, agent)
        self.is_complete = status.phase == "exited"
        return status


class Listed:
    """The pods of one or several jobs, and the events about pods of their namespace. Each is asked for at most once."""

    def __init__(self, kubectl: Kubectl, selector: str) -> None:
        self._kubectl = kubectl
        self._selector = selector
        self._lock = threading.Lock()
        self._pods: dict[tuple[str, str], dict[str, Mapping[str, Any]]] | None = None
        self._events: list[Mapping[str, Any]] | None = None

    def pods(self, plan: Plan) -> Mapping[str, Mapping[str, Any]]:
        """Return the pods of an attempt by their names. Raises ClusterError."""
        with self._lock:
            if self._pods is None:
                self._pods = self._by_attempt()
            return self._pods.get((plan.job.launch_id, str(plan.attempt)), {})

    def events(self) -> list[Mapping[str, Any]]:
        """Return the events about pods. Raises ClusterError."""
        with self._lock:
            if self._events is None:
                self._events = list(self._kubectl.get("events", "--field-selector=involvedObject.kind=Pod"))
            return self._events

    def _by_attempt(self) -> dict[tuple[str, str], dict[str, Mapping[str, Any]]]:
        """Return the pods by launch ID and attempt, then by name."""
        by_attempt: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
        for pod in self._kubectl.get("pods", self._selector):
            labels = pod["metadata"].get("labels", {})
            launch = labels.get(manifests.LAUNCH_LABEL, "")
            attempt = labels.get(manifests.ATTEMPT_LABEL, "")
            by_attempt.setdefault((launch, attempt), {})[pod["metadata"]["name"]] = pod
        return by_attempt


def poll(
    kubectl: Kubectl, plan: Plan, monitors: Sequence[PodMonitor], listing: Listed
) -> tuple[list[NodeStatus], list[waiting.PodState]]:
    """Return the status of each node, and the state of its pod. Raises ClusterError if there is no list of pods."""
    listed = listing.pods(plan)
    events = _needed_events(monitors, listed, listing)
    states = [_state(monitor, listed.get(monitor.pod), events) for monitor in monitors]
    running = [monitor for monitor, state in zip(monitors, states, strict=True) if state.runs]
    for monitor in running:
        monitor.start(kubectl)
    until = time.monotonic() + _WAIT_S
    for monitor in running:
        monitor.wait(until)
    different = waiting.different_image(monitors[0].image if monitors else "", states)
    statuses = []
    for monitor, state in zip(monitors, states, strict=True):
        status = _if_deleted(_status(kubectl, monitor, state), state)
        if status.exit_code is None:
            status = different.get(status.node, status)
        statuses.append(status)
    return statuses, states


def _needed_events(
    monitors: Sequence[PodMonitor], listed: Mapping[str, Mapping[str, Any]], listing: Listed
) -> list[Mapping[str, Any]]:
    """Return the events about pods, if one of the monitored pods needs them."""
    has_vanished = any(monitor.uid and monitor.pod not in listed for monitor in monitors)
    pods = [listed[monitor.pod] for monitor in monitors if monitor.pod in listed]
    if has_vanished or any(waiting.needs_events(pod) for pod in pods):
        with contextlib.suppress(ClusterError):  # without that right a reason is missing, and nothing else
            return listing.events()
    return []


def _state(
    monitor: PodMonitor, pod: Mapping[str, Any] | None, events: Sequence[Mapping[str, Any]]
) -> waiting.PodState:
    """Return the state of a monitored pod (None: it does not exist), and note its UID."""
    if pod is None:
        return waiting.PodState(waiting.gone(monitor.name, _about(events, monitor.uid)))
    monitor.uid = pod["metadata"]["uid"]
    return waiting.observed(monitor.name, pod, _about(events, monitor.uid))


def _status(kubectl: Kubectl, monitor: PodMonitor, state: waiting.PodState) -> NodeStatus:
    """Return the status of a node by its agent and its pod. Complete the log of a pod that has ended."""
    if state.runs:
        return monitor.status(state)
    if monitor.answer is not None and monitor.answer.phase == "exited":
        # The agent knew more than the pod does.
        return replace(monitor.answer, where=state.host)
    if state.status.phase in ("exited", "lost"):
        monitor.complete_log(kubectl)
    return monitor.explained(state.status)


def _if_deleted(status: NodeStatus, state: waiting.PodState) -> NodeStatus:
    """Return the status of a node whose pod is being deleted: how its ranks end follows from that."""
    knows_more = status.phase == "lost" and not status.detail.startswith(waiting.FAILED)
    has_succeeded = status.phase == "exited" and not status.exit_code
    if not state.deleted or knows_more or has_succeeded:
        return status
    if status.phase in ("exited", "lost"):
        return NodeStatus(status.node, "lost", detail=state.deleted, where=state.host)
    return replace(status, detail=state.deleted)


def _about(events: Sequence[Mapping[str, Any]], uid: str) -> list[Mapping[str, Any]]:
    return [event for event in events if uid and event["involvedObject"].get("uid") == uid]
