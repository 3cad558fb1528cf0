"""Jobs as one script per node on machines that a shell reaches: this one, or many behind SSH.

Everything is done by small bash scripts through a Shell, so that nothing here knows how a machine is reached. A job's
processes are found by `CLUSTER_JOB_ID` in their environment: no record, no pid that may have been reused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cluster import fanout, logs, looks, quoting, readiness, resources, script
from cluster.errors import ClusterError, LaunchError, UnreachableError, UsageError
from cluster.looks import Looks, Seen, attempt_dir, machines, on
from cluster.model import Job, Mount, Node, NodeStatus, Plan, Step, one_box, plan_of
from cluster.runtimes import RUNTIMES
from cluster.shells import Shell

#: The exit code of agent/start.sh where another job holds a GPU.
_GPUS_HELD = 74


class HostsBackend:
    """One script per node: N on this machine, as a cluster of one box, or one on each machine of an inventory."""

    def __init__(self, name: str, reach: Callable[[Node], Shell]) -> None:
        self.name = name
        self._reach = reach
        self._looks = Looks(reach, self._look)

    def plan(self, job: Job, *, attempt: int, port: int) -> Plan:
        """One step per node: its script, and the command that runs it."""
        nodes = job.hosts or one_box(job, ["127.0.0.1"] * job.nodes)
        inside = any(node.runtime != "none" for node in nodes)
        master = (nodes[0].address, port)
        made = plan_of(job, self.name, nodes, attempt=attempt, master=master, in_containers=inside)
        return replace(made, steps=tuple(_step(job, made, rank) for rank in range(len(nodes))))

    def check(self, job: Job, plan: Plan) -> None:
        """Look at every node before anything is started anywhere.

        Raises UsageError for what is missing on a node, with every node's name; NameTakenError when it has a job of
        this name; GpusHeldError when another job has the GPUs; PortTakenError when the master's port is not free.
        """
        seen = fanout.all_of(machines(plan), lambda node: self._prepare(plan, node))
        errors = [error for node in machines(plan) for error in readiness.problems(plan, node, seen[node.name])]
        errors += readiness.different(plan, seen).values()
        if errors:
            hints = "\n      ".join(dict.fromkeys(hint for _, hint in errors if hint))
            raise UsageError("\n       ".join(dict.fromkeys(message for message, _ in errors)), hints)
        readiness.refuse_taken(plan.job_id, {readiness.place(node): seen[node.name] for node in machines(plan)})
        held = {node.name: holder for node in machines(plan) if (holder := readiness.held(plan, node, seen[node.name]))}
        if held:
            raise readiness.held_error({name: sorted(jobs) for name, jobs in held.items()})
        readiness.refuse_port(plan, seen)

    def survey(self, plan: Plan, joining: Sequence[Node] = ()) -> dict[str, ClusterError | None]:
        """What keeps each node of the plan from running it, None where nothing does; every node by itself.

        Nodes that are `joining` the others need also those others' image, and a way to the master.
        """
        found = fanout.each(plan.nodes, lambda node: self._prepare(plan, node, alone=node not in joining))
        others_first = sorted(plan.nodes, key=lambda node: node in joining)
        seen = {node.name: lines for node in others_first if isinstance(lines := found[node.name], list)}
        different = readiness.different(plan, seen)

        def problem(node: Node) -> ClusterError | None:
            answer = found[node.name]
            if isinstance(answer, ClusterError):
                return answer
            why = readiness.problems(plan, node, answer)
            if node in joining and node.name in different:
                why.append(different[node.name])
            if why:
                return UsageError(*why[0])
            jobs = readiness.held(plan, node, answer)
            return readiness.held_error({node.name: sorted(jobs)}) if jobs else None

        return {node.name: problem(node) for node in plan.nodes}

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

    def requeued(self, plan: Plan, wait: Callable[[float], None]) -> Plan | None:
        """None: the launcher starts the next attempt."""
        return None

    def observe(self, plan: Plan) -> Sequence[NodeStatus]:
        """From the agent's status file and the script's exit code; a silent machine is lost."""
        return self._looks.statuses(plan)

    def logs(self, plan: Plan, offsets: Mapping[str, int]) -> Mapping[str, bytes]:
        """From the run directory here: `observe` adds what other machines' logs have, so that it stays when they go."""
        return logs.read(plan, offsets)

    def cancel(self, plan: Plan, *, grace_s: float) -> None:
        """SIGTERM to every process of the job, SIGKILL to those that stay longer than `grace_s`; its containers too.

        Every machine is tried; raises ClusterError for what stays and for the machines that do not answer.
        """

        def end(machine: Node) -> str:
            return looks.stop(
                self._reach(machine),
                plan.job_id,
                grace_s,
                [engine] if (engine := RUNTIMES[machine.runtime].engine) else [],
                timeout_s=self._looks.patience_s(plan, machine, grace_s + 30),
            )

        results = fanout.each(machines(plan), end)
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

    def _prepare(self, plan: Plan, node: Node, *, alone: bool = False) -> list[str]:
        step = next(step for step in plan.steps if step.place == node.name)
        words = [node.runtime, plan.image, node.run_dir, plan.device, readiness.ids(node), plan.command[0], *step.needs]
        peer = node.is_machine and node is not plan.nodes[0] and not alone
        words[6:6] = [
            plan.dir_on(node) if node.is_machine and plan.attempt == 1 else "",
            f"{plan.master_addr}:{plan.master_port}" if peer else "",
            str(plan.master_port) if node is plan.nodes[0] and not alone else "",
            plan.job_id if plan.attempt == 1 else "",
        ]
        timeout_s = self._looks.patience_s(plan, node, 30)
        done = self._reach(node).run(
            ["bash", "-c", resources.text("agent/common.sh", "agent/check.sh"), "check", *words], timeout_s=timeout_s
        )
        if done.code:
            raise UnreachableError(
                f"{readiness.place(node)}: {done.last_line}", "the machine needs bash and a POSIX userland"
            )
        return done.out.splitlines()

    def _start(self, plan: Plan, node: Node, step: Step, head: str) -> None:
        ((_, text),) = step.files.items()
        secrets = f"{head}\n" if head else ""
        agent = resources.text("agent/agent.py")
        words = [attempt_dir(plan, node), node.name, plan.job_id, readiness.ids(node)]
        words += [str(secrets.count("\n")), str(agent.count("\n"))]
        start = resources.text("agent/common.sh", "agent/start.sh")
        started = self._reach(node).run(["bash", "-c", start, "start", *words], stdin=secrets + agent + text)
        if started.code == _GPUS_HELD:
            raise readiness.held_error({node.name: started.out.split()})
        if started.code:
            raise LaunchError(f"{node.name}: its script could not be started: {started.last_line}")

    def _look(self, plan: Plan, machine: Node) -> Seen:
        poll = resources.text("agent/common.sh", "agent/poll.sh")
        (now,), answers = looks.ask(
            self._reach(machine), plan, machine, poll, [plan.job_id, str(looks.LOG_CHUNK)], head=1
        )
        return {name: looks.status(name, answer, float(now)) for name, answer in answers.items()}


def _step(job: Job, plan: Plan, rank: int) -> Step:
    node = plan.nodes[rank]
    runtime = RUNTIMES[node.runtime]
    run_dir = plan.dir_on(node)
    mounts = [looks.mounted(node, mount) for mount in job.mounts]
    agent = f"{attempt_dir(plan, node)}/agent.py"
    text = script.render(
        job,
        node,
        rank,
        attempt=plan.attempt,
        run_dir=run_dir,
        agent=agent,
        master=(plan.master_addr, plan.master_port),
        nodes_on_host=len(on(plan, node)),
        runtime=runtime,
        mounts=[Mount(run_dir, run_dir, read_only=False), *mounts] if node.runtime != "none" else (),
    )
    path = f"{attempt_dir(plan, node)}/{node.name}.sh"
    needs = tuple(mount.source if node.runtime != "none" else mount.target for mount in mounts)
    return Step(node.name, {path: text}, ("bash", path), needs, agent)
