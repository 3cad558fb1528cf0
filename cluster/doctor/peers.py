"""Real connections between the nodes: each listens on a port that its kernel chooses, each dials all others."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.doctor.findings import Seen
from cluster.doctor.network import TAKEN, Dialled
from cluster.errors import ClusterError, UnreachableError
from cluster.fanout import each
from cluster.model import Node
from cluster.shells import Stream, reach

# Tells who it is to everyone who connects, over IPv4 and IPv6; its input ends when the launcher goes. A machine's own
# Python may be old (RHEL 8 has 3.6).
_LISTEN = """
import os, socket, sys, threading
def listen(port):
    try:
        listener = socket.socket(socket.AF_INET6)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:
        listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("", port))
    listener.listen(256)
    return listener
def serve(listener):
    while True:
        connection, _ = listener.accept()
        connection.sendall((sys.argv[1] + "\\n").encode())
        connection.close()
for port in sys.argv[2:]:
    try:
        listener = listen(int(port))
    except OSError as error:
        print("busy", port, error.strerror, flush=True)
        continue
    print("port", listener.getsockname()[1], flush=True)
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
print("all", flush=True)
threading.Timer(60, os._exit, (0,)).start()
sys.stdin.buffer.read()
os._exit(0)
"""
# bash cannot listen. `$1` runtime, `$2` image, `$3` the program, then its arguments.
_ANY_PYTHON = """
runtime=$1 image=$2 program=$3
shift 3
command -v python3 >/dev/null && exec timeout 60 python3 -c "$program" "$@"
[ "$runtime" != none ] && [ -n "$image" ] || { echo "there is no python3" >&2; exit 127; }
exec timeout 60 "$runtime" run --rm -i --init --network host --entrypoint python3 "$image" -c "$program" "$@"
"""
# Arguments in fours: name, address, port, the word that the right machine answers.
_DIAL = r"""
export LC_ALL=C
dial() {
    local said word
    said=$(timeout 5 bash -c '
        exec 3<>"/dev/tcp/$0/$1" && IFS= read -r -t 4 -u 3 line && echo "word=$line"' "$2" "$3" 2>&1)
    case $?$said in
        0word="$4") said= ;;
        0word=*) said="another machine answered" ;;
        124*) said="no answer within 5 s" ;;
        *) said=${said%%$'\n'*} said=${said##*: } said=${said:-no answer} ;;
    esac
    printf '%s %s %s\n' "$1" "$3" "$said"
}
while [ $# -ge 4 ]; do dial "$1" "$2" "$3" "$4" & shift 4; done
wait
"""


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


def _listen(node: Node, image: str, ports: Sequence[str]) -> _Listener:
    word = secrets.token_hex(8)
    argv = ["bash", "-c", _ANY_PYTHON, "listen", node.runtime, image, _LISTEN, word, *ports]
    held = reach(node).stream(argv)
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
    done = reach(node).run(["bash", "-c", _DIAL, "dial", *targets], timeout_s=20)
    cut = [line.split(" ", 2) for line in done.out.splitlines() if line.count(" ") >= 2]
    return [Dialled(node.name, target, int(port), said.strip()) for target, port, said in cut]


def _why(error: ClusterError) -> str:
    return error.message.partition(": ")[2] or error.message
