"""The status that an agent writes to NODE.json, from text to types. Pure.

The file comes from a node, where the job's program can change it, so it is read like events: what does not fit its
field is dropped. cluster/agent/__init__.py describes the fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cluster.agent.app.node_agent import events
from cluster.agent.app.node_agent.events import (
    Event,
    amount,
    count,
    flag,
    optional,
    required,
    text,
    timestamp,
)

T = TypeVar("T")

#: Characters of a status, entries of its lists, and the largest exit code.
MOST_STATUS = 1 << 20
_MOST_ENTRIES = 4096
_MOST_EXIT_CODE = 255


def _each(convert: Callable[[object], T | None]) -> Callable[[object], tuple[T, ...] | None]:
    """Return a converter of lists, which drops the entries that do not fit."""

    def convert_list(value: object) -> tuple[T, ...] | None:
        if not isinstance(value, list):
            return None
        return tuple(
            converted for entry in value[:_MOST_ENTRIES] if (converted := convert(entry)) is not None
        )

    return convert_list


def _object(kind: type[T]) -> Callable[[object], T | None]:
    return lambda value: events.read(kind, value)


def exit_code(value: object) -> int | None:
    """Return the exit code of a process."""
    code = count(value)
    return code if code is not None and code <= _MOST_EXIT_CODE else None


def _bytes_total(value: object) -> float | None:
    return amount(value) or None  # a share of nothing has no value


def _events(value: object) -> tuple[Event, ...] | None:
    entries = map(events.event, list(value.values())[:_MOST_ENTRIES]) if isinstance(value, dict) else ()
    return tuple(entry for entry in entries if entry is not None)


@dataclass(frozen=True)
class OtherFailure:
    """A failure after the first one of a node."""

    rank: int = required(count)
    error: str = required(text)


@dataclass(frozen=True)
class Failure:
    """The first failure of a node: `rank` is None if the node could not start its ranks.

    `secondary`: the rank only lost its peers. `others` are the failures of the node's other ranks.
    """

    error: str = required(text)
    rank: int | None = optional(count)
    local_rank: int | None = optional(count)
    time: float | None = optional(timestamp)
    exit_code: int | None = optional(exit_code)
    hint: str | None = optional(text)
    secondary: bool | None = optional(flag)
    others: tuple[OtherFailure, ...] | None = optional(_each(_object(OtherFailure)))


@dataclass(frozen=True)
class StalledRank:
    """Where a rank waits: in a `collective` of torch.distributed ("": none), or in `call` at `place`.

    `busy`: the ranks use the CPU or a GPU, but stay at the same place.
    """

    rank: int = required(count)
    collective: str | None = optional(text)
    call: str | None = optional(text)
    place: str | None = optional(text)
    busy: bool | None = optional(flag)


@dataclass(frozen=True)
class RankUsage:
    """What a rank uses: `cpu` in cores, `rss` in bytes; with a GPU its name, `use` in percent, memory in bytes, °C."""

    rank: int = required(count)
    cpu: float = required(amount)
    rss: float = required(amount)
    gpu: str | None = optional(text)
    use: float | None = optional(amount)
    memory: float | None = optional(amount)
    memory_total: float | None = optional(_bytes_total)
    temperature: float | None = optional(amount)

    def as_json(self) -> dict[str, object]:
        """Return the fields as the agent writes them."""
        names = ("gpu", "use", "memory", "memory_total", "temperature") if self.gpu is not None else ()
        return {name: getattr(self, name) for name in (*names, "rank", "cpu", "rss")}


@dataclass(frozen=True)
class HostMemory:
    """The memory of a machine in bytes."""

    free: float = required(amount)
    total: float = required(_bytes_total)


@dataclass(frozen=True)
class Usage:
    """What the ranks of a node use, and the memory of its machine."""

    ranks: tuple[RankUsage, ...] = required(_each(_object(RankUsage)))
    host: HostMemory | None = optional(_object(HostMemory))

    def as_json(self) -> dict[str, object]:
        """Return the fields as the agent writes them."""
        host = {"host": {"free": self.host.free, "total": self.host.total}} if self.host else {}
        return {"ranks": [rank.as_json() for rank in self.ranks], **host}


@dataclass(frozen=True)
class AgentStatus:
    """The content of NODE.json; empty while there is none. An agent that has exited has an exit code."""

    phase: str | None = optional(text)
    heartbeat: float | None = optional(timestamp)
    exit_code: int | None = optional(exit_code)
    ended_at: float | None = optional(timestamp)
    reason: str | None = optional(text)
    failure: Failure | None = optional(_object(Failure))
    stall: tuple[StalledRank, ...] | None = optional(_each(_object(StalledRank)))
    leaving: tuple[int, ...] | None = optional(_each(count))
    usage: Usage | None = optional(_object(Usage))
    events: tuple[Event, ...] | None = optional(_events)
    output_at: float | None = optional(timestamp)
    lost_lines: int | None = optional(count)
    lost_why: str | None = optional(text)

    @property
    def lost(self) -> str:
        """What the node's log lacks, such as `12 lines: No space left on device`; "": nothing."""
        lines = "1 line" if self.lost_lines == 1 else f"{self.lost_lines} lines"
        return f"{lines}: {self.lost_why or 'unknown error'}" if self.lost_lines else ""

    @property
    def quiet_s(self) -> float:
        """Seconds since the last line of a rank, by the clock of the agent; 0 if that is not known."""
        if self.heartbeat is None or self.output_at is None:
            return 0.0
        return max(0.0, self.heartbeat - self.output_at)

    @property
    def has_exited(self) -> bool:
        """Whether the agent has reported the end of its node."""
        return self.phase == "exited" and self.exit_code is not None


def parse(content: str) -> AgentStatus:
    """Return the status that a file has; an empty one of a file that does not exist, or is malformed."""
    fields = events.load(content) if len(content) <= MOST_STATUS else None
    return events.read(AgentStatus, fields) or AgentStatus()


def from_exit_file(line: str) -> tuple[int, float | None]:
    """Return code and time of the line `CODE TIME` in NODE.exit; code 1 of a line that does not fit."""
    code, _, at = line.strip().partition(" ")
    values = [events.load(word) for word in (code, at)]
    found = exit_code(values[0])
    return (1 if found is None else found), timestamp(values[1])
