"""`clusterctl doctor`: checks the nodes before a launch, and prints a fix for each failure."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.backends import BACKENDS
from cluster.cli.console import console, print_line
from cluster.cli.options import AsJson, NodeOptions, takes_options
from cluster.errors import ClusterError, UsageError
from cluster.spec.counts import counted
from cluster.spec.request import BackendOptions, option
from cluster.store import JobStore

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.doctor import Finding, Report

_SIGNS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "failure": ("FAIL", "bold red")}


@takes_options
def doctor(
    *,
    inventory: NodeOptions,
    image: Annotated[
        str, option(metavar="IMAGE", help="Container image to check.  [default: the inventory's]")
    ] = "",
    data: Annotated[
        list[str],
        typer.Option(metavar="FOLDER", help="Folder that must be the same on all nodes. Repeatable."),
    ] = [],  # noqa: B006 (typer reads the default and never changes it)
    skip: Annotated[
        list[str],
        typer.Option(
            metavar="CHECK", help="Name of a check to skip, as in the second column: --skip link. Repeatable."
        ),
    ] = [],  # noqa: B006 (typer reads the default and never changes it)
    nodes: Annotated[
        int | None, option(min=1, metavar="N", help="Slurm: nodes to check in one job.  [default: 2]")
    ] = None,
    gpus: Annotated[
        int | None, option(min=1, metavar="N", help="Slurm: GPUs to request per node.  [default: 1]")
    ] = None,
    settings: BackendOptions,
    as_json: AsJson = False,
) -> None:
    """Check whether a launch would succeed on the nodes.

    It checks every node, connects each node to every other one, and measures the speed of an all-reduce. Nothing is
    changed. On a Slurm cluster, it checks the login node and submits one short job that checks other nodes.

    Exit codes: 0 a launch would succeed, 3 a check failed, 5 a node cannot be reached.
    """
    from cluster import doctor as checks
    from cluster.transport import discovery
    from cluster.transport.interruption import refuse_interrupted
    from cluster.transport.process import interruptible

    machines = inventory.need(complete=False)
    given = settings.given_settings(machines.backend, BACKENDS)
    if machines.is_assigned:
        changed = BACKENDS[machines.backend].settings(machines.settings, given)
        machines = replace(machines, settings=changed)
    else:
        for flag, value in {"--nodes": nodes, "--gpus": gpus, "--set": given}.items():
            if value:
                raise UsageError(f"{flag}: only where a scheduler chooses the nodes", "--only a,b")
        with suppress(ClusterError):  # the checks report why a machine does not answer
            machines = discovery.complete(machines)
    supervised = JobStore().supervised()
    with console(stderr=True).status("checking") as status:

        def say(text: str) -> None:
            refuse_interrupted()
            status.update(text)

        chosen: dict[str, Any] = {
            "image": image,
            "data": data,
            "skip": skip,
            "nodes": nodes or 2,
            "gpus": gpus or 1,
        }
        report = interruptible(lambda: checks.examine(machines, **chosen, supervised=supervised, say=say))
    if as_json:
        print(json.dumps({"exit_code": checks.exit_code(report.findings), **asdict(report)}, indent=1))
    else:
        _print(report, console())
    raise typer.Exit(checks.exit_code(report.findings))


def _print(report: Report, out: Console) -> None:
    groups: dict[Finding, list[str]] = {}  # equal findings of several nodes are one line
    for finding in report.findings:
        groups.setdefault(replace(finding, node=""), []).append(finding.node)
    everywhere = len(report.nodes)
    lines = [
        ("all" if len(nodes) == everywhere > 1 else " ".join(nodes), finding)
        for finding, nodes in groups.items()
    ]
    node_width = max((len(nodes) for nodes, _ in lines), default=0)
    check_width = max((len(finding.check) for _, finding in lines), default=0)
    for nodes, finding in lines:
        sign, style = _SIGNS[finding.level]
        out.print(f"{sign:<5}", style=style, end="")
        print_line(out, f"{finding.check:<{check_width}}  {nodes:<{node_width}}  {finding.detail}")
        if finding.fix:
            print_line(out, f"{'':5}{'':{check_width}}  fix: {finding.fix}")
    counts = {level: sum(finding.level == level for finding in report.findings) for level in _SIGNS}
    verdict = "ready to launch" if not counts["failure"] else f"{counts['failure']} would stop a launch"
    warnings = f", {counted(counts['warning'], 'warning')}" if counts["warning"] else ""
    print_line(out, f"\n{verdict}{warnings}   ({counted(everywhere, 'node')}, {report.seconds:.1f} s)")
