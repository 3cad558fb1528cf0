"""Monitoring: polls statuses and logs, a thread per machine, and decides that a node is lost (Slurm: slurm/queue.py).

Awake time: durations count only while the launcher itself runs. A closed laptop lid or Ctrl-Z suspends the launcher
while the job continues, and after the resume the network needs some seconds to return. With wall-clock time every node
would then appear silent for the whole suspension, and be lost. A thread ticks each second: a gap of more than 5 s
between two ticks is a suspension. `AwakeTime.seconds` counts neither the gap nor a grace period of at most 20 s after
it. `AwakeClock` returns the awake time as seconds since 1970. Every timeout of a job uses such a clock.
"""

import base64
import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cluster import contract
from cluster.agent import scripts
from cluster.backends import log_files
from cluster.backends.script import attempt_dir
from cluster.errors import ClusterError, SlowError, UnreachableError
from cluster.spec.model import WORKDIR, Machine, NodeStatus, Phase, Plan
from cluster.spec.status import AgentStatus, from_exit_file, parse
from cluster.transport import Shell, files, parallel, reach, workdir
from cluster.transport.process import interruptible
from cluster.transport.waits import waiting

#: A machine that has not answered for this time is lost. Jobs survive shorter network failures.
LOST_AFTER_S = 8.0
#: `NodeMonitor.statuses` waits this long for a poll; a slow poll continues in its thread.
_POLL_WAIT_S = 1.0
#: Timeout of a command on a machine that did not answer the last poll.
_SILENT_TIMEOUT_S = 4.0
#: Timeout of a poll: a machine that answers pings may still be slow.
_POLL_TIMEOUT_S = 30.0
_TICK_S = 1.0
#: A longer gap between two ticks is a suspension of the launcher.
_SUSPENDED_AFTER_S = 5.0
#: Time for the network to return after a suspension.
RESUME_GRACE_S = 20.0
#: An agent writes a heartbeat every 2 s. If it stays the same for this awake time on a machine that answers, the agent
#: is frozen. Its age by the machine's clock proves nothing: the clock may have been set, or the machine suspended.
HEARTBEAT_TIMEOUT_S = 60.0
#: What is known of a machine is forgotten after this time without a poll: `clusterctl serve` sees many jobs.
_FORGET_AFTER_S = 600.0
#: Bytes of a log that one poll fetches at most.
LOG_CHUNK = 1 << 20
#: Characters of the arguments of one polling command: Linux takes 128 KB in the one argument that SSH makes of them.
_MOST_WORDS = 1 << 16

#: The files of a node's folder that hold its state, and are no results; and those that only this machine writes.
NOT_RESULTS = (
    *(
        "*.pid",
        "*.err",
        "*.exit",
        "*.alive",
        "*.agent",
        "*.venv",
        "*.secrets",
        "*.tmp",
        "common.*",
        "attempt",
        "submitted",
    ),
    f"/attempt-*/{contract.GRACE_FILE}",
    *("/job.yaml", "/report.html", "/supervisor.log", "/inputs.json", "/inputs.tar", "/attempt-*/collected"),
)

#: The statuses of a plan's nodes on one machine, by the node's name.
NodeStatuses = dict[str, NodeStatus]
#: What a poll finds of each plan: its nodes' statuses, or why they cannot be read.
Answers = Sequence[NodeStatuses | ClusterError]
#: An attempt: the job's name, its launch ID, because another job may get the name, and the attempt's number.
_Attempt = tuple[str, str, int]
#: An attempt and the name of one of its nodes.
_Key = tuple[_Attempt, str]


class AwakeTime:
    """Seconds in which the launcher was not suspended, from two clocks: one may stop, the other may be set."""

    def __init__(self, monotonic: float, wall: float) -> None:
        self.seconds = 0.0
        self.suspensions = 0
        self._last = (monotonic, wall)
        self._grace_until = monotonic
        self._lock = threading.Lock()

    def tick(self, monotonic: float, wall: float) -> None:
        """Add the time since the last tick, except for suspensions and the grace period after them."""
        with self._lock:
            last_monotonic, last_wall = self._last
            gap_s = max(monotonic - last_monotonic, wall - last_wall)
            if gap_s > _SUSPENDED_AFTER_S:
                self.suspensions += 1
                self._grace_until = monotonic + min(RESUME_GRACE_S, 2 * gap_s)
            self.seconds += max(0.0, monotonic - max(last_monotonic, self._grace_until))
            self._last = (monotonic, wall)


def _boot_time() -> float:
    """Return a time that counts while the machine is suspended. On Linux it is one that cannot be set."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_REALTIME))


@functools.cache
def _awake_time() -> AwakeTime:
    """Return the awake time of this process. A thread ticks, because the main thread may block for long."""
    awake = AwakeTime(time.monotonic(), _boot_time())

    def run() -> None:
        while True:
            awake.tick(time.monotonic(), _boot_time())
            time.sleep(_TICK_S)

    threading.Thread(target=run, daemon=True).start()
    return awake


class AwakeClock:
    """Wall-clock time without the suspensions since this clock was created."""

    def __init__(self) -> None:
        self._zero = 0.0
        self._zero = time.time() - self()

    def __call__(self) -> float:
        """Return seconds since 1970, less the suspensions."""
        _awake_time().tick(time.monotonic(), _boot_time())
        return self._zero + _awake_time().seconds


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

        (found,) = self._observe([plan], _attempt(plan), work)
        if isinstance(found, ClusterError):
            raise found
        return found

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
        machines: dict[tuple[str, str], tuple[Machine, list[Plan]]] = {}
        for plan in plans:
            for machine in plan.machines:
                machines.setdefault((machine.login, machine.ssh_config), (machine, []))[1].append(plan)
        each = [machine for machine, _ in machines.values()]
        if _awake_time().suspensions != self._suspensions:
            self._suspensions = _awake_time().suspensions
            for machine in each:  # a new connection is faster than the timeout of a dead one
                reach(machine).close()
        polls = dict(zip(machines, self._polls_of([(*scope, *key) for key in machines]), strict=True))
        for key, (machine, own) in machines.items():
            polls[key].start(functools.partial(_found, work, tuple(own), machine))
        first = [poll for poll in polls.values() if not poll.statuses]
        if is_shared:
            first = [poll for poll in first if poll.silent_s < LOST_AFTER_S]
        wait_s = LOST_AFTER_S if first else _POLL_WAIT_S  # the first poll logs in
        # no longer than until a silent machine is lost
        silent_s = max((poll.silent_s for poll in polls.values() if poll.silent_s < LOST_AFTER_S), default=0.0)
        wait_s = min(wait_s, LOST_AFTER_S - silent_s + 0.1)
        until = time.monotonic() + (wait_s if any(machine.login for machine in each) else _POLL_TIMEOUT_S)
        errors: dict[tuple[str, str], ClusterError | None] = {}
        broken: dict[tuple[str, str], ClusterError] = {}
        for key, (machine, _) in machines.items():
            try:
                errors[key] = polls[key].wait(reach(machine), max(0.0, until - time.monotonic()))
            except UnreachableError as error:  # this machine's failure
                broken[key] = error
        made: list[list[NodeStatus] | ClusterError] = []
        for plan in plans:
            keys = [(machine.login, machine.ssh_config) for machine in plan.machines]
            problem = next((broken[key] for key in keys if key in broken), None)
            asked = [polls[key] for key in keys]
            made.append(problem or self._statuses_of(plan, asked, [errors[key] for key in keys]))
        return made

    def _statuses_of(
        self, plan: Plan, polls: Sequence["_MachinePoll"], errors: Sequence[ClusterError | None]
    ) -> list[NodeStatus] | ClusterError:
        """Return the statuses of a plan's nodes from the polls of its machines, or why its state is unknown."""
        unknown: Phase = "starting" if self._silent_is_lost else "pending"
        found: NodeStatuses = {}
        for machine, poll, error in zip(plan.machines, polls, errors, strict=True):
            nodes = plan.nodes_on(machine)
            known = {node.name: poll.statuses.get((_attempt(plan), node.name)) for node in nodes}
            # before the first answer only an error is silence: the login may take long
            has_answered = any(known.values())
            is_new = not has_answered and error is None
            silent = not is_new and (poll.silent_s > 2 * _POLL_WAIT_S or not has_answered)
            (self._silent.add if silent else self._silent.discard)((plan.job_id, machine.name))
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
                found[node.name] = status
        if self._silent_is_lost and all(not poll.statuses and poll.silent_s > LOST_AFTER_S for poll in polls):
            # No machine ever answered: rather this machine's network or keys, and the job's state is unknown.
            answers = next((poll.error for poll in polls if isinstance(poll.error, ClusterError)), None)
            no_answer = UnreachableError(f"{plan.machines[0].name}: does not answer")  # the login may be under way
            return UnreachableError(answers.message, answers.hint) if answers else no_answer
        return [found[node.name] for node in plan.nodes]

    def _polls_of(self, keys: Sequence[tuple[object, ...]]) -> list["_MachinePoll"]:
        """Return the polls of these machines, and forget those that were not used for some time."""
        with self._lock:
            now = time.monotonic()
            if now - self._forgotten_at >= _FORGET_AFTER_S:
                self._forgotten_at = now
                self._polls = {key: poll for key, poll in self._polls.items() if now - poll.used_at < _FORGET_AFTER_S}
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
        has_answered = self._poll_thread is not None and not self._poll_thread.is_alive() and self.error is None
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
            self._ping_thread = threading.Thread(target=self._ping, args=(shell, self._poll_thread), daemon=True)
            self._ping_thread.start()
        self._poll_thread.join(max(0.0, timeout_s - _POLL_WAIT_S))
        if self.error is not None and not isinstance(self.error, ClusterError):
            raise in_words(self.error)
        return self.error

    def _run(self, work: Callable[[], dict[_Key, NodeStatus | ClusterError]]) -> None:
        try:
            found = work()
            self._polled_at = self._clock()
            self._heartbeats = {key: seen for key, seen in self._heartbeats.items() if key in found}
            for key, status in found.items():
                if isinstance(status, ClusterError):
                    continue
                if status.heartbeat != self._heartbeats.get(key, (0.0, 0.0))[0]:
                    self._heartbeats[key] = (status.heartbeat, self._polled_at)
            self.statuses = found
            self.error, self._answered_at = None, self._polled_at
        except Exception as error:  # `wait` raises it: a thread that just ends would look like a silent machine
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


def _attempt(plan: Plan) -> _Attempt:
    return plan.job_id, plan.job.launch_id, plan.attempt


def _found(
    work: Callable[[Sequence[Plan], Machine], Answers], plans: Sequence[Plan], machine: Machine
) -> dict[_Key, NodeStatus | ClusterError]:
    """Return what `work` finds of each node of the plans on a machine."""
    found: dict[_Key, NodeStatus | ClusterError] = {}
    for plan, answer in zip(plans, work(plans, machine), strict=True):
        if isinstance(answer, ClusterError):
            found |= {(_attempt(plan), node.name): answer for node in plan.nodes_on(machine)}
        else:
            found |= {(_attempt(plan), name): status for name, status in answer.items()}
    return found


@dataclass(frozen=True)
class Script:
    """A polling script: its name in agent/, its variables, and the lines that it prints of a job before its nodes.

    `words` returns the arguments that come before a job's nodes.
    """

    name: str
    head: int = 0
    words: Callable[[Plan, Machine], Sequence[str]] = lambda plan, machine: ()
    values: Mapping[str, str | int] = field(default_factory=dict)


#: The lines that a script prints of a job, and the statuses of its nodes.
Polled = tuple[list[str], NodeStatuses]


def poll(plan: Plan, machine: Machine, script: Script) -> Polled:
    """Run a polling script for a plan's nodes on a machine, and append to the local copies of logs that are elsewhere.

    Raises UnreachableError.
    """
    nodes = plan.nodes_on(machine)
    copies = {node.name: Path(plan.attempt_dir, f"{node.name}.log") for node in nodes if plan.is_elsewhere(machine)}
    sizes = {name: copy.stat().st_size if copy.exists() else 0 for name, copy in copies.items()}
    ((lines, logs),) = _run([(plan, _words(plan, machine, script, sizes))], machine, script)
    head, found = _parsed(plan, machine, script, lines)
    for node in nodes:
        chunk = base64.b64decode(logs[node.name])
        if node.name in copies:
            log_files.append(plan, copies[node.name], sizes[node.name], chunk)
        if len(chunk) >= LOG_CHUNK:  # a node counts as exited once its whole log has been fetched
            found[node.name] = NodeStatus(node.name, "starting", events=found[node.name].events)
    return head, found


def poll_all(plans: Sequence[Plan], machine: Machine, script: Script) -> list[Polled]:
    """Run a polling script once for the nodes that all plans have on a machine, without their logs.

    The arguments of very many jobs take several commands. Raises UnreachableError.
    """
    return [
        _parsed(plan, machine, script, lines)
        for part in _parts([(plan, _words(plan, machine, script, {})) for plan in plans])
        for (plan, _), (lines, _) in zip(part, _run(part, machine, script), strict=True)
    ]


def _words(plan: Plan, machine: Machine, script: Script, sizes: Mapping[str, int]) -> list[str]:
    """Return the arguments for a plan's nodes on a machine; `sizes` has the size of each log's copy."""
    folder = attempt_dir(plan, machine)
    each = [word for node in plan.nodes_on(machine) for word in (folder, node.name, str(sizes.get(node.name, "")))]
    return [*script.words(plan, machine), *each]


def _parts(pairs: Sequence[tuple[Plan, list[str]]]) -> Iterator[list[tuple[Plan, list[str]]]]:
    """Divide the plans, so that the arguments of each part are no longer than _MOST_WORDS."""
    part: list[tuple[Plan, list[str]]] = []
    size = 0
    for plan, words in pairs:
        own = sum(len(word) + 3 for word in words)
        if part and size + own > _MOST_WORDS:
            yield part
            part, size = [], 0
        part.append((plan, words))
        size += own
    if part:
        yield part


def _run(
    pairs: Sequence[tuple[Plan, list[str]]], machine: Machine, script: Script
) -> list[tuple[list[str], dict[str, str]]]:
    """Run a polling script, and return for each plan its lines, and the logs of its nodes. Raises UnreachableError."""
    words = [word for _, own in pairs for word in own]
    command = scripts.command(script.name, *words, most=LOG_CHUNK, **script.values)
    done = reach(machine).run(command, timeout_s=_POLL_TIMEOUT_S)
    lines = done.out.removesuffix("\n").split("\n")  # not splitlines: a status may have other ends of lines
    sizes = [script.head + 4 * len(plan.nodes_on(machine)) for plan, _ in pairs]
    if len(lines) != sum(sizes):
        raise UnreachableError(f"{machine.name}: {done.last_line}")
    made = []
    for (plan, _), size in zip(pairs, sizes, strict=True):
        own, lines = lines[:size], lines[size:]
        names = [node.name for node in plan.nodes_on(machine)]
        made.append((own, dict(zip(names, own[script.head + 3 :: 4], strict=True))))
    return made


def _parsed(plan: Plan, machine: Machine, script: Script, lines: Sequence[str]) -> Polled:
    found = {}
    for index, node in enumerate(plan.nodes_on(machine)):
        state, why, agent = lines[script.head + 4 * index :][:3]
        found[node.name] = status(node.name, parse(agent), state, why)
    return list(lines[: script.head]), found


def status(name: str, agent: AgentStatus, state: str = "", why: str = "") -> NodeStatus:
    """Return a node's status from the agent's status file, the state of the node's script, and why that exited.

    `state` is `exit CODE TIME`, `alive`, `gone`, `starting` or `no folder`.
    """
    word, _, rest = state.partition(" ")
    events = agent.events or ()
    if agent.has_exited:
        detail = (agent.reason or "") if agent.exit_code else ""
        if failure := agent.failure:
            detail = "" if failure.rank is not None else failure.error
        ended = NodeStatus(name, "exited", agent.exit_code, detail, agent.ended_at, failure=failure, events=events)
        return replace(ended, lost=agent.lost)
    if word == "exit":  # the runtime failed before the agent started
        code, at = from_exit_file(rest)
        return NodeStatus(name, "exited", code, why, at)
    if word == "no":
        return NodeStatus(name, "lost", detail="its folder does not exist")
    if word == "gone":
        detail = "its script exited without an exit code" + (f": {why}" if why else "")
        return NodeStatus(name, "lost", detail=detail)
    return NodeStatus(
        name,
        "setup" if agent.phase == "setup" else "starting",
        stall=agent.stall or (),
        leaving=agent.leaving or (),
        usage=agent.usage,
        events=events,
        heartbeat=agent.heartbeat or 0.0,
        lost=agent.lost,
        quiet_s=agent.quiet_s,
    )


def stop(
    machine: Machine,
    launch_id: str,
    grace_s: float,
    engines: Sequence[str],
    *,
    timeout_s: float,
    attempt: int | None = None,
    folder: str = "",
) -> None:
    """Stop the processes of a launch on a machine, and its containers in `engines`, of all attempts or only of one.

    `folder` is the attempt's on the machine; its agents find `grace_s` there, and wait longer. Raises ClusterError if
    some remain.
    """
    which = {"attempt": "" if attempt is None else attempt, "folder": folder, "engines": engines}
    command = scripts.command("stop", launch=launch_id, grace=math.ceil(grace_s), **which)
    done = reach(machine).run(command, timeout_s=timeout_s)
    if done.out:
        why = f"{machine.name}: {', '.join(done.out.splitlines())} still running after SIGKILL (launch {launch_id})"
        hint = "check the engine with clusterctl doctor, or kill them as root there"
        raise ClusterError(why, hint)


def collect(plan: Plan) -> list[str]:
    """Copy the job's results from the nodes to its local folder; return a sentence for each failure.

    The results come from the first node that answers. Of the others only the ranks' logs are copied.
    """
    with waiting(f"the results of {plan.job_id} to be copied"):
        return _collect(plan)


def _collect(plan: Plan) -> list[str]:
    remote = [machine for machine in plan.machines if plan.is_elsewhere(machine)]

    def copy_logs(machine: Machine) -> None:
        ranks = f"attempt-{plan.attempt}/ranks/{plan.nodes_on(machine)[0].name}"
        with contextlib.suppress(files.NoFolderError):  # no rank has started there
            source, target = f"{plan.dir_on(machine)}/{ranks}", f"{plan.run_dir}/{ranks}"
            files.collect(machine, source, target, run_dir=plan.run_dir)

    copied = interruptible(lambda: parallel.each(remote, copy_logs))  # Ctrl-C ends all of these transfers
    errors = {name: error for name, error in copied.items() if error is not None}
    failures = [f"not copied: {error.message}" for error in errors.values()]
    answering = [each for each in remote if not isinstance(errors.get(each.name), UnreachableError)]
    if answering and plan.is_elsewhere(plan.nodes[0].machine):
        source = answering[0]
        copies: list[Callable[[], object]] = [
            functools.partial(files.collect, source, plan.dir_on(source), plan.run_dir, (*NOT_RESULTS, f"/{WORKDIR}"))
        ]
        if plan.workdir:
            copies.append(functools.partial(workdir.fetch, plan, source))
        for copy in copies:  # also if the one before was not complete
            try:
                copy()
            except ClusterError as error:
                failures.append(f"not copied: {error.message}")
                if isinstance(error, UnreachableError):
                    return failures
        if source != plan.nodes[0].machine:
            failures.append(f"the results here come from {source.name}")
    return failures
