"""The base class of backends."""

import abc
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.agent import scripts
from cluster.backends import processes, results
from cluster.errors import ClusterError, UnreachableError, UsageError
from cluster.runtimes import ENGINES
from cluster.spec.model import Device, Inventory, Job, JobRecord, Machine, Node, Plan, Step
from cluster.spec.node_status import NodeStatus
from cluster.spec.traits import Traits
from cluster.transport import files, parallel, reach, workdir
from cluster.transport.waits import waiting


@dataclass(frozen=True)
class FoundJob:
    """What one launch of a job has on one machine, or in a cluster, of the `backend`.

    `user` is who started it there. `is_own`: the same user asks, so `gc` may remove it. `runs`: a node script, the
    queue, the cluster or a supervisor still has it, so that it is no orphan.
    """

    where: str
    backend: str
    job: str
    launch_id: str
    user: str
    is_own: bool
    runs: bool
    counts: Mapping[str, int]

    @property
    def is_orphan(self) -> bool:
        """Whether `gc` removes it, also if its job is not named."""
        return self.is_own and not self.runs


class Backend(Traits, abc.ABC):
    """Plans, checks, submits, observes and cancels jobs in one kind of environment.

    Its declarations, which code outside asks instead of its name, are in spec/traits.py.
    """

    #: Whether a queue starts the job again without a launcher.
    requeues = False

    @abc.abstractmethod
    def plan(self, job: Job, *, attempt: int, port: int) -> Plan:
        """Return the files and commands of an attempt. Pure: equal arguments give equal plans."""

    @abc.abstractmethod
    def check(self, job: Job, plan: Plan) -> None:
        """Run the preflight check. Raises ClusterError, for example for a missing image or a port in use."""

    def notes(self, job: Job) -> list[str]:
        """Return what the user should know about the environment in which the job will run. Raises ClusterError."""
        return []

    @abc.abstractmethod
    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> None:
        """Start all nodes, or stop the started ones and raise LaunchError; `secrets` are the values by name."""

    def send_files(
        self,
        job: Job,
        plan: Plan,
        sizes: Mapping[str, int] | None,
        earlier: Sequence[str],
        report: files.Report,
    ) -> list[str]:
        """Copy the working directory to the machines that lack it, before an attempt. Return sentences for the user.

        `sizes` are its files (None: the nodes need no copy); `earlier` are jobs whose copies may have the same ones.
        Raises ClusterError.
        """
        if sizes is None:
            return []
        if plan.attempt > 1:
            machines = workdir.without_copy(plan, plan.machines)
        else:
            machines = [job.queue.login] if job.queue else [*job.hosts, *job.spares]
        return [workdir.send(sizes, plan, machines, earlier, report)] if machines else []

    def tend(self, record: JobRecord) -> list[str]:
        """Care for an attempt that waits for its machines; the job's supervisor calls it before each poll.

        Return sentences for the user. Raises ClusterError.
        """
        return []

    @abc.abstractmethod
    def observe(self, plan: Plan) -> Sequence[NodeStatus]:
        """Return one status per node of the plan, in its order. Update the local copies of the nodes' logs."""

    def observe_all(self, plans: Sequence[Plan]) -> list[Sequence[NodeStatus] | ClusterError]:
        """Return what `observe` returns for each plan, or why the state of its nodes is unknown, without their logs.

        As few commands as possible: one for each machine, scheduler or cluster, not for each plan.
        """
        names = [str(number) for number in range(len(plans))]
        return [*parallel.each(names, lambda number: self.observe(plans[int(number)])).values()]

    @abc.abstractmethod
    def cancel(self, plan: Plan, *, grace_s: float, only_attempt: bool = False) -> None:
        """Stop all nodes, and wait for their end. Idempotent. Raises ClusterError if something still runs.

        This stops all attempts of the job. With `only_attempt` the next attempt may have started on these machines, and
        keeps running.
        """

    def collect(self, plan: Plan) -> list[str]:
        """Copy the results to the plan's run directory on this machine; return a sentence for each failure."""
        return results.collect(plan)

    @abc.abstractmethod
    def exec(self, record: JobRecord, node: Node, argv: Sequence[str], *, tty: bool) -> list[str]:
        """Return the command of this machine that runs `argv` in the container of a node (`tty`: on a terminal)."""

    def array(self, job: Job, plans: Sequence[Plan], at_once: int) -> Step:
        """Return the step that submits an array of `plans`, at most `at_once` at a time; `job` is any of their jobs.
        Only a backend that supports `--array` has this method and the next one.
        """
        raise NotImplementedError

    def submit_array(self, plans: Sequence[Plan], step: Step, secrets: Mapping[str, str]) -> None:
        """Submit the jobs of an array. Raises LaunchError."""
        raise NotImplementedError

    #: The engines whose containers its jobs may leave on a machine.
    engines: Sequence[str] = tuple(ENGINES)

    def jobs_on(
        self, inventory: Inventory, supervised: Collection[str]
    ) -> dict[str, list[FoundJob] | ClusterError]:
        """Return what its jobs have on each machine, found without records, or why a machine does not answer.

        `supervised` are the launch IDs of jobs that a launcher on this machine follows: they are no orphans, also while
        nothing of them runs for a moment.
        """

        def look(machine: Machine) -> list[FoundJob]:
            jobs = found_on(machine, self.name, self.engines, needs_engine=self.in_containers is True)
            return [replace(job, runs=job.runs or job.launch_id in supervised) for job in jobs]

        return parallel.each(inventory.machines, look)

    def remove(self, inventory: Inventory, found: FoundJob) -> None:
        """Remove what a launch has on a machine, by its ID. Raises ClusterError."""
        machine = next(candidate for candidate in inventory.machines if candidate.name == found.where)
        with waiting(f"{found.job} to exit on {machine.name}", 60):
            processes.stop(machine, found.launch_id, 0, self.engines, timeout_s=60)

    def survey(self, plan: Plan, joining: Sequence[Machine] = ()) -> dict[str, ClusterError | None]:
        """Return for each host of the plan why it cannot run it, or None. `joining` have not run the job before."""
        return {}

    def requeued(self, plan: Plan) -> Plan | None:
        """Return the next attempt if a queue starts it; None if the launcher has to start it."""
        return None

    def newest(self, plan: Plan) -> Plan | None:
        """Return the plan of the attempt that a queue runs or ran last. `plan` has failed, and no launcher restarts it.

        None: the queue may still start another one. Raises UnreachableError.
        """
        return plan

    def problem(self) -> tuple[str, str] | None:
        """Return why this machine cannot run jobs of the backend, as (message, hint), or None."""
        return None

    def discover(self) -> tuple[Mapping[str, Any], Device, list[str]]:
        """Return its section for the cluster that this machine reaches, the device, and sentences on what was found.

        Raises ClusterError.
        """
        raise UsageError(
            f"--backend {self.name}: nothing to find", "name the machines: clusterctl init gpu-a gpu-b"
        )

    def user(self) -> str:
        """Return the UID:GID in a container that is this user on the host."""
        return f"{os.getuid()}:{os.getgid()}"


def found_on(
    machine: Machine, backend: str, engines: Sequence[str], needs_engine: bool = False
) -> list[FoundJob]:
    """Return what jobs of a backend have on a machine: processes, and containers in `engines`.

    A job runs while the script of a node does or, with `needs_engine`, if an engine says so. Raises UnreachableError,
    also if an engine that is needed does not answer although there are processes.
    """
    done = reach(machine).run(scripts.command("orphans", *engines, backend=backend), timeout_s=60)
    who, *lines = done.out.splitlines() or [""]
    if done.code or not who.startswith("user "):
        raise UnreachableError(f"{machine.name}: {done.last_line}")
    kinds: dict[tuple[str, str, str], list[str]] = {}
    silent = []
    for line in lines:
        kind, *about = line.split(" ")
        if kind == "silent":
            silent += about
        elif len(about) == 3:  # a node may print anything
            launch_id, job, user = about
            kinds.setdefault((job, launch_id, user), []).append(kind)
    if needs_engine and silent and kinds:
        jobs = ", ".join(sorted({job for job, _, _ in kinds}))
        raise UnreachableError(
            f"{machine.name}: {silent[0]} does not answer, so it is not known whether {jobs} runs",
            f"find out why `{silent[0]} ps` fails, then run clusterctl gc again",
        )
    return [
        FoundJob(
            machine.name,
            backend,
            *each,
            is_own=each[2] == who.removeprefix("user "),
            runs="script" in found,
            counts={"processes": found.count("process"), "containers": found.count("container")},
        )
        for each, found in sorted(kinds.items())
    ]
