"""Real connections between the nodes: each listens on a port that its kernel chooses, each dials all others."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster import resources
from cluster.doctor.findings import Seen
from cluster.doctor.network import TAKEN, Dialled
from cluster.errors import ClusterError, UnreachableError
from cluster.fanout import each
from cluster.model import Node
from cluster.shells import Stream, reach


@dataclass(frozen=True)
class _Listener:
    """A node that waits for its peers: `ports` it took, those that others hold, the `word` it answers."""

    held: contextlib.AbstractContextManager[Stream]
    ports: tuple[int, ...]
    busy: tuple[int, ...]
    word: str


def dial(seen: Seen, port: int = 0) -> tuple[list[Dialled], dict[str, str]]:
    """Every connection that was tried, and why some nodes could not listen; `port` is tried too when it is given.

    Only nodes with an address of their own and those that can listen are dialled. Nothing is left running.
    """
    if len(seen.nodes) < 2:
        return [], {}
    asked = ["0", *([str(port)] if port else [])]
    opened = each(seen.nodes, lambda node: _listen(node, seen.image, asked))
    listeners = {name: found for name, found in opened.items() if isinstance(found, _Listener)}
    silent = {name: _why(found) for name, found in opened.items() if isinstance(found, ClusterError)}
    with contextlib.ExitStack() as stack:
        for listener in listeners.values():
            stack.callback(listener.held.__exit__, None, None, None)
        results = each(seen.nodes, lambda node: _dial(node, seen.nodes, listeners))
    dialled = [one for found in results.values() if isinstance(found, list) for one in found]
    held = [Dialled(name, name, busy, TAKEN) for name, listener in listeners.items() for busy in listener.busy]
    return [*dialled, *held], silent


def _script(*words: str) -> list[str]:
    return ["bash", "-c", resources.text("doctor/peers.sh"), "peers", *words]


def _listen(node: Node, image: str, ports: Sequence[str]) -> _Listener:
    word = secrets.token_hex(8)
    program = resources.text("doctor/listen.py")
    held = reach(node).stream(_script("listen", node.runtime, image, program, word, *ports))
    stream = held.__enter__()
    taken, busy = [], []
    while line := stream.stdout.readline().decode(errors="replace").split():
        if line[0] == "port":
            taken.append(int(line[1]))
        elif line[0] == "busy":
            busy.append(int(line[1]))
        elif line[0] == "all":
            return _Listener(held, tuple(taken), tuple(busy), word)
    ended = stream.wait(10)
    held.__exit__(None, None, None)
    raise UnreachableError(f"{node.name}: it could not listen: {ended.last_line}")


def _dial(node: Node, nodes: Sequence[Node], listeners: Mapping[str, _Listener]) -> list[Dialled]:
    targets: list[str] = []
    for peer in nodes:
        if peer.address and peer.name != node.name and peer.name in listeners:
            listener = listeners[peer.name]
            for port in listener.ports:
                targets += [peer.name, peer.address, str(port), listener.word]
    done = reach(node).run(_script("dial", *targets), timeout_s=20)
    cut = [line.split(" ", 2) for line in done.out.splitlines() if line.count(" ") >= 2]
    return [Dialled(node.name, target, int(port), said.strip()) for target, port, said in cut]


def _why(error: ClusterError) -> str:
    return error.message.partition(": ")[2] or error.message
