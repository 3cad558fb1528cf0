"""Diagnosis of the nodes before a launch: `probe.sh` collects facts, and the pure functions of CHECKS judge them."""

import importlib
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from cluster.agent import scripts
from cluster.backends import BACKENDS
from cluster.checks import engine, machine, network
from cluster.checks.findings import (
    PROLOGUE_FAILED,
    TIMEOUT_S,
    Check,
    Facts,
    Finding,
    NodeFacts,
    Say,
    exit_code,
    judge,
    parse,
    with_note,
)
from cluster.doctor import here, orphans
from cluster.errors import ClusterError, UnreachableError, UsageError, near_or_all
from cluster.runtimes import DOCKER
from cluster.spec.counts import counted
from cluster.spec.image import DEFAULT_IMAGE
from cluster.spec.model import Inventory, Job, Machine, Queue
from cluster.spec.port import auto_port
from cluster.transport import LocalShell, reach
from cluster.transport.parallel import each

__all__ = ["CHECKS", "Finding", "Report", "examine", "exit_code"]

#: The checks that need only the facts of the probe, in the order of the report.
CHECKS: dict[str, Check] = {
    "clock": machine.clock,
    "address": network.address,
    "names": network.names,
    "runtime": engine.runtime,
    "gpus": engine.gpus,
    "image": engine.image,
    "architecture": engine.architecture,
    "versions": engine.versions,
    "shm": machine.shm,
    "limits": machine.limits,
    "disk": machine.disk,
    "run_dir": machine.run_dir,
    "user": machine.user,
    "wsl": machine.wsl,
}
#: All checks in the order of the report. --skip accepts all except the login.
ORDER = ("login", "here", *CHECKS, "orphans", "data", "reachable", "link")
#: The checks of a cluster of which no machine is known.
_LAUNCH = ("login", "here", "launch", "orphans")
#: The all-reduce is not tried if one of these checks fails.
_NEEDED_FOR_LINK = ("address", "names", "runtime", "image", "architecture", "versions", "reachable")


@dataclass(frozen=True)
class Report:
    """Findings of all checks on `nodes`, in the order of the checks."""

    findings: tuple[Finding, ...]
    nodes: tuple[str, ...]
    seconds: float


def examine(
    inventory: Inventory,
    *,
    image: str = "",
    data: Sequence[str] = (),
    skip: Sequence[str] = (),
    supervised: frozenset[str] = frozenset(),
    nodes: int = 2,
    gpus: int = 1,
    say: Say = lambda text: None,
) -> Report:
    """Run all checks on the inventory's nodes, except those in `skip`, and return the report. No node is changed.

    `data` are folders of this machine that must be the same on every node. `supervised` are the launch IDs of jobs that
    a launcher here follows, so that they are no orphans. On Slurm one short job checks `nodes` nodes, with `gpus` GPUs
    each if the device is cuda. `say` receives one line of progress per step. Raises UsageError for an unknown check or
    a missing folder.
    """
    start = time.monotonic()
    own = BACKENDS[inventory.backend].doctor
    scheduler: Any = importlib.import_module(own) if own else None
    order = scheduler.ORDER if scheduler else _LAUNCH if inventory.is_assigned else ORDER
    for check in skip:
        if check not in order[1:]:
            raise UsageError(f"--skip {check}: unknown check", near_or_all(check, order[1:]))
    data = () if "data" in skip else data
    image = image or inventory.image
    names = tuple(node.name for node in inventory.machines)
    if scheduler:
        findings = scheduler.examine(inventory, image, data, nodes, gpus, say)
        names = (
            tuple(dict.fromkeys(each.node for each in findings if each.check in scheduler.CHECKS)) or names
        )
    elif inventory.is_assigned:
        if data:
            raise UsageError(
                "--data: pods get their files when a job starts, so none can be compared", "omit it"
            )
        say("checking the cluster")
        findings = _examine_launch(inventory, image or DEFAULT_IMAGE, nodes, gpus)
    else:
        findings = _examine_machines(inventory, image or DEFAULT_IMAGE, data, skip, say)
    if "here" not in skip:
        findings += here.examine(inventory)
    if "orphans" not in skip:
        say("looking for orphans")
        silent = [finding.node for finding in findings if finding.is_silent]
        findings += orphans.examine(inventory, supervised, silent)
    findings = [finding for finding in findings if finding.check not in skip]
    findings.sort(key=lambda finding: order.index(finding.check))
    return Report(tuple(findings), names, time.monotonic() - start)


def _examine_launch(inventory: Inventory, image: str, nodes: int, gpus: int) -> list[Finding]:
    """Return the findings of the preflight check of a job on a cluster, of which no machine is known."""
    backend = BACKENDS[inventory.backend]
    where = inventory.backend
    queue = Queue(inventory.machines[0], inventory.settings)
    job = Job("doctor", ("true",), nodes, gpus, "/", image=image, device=inventory.device, queue=queue)
    try:
        backend.check(job, backend.plan(job, attempt=1, port=auto_port(job.name)))
        notes = backend.notes(job)
    except UnreachableError as error:
        return [Finding("login", where, "failure", error.message, error.hint or "clusterctl doctor")]
    except ClusterError as error:
        why = [line.strip() for line in error.message.splitlines()]
        fixes = [line.strip() for line in error.hint.splitlines()]
        # one hint for all problems, or one for each
        each = fixes if len(fixes) == len(why) else ["; ".join(fixes)] * len(why)
        return [Finding("launch", where, "failure", *pair) for pair in zip(why, each, strict=True)]
    with_gpus = "" if inventory.device == "cpu" else f" with {counted(gpus, 'GPU')} each"
    found = [
        Finding("launch", where, "ok", f"a job on {counted(nodes, 'node')}{with_gpus} would be accepted")
    ]
    return found + [Finding("launch", where, "warning", note) for note in notes]


def _examine_machines(
    inventory: Inventory, image: str, data: Sequence[str], skip: Sequence[str], say: Say
) -> list[Finding]:
    known = tuple(replace(node, runtime=node.runtime or DOCKER.name) for node in inventory.machines)
    say(f"probing {counted(len(known), 'node')}")
    seen, findings = _probe_all(replace(inventory, machines=known), image)
    findings += judge({name: check for name, check in CHECKS.items() if name not in skip}, seen)
    if data:
        say(f"comparing {', '.join(data)}")
        findings += machine.data(seen.nodes, data)
    if "reachable" not in skip and len(seen.nodes) > 1:
        say("testing connections between all nodes")
        findings += network.reachable(seen)
    if "link" in skip or len(seen.nodes) < 2:
        return findings
    failed = dict.fromkeys(f.node for f in findings if f.level == "failure" and f.check in _NEEDED_FOR_LINK)
    if failed:
        why = "not measured because of the failures above"
        fix = "fix them first, then: clusterctl doctor"
        return [*findings, Finding("link", " ".join(failed), "warning", why, fix)]
    say("measuring the link (torch starts on every node)")
    return findings + network.measure_link(seen)


def _probe_all(inventory: Inventory, image: str) -> tuple[NodeFacts, list[Finding]]:
    addresses = list(dict.fromkeys(node.address for node in inventory.machines if node.address))
    image_id = ""
    with suppress(ClusterError):  # this machine may have no docker
        inspected = LocalShell().run(
            [DOCKER.name, "image", "inspect", "--format", "{{.Id}}", image], timeout_s=15
        )
        image_id = "" if inspected.code else inspected.out.strip()
    findings = []
    facts = {}
    clock_s = {}
    results = each(inventory.machines, lambda node: _probe(node, image, addresses, inventory.prologue))
    for node in inventory.machines:
        name = node.name
        result = results[node.name]
        if isinstance(result, ClusterError):
            why = result.message.removeprefix(f"{name}: ")
            findings.append(Finding("login", name, "failure", why, result.hint or "clusterctl doctor"))
        else:
            facts[name], clock_s[name] = result
            findings.append(
                Finding("login", name, "ok", with_note("reachable, host key known", reach(node).note))
            )
    nodes = tuple(node for node in inventory.machines if node.name in facts)
    seen = NodeFacts(
        nodes, facts, image, image_id, inventory.device, clock_s, inventory.backend, inventory.prologue
    )
    return seen, findings


def _probe(node: Machine, image: str, addresses: Sequence[str], prologue: str) -> tuple[Facts, float]:
    """Return the node's facts, and its clock minus this machine's in seconds. Raise ClusterError."""
    bash, option, text, *words = scripts.bash(
        "checks/probe.sh", *addresses, **engine.probe_values(node, image)
    )
    text = scripts.prologue(prologue, PROLOGUE_FAILED) + text
    done = reach(node).run([bash, option, text, *words], timeout_s=TIMEOUT_S)
    facts = parse(done.out)
    if why := facts.text("prologue"):
        raise ClusterError(f"{node.name}: {why}", "correct prologue in cluster.yaml")
    if "end" not in facts.every("probe"):
        hint = f'ssh {node.login} "bash --version"'
        raise UnreachableError(f"{node.name}: commands do not run there: {done.last_line}", hint)
    # A short command on the open connection limits the error to half its round trip.
    before = time.time()
    remote = reach(node).run(["date", "+%s.%N"]).out
    after = time.time()
    return facts, float(remote) - (before + after) / 2
