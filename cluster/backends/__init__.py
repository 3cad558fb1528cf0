"""Where jobs run: one file and one line of this table per backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from cluster.backends.compose import ComposeBackend
from cluster.backends.hosts import HostsBackend
from cluster.model import Job, NodeStatus, Plan
from cluster.shells import reach
from cluster.shells.local import LocalShell


class Backend(Protocol):
    """Plans purely, then starts all places or none, says what it sees of each node, and stops."""

    def plan(self, job: Job, *, attempt: int, port: int) -> Plan:
        """What would be done: pure, so equal arguments give equal plans."""
        ...

    def check(self, job: Job, plan: Plan) -> None:
        """Raise a ClusterError when the plan cannot work here: a taken port, a missing image, no engine."""
        ...

    def submit(self, plan: Plan, secrets: Mapping[str, str] | None = None) -> None:
        """Start every node; on any failure stop those that had started and raise LaunchError.

        `secrets` has the values of the plan's.
        """
        ...

    def observe(self, plan: Plan) -> Sequence[NodeStatus]:
        """One status per node of the plan, in its order, always."""
        ...

    def logs(self, plan: Plan, offsets: Mapping[str, int]) -> Mapping[str, bytes]:
        """The bytes of each named node's log from its offset on."""
        ...

    def cancel(self, plan: Plan, *, grace_s: float) -> None:
        """Stop every node and wait until nothing is left; safe to repeat. Raises ClusterError for what stays."""
        ...

    def requeued(self, plan: Plan, wait: Callable[[float], None]) -> Plan | None:
        """The next attempt, if a queue starts it; None if the launcher has to."""
        ...


class _Backends(Mapping[str, Backend]):
    """The backends by name, each made at its first use: submitit takes 0.1 s to import."""

    def __init__(self, makers: Mapping[str, Callable[[], Backend]]) -> None:
        self._makers = {name: functools.cache(maker) for name, maker in makers.items()}

    def __getitem__(self, name: str) -> Backend:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def _slurm() -> Backend:
    from cluster.backends.slurm import SlurmBackend

    return SlurmBackend(reach)


BACKENDS = _Backends(
    {
        "local": lambda: HostsBackend("local", reach),
        "ssh": lambda: HostsBackend("ssh", reach),
        "compose": lambda: ComposeBackend(LocalShell()),
        "slurm": _slurm,
    }
)
