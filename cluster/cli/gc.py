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

if TYPE_CHECKING:
    from cluster.backends.base import FoundJob


@takes_options
def gc(
    *,
    job: Annotated[str, option("--job", help="Remove what this job started, even while it runs.")] = "",
    yes: Annotated[bool, flag("Remove without asking.", "--yes", "-y")] = False,
    inventory: NodeOptions,
    as_json: AsJson = False,
) -> None:
    """Find and remove orphans: containers and processes of dead jobs.

    Without an inventory, it searches this machine. Containers are found by their label and processes by their
    environment, so no job record is needed. A job whose node script is still running is listed, but removed only with
    --job.
    """
    machines = inventory.load(complete=False) or Inventory((this_machine(),))
    backend = BACKENDS[machines.backend]
    out = console(quiet=as_json)
    failed: list[ClusterError] = []
    rows = []
    present = backend.jobs_on(machines)
    for found in present.values():
        if isinstance(found, ClusterError):
            failed.append(found)
        else:
            rows += [each for each in found if not job or each.job == job]
    for each in rows:
        state = "is running" if each.runs else "is orphaned"
        parts = ", ".join(f"{what}: {count}" for what, count in each.counts.items())
        out.print(f"{each.where}: {each.job} {state}: {parts}")
    removable = [each for each in rows if not each.runs or job]
    confirmed = bool(removable) and (yes or (not as_json and _confirm(f"remove {len(removable)} of them?")))
    removed = []
    for each in removable if confirmed else []:
        try:
            backend.remove(machines, each)
        except ClusterError as error:
            failed.append(error)
            continue
        removed.append(each)
        out.print(f"{each.where}: removed {each.job}")
    if as_json:
        print(json.dumps([_as_json(each, each in removed) for each in rows], indent=1))
    if not rows and not failed:
        out.print("no orphans on " + ", ".join(present))
    if failed:
        raise failed[0]


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError(
            "nothing was removed: gc asks first, and there is no terminal", "to remove them: clusterctl gc --yes"
        )
    return typer.confirm(question)


def _as_json(found: FoundJob, is_removed: bool) -> dict[str, object]:
    return {"node": found.where, "job": found.job, "runs": found.runs, **found.counts, "removed": is_removed}
