"""Backends local and ssh: the first node's address is the master's; each node runs a script, here or over SSH.

The backend runs bash scripts (cluster/agent/*.sh) through a `Shell`. The scripts find a job's processes by
`CLUSTER_LAUNCH_ID` in their environment, because a recorded pid may have been reused, and a name, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster.agent import scripts
from cluster.backends import poll_script, preflight, processes, script
from cluster.backends.base import Backend
from cluster.backends.node_monitor import NodeMonitor
from cluster.backends.script import attempt_dir
from cluster.errors import ClusterError, LaunchError, PortTakenError, UnreachableError, UsageError
from cluster.runtimes import RUNTIMES
from cluster.runtimes.base import Runtime
from cluster.spec.model import Job, JobRecord, Machine, Node, Plan, Step, nodes_of, this_machine
from cluster.spec.node_status import NodeStatus
from cluster.transport import parallel, reach, ssh_to
from cluster.transport.waits import waiting


class HostsBackend(Backend):
    """One script per node: N nodes on this machine, or one on each machine of an inventory."""

    def __init__(self) -> None:
        script = poll_script.Script("poll")
        self._monitor = NodeMonitor(
            lambda plan, machine: poll_script.poll(plan, machine, script)[1],
            lambda plans, machine: [statuses for _, statuses in poll_script.poll_all(plans, machine, script)],
        )

    def plan(self, job: Job, *, attempt: int, port: int) -> Plan:
        """One step per node: its script, and the command that runs it."""
        shares = zip(job.hosts, job.gpus_of_nodes, strict=False)
        hosts = tuple(Node(host.name, host, gpus) for host, gpus in shares)
        nodes = hosts or nodes_of(job, this_machine())
        made = Plan(job, attempt, self.name, nodes, nodes[0].machine.address, port)
        return replace(made, steps=tuple(script.step(job, made, rank) for rank in range(len(nodes))))

    def check(self, job: Job, plan: Plan) -> None:
        """Run the preflight check on every node. Raises UsageError, NameTakenError or PortTakenError."""
        reports = parallel.all_of(plan.machines, lambda machine: self._preflight(plan, machine))
        errors: list[UsageError] = []
        for machine in plan.machines:
            errors += preflight.problems(plan, machine, reports[machine.name])
            errors += preflight.conflicts(plan, machine, reports[machine.name])
        preflight.refuse([*errors, *preflight.different(plan, reports).values()])

    def survey(self, plan: Plan, joining: Sequence[Machine] = ()) -> dict[str, ClusterError | None]:
        """Run the preflight check on each host alone. `joining` need the others' image and a way to the master, too."""
        hosts = plan.job.hosts
        answers = parallel.each(hosts, lambda host: self._preflight(plan, host, alone=host not in joining))
        others_first = sorted(hosts, key=lambda host: host in joining)
        reports = {host.name: lines for host in others_first if isinstance(lines := answers[host.name], list)}
        different = preflight.different(plan, reports)

        def problem(host: Machine) -> ClusterError | None:
            report = answers[host.name]
            if isinstance(report, ClusterError):
                return report
            errors = preflight.problems(plan, host, report)
            if host in joining and host.name in different:
                errors.append(different[host.name])
            errors += preflight.conflicts(plan, host, report)
            return next((error for error in errors if not isinstance(error, PortTakenError)), None)

        return {host.name: problem(host) for host in hosts}

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> None:
        """Start the scripts of all nodes in parallel, each in its own session; stop all of them if one fails."""
        steps = {step.place: step for step in plan.steps}
        results = parallel.each(plan.nodes, lambda node: self._start(plan, node, steps[node.name], secrets))
        failed = [result for result in results.values() if isinstance(result, ClusterError)]
        if failed:
            try:
                self.cancel(plan, grace_s=0)
            except ClusterError as error:
                raise LaunchError(f"{failed[0].message}; and {error.message}", error.hint) from error
            raise failed[0]

    def observe(self, plan: Plan) -> Sequence[NodeStatus]:
        """Return statuses from the agents' files and the scripts' exit codes. Append to copies of the logs."""
        return self._monitor.statuses(plan)

    def observe_all(self, plans: Sequence[Plan]) -> list[Sequence[NodeStatus] | ClusterError]:
        """Run one command on each machine."""
        return [*self._monitor.statuses_of(plans)]

    def cancel(self, plan: Plan, *, grace_s: float, only_attempt: bool = False) -> None:
        """Send SIGTERM to the job's processes, and SIGKILL after `grace_s`; remove its containers. Try all machines."""

        left = {machine.name: None for machine in plan.machines}

        def stop(machine: Machine) -> None:
            timeout_s = self._monitor.timeout_s(plan, machine, grace_s + 30)
            engines = [*filter(None, [RUNTIMES[machine.runtime].engine])]
            attempt = plan.attempt if only_attempt else None
            folder = attempt_dir(plan, machine)
            launch_id = plan.job.launch_id
            processes.stop(
                machine, launch_id, grace_s, engines, timeout_s=timeout_s, attempt=attempt, folder=folder
            )
            left.pop(machine.name)

        try:
            with waiting(lambda: f"{plan.job_id} to exit on {', '.join([*left])}", grace_s + 30):
                parallel.all_of(plan.machines, stop)
        except ClusterError as error:
            raise type(error)(error.message, f"once it answers: clusterctl stop {plan.job_id}") from error

    def exec(self, record: JobRecord, node: Node, argv: Sequence[str], *, tty: bool) -> list[str]:
        """Return a script that enters the node's container, on its machine."""
        return ssh_to(node.machine).command(
            script.exec_command(record.job, record.plan, node, argv, tty=tty), tty=tty
        )

    def _preflight(self, plan: Plan, machine: Machine, *, alone: bool = False) -> list[str]:
        is_first = machine == plan.nodes[0].machine
        needs = script.needs(plan.job, machine)
        new = plan.dir_on(machine) if machine.is_listed and plan.attempt == 1 else ""
        name = plan.job_id if plan.attempt == 1 else ""
        master = (
            f"{plan.master_addr}:{plan.master_port}" if machine.is_listed and not (is_first or alone) else ""
        )
        port = plan.master_port if is_first and not alone else ""
        command = preflight.command(plan, machine, new=new, name=name, master=master, port=port, needs=needs)
        done = reach(machine).run(command, timeout_s=self._monitor.timeout_s(plan, machine, 30))
        if done.code:
            hint = "the machine needs bash and a POSIX userland"
            raise UnreachableError(f"{machine.name}: {done.last_line}", hint)
        return done.out.splitlines()

    def _start(self, plan: Plan, node: Node, step: Step, secrets: Mapping[str, str]) -> None:
        lines, text = script.payload(plan, step, secrets)
        values = {"folder": attempt_dir(plan, node.machine), "node": node.name, "job": plan.job_id}
        values |= {"launch": plan.job.launch_id, "backend": self.name}
        command = scripts.command("start", secrets=lines, gpus=preflight.ids(node.gpus), **values)
        started = reach(node.machine).run(command, stdin=text)
        if started.code == preflight.GPUS_HELD:
            raise preflight.lost_race(plan, node.name, started.out.strip())
        if started.code:
            raise LaunchError(f"{node.name}: cannot start the node's script: {started.last_line}")


class LocalBackend(HostsBackend):
    """The nodes are process groups on this machine."""

    name = "local"
    machines = "here"
    in_containers = False
    engines = ()
    supports = frozenset({"--wait", "--prologue", "unequal nodes"})


class SshBackend(HostsBackend):
    """Each node is a machine of cluster.yaml, reached over SSH."""

    name = "ssh"
    machines = "listed"
    supports = frozenset(
        {"--spares", "--nodes MIN:MAX", "--image", "--mount", "--build", "--push", "--wait", "--prologue"}
    ) | {"--run-option", "unequal nodes", "image push", "sync"}

    def fits(self, runtime: Runtime) -> bool:
        """Return whether the runtime needs no job step of a scheduler."""
        return bool(runtime.engine) or runtime.inside
