"""Masking of secrets in the lines of a log. An event stays an event: only the strings in it are masked."""

from __future__ import annotations

import json
import os
import re
from typing import Any, Iterable

from .events import load
from .settings import EVENT_MARK, Fields

#: Shorter values of secrets are not masked, because they would mask unrelated text.
SECRET_MIN_LENGTH = 4
#: Common values of switches. They are not masked either: the log would be unreadable, and they are no secrets.
COMMON_WORDS = frozenset(
    "true false none null auto default enable enabled disable disabled online offline debug info warning error".split()
)
_MARK = EVENT_MARK.encode()
_MASK = "***"


class Mask:
    """Replaces the values of secrets by `***`, the longest first. Of a value with several lines, each line counts."""

    def __init__(self, secrets: Iterable[str]) -> None:
        values = [os.fsencode(value).decode("utf-8", "surrogateescape") for value in secrets]
        parts = {part.strip() for value in values for part in (value, *_lines(value)) if is_masked(part)}
        parts |= {json.dumps(part)[1:-1] for part in parts}  # as programs print it in a dictionary
        ordered = sorted(parts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def text(self, text: str) -> str:
        """Return the text without the secrets."""
        return self._pattern.sub(_MASK, text) if self._pattern else text

    def event(self, event: Fields) -> Fields:
        """Return the event with its strings masked, but neither its keys nor its kind. Raises RecursionError."""
        return dict(self._values(event), event=event["event"])

    def line(self, line: bytes) -> bytes:
        """Return a line without the secrets. An event remains valid JSON with the same keys, numbers and kind."""
        if self._pattern is None:
            return line
        before, event = split_event(line)
        if event is not None:
            try:
                masked = json.dumps(self.event(event), separators=(",", ":"))
                return self._bytes(before) + _MARK + masked.encode()
            except RecursionError:  # nested too deeply, so no event of the contract
                pass
        return self._bytes(line)

    def _bytes(self, text: bytes) -> bytes:
        return self.text(text.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")

    def _values(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self._values(each) for each in value]
        if isinstance(value, dict):
            return {key: self._values(each) for key, each in value.items()}
        return value


def is_masked(text: str) -> bool:
    """Return whether a secret's value, or a line of it, is masked: unless it is short or a common word."""
    return len(text.strip()) >= SECRET_MIN_LENGTH and text.strip().lower() not in COMMON_WORDS


def stays_visible(value: str) -> bool:
    """Return whether logs show all lines of a secret's value."""
    return bool(value.strip()) and not any(is_masked(line) for line in _lines(value))


def split_event(line: bytes) -> tuple[bytes, Fields | None]:
    """Return the text before the event of a line, and the event; without an event, the whole line and None."""
    before, mark, rest = line.partition(_MARK)
    if mark:
        event = load(rest.decode(errors="replace"))
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            return before, event
    return line, None


def _lines(value: str) -> list[str]:
    return re.split(r"[\r\n]+", value)
