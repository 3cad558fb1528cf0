"""What the nodes of a plan say, through a shell: their states and their logs, also when a machine is slow or silent.

All that judges how long something lasts goes by a `Clock`: while nobody looked, nobody was silent.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster import fanout, files, logs, readiness, resources
from cluster.errors import ClusterError, UnreachableError
from cluster.model import Mount, Node, NodeStatus, Plan
from cluster.shells import Shell

#: A machine that gave no sign of life for so long is lost. Shorter silences are a network's, and jobs outlive them.
LOST_AFTER_S = 8.0
#: How long the launcher waits for an answer before it goes on with what it knows; the answer may come later.
_PATIENCE_S = 1.0
#: How long a machine that was silent may take to show that it is there.
_SILENT_PATIENCE_S = 4.0
#: A machine that is alive may still be slow.
_LOOK_TIMEOUT_S = 30.0
#: How often the launcher notes that it is there. After a longer gap it was not: a closed lid, Ctrl-Z, a clock set anew.
_BEAT_S = 1.0
_ABSENT_S = 5.0
#: A machine that wakes has its network back only after a while; what it cannot reach until then is not lost.
WAKING_S = 20.0
#: An agent writes a heartbeat every 2 s. One that is silent for so long, on a machine that answers, is frozen.
HEARTBEAT_TIMEOUT_S = 60.0
#: So much of a log is fetched at once.
LOG_CHUNK = 1 << 20

#: What a node's folder has besides results.
_NOT_RESULTS = ("*.pid", "*.err", "*.exit", "*.alive", "*.secrets", "*.tmp", "common.*", "attempt", "submitted")

#: What was seen of a plan's nodes on one machine, by node.
Seen = dict[str, NodeStatus]


class Presence:
    """How long the launcher was there to look: `seconds` stand still while it sleeps, and for a while after it.

    Told by two clocks, as the first may stand still with the machine, and somebody may put the second right.
    """

    def __init__(self, monotonic: float, wall: float) -> None:
        self.seconds = 0.0
        #: How often it has woken.
        self.wakings = 0
        self._before = (monotonic, wall)
        self._still_until = monotonic

    def beat(self, monotonic: float, wall: float) -> None:
        """The launcher is there, at this time."""
        since, wall_since = self._before
        absent_s = max(monotonic - since, wall - wall_since)
        if absent_s > _ABSENT_S:
            self.wakings += 1
            self._still_until = monotonic + min(WAKING_S, 2 * absent_s)
        self.seconds += max(0.0, monotonic - max(since, self._still_until))
        self._before = (monotonic, wall)


class _Heart:
    """Beats for this process in a thread, because the launcher itself may wait for long; who asks, beats too."""

    def __init__(self) -> None:
        self._presence = Presence(time.monotonic(), time.time())
        self._lock = threading.Lock()
        threading.Thread(target=self._go_on, daemon=True).start()

    def beat(self) -> tuple[float, int]:
        """The seconds in which this process was there, and how often it has woken."""
        with self._lock:
            self._presence.beat(time.monotonic(), time.time())
            return self._presence.seconds, self._presence.wakings

    def _go_on(self) -> None:
        while True:
            self.beat()
            time.sleep(_BEAT_S)


@functools.cache
def _heart() -> _Heart:
    return _Heart()


class Clock:
    """The time of day, less the time in which the launcher was not there since the clock was made."""

    def __init__(self) -> None:
        self._zero = time.time() - _heart().beat()[0]

    def __call__(self) -> float:
        """Seconds since 1970, as long as the launcher has not slept."""
        return self._zero + _heart().beat()[0]


class Looks:
    """Looks at the machines of plans again and again; `look` asks one machine, and raises a ClusterError."""

    def __init__(
        self, reach: Callable[[Node], Shell], look: Callable[[Plan, Node], Seen], *, loses: bool = True
    ) -> None:
        """`loses`: with a machine that is silent its nodes are lost; else somebody else knows better."""
        self._reach = reach
        self._look = look
        self._loses = loses
        self._looks: dict[tuple[str, int, str], _Look] = {}
        #: The machines that gave no sign of life when they were last looked at.
        self._silent: set[tuple[str, str]] = set()
        self._wakings = 0

    def statuses(self, plan: Plan) -> list[NodeStatus]:
        """One per node of the plan, in its order.

        A machine that is slow keeps its last state, one that gives no sign of life says so and in the end is lost.
        """
        each = machines(plan)
        self._let_go_after_sleep(each)
        looks = [self._looks.setdefault((plan.job_id, plan.attempt, node.name), _Look()) for node in each]
        for machine, look in zip(each, looks, strict=True):
            look.start(self._reach(machine), lambda machine=machine: self._look(plan, machine))  # type: ignore[misc]
        # the first look may have to log in before it sees anything
        patience_s = _PATIENCE_S if all(look.seen for look in looks) else LOST_AFTER_S
        # no longer than until a silent machine is lost
        silent_s = max((look.silent_s for look in looks if look.silent_s < LOST_AFTER_S), default=0.0)
        patience_s = min(patience_s, LOST_AFTER_S - silent_s + 0.1)
        until = time.monotonic() + (patience_s if any(node.login for node in each) else _LOOK_TIMEOUT_S)
        found: Seen = {}
        for machine, look in zip(each, looks, strict=True):
            error = look.answer(max(0.0, until - time.monotonic()))
            if look.here:
                raise look.here
            # one that has never answered has told nothing yet that its silence could be measured by
            silent = look.silent_s > 2 * _PATIENCE_S or (error is not None and not look.seen)
            (self._silent.add if silent else self._silent.discard)((plan.job_id, machine.name))
            for node in on(plan, machine):
                status = look.seen.get(node.name) or NodeStatus(node.name, "starting" if self._loses else "pending")
                found[node.name] = self._hushed(status, look.silent_s, error) if silent else status
        if self._loses and all(not look.seen and look.silent_s > LOST_AFTER_S for look in looks):
            # Rather this machine's network, or its keys, than all of theirs: nothing is known of the job.
            error = next((look.error for look in looks if look.error), None)
            what = f"{readiness.place(each[0])}: does not answer"  # it may still be logging in
            raise UnreachableError(error.message, error.hint) if error else UnreachableError(what)
        return [found[node.name] for node in plan.nodes]

    def patience_s(self, plan: Plan, machine: Node, usual_s: float) -> float:
        """How long to wait for a machine: one that was silent a moment ago is tried anew, and not for long."""
        if (plan.job_id, machine.name) not in self._silent:
            return usual_s
        self._reach(machine).close()
        return _SILENT_PATIENCE_S

    def _let_go_after_sleep(self, each: Sequence[Node]) -> None:
        """A connection that has slept may be dead without a word; waiting for it takes longer than opening another."""
        _, wakings = _heart().beat()
        if wakings != self._wakings:
            for machine in each:
                self._reach(machine).close()
        self._wakings = wakings

    def _hushed(self, status: NodeStatus, silent_s: float, error: ClusterError | None) -> NodeStatus:
        if status.phase in ("exited", "lost"):
            return status
        why = f"has given no sign of life for {silent_s:.0f} s"
        if error is not None:
            why += f": {error.message.removeprefix(f'{status.node}: ')}"
        if silent_s > LOST_AFTER_S and self._loses:
            return NodeStatus(status.node, "lost", detail=why, silent=why)
        return replace(status, silent=why)


class _Look:
    """The looks at one machine, one after the other, each in a thread: a machine that hangs holds up nobody else."""

    def __init__(self) -> None:
        self.seen: Seen = {}
        #: What keeps this machine from taking down what the other one says.
        self.here: UnreachableError | None = None
        self._clock = Clock()
        self._heard = self._clock()
        self._error: ClusterError | None = None
        self._looking: threading.Thread | None = None
        self._pinging: threading.Thread | None = None
        self._shell: Shell | None = None

    @property
    def error(self) -> ClusterError | None:
        """Why the last look saw nothing."""
        return self._error

    @property
    def silent_s(self) -> float:
        """For how long the machine has given no sign of life."""
        return self._clock() - self._heard

    def start(self, shell: Shell, work: Callable[[], Seen]) -> None:
        """Begin the next look, unless one is still going on."""
        self._shell = shell
        if self._looking is None or not self._looking.is_alive():
            if self._error is None:  # since the last look nobody has asked, so nobody was silent
                self._heard = self._clock()
            self._looking = threading.Thread(target=self._look, args=(work,), daemon=True)
            self._looking.start()

    def answer(self, timeout_s: float) -> ClusterError | None:
        """Wait for the look; while it lasts, ask the machine for signs of life. The last error, None if well."""
        assert self._looking is not None
        self._looking.join(min(timeout_s, _PATIENCE_S))
        if self._looking.is_alive() and (self._pinging is None or not self._pinging.is_alive()):
            self._pinging = threading.Thread(target=self._ping, args=(self._looking,), daemon=True)
            self._pinging.start()
        self._looking.join(max(0.0, timeout_s - _PATIENCE_S))
        return self._error

    def _look(self, work: Callable[[], Seen]) -> None:
        try:
            self.seen = work()
            self._error, self._heard, self.here = None, self._clock(), None
        except ClusterError as error:
            self._error = error
        except OSError as error:  # of this machine: a log's copy cannot be written
            self.here = UnreachableError(f"this machine: {error.filename or 'the copy of a log'}: {error.strerror}")

    def _ping(self, looking: threading.Thread) -> None:
        assert self._shell is not None
        while looking.is_alive():
            if self._shell.ping():
                self._heard = self._clock()
            looking.join(_PATIENCE_S)


def ask(
    shell: Shell, plan: Plan, machine: Node, text: str, words: Sequence[str], head: int
) -> tuple[list[str], dict[str, Answer]]:
    """Run a polling script with three words per node after `words`: its first `head` lines, and its nodes' answers.

    Logs that are not in the job's folder here are copied there as they grow. Raises UnreachableError.
    """
    nodes = on(plan, machine)
    copies = {node.name: Path(plan.attempt_dir, f"{node.name}.log") for node in nodes if plan.is_elsewhere(node)}
    sizes = {name: copy.stat().st_size if copy.exists() else 0 for name, copy in copies.items()}
    each = [word for node in nodes for word in (attempt_dir(plan, node), node.name, str(sizes.get(node.name, "")))]
    seen = shell.run(["bash", "-c", text, "poll", *words, *each], timeout_s=_LOOK_TIMEOUT_S)
    lines = seen.out.splitlines()
    if len(lines) != head + 4 * len(nodes):
        raise UnreachableError(f"{readiness.place(machine)}: {seen.last_line}")
    found = {}
    for index, node in enumerate(nodes):
        state, why, status, log = lines[head + 4 * index : head + 4 * index + 4]
        chunk = base64.b64decode(log)
        if node.name in copies:
            logs.append(copies[node.name], sizes[node.name], chunk)
        found[node.name] = Answer(state, why, _json(status), log_is_whole=len(chunk) < LOG_CHUNK)
    return lines[:head], found


@dataclass(frozen=True)
class Answer:
    """What a machine answered of a node: the state of its script, why it ended, and the agent's status file."""

    state: str
    why: str
    agent: Mapping[str, Any]
    log_is_whole: bool = True


def read_agent(path: Path) -> Answer:
    """What the status file of an agent on this machine has; nothing where there is none yet."""
    try:
        return Answer("", "", _json(path.read_text()))
    except OSError:
        return Answer("", "", {})


def status(name: str, answer: Answer, now: float | None = None) -> NodeStatus:
    """A node's status from what its machine answered; `now` is that machine's clock, for the age of the heartbeat.

    An end is reported once the whole log is here.
    """
    agent, (word, _, rest) = answer.agent, answer.state.partition(" ")
    if not answer.log_is_whole:
        return NodeStatus(name, "starting")
    if agent.get("phase") == "exited":
        code, at = int(agent["exit_code"]), float(agent["ended_at"])
        failure = agent.get("failure")
        detail = str(agent.get("reason", "")) if code else ""
        if failure:
            detail = "" if failure["rank"] is not None else str(failure["error"])
        return NodeStatus(name, "exited", code, detail, at, failure=failure)
    if word == "exit":
        code_text, at_text = rest.split()[:2]
        # the runtime's own refusal: there was no agent that could report anything
        return NodeStatus(name, "exited", int(code_text), answer.why, float(at_text))
    if word == "no":
        return NodeStatus(name, "lost", detail="its folder does not exist")
    if word == "gone":
        why = f": {answer.why}" if answer.why else ""
        return NodeStatus(name, "lost", detail=f"its script has ended without an exit code{why}")
    if agent and now is not None and now - float(agent["heartbeat"]) > HEARTBEAT_TIMEOUT_S:
        return NodeStatus(name, "lost", detail=f"no heartbeat of its agent for {now - float(agent['heartbeat']):.0f} s")
    return NodeStatus(name, "starting")


def stop(shell: Shell, job_id: str, grace_s: float, engines: Sequence[str], *, timeout_s: float) -> str:
    """End a job's processes on a machine, and its containers in `engines`; gives what stays, "" for nothing."""
    stop = shell.run(
        ["bash", "-c", resources.text("agent/common.sh", "agent/stop.sh"), "stop", job_id, str(int(grace_s * 10))],
        timeout_s=timeout_s,
    )
    left = stop.out.splitlines()
    if engines:
        containers = ["bash", "-c", resources.text("agent/stop_containers.sh"), "stop", job_id, str(int(grace_s))]
        left += shell.run([*containers, *engines], timeout_s=timeout_s).out.splitlines()
    return ", ".join(left)


def collect(plan: Plan) -> list[str]:
    """Bring what the job wrote elsewhere into its folder here; gives what could not be brought, a sentence each.

    The first node's files are the job's; of the others only the ranks' logs are taken. Where the first one is gone, the
    next that answers has them: a node without a disk in common with it keeps a checkpoint of its own.
    """
    remote = [node for node in machines(plan) if plan.is_elsewhere(node)]

    def bring(node: Node) -> None:
        folder = plan.dir_on(node)
        if node is plan.nodes[0]:
            files.collect(node, folder, plan.run_dir, _NOT_RESULTS)
        else:
            ranks = f"attempt-{plan.attempt}/ranks/{node.name}"
            with contextlib.suppress(files.NoFolderError):  # no rank has begun there
                files.collect(node, f"{folder}/{ranks}", f"{plan.run_dir}/{ranks}")

    results = fanout.each(remote, bring)
    undone = [f"not brought here: {error.message}" for error in results.values() if isinstance(error, ClusterError)]
    if isinstance(results.get(plan.nodes[0].name), UnreachableError):
        others = [node for node in remote if results[node.name] is None]
        for node in others[:1]:
            try:
                files.collect(node, plan.dir_on(node), plan.run_dir, _NOT_RESULTS)
                undone.append(f"the results here are those of {node.name}")
            except ClusterError as error:
                undone.append(f"not brought here: {error.message}")
    return undone


def machines(plan: Plan) -> list[Node]:
    """The first node of each machine: those that share a login are one machine."""
    first: dict[tuple[str, str], Node] = {}
    for node in plan.nodes:
        first.setdefault((node.login, node.ssh_config), node)
    return list(first.values())


def on(plan: Plan, machine: Node) -> list[Node]:
    """The plan's nodes on a machine."""
    return [node for node in plan.nodes if (node.login, node.ssh_config) == (machine.login, machine.ssh_config)]


def attempt_dir(plan: Plan, node: Node) -> str:
    """The folder of the attempt's scripts, logs and exit codes on a node's own disk."""
    return f"{plan.dir_on(node)}/attempt-{plan.attempt}"


def mounted(node: Node, mount: Mount) -> Mount:
    """A job's mount as a node has it: what was synced is below its `data_dir`."""
    source = files.mirror(node, mount.source) if mount.synced and node.data_dir else mount.source
    return Mount(source, mount.target, mount.read_only)


def _json(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
