"""The base class of backends."""

import abc
import os
from collections.abc import Mapping, Sequence

from cluster.errors import ClusterError
from cluster.spec.model import Job, JobRecord, Node, NodeStatus, Plan


class Backend(abc.ABC):
    """Plans, checks, submits, observes and cancels jobs in one kind of environment."""

    name: str
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

    @abc.abstractmethod
    def observe(self, plan: Plan) -> Sequence[NodeStatus]:
        """Return one status per node of the plan, in its order. Update the local copies of the nodes' logs."""

    @abc.abstractmethod
    def cancel(self, plan: Plan, *, grace_s: float, only_attempt: bool = False) -> None:
        """Stop all nodes, and wait for their end. Idempotent. Raises ClusterError if something still runs.

        This stops all attempts of the job. With `only_attempt` the next attempt may have started on these machines, and
        keeps running.
        """

    @abc.abstractmethod
    def exec(self, record: JobRecord, node: Node, argv: Sequence[str], *, tty: bool) -> tuple[Node, list[str]]:
        """Return a machine, and its command that runs `argv` in the container of a node (`tty`: on a terminal)."""

    def survey(self, plan: Plan, joining: Sequence[Node] = ()) -> dict[str, ClusterError | None]:
        """Return for each host of the plan why it cannot run it, or None. `joining` have not run the job before."""
        return {}

    def requeued(self, plan: Plan) -> Plan | None:
        """Return the next attempt if a queue starts it; None if the launcher has to start it."""
        return None

    def problem(self) -> tuple[str, str] | None:
        """Return why this machine cannot run jobs of the backend, as (message, hint), or None."""
        return None

    def user(self) -> str:
        """Return the UID:GID in a container that is this user on the host."""
        return f"{os.getuid()}:{os.getgid()}"
