"""Queue for GPUs (`launch --wait`): tickets on the machines order the launchers that wait, without a daemon.

A ticket is a file in the folder of each machine's GPU locks. Its name begins with the time of the launcher's arrival,
so that all machines have the same order. The launcher renews it at each poll; a ticket that is not renewed does not
count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.agent import scripts
from cluster.backends import BACKENDS
from cluster.errors import ClusterError, GpusHeldError, LaunchError, UnreachableError, UsageError
from cluster.spec.model import Gpu, Job, JobRecord, Machine, this_machine
from cluster.spec.request import Request
from cluster.supervisor import launcher
from cluster.transport import Completed, parallel, reach

_POLL_S = 2.0


class GpuQueue:
    """The place of one launcher in the queue. It is at the end until `leave`."""

    def __init__(self, name: str, machines: Sequence[Machine], in_use: Callable[[], dict[Gpu, str]]) -> None:
        """`in_use` returns more GPUs in use, with their jobs, which a single machine's locks do not show."""
        # Log in before the arrival time is set: a slow login would let a later launcher start first.
        parallel.each(machines, lambda machine: reach(machine).run(["true"], timeout_s=15))
        self._ticket = f"{time.time_ns():020d}-{os.getpid()}-{name}"
        self._machines = machines
        self._in_use = in_use
        self._poll()

    def leave(self) -> None:
        """Remove the tickets. Those on machines that do not answer expire."""
        parallel.each(self._machines, lambda machine: self._run(machine, "leave"))

    def wait(self, job: Job, until: float, note: Callable[[str], None]) -> list[Machine]:
        """Wait until this launcher is the first and enough GPUs are free, and return the machines with only those.

        `until` is a Unix time. `note` gets a sentence when the reason for waiting changes. Raises LaunchError if there
        were not enough free GPUs in time.
        """
        shown = ""
        while True:
            held, tickets = self._poll()
            ahead = sorted(ticket for ticket in tickets if ticket < self._ticket)
            free = [
                replace(machine, gpus=tuple(gpu for gpu in machine.gpus if gpu not in held[machine.name]))
                for machine in self._machines
                if machine.name in held
            ]
            if job.hosts:
                chosen = machines_for(job, self._machines, free)
            else:
                chosen = free if sum(len(machine.gpus) for machine in free) >= job.world_size else None
            if chosen is not None and not ahead:
                return chosen
            holders = sorted({holder for jobs in held.values() for holder in jobs.values()})
            why = f"held by {', '.join(holders)}" if holders else "not enough nodes answer"
            if ahead:
                why = f"behind {', '.join(ticket.split('-', 2)[2] for ticket in ahead)} in the queue"
            if why != shown:
                note(f"waiting for {job.world_size} GPU{'s' if job.world_size > 1 else ''}: {why}")
                shown = why
            if time.time() > until:
                raise LaunchError(
                    f"the GPUs did not become free in time: {why}",
                    "wait longer (--wait), or ask for fewer --nodes or --gpus",
                )
            time.sleep(_POLL_S)

    def _poll(self) -> tuple[dict[str, dict[Gpu, str]], set[str]]:
        """Renew the tickets. Return the job of each GPU in use, by machine that answers, and all tickets."""
        answers = parallel.each(
            self._machines, lambda machine: self._run(machine, ",".join(map(str, machine.gpus)))
        )
        held: dict[str, dict[Gpu, str]] = {}
        tickets: set[str] = set()
        for name, done in answers.items():
            if isinstance(done, ClusterError):
                continue
            tickets.update(done.by_word.get("ticket", ()))
            held[name] = dict(self._in_use())
            for line in done.by_word.get("held", ()):
                job, _, gpu = line.rpartition(" ")
                held[name][int(gpu) if gpu.isdigit() else gpu] = job
        if not held:
            raise next(error for error in answers.values() if isinstance(error, ClusterError))
        return held, tickets

    def _run(self, machine: Machine, what: str) -> Completed:
        done = reach(machine).run(scripts.command("queue", self._ticket, what), timeout_s=15)
        if done.code:
            raise UnreachableError(
                f"{machine.name}: {done.last_line}", "the queue needs GNU find on the node"
            )
        return done


def machines_for(job: Job, machines: Sequence[Machine], free: Sequence[Machine]) -> list[Machine] | None:
    """Return a machine for each node of a job, in order, and then for its spares; None if there are not enough.

    `machines` are all of them, and `free` those that answer, with only their free GPUs. With `--gpus all`, a node takes
    a whole machine. Otherwise the largest nodes choose first, the first machine with enough GPUs, so that none is
    wasted.
    """
    if job.procs_per_node == "all":
        unused = [machine for machine in free if machine in machines]
        wanted = [0] * (job.nodes + len(job.spares))
    else:
        unused = [*free]
        wanted = [*job.procs, *[job.most_procs] * len(job.spares)]
    chosen: dict[int, Machine] = {}
    for index in sorted(range(len(wanted)), key=lambda index: -wanted[index]):
        fitting = [machine for machine in unused if len(machine.gpus) >= wanted[index]]
        if not fitting:
            return None
        chosen[index] = fitting[0]
        unused.remove(fitting[0])
    return [chosen[index] for index in sorted(chosen)]


def launch_in_turn(
    starter: launcher.Launcher,
    request: Request,
    target: launcher.Target,
    wait_s: float,
    note: Callable[[str], None],
) -> tuple[JobRecord, list[str]]:
    """Wait until GPUs are free and all launchers that came before have started, then launch the job on them.

    The request is resolved again with the free GPUs, and a job on machines gets some with enough of them. If
    another job has taken a GPU, the launcher keeps its place and waits again. `note` gets a sentence for the user when
    the reason for waiting changes. Return the record, and notes.

    Raises:
        LaunchError: There were not enough free GPUs in time.
        UsageError: The job cannot wait for GPUs, or its files cannot be sent.
    """
    BACKENDS[target.backend].refuse("--wait", BACKENDS)
    job, _ = target.job(request)
    inventory = target.inventory if job.hosts else None
    machines = inventory.machines if inventory else [this_machine(target.here.gpus)]
    if not all(machine.gpus for machine in machines):
        hint = "omit --wait, or set gpus of the nodes in cluster.yaml" if inventory else "omit --wait"
        raise UsageError("--wait: the job uses no GPUs", hint)
    starter.check_sources(job)  # before the wait, which may take hours
    until = time.time() + wait_s
    queue = GpuQueue(job.name, machines, dict if job.hosts else lambda: launcher.gpus_in_use(starter.records))
    try:
        while True:
            free = queue.wait(job, until, note)
            if inventory:
                free_target = replace(target, inventory=replace(inventory, machines=tuple(free)))
            else:
                free_target = target.with_gpus(free[0].gpus)
            job, _ = free_target.job(request)
            try:
                return starter.launch(job, target.backend, numbered=not request.name)
            except GpusHeldError as error:  # by a launcher without --wait, at the same moment
                note(error.message)
    finally:
        queue.leave()
