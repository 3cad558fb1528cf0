"""Node addresses: chooses the one that the other nodes connect to, from `ip addr` and `ip route`. Pure."""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cluster.errors import ClusterError

#: Devices whose network ends at the machine, such as docker0. Docker names its other bridges `br-ID`; a `br-lan` is a
#: bridge to an outside network.
INSIDE = re.compile(
    r"lo|(docker|podman|nerdctl|virbr|lxcbr|lxdbr|cni|flannel|cali|veth|vnet)[\w.-]*|br-[0-9a-f]{12}"
)
#: Devices of overlay networks, which are slow because they encrypt every packet.
_OVERLAY = re.compile(r"tailscale.*|zt.*|wg.*|nebula.*|tun.*|tap.*|utun.*")
_LINE = re.compile(r"\d+: (?P<device>[^\s@]+)\S*\s+inet6? (?P<number>[0-9A-Fa-f.:]+)(?P<rest>.*)")


@dataclass(frozen=True)
class Address:
    """An IP address, its device, and the device's speed in Mbit/s (0: unknown)."""

    number: str
    device: str
    speed_mbps: int = 0

    def __str__(self) -> str:
        return f"{self.number} on {self.device}"


@dataclass(frozen=True)
class Route:
    """The route to an IP address: device, gateway (`via`, "" if direct), and the `problem` if it is unusable."""

    device: str = ""
    via: str = ""
    problem: str = ""


def addresses(text: str, speeds: Mapping[str, int]) -> tuple[Address, ...]:
    """Return the permanent global addresses in the output of `ip -o addr show`."""
    found = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if (
            match
            and " scope global" in match["rest"]
            and not re.search(r" (temporary|deprecated)", match["rest"])
        ):
            found.append(Address(match["number"], match["device"], max(0, speeds.get(match["device"], 0))))
    return tuple(found)


def route(text: str) -> Route:
    """Parse the first line of `ip -o route get ADDRESS`."""
    words = text.splitlines()[0].split() if text.strip() else []
    if "dev" not in words[:-1] or words[0] in ("unreachable", "prohibit", "blackhole"):
        return Route(problem=text.strip().rpartition("answers: ")[2].lower() or "no answer")
    if text.lstrip().startswith("local "):
        return Route("lo", problem="it has the same address")
    after = dict(pairwise(words))
    device = after["dev"]
    if INSIDE.fullmatch(device):
        return Route(device, problem=f"its route leads into {device}")
    return Route(device, after.get("via", ""))


def candidates(found: Sequence[Address]) -> list[Address]:
    """Return the addresses that another machine could connect to."""
    return [address for address in found if not INSIDE.fullmatch(address.device)]


def warnings(address: Address) -> list[str]:
    """Return warnings about the chosen address of a node."""
    slow = f"its only usable address is on {address.device}, an overlay network: training will be slow"
    return [slow] if _OVERLAY.fullmatch(address.device) else []


def choose(
    found: Mapping[str, Sequence[Address]],
    routes: Mapping[str, Mapping[str, Route]],
    logins: Mapping[str, str],
) -> dict[str, Address]:
    """Return for every node an address to which all other nodes have a route.

    `routes` has each node's routes to the addresses of the others, `logins` the address of each node's SSH login.
    Order of preference: no overlay, IPv4, few gateways, high speed, the login's address.
    Raises ClusterError naming every node without such an address.
    """
    _refuse_duplicates(found)
    chosen: dict[str, Address] = {}
    problems = []
    for name, mine in found.items():
        others = [other for other in found if other != name]
        usable: list[tuple[tuple[object, ...], Address]] = []
        failed = []
        for order, address in enumerate(candidates(mine)):
            paths = {
                other: routes[other].get(address.number, Route(problem="route unknown")) for other in others
            }
            bad = next(((other, path) for other, path in paths.items() if path.problem), None)
            if bad:
                failed.append(f"{address} cannot be reached from {bad[0]} ({bad[1].problem})")
                continue
            devices = (address.device, *(path.device for path in paths.values()))
            overlay = any(_OVERLAY.fullmatch(device) for device in devices)
            gateways = sum(bool(path.via) for path in paths.values())
            not_login = address.number != logins.get(name)
            is_v6 = ipaddress.ip_address(address.number).version == 6
            usable.append(((overlay, is_v6, gateways, -address.speed_mbps, not_login, order), address))
        if usable:
            _, chosen[name] = min(usable)
        elif others:
            why = "; ".join(failed) or "it has none"
            problems.append(f"{name}: the other nodes can reach none of its addresses: {why}")
        else:
            chosen[name] = Address("127.0.0.1", "lo")
    if problems:
        hint = "check `ip address` and `ip route` there, or set `address` in cluster.yaml"
        raise ClusterError("\n       ".join(problems), hint)
    return chosen


def _refuse_duplicates(found: Mapping[str, Sequence[Address]]) -> None:
    seen: dict[frozenset[str], str] = {}
    for name, mine in found.items():
        numbers = frozenset(address.number for address in candidates(mine))
        if numbers and numbers in seen:
            raise ClusterError(
                f"{name}: it has the same address as {seen[numbers]} ({', '.join(sorted(numbers))}): "
                "one machine with two names, or two machines without a common network",
                "name each machine once; all machines need a common network",
            )
        seen[numbers] = name
