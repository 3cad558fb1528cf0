"""Shells that run commands on this machine or over SSH, and files on nodes. `reach` returns the shell of a node."""

import threading
from collections.abc import Sequence
from typing import Protocol

from cluster.spec.model import Node
from cluster.transport.local import Completed, LocalShell

__all__ = ["Completed", "LocalShell", "Shell", "close_all", "reach"]


class Shell(Protocol):
    """Runs commands on one machine."""

    def run(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float = 60.0) -> Completed:
        """Run a command, which may fail. Raise UnreachableError if it cannot start or does not end in time."""
        ...

    def ping(self) -> bool:
        """Return whether the machine responds. This waits until the connection breaks."""
        ...

    def close(self) -> None:
        """Close the connection; the next command opens another."""
        ...


#: One open shell per machine.
_shells: dict[tuple[str, str, str], Shell] = {}
_lock = threading.Lock()


def reach(node: Node) -> Shell:
    """Return the shell of a node, always the same one. It connects at the first command."""
    if not node.login:
        return LocalShell()
    key = (node.name, node.login, node.ssh_config)
    with _lock:
        if key not in _shells:
            # paramiko imports slowly, and local jobs do not need it
            from cluster.transport.ssh import SshShell

            _shells[key] = SshShell(node)
        return _shells[key]


def close_all() -> None:
    """Close every connection."""
    with _lock:
        for shell in _shells.values():
            shell.close()
