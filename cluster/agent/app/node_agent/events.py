"""Events of ranks: from JSON to types, the same on the node and in the launcher.

Any program may print events, and a program that runs as the same user can change the agent's files, so nothing is taken
as it is: of a known kind of event the known fields are read, and a value that does not fit its field is dropped, as if
it were missing. A field that is missing is None.

The module works with the standard library, because the agent has nothing else. msgspec could not replace it in the
launcher either: it rejects the whole line for one wrong field, and for the NaN and Infinity that `json.dumps` writes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Tuple, Type, TypeVar

T = TypeVar("T")

#: Longer texts are cut. It is the maximum length of a path.
MOST_TEXT = 4096
#: The largest number: that of float32 is smaller, so the loss of a training that diverges still fits.
MOST_NUMBER = 1e39
#: The largest count: floats represent all whole numbers up to it.
MOST_COUNT = 1 << 53
#: The latest time, in seconds since 1970: the year 5138.
MOST_TIME_S = 1e11
#: The longest name of a score, and how many an event may have.
MOST_NAME = 64
MOST_SCORES = 256
#: More digits than any number that fits has. Python refuses to convert thousands of them, or takes very long.
_MOST_DIGITS = 40
#: Control characters, which could drive a terminal, and the separators of lines.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_CONVERT = "convert"
_REQUIRED = "required"


def load(text: str) -> object:
    """Parse JSON; None if it is malformed, or nested too deeply. A number with too many digits becomes infinite."""
    try:
        return json.loads(text, parse_int=_whole_number)
    except (ValueError, RecursionError):
        return None


def _whole_number(digits: str) -> float:
    return int(digits) if len(digits) <= _MOST_DIGITS else math.inf


# Converters: they return the value, or None if it does not fit. A comparison with NaN is false.


def _within(value: object, least: float, most: float) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most:
        return value
    return None


def number(value: object) -> float | None:
    """Return a finite number."""
    return _within(value, -MOST_NUMBER, MOST_NUMBER)


def amount(value: object) -> float | None:
    """Return a finite number that is not negative."""
    return _within(value, 0, MOST_NUMBER)


def timestamp(value: object) -> float | None:
    """Return a time in seconds since 1970."""
    return _within(value, 0, MOST_TIME_S)


def count(value: object) -> int | None:
    """Return a whole number that is not negative, also of 3.0."""
    found = _within(value, 0, MOST_COUNT)
    return int(found) if found is not None and found == int(found) else None


def text(value: object) -> str | None:
    """Return a text in one line that any terminal and file can take, cut after MOST_TEXT characters."""
    if not isinstance(value, str):
        return None
    # JSON can name half of a surrogate pair, which has no bytes in UTF-8.
    valid = value[:MOST_TEXT].encode("utf-8", "replace").decode("utf-8")
    return _CONTROL.sub(" ", valid)


def flag(value: object) -> bool | None:
    """Return true or false."""
    return value if isinstance(value, bool) else None


def optional(convert: Callable[[object], object]) -> Any:
    """Declare a field that is None if it is missing or does not fit."""
    return field(default=None, metadata={_CONVERT: convert})


def required(convert: Callable[[object], object]) -> Any:
    """Declare a field without which the whole object does not fit."""
    return field(metadata={_CONVERT: convert, _REQUIRED: True})


def converted(kind: type, found: Mapping[str, object]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a dataclass that fit, and the names of those that do not."""
    values: Dict[str, Any] = {}
    misfits: List[str] = []
    for each in dataclasses.fields(kind):
        convert = each.metadata.get(_CONVERT)
        value = found.get(each.name)
        if convert is None or value is None:
            continue
        values[each.name] = convert(value)
        if values[each.name] is None:
            misfits.append(each.name)
    return values, misfits


def read(kind: Type[T], found: object) -> T | None:
    """Return an object of a dataclass from the JSON `found`, or None if a required field is missing or does not fit."""
    if not isinstance(found, dict):
        return None
    values, _ = converted(kind, found)
    needed = [each.name for each in dataclasses.fields(kind) if each.metadata.get(_REQUIRED)]  # type: ignore[arg-type]
    return None if any(values.get(name) is None for name in needed) else kind(**values)


@dataclass(frozen=True)
class Event:
    """An event: `kind` is its field `event`, `node` the node rank, `time` in seconds since 1970.

    Kinds that the launcher does not know have this class. `misfits` are the names of the fields that do not fit.
    """

    kind: str
    node: int | None = optional(count)
    time: float | None = optional(timestamp)
    misfits: Tuple[str, ...] = field(default=(), compare=False)

    def as_json(self) -> dict[str, object]:
        """Return the event's fields under their names in docs/reference/contract.md, without those that are missing."""
        known = {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if _CONVERT in each.metadata
        }
        return {"event": self.kind, **{name: value for name, value in known.items() if value is not None}}


@dataclass(frozen=True)
class SettingUp(Event):
    """The node runs its setup commands."""


@dataclass(frozen=True)
class Joining(Event):
    """Whether the node reaches the master, a "host:port"; `why` is the reason if not."""

    master: str | None = optional(text)
    reachable: bool | None = optional(flag)
    listening: bool | None = optional(flag)
    why: str | None = optional(text)


@dataclass(frozen=True)
class Ready(Event):
    """The process group has formed."""

    world_size: int | None = optional(count)
    local_world_size: int | None = optional(count)
    backend: str | None = optional(text)
    device: str | None = optional(text)


@dataclass(frozen=True)
class Progress(Event):
    """A step of the training. `step` and `steps` count within the epoch.

    `eta_s` and `run_eta_s` are the seconds until the epoch and the run end.
    """

    epoch: int | None = optional(count)
    epochs: int | None = optional(count)
    step: int | None = optional(count)
    steps: int | None = optional(count)
    loss: float | None = optional(number)
    images_per_s: float | None = optional(amount)
    eta_s: float | None = optional(amount)
    run_eta_s: float | None = optional(amount)


def _scores(value: object) -> Mapping[str, float | None] | None:
    """Return the entries that are numbers, or null."""
    if not isinstance(value, dict):
        return None
    fitting = [(name, each) for name, each in value.items() if each is None or number(each) is not None]
    return {text(name) or "": each for name, each in fitting[:MOST_SCORES] if len(name) <= MOST_NAME}


@dataclass(frozen=True)
class Scored(Event):
    """An event with scores: `scores` has its further fields that are numbers, by name; null is None."""

    scores: Mapping[str, float | None] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """Return the event's fields, and its scores beside them."""
        return {**super().as_json(), **self.scores}

    def score(self, name: str) -> float | None:
        """Return a score, or None if it is missing."""
        return self.scores.get(name)


@dataclass(frozen=True)
class Metric(Scored):
    """The end of an epoch. `shares` has the fraction of the time that each part took."""

    epoch: int | None = optional(count)
    epochs: int | None = optional(count)
    slowest_rank: int | None = optional(count)
    shares: Mapping[str, float | None] | None = optional(_scores)


@dataclass(frozen=True)
class Done(Scored):
    """The end of the program, with the best epoch's scores, and the path of its checkpoint."""

    best: str | None = optional(text)


@dataclass(frozen=True)
class Checkpoint(Event):
    """A checkpoint was written."""


@dataclass(frozen=True)
class Heartbeat(Event):
    """The rank is alive, and made its last step `idle_s` seconds ago."""

    idle_s: float | None = optional(amount)


@dataclass(frozen=True)
class Failed(Event):
    """A rank failed. `echo`: as a consequence of another rank's failure."""

    error: str | None = optional(text)
    hint: str | None = optional(text)
    echo: bool | None = optional(flag)


#: The classes of the kinds that the launcher knows.
KINDS: Mapping[str, Type[Event]] = {
    "setup": SettingUp,
    "joining": Joining,
    "ready": Ready,
    "progress": Progress,
    "metric": Metric,
    "checkpoint": Checkpoint,
    "heartbeat": Heartbeat,
    "done": Done,
    "failed": Failed,
}


def event(found: object) -> Event | None:
    """Return an event from its JSON, or None if it is none."""
    name = found.get("event") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(name, str):
        return None
    kind = KINDS.get(name, Event)
    values, misfits = converted(kind, found)
    if issubclass(kind, Scored):
        known = {each.name for each in dataclasses.fields(kind)}
        others = {name: value for name, value in found.items() if name not in known}
        values["scores"] = _scores(others)
        misfits += [
            name for name, value in others.items() if isinstance(value, float) and number(value) is None
        ]
    return kind((text(name) or "")[:MOST_NAME], misfits=tuple(misfits), **values)
