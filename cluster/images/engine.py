"""What the engine on a node is, what it knows of an image and which layers it holds, and how it loads what it lacks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cluster import resources
from cluster.errors import ClusterError, LaunchError, UnreachableError, UsageError
from cluster.model import Node
from cluster.rsync import reason
from cluster.runtimes.containers import ARCHITECTURES
from cluster.shells import reach

#: Exit code of engine.sh on a machine without rsync.
_NO_RSYNC = 4
#: This machine, as a node that has no login.
HERE = Node("this machine", "")


@dataclass(frozen=True)
class Engine:
    """An engine as it was found, with what it knows of one image (`id` "" when it has none) and of any layers.

    `free` (None where the engine's folder cannot be seen) and `size` are in bytes; layers are diff ids, lowest first.
    """

    program: str
    version: tuple[int, ...]
    platform: str
    root: str = ""
    driver: str = ""
    containerd: bool = False
    free: int | None = None
    id: str = ""
    size: int = 0
    layers: tuple[str, ...] = ()
    held: tuple[tuple[str, ...], ...] = ()

    @property
    def takes_layers(self) -> bool:
        """Whether it loads an archive without the layers it has: podman and containerd's store want all of them."""
        return self.program == "docker" and not self.containerd

    @property
    def takes_zstd(self) -> bool:
        """Whether it unpacks zstd; every engine unpacks gzip."""
        return self.program == "podman" or self.version >= (23,)


def look(node: Node, image: str) -> Engine:
    """Raises UnreachableError when the node's engine does not answer."""
    said: dict[str, str] = {}
    held = []
    for line in _ask(node, "inspect", image).splitlines():
        key, _, rest = line.partition(" ")
        said[key] = rest
        if key == "layers":
            held.append(tuple(json.loads(rest) or ()))
    image_id, size, layers = said.get("image", " 0 []").split(" ", 2)
    driver, _, status = said.get("driver", "").partition(" ")
    system, _, machine = said["platform"].partition("/")
    return Engine(
        program=said["engine"],
        version=tuple(int(number) for number in re.findall(r"\d+", said["version"])[:3]),
        platform=f"{system}/{ARCHITECTURES.get(machine, machine)}",
        root=said["root"],
        driver=driver,
        containerd="io.containerd" in status,
        free=int(said["free"]) * 1024 if "free" in said else None,
        id=_full(image_id),
        size=int(size),
        layers=tuple(json.loads(layers) or ()),
        held=tuple(held),
    )


def image_id(node: Node, image: str) -> str:
    """The image's full id, "" when the node has none; raises UnreachableError when its engine does not answer."""
    return _full(_ask(node, "id", image).strip())


def arrived(node: Node) -> tuple[str, list[str]]:
    """The folder on the node for the files of a push, which is created, and the names of the complete files in it."""
    answer = reach(node).run(_script("arrived", node, ""))
    if answer.code == _NO_RSYNC:
        raise ClusterError(f"{node.name}: rsync is not installed", f"on {node.name}: sudo apt-get install rsync")
    if answer.code:
        why = f"{node.name}: ~/.cache/clusterctl cannot be written: {reason(answer.err)}"
        raise LaunchError(why, f"on {node.name}: ls -ld ~/.cache; df -h ~/.cache")
    folder, *names = answer.out.splitlines()
    return folder, names


def load(node: Node, image: str, files: Sequence[str], head: bytes) -> str:
    """Make an image of files that have arrived, and remove them; returns the id of what now has the image's name.

    With `head` they are its layers, without it the one file is the whole archive. Raises LaunchError.
    """
    names = ["", *files] if head else files
    done = reach(node).run(_script("load", node, image, *names), stdin=head, timeout_s=3600)
    if done.code:
        raise LaunchError(f"{node.name}: the engine does not load the image: {done.last_line}", "there: docker info")
    return _full(done.out.strip())


def _script(operation: str, node: Node, image: str, *files: str) -> list[str]:
    return ["bash", "-c", resources.text("images/engine.sh"), "engine", operation, _program(node), image, *files]


def _ask(node: Node, operation: str, image: str) -> str:
    answer = reach(node).run(_script(operation, node, image), timeout_s=120)
    if answer.code:
        raise _silent(node, answer.last_line)
    return answer.out


def _program(node: Node) -> str:
    """The node's runtime; "" leaves the choice to the node."""
    if node.runtime == "none" and node is not HERE:
        raise UsageError(f"{node.name}: its runtime is none: jobs run there without an image", "runtime: docker")
    return "" if node.runtime == "none" else node.runtime


def _silent(node: Node, said: str) -> ClusterError:
    if "permission denied" in said.lower():
        hint = 'there: sudo usermod -aG docker "$USER", then log in again'
    elif said.startswith("no program"):
        hint = "make engine" if node is HERE else "install Docker Engine there, or podman"
    else:
        hint = "docker info" if node is HERE else f"there: docker info   (or: clusterctl doctor --only {node.name})"
    return UnreachableError(f"{node.name}: no engine answers: {said}", hint)


def _full(image_id: str) -> str:
    """podman leaves the kind of digest away."""
    return f"sha256:{image_id.removeprefix('sha256:')}" if image_id else ""
