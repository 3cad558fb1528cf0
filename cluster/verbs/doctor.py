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
from cluster.verbs import options
from cluster.verbs.options import AsJson, Hostfile, Hosts, InventoryFile, Only, SshConfig, needed_inventory

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.doctor import Finding, Report
    from cluster.model import Inventory

_SIGNS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "failure": ("FAIL", "bold red")}


def doctor(
    inventory: InventoryFile = "",
    hosts: Hosts = "",
    hostfile: Hostfile = "",
    ssh_config: SshConfig = "",
    only: Only = "",
    image: Annotated[
        str,
        typer.Option("--image", help="The image that a job will use; by default the inventory's.", show_default=False),
    ] = "",
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
    port: Annotated[
        int, typer.Option("--master-port", help="Try this port too, beside a random one.", show_default=False)
    ] = 0,
    model: Annotated[str, typer.Option("--model", help="Forecast for: yolov5n, s, m, l or x.")] = "yolov5s",
    step_ms: Annotated[
        float,
        typer.Option(
            "--step-time", metavar="MS", help="Milliseconds of a training step on one node.", show_default=False
        ),
    ] = 0.0,
    job: Annotated[
        str, typer.Option("--job", help="Take the step's time from what this job reported.", show_default=False)
    ] = "",
    nodes: Annotated[
        int, typer.Option("--nodes", help="Slurm: look at so many nodes in one job; 2 by default.", show_default=False)
    ] = 0,
    gpus: Annotated[
        int, typer.Option("--gpus", help="Slurm: GPUs to ask for on each node; 1 by default.", show_default=False)
    ] = 0,
    partition: options.Partition = "",
    account: options.Account = "",
    qos: options.Qos = "",
    time_limit: options.Time = "",
    slurm: options.Slurm = [],  # noqa: B006
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

    if step_ms < 0:
        raise UsageError(f"--step-time {step_ms:g}: must be more than 0 milliseconds")
    for option, count in (("--nodes", nodes), ("--gpus", gpus)):
        if count < 0:
            raise UsageError(f"{option} {count}: must be more than 0")
    if job and step_ms:
        raise UsageError("--job and --step-time both tell the time of a step", "leave one out")
    step_s = _measured(job) if job else step_ms / 1000 or None
    machines = needed_inventory(inventory, hosts, hostfile, ssh_config, only, complete=False)
    for_sbatch = options.for_sbatch(partition, account, qos, time_limit, slurm)
    if machines.backend == "slurm":
        only_ssh = {"--master-port": port, "--step-time": step_ms, "--job": job, "--model": model != "yolov5s"}
        _refuse(only_ssh, "the link is not measured on a Slurm cluster", "leave it out")
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
                model=model,
                step_s=step_s,
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
        _print(report, Console(highlight=False), names, model)
    raise typer.Exit(checks.exit_code(report.findings))


def _refuse(given: Mapping[str, object], why: str, hint: str) -> None:
    for option, value in given.items():
        if value:
            raise UsageError(f"{option}: {why}", hint)


def _with_options(machines: Inventory, texts: Sequence[str]) -> Inventory:
    from cluster import sbatch

    typed = [text.partition("=") for text in texts]
    given = {name.removeprefix("--"): value for name, _, value in typed}
    return replace(machines, options=sbatch.checked({**machines.options, **given}))


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


def _measured(job: str) -> float:
    from cluster import logs
    from cluster.doctor.forecast import step_s
    from cluster.records import Records

    plan = Records().load(job).plan
    first = plan.nodes[0].name
    lines = logs.read(plan, {first: 0})[first].decode(errors="replace").splitlines()
    found = step_s([event for line in lines if (event := logs.event(line)) is not None])
    if found is None:
        raise UsageError(f"--job {job}: it has not reported steps", "give the time of a step: --step-time 500")
    return found


def _print(report: Report, out: Console, names: Sequence[str], model: str) -> None:
    lines = [(_who(nodes, names), finding) for nodes, finding in _grouped(report.findings)]
    wide = max((len(who) for who, _ in lines), default=0)
    broad = max((len(finding.check) for _, finding in lines), default=0)
    for who, finding in lines:
        sign, style = _SIGNS[finding.level]
        out.print(f"{sign:<5}", style=style, end="")
        _say(out, f"{finding.check:<{broad}}  {who:<{wide}}  {finding.detail}")
        if finding.fix:
            _say(out, f"{'':5}{'':{broad}}  fix: {finding.fix}")
    _print_forecasts(report, out, model)
    counts = {level: sum(finding.level == level for finding in report.findings) for level in _SIGNS}
    verdict = "nothing would stop a launch" if not counts["failure"] else f"{counts['failure']} would stop a launch"
    warned = f", {counts['warning']} to know" if counts["warning"] else ""
    _say(out, f"\n{verdict}{warned}   ({len(names)} nodes, {report.seconds:.1f} s)")


def _print_forecasts(report: Report, out: Console, model: str) -> None:
    if report.link is None:
        return
    by_nodes: dict[int, list[str]] = {}
    for forecast in report.forecasts:
        text = f"{forecast.all_reduce_s * 1000:.0f} ms"
        if forecast.worst is not None and forecast.best is not None:
            text += f", {forecast.worst:.0%} to {forecast.best:.0%}"
        by_nodes.setdefault(forecast.nodes, []).append(text)
    step = f"a step of {report.step_s * 1000:.0f} ms" if report.step_s else "a step"
    _say(out, f"\n{model}'s sums in {step} on this link, and the share of N nodes' speed that they leave")
    _say(out, f"  {'nodes':<7}{'fp32':<24}bf16")
    for nodes, (plain, compressed) in by_nodes.items():
        _say(out, f"  {nodes:<7}{plain:<24}{compressed}")
    if all(forecast.worst is None for forecast in report.forecasts):
        _say(out, "  (the share needs --step-time MS, a step's time on one node; bf16: train --grad-compress bf16)")


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
