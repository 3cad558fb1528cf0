"""Runs the points of a benchmark: each is an ordinary job, in rounds that take turns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster import commands, config, logs, report, scaling, supervise
from cluster.commands import Show
from cluster.config import Request
from cluster.errors import ClusterError, UnreachableError, UsageError, with_hint
from cluster.model import Job
from cluster.records import Records
from cluster.scaling import Measured, Point


def jobs(
    request: Request, points: Sequence[Point], arguments: Sequence[str], backend: str
) -> tuple[dict[Point, Job], list[str]]:
    """The job of each point, all on the same kind of device, and plain sentences on what the user should know.

    On this machine, where nodes share the cores, a process has as many threads at every point, so that it stands for a
    device. Raises UsageError for what makes no sense at any of the points.
    """
    for point in points:
        ranks = point.nodes * request.gpus
        if point.step_batch < ranks:
            raise UsageError(
                f"--batch {point.batch}: fewer pictures in a step than ranks, {ranks} on {point.nodes} nodes",
                f"for example: --batch {4 * ranks}",
            )
    most = max(points, key=lambda point: point.nodes)
    base = request.name or "bench"

    def asked(point: Point) -> Request:
        return replace(
            request,
            nodes=point.nodes,
            min_nodes=point.nodes,
            arguments=tuple(scaling.arguments_of(point, arguments)),
            name=f"{base}-{point.nodes}x{request.gpus}-b{point.step_batch}",
            max_restarts=0,  # what began anew would be no measurement
        )

    here = commands.here(asked(most), backend)
    largest, notes = config.job(asked(most), here, backend)
    request = replace(request, device=largest.device)
    if backend in config.ON_THIS_MACHINE and largest.device == "cpu" and "OMP_NUM_THREADS" not in largest.env:
        cores = len(os.sched_getaffinity(0))
        threads = max(1, cores // largest.world_size)
        request = replace(request, env=(*request.env, f"OMP_NUM_THREADS={threads}"))
        notes.append(f"all nodes share this machine's {cores} cores: {threads} for each process, at every point")
    return {point: config.job(asked(point), here, backend)[0] for point in points}, notes


def run(job: Job, backend: str, records: Records, show: Show, values: Mapping[str, str]) -> Measured | str:
    """Run one point to its end: what it measured, or in one line why it did not.

    Ctrl-C stops the job on every node and goes on as KeyboardInterrupt. Raises ClusterError where the job may still be
    running: whatever is measured beside it would be wrong.
    """
    try:
        record = commands.launch(job, backend, records, numbered=True, secrets=values)
    except ClusterError as error:
        return with_hint("; ".join(line.strip() for line in error.message.splitlines()), error.hint)
    name = record.plan.job_id
    try:
        watched, _ = supervise.run(record, records, show, secrets=values)
        outcome, undone = commands.finish(watched, records)
    except KeyboardInterrupt:
        show.note(
            f"stopping {name} on {len(record.plan.nodes)} nodes (if Ctrl-C breaks that off: clusterctl stop {name})"
        )
        _stop(name, records)
        raise
    except ClusterError as error:
        _stop(name, records)
        return with_hint(error.message, error.hint)
    for text in undone:
        show.note(text)
        if text.startswith(commands.NOT_CLEANED_UP):
            raise UnreachableError(
                f"{name} may still run there, and would be measured with the next", f"clusterctl stop {name}"
            )
    if outcome != "done":
        why = report.cause(watched.view, watched.verdict) or f"it was {outcome}"
        return with_hint(why, report.hint(watched.view, watched.verdict) or f"clusterctl logs {name}")
    first = watched.plan.nodes[0].name
    lines = logs.read(watched.plan, {first: 0})[first].decode(errors="replace").splitlines()
    found = scaling.measured([event for line in lines if (event := logs.event(line)) is not None])
    return found or f"it reported no epoch: clusterctl logs {name}"


def _stop(name: str, records: Records) -> None:
    try:
        commands.stop(name, records)
    except ClusterError as error:
        raise ClusterError(f"{name} may still be running: {error.message}", f"clusterctl stop {name}") from error
