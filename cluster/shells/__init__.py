"""Where commands run: one file per way to reach a machine, and `reach`, which chooses by the node's login."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from cluster.model import Node
from cluster.shells.local import LocalShell
from cluster.shells.result import Completed

__all__ = ["Completed", "LocalShell", "Shell", "Stream", "close_all", "reach"]


class Stream(Protocol):
    """A running command: write to `stdin` and close it, read `stdout` to its end, then ask for the result."""

    @property
    def stdin(self) -> BinaryIO:
        """The command's input."""
        ...

    @property
    def stdout(self) -> BinaryIO:
        """The command's output."""
        ...

    def wait(self, timeout_s: float) -> Completed:
        """The exit code and stderr (`out` is empty); raises UnreachableError when it does not end in time."""
        ...


class Shell(Protocol):
    """Runs commands on one machine."""

    def run(self, argv: Sequence[str], *, stdin: str | bytes = "", timeout_s: float = 60.0) -> Completed:
        """Never raises for a failing command; raises UnreachableError when it cannot run or does not end in time."""
        ...

    def stream(self, argv: Sequence[str]) -> AbstractContextManager[Stream]:
        """Start a command whose input or output is large; leaving the block ends it. Raises UnreachableError."""
        ...

    def ping(self) -> bool:
        """Whether the machine gives a sign of life; waits for it as long as the connection holds."""
        ...

    def close(self) -> None:
        """Let go of the machine; the next command reaches for it again."""
        ...


@dataclass
class _Pool:
    """One shell per machine, kept, so that every machine is logged into once."""

    shells: dict[tuple[str, str, str], Shell]
    lock: threading.Lock


_POOL = _Pool({}, threading.Lock())


def reach(node: Node) -> Shell:
    """The shell of a node: the same one at every call. Nothing is connected before the first command."""
    if not node.login:
        return LocalShell()
    key = (node.name, node.login, node.ssh_config)
    with _POOL.lock:
        if key not in _POOL.shells:
            # paramiko takes a while to import, and a job on this machine does not need it
            from cluster.shells.ssh import SshShell

            _POOL.shells[key] = SshShell(node.login, place=node.name, config_file=node.ssh_config)
        return _POOL.shells[key]


def close_all() -> None:
    """Close every connection."""
    with _POOL.lock:
        for shell in _POOL.shells.values():
            shell.close()
