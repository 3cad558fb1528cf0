"""Shells that run commands on this machine or over SSH, and files on nodes. `reach` returns the shell of a node."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from cluster.spec.model import Machine
from cluster.transport import settings
from cluster.transport.local import Completed, LocalShell
from cluster.transport.openssh import Ssh

if TYPE_CHECKING:
    from cluster.transport.ssh import SshShell

__all__ = ["Completed", "LocalShell", "Shell", "close_all", "reach", "ssh_to"]


class Shell(Protocol):
    """Runs commands on one machine. `note` says how it is reached, unless that is the usual way."""

    note: str

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
_shells: dict[tuple[str, str, str], "SshShell"] = {}
_lock = threading.Lock()


def reach(node: Machine) -> Shell:
    """Return the shell of a node, always the same one. It connects at the first command."""
    if not node.login:
        return LocalShell()
    key = (node.name, node.login, node.ssh_config)
    with _lock:
        if key not in _shells:
            from cluster.transport.ssh import SshShell

            _shells[key] = SshShell(node)
        return _shells[key]


def ssh_to(node: Machine) -> Ssh:
    """Return the ssh program for a node, over the connection of its shell if that can be shared.

    Raises UnreachableError if the ssh configuration cannot be read.
    """
    if not node.login:
        return Ssh(node)
    with _lock:
        shell = _shells.get((node.name, node.login, node.ssh_config))
    return Ssh(node, settings.read(node), shell.socket if shell else "")


def close_all() -> None:
    """Close every connection."""
    with _lock:
        shells = list(_shells.values())
    for shell in shells:
        shell.close()
