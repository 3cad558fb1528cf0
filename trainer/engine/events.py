"""Events: JSON lines on stdout for a launcher (docs/reference/contract.md)."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from trainer import contract

PROGRESS_EVERY_S = 0.5


class Events:
    """Writer of events; without a launcher it writes nothing."""

    def __init__(self, environment: Mapping[str, str], out: TextIO | None = None) -> None:
        self.launched = bool(environment.get(contract.JOB_ID))
        self._is_local_rank_0 = environment.get("LOCAL_RANK", "0") == "0"
        node = environment.get("GROUP_RANK", "0")
        self._node = int(node) if node.isdigit() else 0
        self._out = out
        self._last_progress = -math.inf
        self.listener: Callable[[str, Mapping[str, Any]], None] | None = (
            None  # called with each event, in this process
        )

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event, on local rank 0 only; any rank writes `failed`."""
        if self.listener:
            self.listener(event, fields)
        if not self.launched or not (self._is_local_rank_0 or event == contract.FAILED):
            return
        content = {"event": event, "node": self._node, "time": round(time.time(), 3), **_plain(fields)}
        line = contract.EVENT_MARK + json.dumps(content, separators=(",", ":"))
        # One write with the newline, because several ranks share a pipe.
        out = self._out or sys.stdout
        # If the reader was killed, SIGTERM follows, and the rank still writes a checkpoint.
        with contextlib.suppress(BrokenPipeError):
            out.write(line + "\n")
            out.flush()

    def progress(self, **fields: Any) -> None:
        """Write `progress` at most twice a second, and always for an epoch's last step."""
        if self.is_progress_due(last=fields["step"] == fields["steps"]):
            self._last_progress = time.monotonic()
            self.emit(contract.PROGRESS, **fields)

    def is_progress_due(self, *, last: bool) -> bool:
        """Return whether `progress` would write after a step of an epoch, or after its `last`."""
        is_heard = self.listener is not None or (self.launched and self._is_local_rank_0)
        return is_heard and (last or time.monotonic() - self._last_progress >= PROGRESS_EVERY_S)


def _plain(value: Any) -> Any:
    """Round floats, and replace NaN and infinity, which JSON lacks, by null."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
