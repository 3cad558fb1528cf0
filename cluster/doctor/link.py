"""Measures the link: one process per node, inside the image, sums numbers with all others as a training does."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster import contract, resources
from cluster.doctor.findings import Finding, Seen, typed_on
from cluster.doctor.network import device_towards, devices
from cluster.errors import ClusterError, UnreachableError
from cluster.fanout import each
from cluster.model import Node
from cluster.shells import reach

TIMEOUT_S = 45.0
_TOO_LATE = 70
#: Less than this share of what the network card says is worth a word.
_POOR_SHARE = 0.4


@dataclass(frozen=True)
class Link:
    """What was measured between `nodes` nodes: the time of a tiny all-reduce, and the bytes per second of a large one.

    `bytes_per_s` is the bus bandwidth: what passes over one node's link, whatever the number of nodes.
    """

    nodes: int
    latency_s: float
    bytes_per_s: float


def bus_bytes_per_s(size: int, nodes: int, taken_s: float) -> float:
    """The bandwidth of one node's link when an all-reduce of `size` bytes takes `taken_s`."""
    return size * 2 * (nodes - 1) / nodes / taken_s


def measure(seen: Seen, image: str) -> tuple[Link | None, list[Finding]]:
    """The link between all nodes, and what is to be said of it; None with a failure where they could not sum."""
    name = f"doctor-{secrets.token_hex(4)}"
    port = 20000 + secrets.randbelow(10000)
    master = seen.nodes[0]
    gpus = seen.device == "cuda" and all(node.gpus for node in seen.nodes)
    where = f"[{master.address}]:{port}" if ":" in master.address else f"{master.address}:{port}"
    tail = [str(len(seen.nodes)), where, "nccl" if gpus else "gloo", str(TIMEOUT_S - 5)]
    ranks = {node.name: str(rank) for rank, node in enumerate(seen.nodes)}

    def run(node: Node) -> str:
        argv = [*_inside(node, seen, image, name, gpus=gpus), "-", ranks[node.name], *tail]
        try:
            done = reach(node).run(argv, stdin=resources.text("doctor/all_reduce.py"), timeout_s=TIMEOUT_S)
        except UnreachableError:
            if node.runtime != "none":
                reach(node).run([node.runtime, "rm", "-f", name])
            raise
        if len(_sums(done.out)) < 2:
            far = "met the others, but they did not sum: " if "joined" in done.out.split() else ""
            why = f"no end within {TIMEOUT_S - 5:g} s" if done.code == _TOO_LATE else done.last_line
            raise ClusterError(f"{node.name}: {far}{why}")
        return done.out

    return judge(seen, each(seen.nodes, run), "nccl" if gpus else "gloo")


def judge(seen: Seen, said: Mapping[str, str | ClusterError], backend: str) -> tuple[Link | None, list[Finding]]:
    """The link from what every node's process printed (or the error it ended with)."""
    failed = {name: found for name, found in said.items() if isinstance(found, ClusterError)}
    if failed:
        by_name = {node.name: node for node in seen.nodes}
        return None, [
            Finding(
                "link",
                name,
                "failure",
                error.message.removeprefix(f"{name}: "),
                f"every port must be open between the nodes: {typed_on(by_name[name], None, 'iptables -S', root=True)}",
            )
            for name, error in failed.items()
        ]
    sums = _sums(next(text for text in said.values() if isinstance(text, str)))
    latency_s, (size, taken_s) = sums[0][1], sums[-1]
    nodes = len(seen.nodes)
    link = Link(nodes, latency_s, bus_bytes_per_s(size, nodes, taken_s))
    shown = (
        f"{backend}: {link.bytes_per_s / 1e6:.0f} MB/s ({link.bytes_per_s * 8e-9:.2g} Gbit/s), {latency_s * 1e3:.2g} ms"
    )
    names = " ".join(node.name for node in seen.nodes)
    card = _slowest_card_bits_per_s(seen)
    if card and link.bytes_per_s * 8 < card * _POOR_SHARE:
        why = f"{shown}; the slowest card says {card / 1e9:g} Gbit/s"
        fix = "see what else uses the network and whether a faster device's address fits: ip -br addr"
        return link, [Finding("link", names, "warning", why, fix)]
    return link, [Finding("link", names, "ok", shown)]


def _sums(text: str) -> list[tuple[int, float]]:
    lines = (line.split() for line in text.splitlines() if line.startswith("sum "))
    return [(int(size), float(taken_s)) for _, size, taken_s in lines]


def _slowest_card_bits_per_s(seen: Seen) -> float:
    speeds = []
    for node in seen.nodes:
        facts = seen.facts[node.name]
        speed = dict(facts.pairs("speed")).get(_device(node, seen), "")
        if speed.isdigit():  # -1 without a wire
            speeds.append(int(speed) * 1e6)
    return min(speeds, default=0.0)


def _device(node: Node, seen: Seen) -> str:
    facts = seen.facts[node.name]
    own = [device for device, address in devices(facts) if str(address.ip) == node.address]
    others = [device_towards(facts, peer.address) for peer in seen.nodes if peer.name != node.name]
    return next((device for device in (*own, *others) if device), "")


def _inside(node: Node, seen: Seen, image: str, name: str, *, gpus: bool) -> Sequence[str]:
    device = _device(node, seen)
    values = {"GLOO_SOCKET_IFNAME": device, "NCCL_SOCKET_IFNAME": f"={device}", "OMP_NUM_THREADS": "1"}
    if gpus:
        values |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(node.gpus[0])}
    pairs = [f"{key}={value}" for key, value in values.items()]
    if node.runtime == "none":
        return ["env", *pairs, "python3"]
    devices_of = (
        [] if not gpus else ["--gpus", "all"] if node.runtime == "docker" else ["--device", "nvidia.com/gpu=all"]
    )
    return [
        *(node.runtime, "run", "--rm", "-i", "--init", "--name", name, "--label", f"{contract.JOB_ID}={name}"),
        *("--network", "host", "--ipc", "host", *devices_of),
        *(word for pair in pairs for word in ("-e", pair)),
        *("--entrypoint", "python3", image),
    ]
