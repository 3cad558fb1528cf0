"""Milestones as lines that a launcher reads (docs/contract.md); silent when no launcher is listening."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from trainer import contract

PROGRESS_EVERY_S = 0.5


class Events:
    """Writes events to stdout when the environment names a job."""

    def __init__(self, environment: Mapping[str, str], out: TextIO | None = None) -> None:
        self.listening = bool(environment.get(contract.JOB_ID))
        self._speaks = environment.get("LOCAL_RANK", "0") == "0"
        node = environment.get("GROUP_RANK", "0")
        self._node = int(node) if node.isdigit() else 0
        self._out = out
        self._last_progress = -math.inf
        self.listener: Callable[[str, Mapping[str, Any]], None] | None = None  # hears what is told, in this process

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event, from the node's local rank 0 only, except `failed`, which any rank may have to say."""
        if self.listener:
            self.listener(event, fields)
        if not self.listening or not (self._speaks or event == contract.FAILED):
            return
        content = {"event": event, "node": self._node, "time": round(time.time(), 3), **_plain(fields)}
        line = contract.EVENT_MARK + json.dumps(content, separators=(",", ":"))
        # One write, with the newline: the lines of several ranks share a pipe.
        out = self._out or sys.stdout
        out.write(line + "\n")
        out.flush()

    def progress(self, **fields: Any) -> None:
        """Write `progress`, at most twice a second; an epoch's last step is always written."""
        now = time.monotonic()
        if fields["step"] == fields["steps"] or now - self._last_progress >= PROGRESS_EVERY_S:
            self._last_progress = now
            self.emit(contract.PROGRESS, **fields)


def _plain(value: Any) -> Any:
    """Floats shortened, and NaN and infinity as null: JSON has no words for them."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
