"""The nodes' logs: read from where we stopped, cut into lines, events told from text."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import contract
from cluster.model import Plan

Event = dict[str, Any]

#: What the agent writes of its own into a node's log.
AGENT_PREFIX = "agent: "


def read(plan: Plan, offsets: Mapping[str, int]) -> dict[str, bytes]:
    """Each named node's log from its offset on; nothing where there is no log yet."""
    found = {}
    for node, offset in offsets.items():
        try:
            with Path(plan.attempt_dir, f"{node}.log").open("rb") as file:
                file.seek(offset)
                found[node] = file.read()
        except FileNotFoundError:
            found[node] = b""
    return found


def append(copy: Path, at: int, chunk: bytes) -> None:
    """Add to the copy of a log what follows its first `at` bytes, unless another follower has done so already."""
    if not chunk:
        return
    with copy.open("ab") as file:
        with contextlib.suppress(OSError):  # a disk without locks: two followers at once may write a line twice
            fcntl.flock(file, fcntl.LOCK_EX)
        known = file.seek(0, io.SEEK_END) - at  # others may have written since it was opened
        if 0 <= known < len(chunk):
            file.write(chunk[known:])


def event(line: str) -> Event | None:
    """The event that a line carries, or None for a line that is text (also when the event is not as it should be)."""
    _, mark, rest = line.partition(contract.EVENT_MARK)
    if not mark:
        return None
    try:
        found = json.loads(rest)
    except json.JSONDecodeError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("event"), str):
        return None
    return found if isinstance(found.get("time", 0), int | float) else None


def number(found: Event, name: str) -> float:
    """A number that an event carries; 0 where it has none, because a program may write what it likes."""
    value = found.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


@dataclass
class Reader:
    """Turns growing logs into whole lines: every line once, none cut in two."""

    offsets: dict[str, int]
    _rest: dict[str, bytes] = field(default_factory=dict)

    def lines(self, chunks: Mapping[str, bytes]) -> list[tuple[str, str]]:
        """(node, line) for each line that the new chunks complete, in order per node."""
        complete = []
        for node, chunk in chunks.items():
            self.offsets[node] += len(chunk)
            *whole, self._rest[node] = (self._rest.get(node, b"") + chunk).split(b"\n")
            complete += [(node, line.decode(errors="replace").rstrip("\r")) for line in whole]
        return complete
