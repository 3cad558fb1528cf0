"""`clusterctl gc`: finds orphans of dead jobs on the machines, and removes them."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from cluster.agent import scripts
from cluster.cli.follow import console
from cluster.cli.options import AsJson, NodeOptions, flag, takes_options
from cluster.errors import ClusterError, UnreachableError
from cluster.runtimes import ENGINES
from cluster.spec.model import Node
from cluster.spec.request import option


@dataclass(frozen=True)
class Orphan:
    """A job on one machine; `runs` while its node script runs, so that it is no orphan."""

    node: str
    job: str
    runs: bool
    processes: int
    containers: int


@takes_options
def gc(
    *,
    job: Annotated[str, option("--job", help="Only this job, even while it runs.")] = "",
    yes: Annotated[bool, flag("Remove without asking.", "--yes", "-y")] = False,
    inventory: NodeOptions,
    as_json: AsJson = False,
) -> None:
    """Find and remove orphans: containers and processes of dead jobs.

    Without an inventory it searches this machine.
    It finds containers by their label and processes by their environment, so it needs no record of the job.
    It lists a job whose node script still runs, but removes it only with --job.
    """
    from cluster.backends import monitor
    from cluster.transport import parallel

    machines = inventory.load(complete=False)
    nodes = machines.nodes if machines else (Node("this machine", "127.0.0.1"),)
    out = console(quiet=as_json)
    found = parallel.each(nodes, _orphans)
    failed: list[ClusterError] = []
    rows = []
    for node in nodes:
        present = found[node.name]
        if isinstance(present, ClusterError):
            failed.append(present)
        else:
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
            monitor.stop(node, each.job, 0, tuple(ENGINES), timeout_s=60)
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


def _orphans(node: Node) -> list[Orphan]:
    """Return the jobs with a process or container on a machine, found without records."""
    from cluster.transport import reach

    done = reach(node).run(scripts.command("orphans", *ENGINES), timeout_s=60)
    if done.code:
        raise UnreachableError(f"{node.display_name}: {done.last_line}")
    kinds: dict[str, list[str]] = {}
    for line in done.out.splitlines():
        kind, job, _ = line.split(" ", 2)
        kinds.setdefault(job, []).append(kind)
    return [
        Orphan(node.display_name, job, "script" in found, found.count("process"), found.count("container"))
        for job, found in sorted(kinds.items())
    ]
