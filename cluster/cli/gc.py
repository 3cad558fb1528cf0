"""`clusterctl gc`: finds orphans of dead jobs on the machines, and removes them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.backends import BACKENDS
from cluster.cli.console import console
from cluster.cli.options import AsJson, NodeOptions, flag, takes_options
from cluster.errors import ClusterError, UsageError
from cluster.spec.model import Inventory, this_machine
from cluster.spec.request import option
from cluster.store import JobStore

if TYPE_CHECKING:
    from cluster.backends.base import FoundJob


@takes_options
def gc(
    *,
    job: Annotated[
        str,
        option(
            "--job",
            metavar="NAME",
            help="Remove everything that this job (a name or launch ID) has started, even while it runs.",
        ),
    ] = "",
    yes: Annotated[bool, flag("Remove without asking.", "--yes", "-y")] = False,
    inventory: NodeOptions,
    as_json: AsJson = False,
) -> None:
    """Find and remove orphans: containers and processes of dead jobs.

    Without an inventory, it searches this machine for jobs that run here. Jobs are found by the launch ID on their
    containers, processes and pods, so no job record is needed. Jobs of other backends and other users are left alone. A
    job is an orphan if no node script, queue, cluster or supervisor still has it; others are listed, but removed only
    with --job.
    """
    given = inventory.load(complete=False)
    machines = given or Inventory((this_machine(),))
    here = [local for local in BACKENDS.values() if local.machines == "here"]
    out = console(quiet=as_json)
    failed: list[ClusterError] = []
    rows: list[FoundJob] = []
    present = []
    records = JobStore()
    supervised = records.supervised()
    for backend in [BACKENDS[given.backend]] if given else here:
        for where, answer in backend.jobs_on(machines, supervised).items():
            present.append(where)
            if isinstance(answer, ClusterError):
                failed.append(answer)
            else:
                # with its name also other users' jobs, because it may be one of them that is meant
                rows += [row for row in answer if job in (row.job, row.launch_id) or (row.is_own and not job)]
    for row in rows:
        state = "is running" if row.runs else "is orphaned"
        state += "" if row.is_own else f", of user {row.user}, and left alone"
        parts = ", ".join(f"{what}: {count}" for what, count in row.counts.items())
        out.print(f"{row.where}: {row.job} {state}: {parts} (launch {row.launch_id})")
    removable = [row for row in rows if row.is_orphan or (row.is_own and job)]
    confirmed = bool(removable) and (yes or (not as_json and _confirm(f"remove {len(removable)} of them?")))
    removed = []
    for row in removable if confirmed else []:
        try:
            if job:  # others that are removed have no supervisor
                _record_the_end(row, records)
            BACKENDS[row.backend].remove(machines, row)
        except ClusterError as error:
            failed.append(error)
            continue
        removed.append(row)
        out.print(f"{row.where}: removed {row.job}")
    if as_json:
        print(json.dumps([_as_json(row, row in removed) for row in rows], indent=1))
    if not rows and not failed:
        out.print("no orphans on " + ", ".join(dict.fromkeys(present)))
    if failed:
        raise failed[0]


def _record_the_end(found: FoundJob, records: JobStore) -> None:
    """Record that a job of this machine was stopped, so that its launcher or supervisor does not restart it.

    A node reports the name and the launch ID. Both must be the record's, so that no node can end the record of another
    job than the one that was named.
    """
    for record in records:
        if (record.plan.job_id, record.job.launch_id) == (found.job, found.launch_id):
            records.end(record.plan.job_id, "stopped")


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError(
            "nothing was removed: gc asks first, but there is no terminal to ask on",
            "to remove them: clusterctl gc --yes",
        )
    return typer.confirm(question)


def _as_json(found: FoundJob, is_removed: bool) -> dict[str, object]:
    about = {"node": found.where, "job": found.job, "launch_id": found.launch_id, "backend": found.backend}
    return about | {"user": found.user, "runs": found.runs, **found.counts, "removed": is_removed}
