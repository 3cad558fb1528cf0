"""The monitor: polls machines, a thread for each, and calls a silent node lost.

How long a lost node may still return is decided in supervisor/job_state.py. Batch systems (batch/queued.py), Kubernetes
(kubernetes/pods.py) and compose also call nodes lost of which their scheduler or engine has no container any more.
"""

import functools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from cluster.backends import awake_clock
from cluster.backends.awake_clock import AwakeClock
from cluster.backends.poll_script import TIMEOUT_S
from cluster.errors import ClusterError, SlowError, UnreachableError
from cluster.spec.model import Machine, Plan
from cluster.spec.node_status import NodeStatus, NodeStatuses, Phase
from cluster.transport import Shell, reach

#: A machine that has not answered for this time is lost. Jobs survive shorter network failures.
LOST_AFTER_S = 8.0
#: `NodeMonitor.statuses` waits this long for a poll; a slow poll continues in its thread.
_POLL_WAIT_S = 1.0
#: Timeout of a command on a machine that did not answer the last poll.
_SILENT_TIMEOUT_S = 4.0
#: An agent writes a heartbeat every 2 s. If it stays the same for this awake time on a machine that answers, the agent
#: is frozen. Its age by the machine's clock proves nothing: the clock may have been set, or the machine suspended.
HEARTBEAT_TIMEOUT_S = 60.0
#: What is known of a machine is forgotten after this time without a poll: `clusterctl serve` sees many jobs.
_FORGET_AFTER_S = 600.0

#: What a poll finds of each plan: its nodes' statuses, or why they cannot be read.
Answers = Sequence[NodeStatuses | ClusterError]
#: An attempt: the job's name, its launch ID, because another job may get the name, and the attempt's number.
_Attempt = tuple[str, str, int]
#: An attempt and the name of one of its nodes.
_Key = tuple[_Attempt, str]
#: A machine's login and its SSH configuration: those with the same are one.
_MachineKey = tuple[str, str]


class NodeMonitor:
    """Polls the machines of plans repeatedly.

    `poll` polls one machine for one plan, and `poll_all` for several, without their logs; both raise a ClusterError.
    """

    def __init__(
        self,
        poll: Callable[[Plan, Machine], NodeStatuses],
        poll_all: Callable[[Sequence[Plan], Machine], Answers] | None = None,
        *,
        silent_is_lost: bool = True,
    ) -> None:
        """`silent_is_lost`: the nodes of a silent machine are lost. With Slurm, its controller decides."""
        self._poll = poll
        self._poll_all = poll_all or (lambda plans, machine: [poll(plan, machine) for plan in plans])
        self._silent_is_lost = silent_is_lost
        self._polls: dict[tuple[object, ...], _MachinePoll] = {}
        self._forgotten_at = time.monotonic()
        self._lock = threading.Lock()
        #: The machines that did not answer the last poll.
        self._silent: set[tuple[str, str]] = set()
        self._suspensions = 0

    def statuses(self, plan: Plan) -> list[NodeStatus]:
        """Return one status per node of the plan, in its order.

        A slow machine keeps its last status. A machine that answers neither poll nor ping is silent, and then lost.
        """

        def work(plans: Sequence[Plan], machine: Machine) -> Answers:
            return [self._poll(plan, machine) for plan in plans]

        (answer,) = self._observe([plan], _attempt(plan), work)
        if isinstance(answer, ClusterError):
            raise answer
        return answer

    def statuses_of(self, plans: Sequence[Plan], *scope: str) -> list[list[NodeStatus] | ClusterError]:
        """Return what `statuses` returns or raises for each plan, but poll each machine once for all of them.

        A machine that never answers delays only the first call. Calls with another `scope` have their own polls.
        """
        return self._observe(plans, scope, self._poll_all, is_shared=True)

    def _observe(
        self,
        plans: Sequence[Plan],
        scope: tuple[object, ...],
        work: Callable[[Sequence[Plan], Machine], Answers],
        *,
        is_shared: bool = False,
    ) -> list[list[NodeStatus] | ClusterError]:
        plans_of: dict[_MachineKey, list[Plan]] = {}
        machines: dict[_MachineKey, Machine] = {}
        for plan in plans:
            for machine in plan.machines:
                machines.setdefault(_key(machine), machine)
                plans_of.setdefault(_key(machine), []).append(plan)
        self._reconnect_after_suspension(machines.values())
        polls = dict(zip(machines, self._polls_of([(*scope, *key) for key in machines]), strict=True))
        for key, machine in machines.items():
            polls[key].start(functools.partial(_found, work, tuple(plans_of[key]), machine))
        is_remote = any(machine.login for machine in machines.values())
        wait_s = _wait_s(polls.values(), is_shared=is_shared) if is_remote else TIMEOUT_S
        until = time.monotonic() + wait_s
        errors: dict[_MachineKey, ClusterError | None] = {}
        broken: dict[_MachineKey, ClusterError] = {}
        for key, machine in machines.items():
            try:
                errors[key] = polls[key].wait(reach(machine), max(0.0, until - time.monotonic()))
            except UnreachableError as error:  # this machine's failure
                broken[key] = error
        made: list[list[NodeStatus] | ClusterError] = []
        for plan in plans:
            keys = [_key(machine) for machine in plan.machines]
            problem = next((broken[key] for key in keys if key in broken), None)
            if problem is None:
                asked = [polls[key] for key in keys]
                made.append(self._statuses_of(plan, asked, [errors[key] for key in keys]))
            else:
                made.append(problem)
        return made

    def _reconnect_after_suspension(self, machines: Iterable[Machine]) -> None:
        """Close the connections if this machine has slept: a new one is faster than the timeout of a dead one."""
        suspensions = awake_clock.awake_time().suspensions
        if suspensions != self._suspensions:
            self._suspensions = suspensions
            for machine in machines:
                reach(machine).close()

    def _statuses_of(
        self, plan: Plan, polls: Sequence["_MachinePoll"], errors: Sequence[ClusterError | None]
    ) -> list[NodeStatus] | ClusterError:
        """Return the statuses of a plan's nodes from the polls of its machines, or why its state is unknown."""
        unknown: Phase = "starting" if self._silent_is_lost else "pending"
        statuses: NodeStatuses = {}
        for machine, poll, error in zip(plan.machines, polls, errors, strict=True):
            nodes = plan.nodes_on(machine)
            known = {node.name: poll.statuses.get((_attempt(plan), node.name)) for node in nodes}
            # before the first answer only an error is silence: the login may take long
            has_answered = any(known.values())
            is_new = not has_answered and error is None
            silent = not is_new and (poll.silent_s > 2 * _POLL_WAIT_S or not has_answered)
            if silent:
                self._silent.add((plan.job_id, machine.name))
            else:
                self._silent.discard((plan.job_id, machine.name))
            for node in nodes:
                status = known[node.name] or NodeStatus(node.name, unknown)
                if isinstance(status, ClusterError):
                    return status
                if silent:
                    status = self._silent_status(status, poll.silent_s, error)
                elif is_new:
                    status = replace(status, silent="has not answered yet")
                elif self._silent_is_lost:
                    status = poll.unless_frozen(plan, status)
                statuses[node.name] = status
        if self._silent_is_lost and all(not poll.statuses and poll.silent_s > LOST_AFTER_S for poll in polls):
            # No machine ever answered: rather this machine's network or keys, and the job's state is unknown.
            error = next((poll.error for poll in polls if isinstance(poll.error, ClusterError)), None)
            if error is None:  # the login may be under way
                return UnreachableError(f"{plan.machines[0].name}: does not answer")
            return UnreachableError(error.message, error.hint)
        return [statuses[node.name] for node in plan.nodes]

    def _polls_of(self, keys: Sequence[tuple[object, ...]]) -> list["_MachinePoll"]:
        """Return the polls of these machines, and forget those that were not used for some time."""
        with self._lock:
            now = time.monotonic()
            if now - self._forgotten_at >= _FORGET_AFTER_S:
                self._forgotten_at = now
                self._polls = {
                    key: poll for key, poll in self._polls.items() if now - poll.used_at < _FORGET_AFTER_S
                }
                if not self._polls:
                    self._silent.clear()
            polls = [self._polls.setdefault(key, _MachinePoll()) for key in keys]
            for poll in polls:
                poll.used_at = now
            return polls

    def timeout_s(self, plan: Plan, machine: Machine, default_s: float) -> float:
        """Return the timeout of a command; shorter, over a new connection, if the machine was silent."""
        if (plan.job_id, machine.name) not in self._silent:
            return default_s
        reach(machine).close()
        return _SILENT_TIMEOUT_S

    def _silent_status(self, status: NodeStatus, silent_s: float, error: ClusterError | None) -> NodeStatus:
        if status.phase in ("exited", "lost"):
            return status
        why = f"has not answered for {silent_s:.0f} s"
        if error is not None:
            cause = error.message.removeprefix(f"{status.node}: ")
            why = f"{why}: {cause}" if silent_s >= 1 else cause
        if silent_s > LOST_AFTER_S and self._silent_is_lost:
            return NodeStatus(status.node, "lost", detail=why, silent=why)
        return replace(status, silent=why)


class _MachinePoll:
    """The polls of one machine, one at a time, each in a thread: a machine that hangs delays no other."""

    def __init__(self) -> None:
        self.statuses: dict[_Key, NodeStatus | ClusterError] = {}
        #: Why the last poll failed; None after a success. What is no ClusterError is this machine's failure.
        self.error: Exception | None = None
        self.used_at = 0.0
        self._clock = AwakeClock()
        self._answered_at = self._polled_at = self._clock()
        #: The last heartbeat of each node's agent, and the awake time at which it was new.
        self._heartbeats: dict[_Key, tuple[float, float]] = {}
        self._poll_thread: threading.Thread | None = None
        self._ping_thread: threading.Thread | None = None

    @property
    def silent_s(self) -> float:
        """The awake seconds since the machine last answered a poll or a ping; 0 if it has answered the last poll."""
        has_answered = (
            self._poll_thread is not None and not self._poll_thread.is_alive() and self.error is None
        )
        return 0.0 if has_answered else self._clock() - self._answered_at

    def unless_frozen(self, plan: Plan, status: NodeStatus) -> NodeStatus:
        """Return the status, or `lost` if the node's agent runs without a new heartbeat."""
        _, since = self._heartbeats.get((_attempt(plan), status.node), (0.0, self._polled_at))
        frozen_s = self._polled_at - since
        if status.phase in ("exited", "lost") or frozen_s <= HEARTBEAT_TIMEOUT_S:
            return status
        return NodeStatus(status.node, "lost", detail=f"no heartbeat of its agent for {frozen_s:.0f} s")

    def start(self, work: Callable[[], dict[_Key, NodeStatus | ClusterError]]) -> None:
        """Start a poll, unless one is running."""
        if self._poll_thread is None or not self._poll_thread.is_alive():
            if self.error is None:  # time between two polls is no silence
                self._answered_at = self._clock()
            self._poll_thread = threading.Thread(target=self._run, args=(work,), daemon=True)
            self._poll_thread.start()

    def wait(self, shell: Shell, timeout_s: float) -> ClusterError | None:
        """Wait for the poll, and ping the machine while it runs. Return its error; raise one of this machine."""
        assert self._poll_thread is not None
        self._poll_thread.join(min(timeout_s, _POLL_WAIT_S))
        # A machine that breaks each command off, before or after it answers a ping, does not answer.
        is_broken = self.error is not None and not isinstance(self.error, SlowError)
        is_polling = self._poll_thread.is_alive() and not is_broken
        if is_polling and (self._ping_thread is None or not self._ping_thread.is_alive()):
            self._ping_thread = threading.Thread(
                target=self._ping, args=(shell, self._poll_thread), daemon=True
            )
            self._ping_thread.start()
        self._poll_thread.join(max(0.0, timeout_s - _POLL_WAIT_S))
        if self.error is not None and not isinstance(self.error, ClusterError):
            raise in_words(self.error)
        return self.error

    def _run(self, work: Callable[[], dict[_Key, NodeStatus | ClusterError]]) -> None:
        try:
            answer = work()
            self._polled_at = self._clock()
            self._heartbeats = {key: seen for key, seen in self._heartbeats.items() if key in answer}
            for key, status in answer.items():
                if isinstance(status, ClusterError):
                    continue
                if status.heartbeat != self._heartbeats.get(key, (0.0, 0.0))[0]:
                    self._heartbeats[key] = (status.heartbeat, self._polled_at)
            self.statuses = answer
            self.error = None
            self._answered_at = self._polled_at
        # `wait` raises it: a thread that just ends would look like a silent machine.
        except Exception as error:
            self.error = error

    def _ping(self, shell: Shell, poll_thread: threading.Thread) -> None:
        while poll_thread.is_alive():
            if shell.ping():
                self._answered_at = self._clock()
            poll_thread.join(_POLL_WAIT_S)


def in_words(error: Exception) -> ClusterError:
    """Return what a poll has raised as an error for the user."""
    if isinstance(error, ClusterError):
        return error
    if isinstance(error, OSError):  # the local copy of a log cannot be written
        return UnreachableError(f"this machine: {error.filename or 'the copy of a log'}: {error.strerror}")
    return UnreachableError(f"the nodes' answer cannot be read: {type(error).__name__}: {error}")


def _wait_s(polls: Collection[_MachinePoll], *, is_shared: bool) -> float:
    """Return how long to wait for polls: longer for a first one, which logs in, but at most until a machine is lost.

    A machine that never answers delays only the first of several shared polls.
    """
    first = [poll for poll in polls if not poll.statuses]
    if is_shared:
        first = [poll for poll in first if poll.silent_s < LOST_AFTER_S]
    silent_s = max((poll.silent_s for poll in polls if poll.silent_s < LOST_AFTER_S), default=0.0)
    return min(LOST_AFTER_S if first else _POLL_WAIT_S, LOST_AFTER_S - silent_s + 0.1)


def _key(machine: Machine) -> _MachineKey:
    return machine.login, machine.ssh_config


def _attempt(plan: Plan) -> _Attempt:
    return plan.job_id, plan.job.launch_id, plan.attempt


def _found(
    work: Callable[[Sequence[Plan], Machine], Answers], plans: Sequence[Plan], machine: Machine
) -> dict[_Key, NodeStatus | ClusterError]:
    """Return what `work` finds of each node of the plans on a machine."""
    answers: dict[_Key, NodeStatus | ClusterError] = {}
    for plan, answer in zip(plans, work(plans, machine), strict=True):
        if isinstance(answer, ClusterError):
            answers |= {(_attempt(plan), node.name): answer for node in plan.nodes_on(machine)}
        else:
            answers |= {(_attempt(plan), name): status for name, status in answer.items()}
    return answers
