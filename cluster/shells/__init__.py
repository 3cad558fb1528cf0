"""Where commands run: one file per way to reach a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Completed:
    """What a command left: its exit code and everything it printed."""

    code: int
    out: str
    err: str


class Shell(Protocol):
    """Runs one command on one machine and waits for it."""

    def run(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float = 60.0) -> Completed:
        """Never raises for a failing command; raises UnreachableError when it cannot run or does not end in time."""
        ...
