"""Parallel calls for many nodes, with a bounded number of threads."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cluster.errors import ClusterError, UnreachableError
from cluster.spec.model import Machine, Node

T = TypeVar("T")
Target = TypeVar("Target", Machine, Node, str)

#: Concurrent nodes; beyond this number the sockets and CPU of this machine are the limit.
WIDTH = 64


def each(nodes: Sequence[Target], work: Callable[[Target], T]) -> dict[str, T | ClusterError]:
    """Return the result of `work` for every node by name, or the ClusterError that it raised."""

    def call(node: Target) -> T | ClusterError:
        try:
            return work(node)
        except ClusterError as error:
            return error

    # Also for one node: Ctrl-C then waits for the call's end. A start that is under way would escape the stop after it.
    with ThreadPoolExecutor(min(WIDTH, len(nodes) or 1)) as pool:
        return dict(
            zip(
                (node if isinstance(node, str) else node.name for node in nodes),
                pool.map(call, nodes),
                strict=True,
            )
        )


def all_of(nodes: Sequence[Target], work: Callable[[Target], T]) -> dict[str, T]:
    """As `each`, but raise one ClusterError with all messages if any node failed."""
    return together(each(nodes, work))


def together(results: Mapping[str, T | ClusterError]) -> dict[str, T]:
    """Return the results if no node failed; else raise one error of the same kind with all messages."""
    errors = [result for result in results.values() if isinstance(result, ClusterError)]
    if errors:
        kind = next(
            (type(error) for error in errors if not isinstance(error, UnreachableError)), UnreachableError
        )
        hints = list(dict.fromkeys(error.hint for error in errors if error.hint))
        raise kind("\n       ".join(error.message for error in errors), "\n      ".join(hints))
    return {name: result for name, result in results.items() if not isinstance(result, ClusterError)}
