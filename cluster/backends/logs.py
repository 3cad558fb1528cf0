"""Node logs: read from an offset, split into lines, events parsed."""

import contextlib
import fcntl
import io
import json
from pathlib import Path
from typing import Any, TypeGuard

from cluster import contract
from cluster.spec.model import Plan

Event = dict[str, Any]

#: The prefix of the agent's own lines in a node's log.
AGENT_PREFIX = "agent: "


def append(copy: Path, at: int, chunk: bytes) -> None:
    """Append `chunk`, which starts at offset `at`, to the copy of a log, less what another follower has appended."""
    if not chunk:
        return
    with copy.open("ab") as file:
        with contextlib.suppress(OSError):  # a file system without locks: two followers may write a line twice
            fcntl.flock(file, fcntl.LOCK_EX)
        written = file.seek(0, io.SEEK_END) - at
        if 0 <= written < len(chunk):
            file.write(chunk[written:])


def event(line: str) -> Event | None:
    """Return the event of a line, or None for text and for a malformed event."""
    _, mark, rest = line.partition(contract.EVENT_MARK)
    if not mark:
        return None
    try:
        found = json.loads(rest)
    except (ValueError, RecursionError):  # also for a number of thousands of digits
        return None
    return found if is_event(found) else None


def is_event(found: object) -> TypeGuard[Event]:
    """Return whether a JSON value is an event."""
    if not isinstance(found, dict) or not isinstance(found.get("event"), str):
        return False
    return isinstance(found.get("time", 0), int | float)


def number(found: Event, name: str) -> float:
    """Return a numeric field of an event; 0 if it is missing or not a number."""
    value = found.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


class Reader:
    """Reads the growing logs of an attempt as complete lines."""

    def __init__(self, plan: Plan) -> None:
        self._paths = {node.name: Path(plan.attempt_dir, f"{node.name}.log") for node in plan.nodes}
        self._offsets = dict.fromkeys(self._paths, 0)
        self._rest = dict.fromkeys(self._paths, b"")

    def lines(self) -> list[tuple[str, str]]:
        """Return (node, line) for each line that has been completed since the last call, in order per node."""
        lines = []
        for node, path in self._paths.items():
            try:
                with path.open("rb") as file:
                    file.seek(self._offsets[node])
                    chunk = file.read()
            except FileNotFoundError:
                continue
            self._offsets[node] += len(chunk)
            *complete, self._rest[node] = (self._rest[node] + chunk).split(b"\n")
            lines += [(node, line.decode(errors="replace").rstrip("\r")) for line in complete]
        return lines
