"""`clusterctl doctor`: a line per check, a command to type with every failure."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.errors import ClusterError, UsageError
from cluster.verbs.options import AsJson, NodeOptions, SlurmOptions, option, takes_options

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.doctor import Finding, Report
    from cluster.model import Inventory

_SIGNS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "failure": ("FAIL", "bold red")}


@takes_options
def doctor(
    *,
    inventory: NodeOptions,
    image: Annotated[str, option("--image", help="The image that a job will use; by default the inventory's.")] = "",
    data: Annotated[
        list[str],
        typer.Option("--data", metavar="FOLDER", help="A folder that must be the same everywhere; repeatable."),
    ] = [],  # noqa: B006 (typer reads the default and never changes it)
    skip: Annotated[
        list[str],
        typer.Option(
            "--skip", metavar="CHECK", help="Leave out a check, as the second column names it: --skip link; repeatable."
        ),
    ] = [],  # noqa: B006 (typer reads the default and never changes it)
    port: Annotated[int, option("--master-port", help="Try this port too, beside a random one.")] = 0,
    nodes: Annotated[int, option("--nodes", help="Slurm: look at so many nodes in one job; 2 by default.")] = 0,
    gpus: Annotated[int, option("--gpus", help="Slurm: GPUs to ask for on each node; 1 by default.")] = 0,
    slurm: SlurmOptions,
    as_json: AsJson = False,
) -> None:
    """Say what would go wrong on the nodes, before it does.

    Looks at every node, tries a connection from each to each, measures how fast they sum gradients. Changes nothing.
    On a Slurm cluster: looks at the login node, then, in one short job, at nodes that Slurm gives.

    Exit codes: 0 nothing would stop a launch, 3 something would, 5 a node cannot be reached.
    """
    from rich.console import Console

    from cluster import discovery
    from cluster import doctor as checks
    from cluster.records import Records

    for flag, count in (("--nodes", nodes), ("--gpus", gpus)):
        if count < 0:
            raise UsageError(f"{flag} {count}: must be more than 0")
    machines = inventory.need(complete=False)
    for_sbatch = slurm.for_sbatch()
    if machines.backend == "slurm":
        _refuse({"--master-port": port}, "doctor tests no ports on a Slurm cluster", "leave it out")
        machines = _with_options(machines, for_sbatch)
    else:
        _refuse({"--nodes": nodes, "--gpus": gpus, "--slurm": for_sbatch}, "only for a Slurm cluster", "--only a,b")
    with suppress(ClusterError):  # what keeps a machine from answering is what the checks are for
        machines = discovery.complete(machines)
    running: frozenset[str] = frozenset()
    with suppress(ClusterError):  # a record that cannot be read is no fault of the machines
        running = frozenset(record.plan.job_id for record in Records() if not record.outcome)
    waiting = Console(stderr=True)
    with waiting.status("looking") if waiting.is_terminal else nullcontext() as shown:
        report = _interruptible(
            lambda say: checks.examine(
                machines,
                image=image,
                data=data,
                skip=skip,
                port=port,
                jobs=running,
                nodes=nodes or 2,
                gpus=gpus or 1,
                say=say,
            ),
            shown.update if shown is not None else lambda text: None,
        )
    if as_json:
        print(json.dumps({"exit_code": checks.exit_code(report.findings), **asdict(report)}, indent=1))
    else:
        names = [node.name for node in machines.nodes]
        if machines.backend == "slurm":
            by_slurm = (each.node for each in report.findings if each.check not in checks.slurm.ON_LOGIN)
            names = list(dict.fromkeys(by_slurm)) or names
        _print(report, Console(highlight=False), names)
    raise typer.Exit(checks.exit_code(report.findings))


def _refuse(given: Mapping[str, object], why: str, hint: str) -> None:
    for flag, value in given.items():
        if value:
            raise UsageError(f"{flag}: {why}", hint)


def _with_options(machines: Inventory, texts: Sequence[str]) -> Inventory:
    from cluster import slurm

    typed = [text.partition("=") for text in texts]
    given = {name.removeprefix("--"): value for name, _, value in typed}
    return replace(machines, options=slurm.checked({**machines.options, **given}))


def _interruptible(work: Callable[[Callable[[str], None]], Report], show: Callable[[str], None]) -> Report:
    """What `work` returns; Ctrl-C ends what runs on the nodes, waits for that, and goes on as KeyboardInterrupt."""
    from cluster.shells import close_all

    stopped = threading.Event()

    def say(text: str) -> None:
        if stopped.is_set():
            raise ClusterError("interrupted")
        show(text)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work, say)
        try:
            return running.result()
        except KeyboardInterrupt:
            stopped.set()
            close_all()  # a command that somebody waits for ends with its connection
            raise


def _print(report: Report, out: Console, names: Sequence[str]) -> None:
    lines = [(_who(nodes, names), finding) for nodes, finding in _grouped(report.findings)]
    wide = max((len(who) for who, _ in lines), default=0)
    broad = max((len(finding.check) for _, finding in lines), default=0)
    for who, finding in lines:
        sign, style = _SIGNS[finding.level]
        out.print(f"{sign:<5}", style=style, end="")
        _say(out, f"{finding.check:<{broad}}  {who:<{wide}}  {finding.detail}")
        if finding.fix:
            _say(out, f"{'':5}{'':{broad}}  fix: {finding.fix}")
    counts = {level: sum(finding.level == level for finding in report.findings) for level in _SIGNS}
    verdict = "nothing would stop a launch" if not counts["failure"] else f"{counts['failure']} would stop a launch"
    warned = f", {counts['warning']} to know" if counts["warning"] else ""
    _say(out, f"\n{verdict}{warned}   ({len(names)} nodes, {report.seconds:.1f} s)")


def _grouped(findings: Sequence[Finding]) -> list[tuple[list[str], Finding]]:
    """Findings that say the same in one line, in their order."""
    groups: dict[tuple[str, str, str, str], tuple[list[str], Finding]] = {}
    for finding in findings:
        key = (finding.check, finding.level, finding.detail, finding.fix)
        groups.setdefault(key, ([], finding))[0].append(finding.node)
    return list(groups.values())


def _who(nodes: Sequence[str], names: Sequence[str]) -> str:
    return "all" if len(nodes) == len(names) > 1 else " ".join(nodes)


def _say(out: Console, text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)
