"""`clusterctl gc`: finds orphans of dead jobs on the machines, and removes them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from cluster.cli.options import AsJson, NodeOptions, takes_options
from cluster.errors import ClusterError
from cluster.spec.request import option


@takes_options
def gc(
    *,
    job: Annotated[str, option("--job", help="Only this job, even while it runs.")] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    inventory: NodeOptions,
    as_json: AsJson = False,
) -> None:
    """Find and remove orphans: containers and processes of dead jobs.

    Without an inventory it searches this machine.
    It finds containers by their label and processes by their environment, so it needs no record of the job.
    It lists a job whose node script still runs, but removes it only with --job.
    """
    from rich.console import Console

    from cluster.backends import orphans
    from cluster.spec.model import Node

    machines = inventory.load(complete=False)
    nodes = machines.nodes if machines else (Node("this machine", "127.0.0.1"),)
    out = Console(highlight=False, quiet=as_json)
    found = orphans.find(nodes)
    failed = [each for each in found.values() if isinstance(each, ClusterError)]
    rows = []
    for node in nodes:
        present = found[node.name]
        if not isinstance(present, ClusterError):
            rows += [(node, each) for each in present if not job or each.job == job]
    for _, each in rows:
        state = "is running" if each.runs else "is orphaned"
        parts = f"processes: {each.processes}, containers: {each.containers}"
        out.print(f"{each.node}: {each.job} {state}: {parts}", markup=False)
    removable = [(node, each) for node, each in rows if not each.runs or job]
    confirmed = bool(removable) and (yes or (not as_json and typer.confirm(f"remove {len(removable)} of them?")))
    removed = []
    for node, each in removable if confirmed else []:
        try:
            orphans.remove(node, each.job)
        except ClusterError as error:
            failed.append(error)
            continue
        removed.append(each)
        out.print(f"{each.node}: removed {each.job}", markup=False)
    if as_json:
        print(json.dumps([{**asdict(each), "removed": each in removed} for _, each in rows], indent=1))
    if not rows and not failed:
        out.print("no orphans on " + ", ".join(node.name for node in nodes), markup=False)
    if failed:
        raise failed[0]
