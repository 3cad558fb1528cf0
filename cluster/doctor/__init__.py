"""What would go wrong on the nodes, before it does: looks at every node once, tries connections and the link, judges.

What a node says is read in `probe`; what it means is decided by the functions of CHECKS, which do nothing else.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster import resources
from cluster.config import DEFAULT_IMAGE
from cluster.doctor import data as data_check
from cluster.doctor import engine, link, machine, network, peers, probe, slurm, windows
from cluster.doctor.findings import Finding, Seen, exit_code
from cluster.doctor.link import Link
from cluster.errors import ClusterError, UsageError
from cluster.fanout import each
from cluster.model import Inventory, Node
from cluster.shells import LocalShell, reach

__all__ = ["CHECKS", "Finding", "Report", "examine", "exit_code"]

#: The checks that judge what one look at each node saw, in the order of the report.
CHECKS: dict[str, Callable[[Seen], list[Finding]]] = {
    "clock": machine.clock,
    "address": network.address,
    "names": network.names,
    "runtime": engine.runtime,
    "gpus": engine.gpus,
    "image": engine.image,
    "architecture": engine.architecture,
    "shm": machine.shm,
    "limits": machine.limits,
    "disk": machine.disk,
    "run_dir": machine.run_dir,
    "user": machine.user,
    "leftovers": machine.leftovers,
    "wsl": windows.wsl,
}
#: All that can be left out, with those that need a second look; the login is none of them.
ORDER = (*CHECKS, "versions", "data", "reachable", "link")


@dataclass(frozen=True)
class Report:
    """Everything that was found: the login, then in the order of ORDER.

    `link` is None unless the link was measured.
    """

    findings: tuple[Finding, ...]
    seconds: float
    link: Link | None = None


def examine(
    inventory: Inventory,
    *,
    image: str = "",
    data: Sequence[str] = (),
    skip: Sequence[str] = (),
    port: int = 0,
    jobs: frozenset[str] = frozenset(),
    nodes: int = 2,
    gpus: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Look at all nodes and judge; `say` is told what is being done. Raises UsageError for an unknown check.

    `jobs` are those known to run: what they have on the nodes is not left over. `data` are folders of this machine.
    Nothing is changed on the nodes. Of a Slurm cluster one job looks at `nodes` nodes, and asks for `gpus` on each
    where the device is cuda.
    """
    began = time.monotonic()
    if inventory.backend == "slurm":
        _refuse_unknown(skip, slurm.ORDER)
        image = image or inventory.image
        findings = slurm.look(inventory, image=image, data=data, skip=skip, nodes=nodes, gpus=gpus, say=say)
        findings.sort(key=lambda finding: slurm.ORDER.index(finding.check))
        return Report(tuple(findings), time.monotonic() - began)
    _refuse_unknown(skip, ORDER)
    image = image or inventory.image or DEFAULT_IMAGE
    known = tuple(replace(node, runtime=node.runtime or "docker") for node in inventory.nodes)
    inventory = replace(inventory, nodes=known)
    say(f"looking at {len(inventory.nodes)} nodes")
    seen, findings = _look(inventory, image, jobs)
    for check, judge in CHECKS.items():
        if check not in skip:
            findings += judge(seen)
    able = _able(seen, findings)
    if able.nodes and "versions" not in skip:
        say("reading what the image holds")
        findings += engine.versions(_with_versions(able))
    if data and "data" not in skip:
        say(f"comparing {', '.join(data)}")
        findings += data_check.data(seen, data)
    if "reachable" not in skip:
        say("connecting every node to every other")
        findings += network.reachable(seen, *peers.dial(seen, port))
    measured = None
    if "link" not in skip and len(seen.nodes) > 1:
        say("measuring the link (torch starts on every node)")
        measured, said = _measure(seen, able, findings)
        findings += said
    findings.sort(key=lambda finding: ("login", *ORDER).index(finding.check))
    return Report(tuple(findings), time.monotonic() - began, measured)


def _refuse_unknown(skip: Sequence[str], known: Sequence[str]) -> None:
    for check in skip:
        if check not in known:
            raise UsageError(f"--skip {check!r}: there is no such check", f"one of: {', '.join(known)}")


def _look(inventory: Inventory, image: str, jobs: frozenset[str]) -> tuple[Seen, list[Finding]]:
    addresses = list(dict.fromkeys(node.address for node in inventory.nodes if node.address))

    def one(node: Node) -> tuple[probe.Facts, float]:
        facts = probe.look(node, image, addresses)
        # its own short command on the open connection: half the way there and back is all that can be wrong with it
        before = time.time()
        told = reach(node).run(["date", "+%s.%N"]).out
        after = time.time()
        try:
            return facts, float(told) - (before + after) / 2
        except ValueError:
            return facts, 0.0

    findings, facts, clock_s = [], {}, {}
    for name, result in each(inventory.nodes, one).items():
        if isinstance(result, ClusterError):
            # of "gpu-a (ann@10.0.0.5:22): ..." the name has a column of its own
            why = re.sub(r"^\((\S+)\): ", r"\1: ", result.message.removeprefix(f"{name}: ").removeprefix(f"{name} "))
            findings.append(Finding("login", name, "failure", why, result.hint or "clusterctl doctor, once more"))
        else:
            facts[name], clock_s[name] = result
            findings.append(Finding("login", name, "ok", "answers, its host key is known"))
    return Seen(
        nodes=tuple(node for node in inventory.nodes if node.name in facts),
        facts=facts,
        image=image,
        image_id=_own_image_id(image),
        device=inventory.device,
        clock_s=clock_s,
        jobs=jobs,
    ), findings


def _own_image_id(image: str) -> str:
    if not image:
        return ""
    try:
        found = LocalShell().run(["docker", "image", "inspect", "--format", "{{.Id}}", image], timeout_s=15)
    except ClusterError:
        return ""
    return found.out.strip() if found.code == 0 else ""


def _able(seen: Seen, findings: Sequence[Finding]) -> Seen:
    """The nodes that can start the image: what the second look needs."""
    in_the_way = {
        finding.node
        for finding in findings
        if finding.level == "failure" and finding.check in ("runtime", "image", "architecture")
    }
    nodes = (node for node in seen.nodes if node.name not in in_the_way and (seen.image or node.runtime == "none"))
    return replace(seen, nodes=tuple(nodes))


def _with_versions(able: Seen) -> Seen:
    node = able.nodes[0]
    if node.runtime == "none":
        return replace(able, versions=able.facts[node.name])
    program = resources.text("doctor/versions.py")
    argv = [node.runtime, "run", "--rm", "--entrypoint", "python3", able.image, "-c", program]
    try:
        told = reach(node).run(argv, timeout_s=30)
    except ClusterError:
        return able
    return replace(able, versions=probe.parse(told.out)) if told.code == 0 else able


def _measure(seen: Seen, able: Seen, findings: Sequence[Finding]) -> tuple[Link | None, list[Finding]]:
    wrong = {f.node for f in findings if f.level == "failure" and f.check in ("address", "names", "reachable")}
    names = [node.name for node in seen.nodes if node not in able.nodes or node.name in wrong]
    if not names:
        return link.measure(able, able.image)
    why = "not measured: see above"
    return None, [Finding("link", " ".join(names), "warning", why, "mend those first, then: clusterctl doctor")]
