"""Lines of node logs: events, and the agent's own."""

from cluster import contract
from cluster.agent.app.node_agent import events
from cluster.agent.app.node_agent.events import Event

#: The prefix of the agent's own lines in a node's log.
AGENT_PREFIX = "agent: "


def event(line: str) -> Event | None:
    """Return the event of a line, or None for text and for a malformed event."""
    _, mark, rest = line.partition(contract.EVENT_MARK)
    return events.event(events.load(rest)) if mark else None
