"""Checks of the network: addresses, name resolution, connections between all nodes, and the speed of an all-reduce."""

import contextlib
import ipaddress
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence

from cluster import contract
from cluster.agent import scripts
from cluster.checks.findings import Facts, Finding, NodeFacts, Verdict, typed_on, usual
from cluster.errors import ClusterError, UnreachableError
from cluster.runtimes import ENGINES
from cluster.spec.addresses import INSIDE
from cluster.spec.model import Machine
from cluster.transport import reach
from cluster.transport.parallel import each
from cluster.transport.process import piped

#: torch gives up after 30 s.
_ALL_REDUCE_TIMEOUT_S = 45.0


def device_of(node: Machine, facts: Facts) -> str:
    """Return the node's network device that has its address, or ""."""
    number = number_of(node.address, facts)
    devices = {address.partition("/")[0]: device for device, address in facts.pairs("address")}
    # lo has all of 127.0.0.0/8
    return devices.get(number, "lo" if number.startswith("127.") else "")


def device_towards(facts: Facts, peer: str) -> str:
    """Return the device of the node's route to a peer, or "" without a route."""
    found = re.search(r"\bdev (\S+)", dict(facts.pairs("route")).get(peer, ""))
    return found[1] if found else ""


def number_of(address: str, facts: Facts) -> str:
    """Return the number to which an address resolves on the node, or ""."""
    return dict(facts.pairs("number")).get(address, "")


def address(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict:
    """Check that the node's address is unique, and on a device of the node that peers can reach."""
    if not facts.every("address"):
        fix = typed_on(node, facts, "apt-get install iproute2", root=True)
        return Verdict("warning", "not checked: the ip command is not installed", fix)
    number = number_of(node.address, facts)
    device = device_of(node, facts)
    shown = node.address if number == node.address else f"{node.address} ({number})"
    twins = [other.name for other in seen.nodes if other.address == node.address and other.name != node.name]
    if not node.address:
        why = "the inventory has no address for this node"
    elif not number:
        why = f"{node.address} does not resolve on this node"
    elif twins:
        why = f"{node.address} is also the address of {', '.join(twins)}"
    elif not device:
        why = f"{shown} is on no network device of this node"
    elif INSIDE.fullmatch(device) and len(seen.nodes) > 1:
        why = f"{shown} is on {device}, which no other machine can reach"
    else:
        return Verdict("ok", f"{shown} on {device}")
    right = _own_address(node, facts, seen) or "... (see ip addr)"
    return Verdict("failure", why, f"in cluster.yaml, {node.name}: address: {right}")


def _own_address(node: Machine, facts: Facts, seen: NodeFacts) -> str:
    """Return the source address of the node's route to another node, or ""."""
    others = {other.address for other in seen.nodes if other.name != node.name}
    for peer, route in facts.pairs("route"):
        found = re.search(r"\bdev (\S+).* src (\S+)", route)
        if found and peer in others and not INSIDE.fullmatch(found[1]):
            return found[2]
    return ""


def names(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict | None:
    """Check that the node's address resolves to the same number on every node."""
    numbers = {peer.name: number_of(node.address, seen.facts[peer.name]) for peer in seen.nodes}
    wanted = usual(number for number in numbers.values() if number)
    if not node.address or node.address == wanted:
        return None
    odd = [f"{name}: {number or 'nothing'}" for name, number in numbers.items() if number != wanted]
    if wanted and not odd:
        return Verdict("ok", f"{node.address} is {wanted} on every node")
    why = f"{node.address} is {wanted or 'unknown'}, but on {'; '.join(odd) or 'every node'}"
    right = _own_address(node, facts, seen) or "..."
    fix = f"in cluster.yaml, {node.name}: address: {right} (a number), or correct /etc/hosts on those nodes"
    return Verdict("failure", why, fix)


def reachable(seen: NodeFacts) -> list[Finding]:
    """Connect all nodes to each other on random ports, and report the connections by target."""
    with contextlib.ExitStack() as stack:
        listening = each(seen.nodes, lambda node: stack.enter_context(_listen(node)))
        ports = {name: port for name, port in listening.items() if isinstance(port, int)}
        dialled = each(seen.nodes, lambda node: _dial(node, seen.nodes, ports))
    found = []
    for node in seen.nodes:
        error = listening[node.name]
        problems = {
            name: made[node.name]
            for name, made in dialled.items()
            if isinstance(made, dict) and node.name in made
        }
        if isinstance(error, ClusterError):
            fix = typed_on(node, seen.facts[node.name], "apt-get install python3", root=True)
            why = f"not tested: {error.message.removeprefix(f'{node.name}: ')}"
            found.append(Finding("reachable", node.name, "warning", why, fix))
        elif problems:
            found.append(
                Finding("reachable", node.name, *judge_connections(node, seen.facts[node.name], problems))
            )
    return found


def judge_connections(node: Machine, facts: Facts, problems: Mapping[str, str]) -> Verdict:
    """Judge the connections to a node; `problems` has the problem of each source, "" on success."""
    sources: dict[str, list[str]] = {}
    for source, problem in problems.items():
        sources.setdefault(problem, []).append(source)
    if not any(problems.values()):
        return Verdict("ok", f"from {', '.join(problems)}")
    reasons = "; ".join(
        f"from {', '.join(names)}: {problem}" for problem, names in sources.items() if problem
    )
    interfaces = [ipaddress.ip_interface(text) for _, text in facts.pairs("address")]
    number = number_of(node.address, facts)
    network = next((str(each.network) for each in interfaces if str(each.ip) == number), "NETWORK")
    command = typed_on(node, facts, f"iptables -I INPUT -s {network} -j ACCEPT", root=True)
    # NCCL and gloo listen on random ports.
    fix = f"open every port between the nodes (NCCL uses random ones): {command}"
    return Verdict("failure", f"{node.address}, a random port, {reasons}", fix)


def _python(*words: str) -> list[str]:
    return ["timeout", "60", "python3", "-c", scripts.text("checks/peers.py"), *words]


@contextlib.contextmanager
def _listen(node: Machine) -> Iterator[int]:
    """Yield the port on which the node listens."""
    with piped(node, _python()) as process:
        line = process.stdout.readline()
        if not line:
            raise UnreachableError(f"{node.name}: cannot listen on a port: {process.wait(10).last_line}")
        yield int(line)


def _dial(node: Machine, nodes: Sequence[Machine], ports: Mapping[str, int]) -> dict[str, str]:
    """Connect to every other node that listens, and return the problem of each connection, "" on success."""
    targets = [peer for peer in nodes if peer.address and peer.name != node.name and peer.name in ports]
    words = [word for peer in targets for word in (peer.address, str(ports[peer.name]))]
    problems = reach(node).run(_python(*words), timeout_s=20).out.split("\n") if words else []
    return dict(zip((peer.name for peer in targets), problems, strict=False))


def measure_link(seen: NodeFacts) -> list[Finding]:
    """Measure latency and bandwidth of the link between all nodes."""
    name = f"doctor-{secrets.token_hex(8)}"
    port = 20000 + secrets.randbelow(10000)
    master = seen.nodes[0]
    gpus = seen.device == "cuda" and all(node.gpus for node in seen.nodes)
    where = f"[{master.address}]:{port}" if ":" in master.address else f"{master.address}:{port}"
    backend = "nccl" if gpus else "gloo"
    ranks = {node.name: str(rank) for rank, node in enumerate(seen.nodes)}

    def run(node: Machine) -> str:
        program = _all_reduce_command(node, seen, name, gpus=gpus)
        argv = [*program, "-", ranks[node.name], str(len(ranks)), where, backend]
        if lines := scripts.prologue(seen.prologue, 'echo "$1" >&2; exit 71'):
            argv = ["bash", "-c", f'{lines}exec "$@"', "link", *argv]
        try:
            done = reach(node).run(
                argv, stdin=scripts.text("checks/all_reduce.py"), timeout_s=_ALL_REDUCE_TIMEOUT_S
            )
        except UnreachableError:
            if node.in_container:
                reach(node).run([node.runtime, "rm", "-f", name])
            raise
        if done.code:
            stage = "joined, but the all-reduce failed: " if "joined" in done.out.split() else ""
            raise ClusterError(f"{node.name}: {stage}{done.last_line}")
        return done.out

    return judge_link(seen, each(seen.nodes, run), backend)


def judge_link(seen: NodeFacts, outputs: Mapping[str, str | ClusterError], backend: str) -> list[Finding]:
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
    (_, latency_s), (size, large_s) = (
        map(float, line.split()[1:]) for line in lines if line.startswith("sum ")
    )
    nodes = len(seen.nodes)
    # The bus bandwidth by the formula of nccl-tests: the rate over one node's link, for any number of nodes.
    bytes_per_s = size * 2 * (nodes - 1) / nodes / large_s
    speed = f"{bytes_per_s / 1e6:.0f} MB/s ({bytes_per_s * 8e-9:.2g} Gbit/s)"
    names = " ".join(node.name for node in seen.nodes)
    # The transport that NCCL chose, from its log: IB (InfiniBand or RoCE), Socket, or a plugin's.
    used = re.search(r"NCCL INFO Using network (\S+)", str(outputs[seen.nodes[0].name]))
    what = f"{backend} over {used[1]}" if used else backend
    detail = f"{what}: {speed}, {latency_s * 1e3:.2g} ms"
    if used and used[1] == "Socket" and all(seen.facts[node.name].text("infiniband") for node in seen.nodes):
        why = f"{detail}: the nodes have InfiniBand devices, which NCCL does not use"
        fix = "the image needs libibverbs1 and ibverbs-providers; NCCL's reason: NCCL_DEBUG=INFO"
        return [Finding("link", names, "failure", why, fix)]
    return [Finding("link", names, "ok", detail)]


def _all_reduce_command(node: Machine, seen: NodeFacts, name: str, *, gpus: bool) -> Sequence[str]:
    device = device_of(node, seen.facts[node.name])
    values = {"GLOO_SOCKET_IFNAME": device, "NCCL_SOCKET_IFNAME": f"={device}"} if device else {}
    values |= {"OMP_NUM_THREADS": "1"}
    kind = ENGINES.get(node.runtime)
    if gpus:
        values |= {
            "NCCL_DEBUG": "INFO",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": "0" if kind else str(node.gpus[0]),
        }
    pairs = [f"{key}={value}" for key, value in values.items()]
    if kind is None:
        return ["env", *pairs, "python3"]
    # `clusterctl gc` finds a container that a killed doctor has left.
    labels = {
        contract.JOB_ID: name,
        contract.LAUNCH_ID: name.rpartition("-")[2],
        contract.BACKEND: seen.backend,
    }
    labels[contract.USER_ID] = seen.facts[node.name].text("uid")
    devices = kind.gpu_words(node.gpus[:1]) if gpus else []
    if gpus and seen.facts[node.name].text("infiniband"):
        devices += ["--device", "/dev/infiniband", "--ulimit", "memlock=-1"]
    return [
        *(node.runtime, "run", "--rm", "-i", "--init", "--name", name),
        *(word for label, value in labels.items() for word in ("--label", f"{label}={value}")),
        *("--network", "host", "--ipc", "host", *devices),
        *(word for pair in pairs for word in ("-e", pair)),
        *("--entrypoint", "python3", seen.image),
    ]
