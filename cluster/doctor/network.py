"""Judges addresses: is it the node's own, on a device that peers reach, the same number everywhere, and reached."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.addresses import INSIDE
from cluster.doctor.findings import Finding, Seen, typed_on
from cluster.doctor.probe import Facts
from cluster.model import Node

#: What a node says of a port that it could not listen on.
TAKEN = "another program holds it"


@dataclass(frozen=True)
class Dialled:
    """One connection that a node tried to an address: `said` is "" when the right machine answered."""

    source: str
    target: str
    port: int
    said: str = ""


def devices(facts: Facts) -> list[tuple[str, ipaddress.IPv4Interface | ipaddress.IPv6Interface]]:
    """The node's devices with their addresses, in the machine's order."""
    return [(device, ipaddress.ip_interface(address)) for device, address in facts.pairs("address")]


def own_address(node: Node, seen: Seen) -> str:
    """The address that peers should dial: the source of the node's route to another node; "" when none is found."""
    facts = seen.facts[node.name]
    real = {str(address.ip): address for device, address in devices(facts) if not INSIDE.fullmatch(device)}
    others = {other.address for other in seen.nodes if other.name != node.name}
    for peer, route in facts.pairs("route"):
        source = re.search(r"\bsrc (\S+)", route)
        if peer in others and source and source[1] in real:
            return source[1]
    usable = [text for text, address in real.items() if address.version == 4 and not address.is_link_local]
    return usable[0] if usable else ""


def device_towards(facts: Facts, peer: str) -> str:
    """The device on the node's route to a peer's address; "" when there is no route."""
    route = dict(facts.pairs("route")).get(peer, "")
    found = re.search(r"\bdev (\S+)", route)
    return found[1] if found else ""


def address(seen: Seen) -> list[Finding]:
    """Every node's address is its own, on a device that leads out, and nobody else's."""
    return [_address(node, seen) for node in seen.nodes]


def _address(node: Node, seen: Seen) -> Finding:
    facts = seen.facts[node.name]
    number = dict(facts.pairs("number")).get(node.address, "")
    right = own_address(node, seen)
    mend = f"in cluster.yaml, {node.name}: address: {right}" if right else f"give {node.name} an address (ip addr)"

    def wrong(why: str) -> Finding:
        return Finding("address", node.name, "failure", why, mend)

    if not facts.has("ip"):
        fix = typed_on(node, facts, "apt-get install iproute2", root=True)
        return Finding("address", node.name, "warning", "the ip command is not there, so nothing is known", fix)
    if not node.address:
        return wrong("the inventory gives it no address for its peers")
    if not number:
        return wrong(f"{node.address} does not resolve on it")
    twins = [other.name for other in seen.nodes if other.address == node.address and other.name != node.name]
    if twins:
        return wrong(f"{node.address} is also the address of {', '.join(twins)}")
    at = {str(found.ip): device for device, found in devices(facts)}
    shown = node.address if number == node.address else f"{node.address} ({number})"
    if number not in at and ipaddress.ip_address(number).is_loopback:
        at[number] = "lo"  # 127.0.0.0/8 is all there
    if number not in at:
        return wrong(f"{shown} is on no device of it; peers dial addresses that a node has itself")
    if INSIDE.fullmatch(at[number]) and len(seen.nodes) > 1:
        return wrong(f"{shown} is on {at[number]}, which no other machine can reach")
    return Finding("address", node.name, "ok", f"{shown} on {at[number]}")


def names(seen: Seen) -> list[Finding]:
    """Every node's address means the same number on every node."""
    found = []
    for node in (node for node in seen.nodes if node.address):
        numbers = {peer.name: dict(seen.facts[peer.name].pairs("number")).get(node.address, "") for peer in seen.nodes}
        counts = [number for number in numbers.values() if number]
        usual = max(set(counts), key=counts.count) if counts else ""
        odd = [f"{name}: {number or 'nothing'}" for name, number in numbers.items() if number != usual]
        right = own_address(node, seen) or "its number"
        if not usual or odd:
            found.append(
                Finding(
                    "names",
                    node.name,
                    "failure",
                    f"{node.address} is {usual or 'unknown'}, but on {'; '.join(odd) or 'every node'}",
                    f"in cluster.yaml, {node.name}: address: {right} (a number), or mend /etc/hosts on those nodes",
                )
            )
        elif usual != node.address:
            found.append(Finding("names", node.name, "ok", f"{node.address} is {usual} on every node"))
    return found


def reachable(seen: Seen, dialled: Sequence[Dialled], silent: Mapping[str, str]) -> list[Finding]:
    """Every node's address took a connection from every other node; `silent` nodes could not listen, and why."""
    found = []
    for node in seen.nodes:
        tried = [each for each in dialled if each.target == node.name]
        if node.name in silent:
            fix = typed_on(node, seen.facts[node.name], "apt-get install python3", root=True)
            found.append(Finding("reachable", node.name, "warning", f"not tried: {silent[node.name]}", fix))
        elif failed := [each for each in tried if each.said not in ("", TAKEN)]:
            found.append(_blocked(node, failed, seen))
        elif held := [each for each in tried if each.said == TAKEN]:
            fix = typed_on(node, seen.facts[node.name], f"ss -ltnp sport = :{held[0].port}", root=True)
            fix = f"another one (--master-port auto), or see who: {fix}"
            found.append(Finding("reachable", node.name, "warning", f"port {held[0].port}: {TAKEN}", fix))
        elif tried:
            sources = ", ".join(dict.fromkeys(each.source for each in tried))
            found.append(Finding("reachable", node.name, "ok", f"from {sources}"))
    return found


def _blocked(node: Node, failed: Sequence[Dialled], seen: Seen) -> Finding:
    ports = ", ".join(str(port) for port in dict.fromkeys(each.port for each in failed))
    reasons = "; ".join(
        f"from {', '.join(dict.fromkeys(each.source for each in failed if each.said == said))}: {said}"
        for said in dict.fromkeys(each.said for each in failed)
    )
    return Finding(
        "reachable", node.name, "failure", f"{node.address}, port {ports}, {reasons}", _opened(node, failed[0], seen)
    )


def _opened(node: Node, failed: Dialled, seen: Seen) -> str:
    facts = seen.facts[node.name]
    networks = [str(found.network) for _, found in devices(facts) if str(found.ip) == node.address]
    peers = networks[0] if networks else own_address(next(n for n in seen.nodes if n.name == failed.source), seen)
    if facts.has("ufw"):
        command = f"ufw allow from {peers}"
    elif facts.has("firewall-cmd"):
        command = f"firewall-cmd --zone=trusted --add-source={peers}"
    else:
        command = f"iptables -I INPUT -s {peers} -j ACCEPT"
    # NCCL and gloo listen on ports that the kernel chooses
    return f"open every port between the nodes (NCCL uses random ones): {typed_on(node, facts, command, root=True)}"
