"""Jobs as one script per node on machines that a shell reaches: this one, or many behind SSH.

Everything is done by small bash scripts through a Shell, so that nothing here knows how a machine is reached. A job's
processes are found by `CLUSTER_JOB_ID` in their environment: no record, no pid that may have been reused.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cluster import errands, fanout, files, logs, quoting, readiness, script
from cluster.errors import ClusterError, LaunchError, UnreachableError, UsageError
from cluster.model import Job, Mount, Node, NodeStatus, Plan, Step, one_box
from cluster.runtimes import RUNTIMES
from cluster.shells import Shell

#: A machine that gave no sign of life for so long is lost. Shorter silences are a network's, and jobs outlive them.
LOST_AFTER_S = 8.0
#: How long the launcher waits for an answer before it goes on with what it knows; the answer may come later.
_PATIENCE_S = 1.0
#: How long a machine that was silent may take to show that it is there.
_SILENT_PATIENCE_S = 4.0
#: A machine that is alive may still be slow.
_LOOK_TIMEOUT_S = 30.0
#: So much of a log is fetched at once.
_LOG_CHUNK = 1 << 20

#: What a node's folder has besides results.
_NOT_RESULTS = ("*.pid", "*.err", "*.exit", "*.secrets", "*.tmp")

#: Fixes gloo and NCCL to the loopback interface: all nodes are on this machine, whatever its host name resolves to.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class HostsBackend:
    """One script per node: N on this machine, as a cluster of one box, or one on each machine of an inventory."""

    def __init__(self, name: str, reach: Callable[[Node], Shell]) -> None:
        self.name = name
        self._reach = reach
        self._looks: dict[tuple[str, int, str], _Look] = {}
        #: The machines that gave no sign of life when they were last looked at.
        self._silent: set[tuple[str, str]] = set()

    def plan(self, job: Job, *, attempt: int, port: int) -> Plan:
        """One step per node: its script, and the command that runs it."""
        nodes = job.hosts or one_box(job, ["127.0.0.1"] * job.nodes)
        made = Plan(
            job_id=job.name,
            attempt=attempt,
            backend=self.name,
            nodes=nodes,
            steps=(),
            run_dir=f"{job.run_root}/{job.name}",
            master_addr=nodes[0].address,
            master_port=port,
            world_size=job.world_size,
            timeout_s=job.timeout_s,
            says_ready=job.says_ready,
            image=job.image if any(node.runtime != "none" for node in nodes) else "",
            command=(job.python, *job.command),
            device=job.device,
            secrets=job.secrets,
        )
        return Plan(**{**vars(made), "steps": tuple(_step(job, made, rank) for rank in range(len(nodes)))})

    def check(self, plan: Plan) -> None:
        """Look at every node before anything is started anywhere.

        Raises UsageError for what is missing on a node, with every node's name; GpusHeldError when another job has the
        GPUs; PortTakenError when the master's port is not free.
        """
        seen = fanout.all_of(_machines(plan), lambda node: self._prepare(plan, node))
        errors = [error for node in _machines(plan) for error in readiness.problems(plan, node, seen[node.name])]
        errors += readiness.different(plan, seen)
        if errors:
            hints = "\n      ".join(dict.fromkeys(hint for _, hint in errors if hint))
            raise UsageError("\n       ".join(dict.fromkeys(message for message, _ in errors)), hints)
        readiness.refuse_taken(seen)
        held = {
            node.name: holder for node in _machines(plan) if (holder := readiness.held(plan, node, seen[node.name]))
        }
        if held:
            raise readiness.held_error({name: sorted(jobs) for name, jobs in held.items()})
        readiness.refuse_port(plan, seen)

    def survey(self, plan: Plan) -> dict[str, ClusterError | None]:
        """What keeps each node of the plan from running it, None where nothing does; every node by itself."""

        def look(node: Node) -> ClusterError | None:
            found = readiness.problems(plan, node, self._prepare(plan, node, alone=True))
            return UsageError(found[0][0], found[0][1]) if found else None

        return dict(fanout.each(plan.nodes, look))

    def submit(self, plan: Plan, secrets: Mapping[str, str] | None = None) -> None:
        """Start every node's script in a session of its own, at once; all of them or none."""
        head = quoting.exports({name: (secrets or {})[name] for name in plan.secrets})
        steps = {step.place: step for step in plan.steps}
        results = fanout.each(plan.nodes, lambda node: self._start(plan, node, steps[node.name], head))
        failed = [result for result in results.values() if isinstance(result, ClusterError)]
        if failed:
            try:
                self.cancel(plan, grace_s=0)
            except ClusterError as error:
                raise LaunchError(f"{failed[0].message}; and {error.message}", error.hint) from error
            raise failed[0]

    def observe(self, plan: Plan) -> Sequence[NodeStatus]:
        """From the exit-code file where there is one, else from the script's process.

        A machine that is slow keeps its last state, one that gives no sign of life says so and in the end is lost.
        """
        machines = _machines(plan)
        looks = [
            self._looks.setdefault((plan.job_id, plan.attempt, node.name), _Look(time.time())) for node in machines
        ]
        for machine, look in zip(machines, looks, strict=True):
            look.start(self._reach(machine), partial(self._look, plan, machine))
        # the first look may have to log in before it sees anything
        patience_s = _PATIENCE_S if all(look.seen for look in looks) else LOST_AFTER_S
        until = time.monotonic() + (_LOOK_TIMEOUT_S if not machines[0].login else patience_s)
        found: dict[str, NodeStatus] = {}
        for machine, look in zip(machines, looks, strict=True):
            error = look.answer(max(0.0, until - time.monotonic()))
            silent = look.silent_s > 2 * _PATIENCE_S
            (self._silent.add if silent else self._silent.discard)((plan.job_id, machine.name))
            for node in _on(plan, machine):
                status = look.seen.get(node.name) or NodeStatus(node.name, "starting")
                found[node.name] = _silent(status, look.silent_s, error) if silent else status
        return [found[node.name] for node in plan.nodes]

    def logs(self, plan: Plan, offsets: Mapping[str, int]) -> Mapping[str, bytes]:
        """From the run directory here: `observe` adds what other machines' logs have, so that it stays when they go."""
        return logs.read(plan, offsets)

    def cancel(self, plan: Plan, *, grace_s: float) -> None:
        """SIGTERM to every process of the job, SIGKILL to those that stay longer than `grace_s`; its containers too.

        Every machine is tried; raises ClusterError for what stays and for the machines that do not answer.
        """

        def end(machine: Node) -> str:
            text = errands.CANCEL + RUNTIMES[machine.runtime].stop(plan.job_id, int(grace_s))
            done = self._reach(machine).run(
                ["bash", "-c", text, "cancel", plan.job_id, str(int(grace_s * 10))],
                timeout_s=self._patience_s(plan, machine, grace_s + 30),
            )
            return ", ".join(done.out.split("\n")[:-1]) if done.out.strip() else ""

        results = fanout.each(_machines(plan), end)
        places = {node.name: readiness.place(node) for node in plan.nodes}
        stays = [
            f"{places[name]}: {left} of {plan.job_id} do not end"
            for name, left in results.items()
            if isinstance(left, str) and left
        ]
        silent = [error.message for error in results.values() if isinstance(error, ClusterError)]
        if stays or silent:
            kind = ClusterError if stays else UnreachableError
            raise kind("\n       ".join([*stays, *silent]), f"once it answers: clusterctl stop {plan.job_id}")

    def collect(self, plan: Plan) -> list[str]:
        """Bring what the job wrote on other machines into its folder here; gives what could not be, a sentence each.

        The first node's files are the job's; of the others only the ranks' logs are taken.
        """
        remote = [node for node in plan.nodes if node.login]

        def bring(node: Node) -> None:
            folder = plan.dir_on(node)
            if node is plan.nodes[0]:
                files.collect(node, folder, plan.run_dir, _NOT_RESULTS)
            else:
                ranks = f"attempt-{plan.attempt}/ranks/{node.name}"
                files.collect(node, f"{folder}/{ranks}", f"{plan.run_dir}/{ranks}")

        results = fanout.each(remote, bring)
        return [f"not brought here: {error.message}" for error in results.values() if isinstance(error, ClusterError)]

    def _prepare(self, plan: Plan, node: Node, *, alone: bool = False) -> list[str]:
        step = next(step for step in plan.steps if step.place == node.name)
        words = [node.runtime, plan.image, node.run_dir, plan.device, readiness.ids(node), plan.command[0], *step.needs]
        peer = node.login and node is not plan.nodes[0] and not alone
        words[6:6] = [
            plan.dir_on(node) if node.login and plan.attempt == 1 else "",
            f"{plan.master_addr}:{plan.master_port}" if peer else "",
            str(plan.master_port) if node is plan.nodes[0] and not alone else "",
        ]
        timeout_s = self._patience_s(plan, node, 30)
        done = self._reach(node).run(["bash", "-c", errands.PREPARE, "prepare", *words], timeout_s=timeout_s)
        if done.code:
            raise UnreachableError(
                f"{readiness.place(node)}: {done.last_line}", "the machine needs bash and a POSIX userland"
            )
        return done.out.splitlines()

    def _patience_s(self, plan: Plan, machine: Node, usual_s: float) -> float:
        """How long to wait for a machine: one that was silent a moment ago is tried anew, and not for long."""
        if (plan.job_id, machine.name) not in self._silent:
            return usual_s
        self._reach(machine).close()
        return _SILENT_PATIENCE_S

    def _start(self, plan: Plan, node: Node, step: Step, head: str) -> None:
        ((_, text),) = step.files.items()
        secrets = f"{head}\n" if head else ""
        words = [_attempt_dir(plan, node), node.name, plan.job_id, readiness.ids(node)]
        started = self._reach(node).run(
            ["bash", "-c", errands.START, "start", *words, str(secrets.count("\n"))], stdin=secrets + text
        )
        if started.code == errands.HELD:
            raise readiness.held_error({node.name: started.out.split()})
        if started.code:
            raise LaunchError(f"{node.name}: its script could not be started: {started.last_line}")

    def _look(self, plan: Plan, machine: Node) -> dict[str, NodeStatus]:
        nodes = _on(plan, machine)
        copies = {node.name: Path(plan.attempt_dir, f"{node.name}.log") for node in nodes if node.login}
        sizes = {name: copy.stat().st_size if copy.exists() else 0 for name, copy in copies.items()}
        words = [
            word for node in nodes for word in (_attempt_dir(plan, node), node.name, str(sizes.get(node.name, "")))
        ]
        seen = self._reach(machine).run(
            ["bash", "-c", errands.LOOK, "look", plan.job_id, str(_LOG_CHUNK), *words], timeout_s=_LOOK_TIMEOUT_S
        )
        lines = seen.out.splitlines()
        if len(lines) != 2 * len(nodes):
            raise UnreachableError(f"{readiness.place(machine)}: {seen.last_line}")
        found = {}
        for node, state, log in zip(nodes, lines[::2], lines[1::2], strict=True):
            chunk = base64.b64decode(log)
            if node.name in copies:
                logs.append(copies[node.name], sizes[node.name], chunk)
            # its end is told once its whole log is here
            found[node.name] = _status(node.name, state if len(chunk) < _LOG_CHUNK else "alive")
        return found


def _step(job: Job, plan: Plan, rank: int) -> Step:
    node = plan.nodes[rank]
    runtime = RUNTIMES[node.runtime]
    run_dir = plan.dir_on(node)
    mounts = [Mount(_source(node, mount), mount.target, mount.read_only) for mount in job.mounts]
    text = script.render(
        job,
        node,
        rank,
        attempt=plan.attempt,
        run_dir=run_dir,
        master=(plan.master_addr, plan.master_port),
        nodes_on_host=len(_on(plan, node)),
        runtime=runtime,
        mounts=[Mount(run_dir, run_dir, read_only=False), *mounts] if node.runtime != "none" else (),
        extra={} if node.login else _LOOPBACK,
        finds_device=bool(node.login),
    )
    path = f"{_attempt_dir(plan, node)}/{node.name}.sh"
    needs = tuple(mount.source if node.runtime != "none" else mount.target for mount in mounts)
    return Step(node.name, {path: text}, ("bash", path), needs)


def _source(node: Node, mount: Mount) -> str:
    """Where a mount's folder is on the node: what was synced is below its `data_dir`."""
    return files.mirror(node, mount.source) if mount.synced and node.data_dir else mount.source


def _attempt_dir(plan: Plan, node: Node) -> str:
    return f"{plan.dir_on(node)}/attempt-{plan.attempt}"


def _machines(plan: Plan) -> list[Node]:
    """The first node of each machine: those that share a login are one machine."""
    first: dict[tuple[str, str], Node] = {}
    for node in plan.nodes:
        first.setdefault((node.login, node.ssh_config), node)
    return list(first.values())


def _on(plan: Plan, machine: Node) -> list[Node]:
    return [node for node in plan.nodes if (node.login, node.ssh_config) == (machine.login, machine.ssh_config)]


class _Look:
    """The looks at one machine, one after the other, each in a thread: a machine that hangs holds up nobody else."""

    def __init__(self, now: float) -> None:
        self.seen: dict[str, NodeStatus] = {}
        self._heard = now
        self._error: ClusterError | None = None
        self._looking: threading.Thread | None = None
        self._pinging: threading.Thread | None = None
        self._shell: Shell | None = None

    @property
    def silent_s(self) -> float:
        """For how long the machine has given no sign of life."""
        return time.time() - self._heard

    def start(self, shell: Shell, work: Callable[[], dict[str, NodeStatus]]) -> None:
        """Begin the next look, unless one is still going on."""
        self._shell = shell
        if self._looking is None or not self._looking.is_alive():
            self._looking = threading.Thread(target=self._look, args=(work,), daemon=True)
            self._looking.start()

    def answer(self, timeout_s: float) -> ClusterError | None:
        """Wait for the look; when it takes longer, ask the machine for a sign of life. The last error, None if well."""
        assert self._looking is not None
        self._looking.join(timeout_s)
        if self._looking.is_alive() and (self._pinging is None or not self._pinging.is_alive()):
            self._pinging = threading.Thread(target=self._ping, daemon=True)
            self._pinging.start()
        return self._error

    def _look(self, work: Callable[[], dict[str, NodeStatus]]) -> None:
        try:
            self.seen = work()
            self._error, self._heard = None, time.time()
        except ClusterError as error:
            self._error = error

    def _ping(self) -> None:
        assert self._shell is not None
        if self._shell.ping():
            self._heard = time.time()


def _silent(status: NodeStatus, silent_s: float, error: ClusterError | None) -> NodeStatus:
    if status.phase in ("exited", "lost"):
        return status
    why = f"has given no sign of life for {silent_s:.0f} s"
    if error is not None:
        why += f": {error.message.removeprefix(f'{status.node}: ')}"
    if silent_s > LOST_AFTER_S:
        return NodeStatus(status.node, "lost", detail=why)
    return replace(status, silent=why)


def _status(name: str, line: str) -> NodeStatus:
    word, _, rest = line.partition(" ")
    if word == "exited":
        code, at, why = f"{rest} ".split(" ", 2)
        return NodeStatus(name, "exited", exit_code=int(code), ended_at=float(at), detail=why.strip())
    if word == "lost":
        return NodeStatus(name, "lost", detail=rest or "its process is gone and left no exit code")
    return NodeStatus(name, "starting")
