"""Measurement of the link: latency and bandwidth of an all-reduce between all nodes, inside the container image."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from cluster import contract
from cluster.agent import scripts
from cluster.doctor.findings import Finding, NodeFacts, typed_on
from cluster.doctor.network import device_of
from cluster.errors import ClusterError, UnreachableError
from cluster.runtimes import ENGINES
from cluster.spec.model import Node
from cluster.transport import reach
from cluster.transport.parallel import each

#: torch gives up after 30 s.
TIMEOUT_S = 45.0


def measure(seen: NodeFacts) -> list[Finding]:
    """Measure latency and bandwidth of the link between all nodes."""
    name = f"doctor-{secrets.token_hex(4)}"
    port = 20000 + secrets.randbelow(10000)
    master = seen.nodes[0]
    gpus = seen.device == "cuda" and all(node.gpus for node in seen.nodes)
    where = f"[{master.address}]:{port}" if ":" in master.address else f"{master.address}:{port}"
    backend = "nccl" if gpus else "gloo"
    ranks = {node.name: str(rank) for rank, node in enumerate(seen.nodes)}

    def run(node: Node) -> str:
        program = _python_command(node, seen, name, gpus=gpus)
        argv = [*program, "-", ranks[node.name], str(len(ranks)), where, backend]
        try:
            done = reach(node).run(argv, stdin=scripts.text("doctor/all_reduce.py"), timeout_s=TIMEOUT_S)
        except UnreachableError:
            if node.runtime != "none":
                reach(node).run([node.runtime, "rm", "-f", name])
            raise
        if done.code:
            stage = "joined, but the all-reduce failed: " if "joined" in done.out.split() else ""
            raise ClusterError(f"{node.name}: {stage}{done.last_line}")
        return done.out

    return judge(seen, each(seen.nodes, run), backend)


def judge(seen: NodeFacts, outputs: Mapping[str, str | ClusterError], backend: str) -> list[Finding]:
    """Return the findings from the output or the error of every node's process."""
    failures = []
    for node in seen.nodes:
        if isinstance(output := outputs[node.name], ClusterError):
            why = output.message.removeprefix(f"{node.name}: ")
            fix = f"open every port between the nodes; see: {typed_on(node, None, 'iptables -S', root=True)}"
            failures.append(Finding("link", node.name, "failure", why, fix))
    if failures:
        return failures
    lines = str(outputs[seen.nodes[0].name]).splitlines()
    (_, latency_s), (size, large_s) = (map(float, line.split()[1:]) for line in lines if line.startswith("sum "))
    nodes = len(seen.nodes)
    # The bus bandwidth by the formula of nccl-tests: the rate over one node's link, for any number of nodes.
    bytes_per_s = size * 2 * (nodes - 1) / nodes / large_s
    speed = f"{bytes_per_s / 1e6:.0f} MB/s ({bytes_per_s * 8e-9:.2g} Gbit/s)"
    names = " ".join(node.name for node in seen.nodes)
    return [Finding("link", names, "ok", f"{backend}: {speed}, {latency_s * 1e3:.2g} ms")]


def _python_command(node: Node, seen: NodeFacts, name: str, *, gpus: bool) -> Sequence[str]:
    device = device_of(node, seen.facts[node.name])
    values = {"GLOO_SOCKET_IFNAME": device, "NCCL_SOCKET_IFNAME": f"={device}"} if device else {}
    values |= {"OMP_NUM_THREADS": "1"}
    kind = ENGINES.get(node.runtime)
    if gpus:
        values |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0" if kind else str(node.gpus[0])}
    pairs = [f"{key}={value}" for key, value in values.items()]
    if kind is None:
        return ["env", *pairs, "python3"]
    devices = kind.gpu_words(node.gpus[:1]) if gpus else []
    return [
        *(node.runtime, "run", "--rm", "-i", "--init", "--name", name, "--label", f"{contract.JOB_ID}={name}"),
        *("--network", "host", "--ipc", "host", *devices),
        *(word for pair in pairs for word in ("-e", pair)),
        *("--entrypoint", "python3", seen.image),
    ]
