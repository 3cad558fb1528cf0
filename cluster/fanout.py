"""The same thing on many machines at once: bounded, and one slow machine holds up nobody but itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cluster.errors import ClusterError, UnreachableError
from cluster.model import Node

T = TypeVar("T")

#: Machines worked on at once: more than this, and this machine's own sockets and processor are the limit.
WIDTH = 64


def each(nodes: Sequence[Node], work: Callable[[Node], T]) -> dict[str, T | ClusterError]:
    """What `work` gave for every node by its name; the ClusterError where it raised one, so that none is missing."""

    def one(node: Node) -> T | ClusterError:
        try:
            return work(node)
        except ClusterError as error:
            return error

    if len(nodes) == 1:
        return {nodes[0].name: one(nodes[0])}
    with ThreadPoolExecutor(min(WIDTH, len(nodes) or 1)) as pool:
        return dict(zip((node.name for node in nodes), pool.map(one, nodes), strict=True))


def all_of(nodes: Sequence[Node], work: Callable[[Node], T]) -> dict[str, T]:
    """As `each`, but raises when any node failed: one ClusterError that names every such node and why."""
    return together(each(nodes, work))


def together(results: Mapping[str, T | ClusterError]) -> dict[str, T]:
    """The results where no node failed; else raises one error of the same kind that has every node's line."""
    errors = [result for result in results.values() if isinstance(result, ClusterError)]
    if errors:
        kind = next((type(error) for error in errors if not isinstance(error, UnreachableError)), UnreachableError)
        hints = list(dict.fromkeys(error.hint for error in errors if error.hint))
        raise kind("\n       ".join(error.message for error in errors), "\n      ".join(hints))
    return {name: result for name, result in results.items() if not isinstance(result, ClusterError)}
