"""Lines of node logs: events, and the agent's own."""

import json
from typing import Any, TypeGuard

from cluster import contract

Event = dict[str, Any]

#: The prefix of the agent's own lines in a node's log.
AGENT_PREFIX = "agent: "


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
