"""Queue for GPUs (`launch --wait`): tickets on the nodes order the launchers that wait, without a daemon.

A ticket is a file in the folder of each node's GPU locks. Its name begins with the time of the launcher's arrival, so
that all nodes have the same order. The launcher renews it at each poll; a ticket that is not renewed does not count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from cluster.agent import scripts
from cluster.errors import ClusterError, GpusHeldError, LaunchError, UnreachableError, UsageError
from cluster.spec.model import Gpu, Inventory, Job, Node
from cluster.spec.request import Request
from cluster.store import JobStore
from cluster.supervisor import launcher
from cluster.transport import parallel, reach

T = TypeVar("T")
_POLL_S = 2.0


@dataclass
class _Node:
    """What a node reports: the jobs that hold its GPUs by GPU id, and the tickets there."""

    held: dict[Gpu, str] = field(default_factory=dict)
    tickets: list[str] = field(default_factory=list)


class GpuQueue:
    """The place of one launcher in the queue. Leaving the `with` block gives it up."""

    def __init__(self, name: str, nodes: Sequence[Node], held: Callable[[], dict[Gpu, str]] = dict) -> None:
        """`held` returns more GPUs in use, with their jobs, which a single node's locks do not show."""
        self._ticket, self._nodes, self._held = f"{time.time_ns():020d}-{os.getpid()}-{name}", nodes, held

    def __enter__(self) -> GpuQueue:
        """Take a place at the end."""
        self._poll()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the tickets. Those on nodes that do not answer expire."""
        parallel.each(self._nodes, lambda node: self._run(node, "leave"))

    def wait(self, job: Job, until: float, note: Callable[[str], None]) -> list[Node]:
        """Wait until this launcher is the first and enough GPUs are free, and return the nodes with only those.

        Args:
            job: Its numbers of nodes, spares and processes per node.
            until: The Unix time at which to end.
            note: Gets a sentence when the reason for waiting changes.

        Raises:
            LaunchError: There were not enough free GPUs in time.
        """
        shown = ""
        while True:
            found = self._poll()
            ahead = sorted({ticket for node in found.values() for ticket in node.tickets if ticket < self._ticket})
            free = [
                replace(node, gpus=tuple(gpu for gpu in node.gpus if gpu not in found[node.name].held))
                for node in self._nodes
                if node.name in found
            ]
            if job.hosts:
                free = [node for node in free if len(node.gpus) >= job.procs_per_node]
                is_enough = len(free) >= job.nodes + len(job.spares)
            else:
                is_enough = sum(len(node.gpus) for node in free) >= job.world_size
            if is_enough and not ahead:
                return free
            holders = sorted({holder for node in found.values() for holder in node.held.values()})
            why = f"held by {', '.join(holders)}" if holders else "not enough nodes answer"
            if ahead:
                why = f"behind {', '.join(ticket.split('-', 2)[2] for ticket in ahead)} in the queue"
            if why != shown:
                note(f"waiting for {job.world_size} GPU{'s' if job.world_size > 1 else ''}: {why}")
                shown = why
            if time.time() > until:
                raise LaunchError(f"not enough free GPUs in time: {why}", "a longer --wait, or fewer --nodes or --gpus")
            time.sleep(_POLL_S)

    def _poll(self) -> dict[str, _Node]:
        """Renew the tickets. Return the reports of the nodes that answer."""
        answers = parallel.each(self._nodes, lambda node: self._run(node, ",".join(map(str, node.gpus))))
        found = {}
        for name, lines in answers.items():
            if isinstance(lines, ClusterError):
                continue
            found[name] = _Node(held=dict(self._held()))
            for line in lines:
                word, _, rest = line.partition(" ")
                if word == "ticket":
                    found[name].tickets.append(rest)
                elif word == "held":
                    job, _, gpu = rest.rpartition(" ")
                    found[name].held[int(gpu) if gpu.isdigit() else gpu] = job
        if not found:
            raise next(error for error in answers.values() if isinstance(error, ClusterError))
        return found

    def _run(self, node: Node, what: str) -> list[str]:
        done = reach(node).run(scripts.command("queue", self._ticket, what), timeout_s=15)
        if done.code:
            raise UnreachableError(f"{node.display_name}: {done.last_line}", "the queue needs GNU find on the node")
        return done.out.splitlines()


def launch_in_turn(
    job: Job,
    backend: str,
    request: Request,
    inventory: Inventory | None,
    records: JobStore,
    wait_s: float,
    note: Callable[[str], None],
    start: Callable[[Job], T],
) -> T:
    """Wait until GPUs are free and all launchers that came before have started, then `start` the job on them.

    Args:
        job: The job of the request, resolved with all GPUs.
        backend: The name of its backend.
        request: The request, which is resolved again with the free GPUs.
        inventory: The machines; the job gets the first ones with enough free GPUs.
        records: Of the jobs on this machine.
        wait_s: How long to wait.
        note: Gets a sentence for the user when the reason for waiting changes.
        start: Starts a job. On GpusHeldError the launcher keeps its place and waits again.

    Raises:
        LaunchError: There were not enough free GPUs in time.
        UsageError: The job cannot wait for GPUs.
    """
    if backend == "slurm":
        raise UsageError("--wait: Slurm has a queue of its own", "omit --wait")
    here = Node("this-machine", "", launcher.local_machine(request, backend).gpus)
    nodes = inventory.nodes if job.hosts and inventory else [here]
    if not all(node.gpus for node in nodes):
        raise UsageError("--wait: the job uses no GPUs", "omit --wait, or set gpus of the nodes in cluster.yaml")
    until = time.time() + wait_s
    in_use: Callable[[], dict[Gpu, str]] = dict if job.hosts else lambda: launcher.gpus_in_use(records)
    with GpuQueue(job.name, nodes, in_use) as queue:
        while True:
            free = queue.wait(job, until, note)
            if job.hosts and inventory:
                job, _, _ = launcher.resolve(request, replace(inventory, nodes=tuple(free)))
            else:
                job, _, _ = launcher.resolve(request, inventory, free[0].gpus)
            try:
                return start(job)
            except GpusHeldError as error:  # by a launcher without --wait, at the same moment
                note(error.message)
