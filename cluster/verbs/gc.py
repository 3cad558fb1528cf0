"""`clusterctl gc`: finds what jobs have left on the machines, and removes it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from cluster.errors import ClusterError
from cluster.verbs.options import AsJson, NodeOptions, option, takes_options


@takes_options
def gc(
    *,
    job: Annotated[str, option("--job", help="Only this job; also while it runs.")] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    inventory: NodeOptions,
    as_json: AsJson = False,
) -> None:
    """Find what jobs have left on this machine, or on those of an inventory, and remove it.

    No record is needed: containers are found by their label, processes by their environment. A job whose node script
    still runs is listed and left alone; end it with `clusterctl stop`, or here with --job.
    """
    from rich.console import Console

    from cluster import leftovers
    from cluster.model import Node

    machines = inventory.load(complete=False)
    nodes = machines.nodes if machines else (Node("this machine", "127.0.0.1"),)
    out = Console(highlight=False)
    found = leftovers.look(nodes)
    failed = [each for each in found.values() if isinstance(each, ClusterError)]
    rows = []
    for node in nodes:
        present = found[node.name]
        if not isinstance(present, ClusterError):
            rows += [(node, each) for each in present if not job or each.job == job]
    for _, each in rows if not as_json else []:
        state = "runs" if each.runs else "is left over"
        parts = [
            f"{count} {kind}"
            for count, kind in ((each.processes, "processes"), (each.containers, "containers"))
            if count
        ]
        out.print(f"{each.node}: {each.job} {state}: {', '.join(parts) or 'its script'}", markup=False)
    mine = [(node, each) for node, each in rows if not each.runs or job]
    removes = bool(mine) and (yes or (not as_json and typer.confirm(f"remove {len(mine)} of them?")))
    gone = []
    for node, each in mine if removes else []:
        try:
            leftovers.remove(node, each.job)
        except ClusterError as error:
            failed.append(error)
            continue
        gone.append(each)
        if not as_json:
            out.print(f"{each.node}: removed {each.job}", markup=False)
    if as_json:
        print(json.dumps([{**asdict(each), "removed": each in gone} for _, each in rows], indent=1))
    elif not rows and not failed:
        out.print("nothing of any job is on " + ", ".join(node.name for node in nodes), markup=False)
    if failed:
        raise failed[0]
