"""Detection of ranks that make no progress, and where they wait."""

from __future__ import annotations

import os
import re
import time

from .output import Log, Status
from .ranks import Rank
from .settings import HEARTBEAT_S, Fields, Settings
from .usage import Usage

#: A rank that uses less than this share of a core, and prints nothing, makes no progress.
IDLE_SHARE = 0.05


class StallWatch:
    """Finds out that the ranks of the node make no progress, and where they wait."""

    def __init__(self, settings: Settings, log: Log, status: Status, ranks: list[Rank]) -> None:
        self._timeout_s, self._log, self._status, self._ranks = settings.stall_timeout_s, log, status, ranks
        self._checked = self._active = time.monotonic()

    def check(self, usage: Usage) -> None:
        """Update the field `stall` of the status after a sample; once per stall, write the stacks to the log."""
        now = time.monotonic()
        if not self._timeout_s:
            return
        # A longer gap is a time in which this process was suspended, and the ranks were, too.
        if now - self._checked > 2 * HEARTBEAT_S:
            self._active += now - self._checked - HEARTBEAT_S
        self._checked = now
        running = [rank for rank in self._ranks if rank.code is None]
        if usage.cpu > IDLE_SHARE * len(running):
            self._active = now
        self._active = max([self._active, *(rank.output_at for rank in running)])
        stalled = now - self._active >= self._timeout_s
        if stalled and not self._status.fields.get("stall") and usage.gpus_are_active:
            self._active = now
        elif stalled != bool(self._status.fields.get("stall")):
            self._status.write(stall=self._report(running) if stalled else [])

    def _report(self, running: list[Rank]) -> list[Fields]:
        found = []
        for rank in running:
            stack = rank.stack()
            self._log.message("rank %d: no output and no activity for %d s" % (rank.number, self._timeout_s))
            for line in stack:
                self._log.message("rank %d:   %s" % (rank.number, line))
            found.append(dict(place(stack), rank=rank.number))
        return found


def place(stack: list[str]) -> Fields:
    """Return where a rank waits: `collective` of torch.distributed or "", newest `call`, `place` in the program."""
    found: Fields = {"collective": "", "call": "", "place": ""}
    for line in stack:
        match = re.match(r'File "(.*)", line (\d+) in (.*)', line)
        if match is None:
            continue
        path, number, function = match.groups()
        is_library = "-packages/" in path or "/lib/python3" in path or path.startswith("<")
        if "/torch/distributed/" in path or "/torch/nn/parallel/" in path or function == "backward":
            if function not in ("wrapper", "wait", "forward") and not function.startswith("_"):
                found["collective"] = function
        found["call"] = found["call"] or function
        if not is_library:
            found["place"] = "%s:%s" % (os.path.basename(path), number)
            break
    return found
