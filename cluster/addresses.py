"""Which of a machine's addresses its peers should dial: pure, from what every machine says of its own network."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cluster.errors import ClusterError

#: Networks inside one machine: every machine has its own docker0, often with the same address. Docker's other bridges
#: are called after their id; a `br-lan` leads outside.
INSIDE = re.compile(r"lo|(docker|podman|nerdctl|virbr|lxcbr|lxdbr|cni|flannel|cali|veth|vnet)[\w.-]*|br-[0-9a-f]{12}")
#: Networks made of encrypted packets on another network: they reach everywhere, slowly.
_OVERLAY = re.compile(r"tailscale.*|zt.*|wg.*|nebula.*|tun.*|tap.*|utun.*")
_LINE = re.compile(r"\d+: (?P<device>[^\s@]+)\S*\s+inet6? (?P<number>[0-9A-Fa-f.:]+)(?P<rest>.*)")


@dataclass(frozen=True)
class Address:
    """A number, the device that has it, and that device's speed in Mbit/s (0: unknown)."""

    number: str
    device: str
    speed_mbps: int = 0

    def __str__(self) -> str:
        return f"{self.number} on {self.device}"


@dataclass(frozen=True)
class Route:
    """How one machine reaches a number: through its `device`, `via` a gateway or ("") directly; or why it does not."""

    device: str = ""
    via: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Choice:
    """The address for a node, why it is that one, and what the user must know ("": nothing)."""

    address: Address
    why: str
    warning: str = ""


def addresses(text: str, speeds: Mapping[str, int]) -> tuple[Address, ...]:
    """The lasting global addresses in what `ip -o addr show` prints."""
    found = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and " scope global" in match["rest"] and not re.search(r" (temporary|deprecated)", match["rest"]):
            found.append(Address(match["number"], match["device"], max(0, speeds.get(match["device"], 0))))
    return tuple(found)


def route(text: str) -> Route:
    """What the first line of `ip -o route get NUMBER` says."""
    words = text.splitlines()[0].split() if text.strip() else []
    if "dev" not in words[:-1] or words[0] in ("unreachable", "prohibit", "blackhole"):
        return Route(problem=text.strip().rpartition("answers: ")[2].lower() or "no answer")
    if words[0] == "local":
        return Route("lo", problem="it has the same address itself")
    after = dict(pairwise(words))
    device = after["dev"]
    if INSIDE.fullmatch(device):
        return Route(device, problem=f"there it leads into {device}")
    return Route(device, after.get("via", ""))


def candidates(found: Sequence[Address]) -> list[Address]:
    """The addresses that another machine could dial."""
    return [address for address in found if not INSIDE.fullmatch(address.device)]


def choose(
    found: Mapping[str, Sequence[Address]],
    routes: Mapping[str, Mapping[str, Route]],
    logins: Mapping[str, str],
) -> dict[str, Choice]:
    """For every node the address to which all others have a route outside of themselves.

    `routes` are each node's to the numbers of the others, `logins` the numbers at which we reached the nodes. Among
    several: no overlay, IPv4, directly from most, the fastest, the one we reached. Raises ClusterError that names
    every node without one.
    """
    _refuse_twins(found)
    chosen: dict[str, Choice] = {}
    problems = []
    for name, mine in found.items():
        others = [other for other in found if other != name]
        best: list[tuple[tuple[object, ...], Address]] = []
        failed = []
        for order, address in enumerate(candidates(mine)):
            ways = {other: routes[other].get(address.number, Route(problem="not asked")) for other in others}
            bad = next(((other, way) for other, way in ways.items() if way.problem), None)
            if bad:
                failed.append(f"{address} is not reached from {bad[0]} ({bad[1].problem})")
                continue
            overlay = any(_OVERLAY.fullmatch(device) for device in (address.device, *(w.device for w in ways.values())))
            gateways = sum(bool(way.via) for way in ways.values())
            login = address.number != logins.get(name)
            is_v6 = ipaddress.ip_address(address.number).version == 6
            best.append(((overlay, is_v6, gateways, -address.speed_mbps, login, order), address))
        if best:
            rank, address = min(best)
            ways = {other: routes[other][address.number] for other in others}
            chosen[name] = _choice(address, mine, ways, overlay=bool(rank[0]))
        elif others:
            problems.append(f"{name}: no address that the others reach: {'; '.join(failed) or 'it has none'}")
        else:
            chosen[name] = Choice(Address("127.0.0.1", "lo"), "on lo: it is the only node and has no other address")
    if problems:
        raise ClusterError("\n       ".join(problems), "see there: ip address, ip route; or write `address:` yourself")
    return chosen


def _refuse_twins(found: Mapping[str, Sequence[Address]]) -> None:
    seen: dict[frozenset[str], str] = {}
    for name, mine in found.items():
        numbers = frozenset(address.number for address in candidates(mine))
        if numbers and numbers in seen:
            raise ClusterError(
                f"{name}: it has the same address as {seen[numbers]} ({', '.join(sorted(numbers))}): "
                "one machine under two names, or each in a network of its own",
                "name each machine once; machines need a network between them",
            )
        seen[numbers] = name


def _choice(address: Address, mine: Sequence[Address], ways: Mapping[str, Route], *, overlay: bool) -> Choice:
    direct = [name for name, way in ways.items() if not way.via]
    passed = [str(each) for each in mine if INSIDE.fullmatch(each.device)]
    why = f"on {address.device}"
    if ways:
        why += f", from {_names(direct)} directly" if direct else ""
        gateways = sorted({way.via for way in ways.values() if way.via})
        far = [name for name in ways if name not in direct]
        why += f", from {_names(far)} by way of {', '.join(gateways)}" if far else ""
    why += f"; not {', '.join(passed)}: inside the machine" if passed else ""
    slow = f"the others reach it only over {address.device}, an overlay network: training will be slow"
    return Choice(address, why, slow if overlay else "")


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{len(names)} nodes"
