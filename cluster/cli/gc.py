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
            help="Remove what this job, by its name or launch ID, started, even while it runs.",
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
    here = [each for each in BACKENDS.values() if each.machines == "here"]
    out = console(quiet=as_json)
    failed: list[ClusterError] = []
    rows: list[FoundJob] = []
    present = []
    supervised = JobStore().supervised()
    for backend in [BACKENDS[given.backend]] if given else here:
        for where, found in backend.jobs_on(machines, supervised).items():
            present.append(where)
            if isinstance(found, ClusterError):
                failed.append(found)
            else:
                # with its name also other users' jobs, because it may be one of them that is meant
                rows += [
                    each for each in found if job in (each.job, each.launch_id) or (each.is_own and not job)
                ]
    for each in rows:
        state = "is running" if each.runs else "is orphaned"
        state += "" if each.is_own else f", of user {each.user}, and left alone"
        parts = ", ".join(f"{what}: {count}" for what, count in each.counts.items())
        out.print(f"{each.where}: {each.job} {state}: {parts} (launch {each.launch_id})")
    removable = [each for each in rows if each.is_orphan or (each.is_own and job)]
    confirmed = bool(removable) and (yes or (not as_json and _confirm(f"remove {len(removable)} of them?")))
    removed = []
    for each in removable if confirmed else []:
        try:
            BACKENDS[each.backend].remove(machines, each)
        except ClusterError as error:
            failed.append(error)
            continue
        removed.append(each)
        out.print(f"{each.where}: removed {each.job}")
    if as_json:
        print(json.dumps([_as_json(each, each in removed) for each in rows], indent=1))
    if not rows and not failed:
        out.print("no orphans on " + ", ".join(dict.fromkeys(present)))
    if failed:
        raise failed[0]


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError(
            "nothing was removed: gc asks first, and there is no terminal",
            "to remove them: clusterctl gc --yes",
        )
    return typer.confirm(question)


def _as_json(found: FoundJob, is_removed: bool) -> dict[str, object]:
    about = {"node": found.where, "job": found.job, "launch_id": found.launch_id, "backend": found.backend}
    return about | {"user": found.user, "runs": found.runs, **found.counts, "removed": is_removed}
