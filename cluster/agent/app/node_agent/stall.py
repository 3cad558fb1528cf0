"""Detection of ranks that make no progress.

The ranks of a node have stalled when for the timeout none of them prints, and

- they use neither the CPU nor a GPU, or
- they stay at the same place of their Python programs, although they are busy: a rank that waits in NCCL, or polls for
  the end of a collective, keeps a core and a GPU at 100 %.

A stack cannot tell a wait from a computation in a single line. So stacks are compared often near the end of the
timeout, which finds a program that leaves its place now and then; and what child processes compute, and what is read or
written, is progress.
"""

from __future__ import annotations

import time

from .output import Log, Status
from .ranks import Rank
from .settings import HEARTBEAT_S, Fields, Settings
from .stacks import BLOCKED_S, is_same_place, place, waits_for_others
from .usage import Usage

#: A rank that uses less than this share of a core, and prints nothing, makes no progress.
IDLE_SHARE = 0.05
#: Bytes that the ranks of a node read or write between two heartbeats, if they save or load something large.
BUSY_BYTES = 1 << 20
#: How many samples of the stacks have to agree.
SAMPLES = 3
#: The interval of the main loop in the second half of the timeout. A sample takes two or three.
SAMPLE_S = 0.1


class StallDetector:
    """Finds out that the ranks of the node make no progress, and where they wait."""

    def __init__(self, settings: Settings, log: Log, status: Status, ranks: list[Rank]) -> None:
        self._timeout_s = settings.stall_timeout_s
        self._log = log
        self._status = status
        self._ranks = ranks
        self._checked = self._active = time.monotonic()
        self._is_asked = self._is_stuck = False
        self._restart(self._active)

    @property
    def wait_s(self) -> float:
        """How long the main loop may wait until it calls `sample` again."""
        is_suspect = (
            self._samples
            and not self._is_stuck
            and time.monotonic() - self._still_since > self._timeout_s / 2
        )
        return SAMPLE_S if self._timeout_s and is_suspect else HEARTBEAT_S / 2

    def _running(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.code is None]

    def _restart(self, now: float) -> None:
        """Compare with the stacks from `now` on, because of progress then."""
        self._still_since = now
        self._samples = 0
        self._is_stuck = False
        self._first: dict[int, list[str]] = {}

    def sample(self) -> None:
        """While no rank prints, compare the ranks' stacks with the first ones, and ask for the next."""
        now = time.monotonic()
        running = self._running()
        if not self._timeout_s or not running:
            return
        output_at = max(rank.output_at for rank in running)
        if output_at > self._still_since:
            self._restart(output_at)
        if self._is_asked:
            for rank in running:
                rank.stack.read()
            stacks = {rank.number: rank.stack.lines for rank in running if rank.stack.lines is not None}
            if len(stacks) < len(running):
                return
            self._is_asked = False
            self._compare(stacks, now)
        if now - output_at >= HEARTBEAT_S:
            self._is_asked = True
            for rank in running:
                rank.stack.ask()

    def _compare(self, stacks: dict[int, list[str]], now: float) -> None:
        is_same = stacks.keys() == self._first.keys()
        if not is_same or not all(
            is_same_place(self._first[number], stack) for number, stack in stacks.items()
        ):
            self._restart(now)
            self._first = stacks
        self._samples += 1
        self._is_stuck = self._samples >= SAMPLES and now - self._still_since >= self._timeout_s

    def check(self, usage: Usage) -> None:
        """Update the field `stall` of the status after a sample; once per stall, write the stacks to the log."""
        now = time.monotonic()
        if not self._timeout_s:
            return
        # A longer gap is a time in which this process was suspended, and the ranks were, too.
        if now - self._checked > 2 * HEARTBEAT_S:
            gap_s = now - self._checked - HEARTBEAT_S
            self._active += gap_s
            self._restart(min(now, self._still_since + gap_s))
        self._checked = now
        running = self._running()
        if usage.cpu > IDLE_SHARE * len(running):
            self._active = now
        self._active = max([self._active, *(rank.output_at for rank in running)])
        if self._works_elsewhere(usage):
            self._restart(now)
        was_stalled = bool(self._status.fields.get("stall"))
        is_idle = now - self._active >= self._timeout_s
        if is_idle and not was_stalled and usage.gpus_are_active:
            self._active = now
            is_idle = False
        is_stalled = is_idle or self._is_stuck
        if is_stalled != was_stalled:
            self._status.write(stall=self._report(is_idle) if is_stalled else [])

    def _works_elsewhere(self, usage: Usage) -> bool:
        """Return whether there is work that the stacks of the main threads do not show."""
        if usage.children_cpu > IDLE_SHARE or usage.io_bytes > BUSY_BYTES:
            return True
        waiting = [number for number, stack in self._first.items() if waits_for_others(stack)]
        return any(usage.own_cpu.get(number, 0.0) > IDLE_SHARE for number in waiting)

    def _report(self, is_idle: bool) -> list[Fields]:
        running = self._running()
        what = "no output and no activity" if is_idle else "no output, and busy at the same place"
        found = []
        for rank, stack in zip(running, newest_stacks(running)):
            self._log.message("rank %d: %s for %d s" % (rank.number, what, self._timeout_s))
            for line in stack:
                self._log.message("rank %d:   %s" % (rank.number, line))
            found.append(dict(place(stack), rank=rank.number, **({} if is_idle else {"busy": True})))
        return found


def newest_stacks(ranks: list[Rank]) -> list[list[str]]:
    """Return the current stack of each rank, newest call first; [] if it is not Python or does not answer in time."""
    for rank in ranks:
        rank.stack.ask()
    until = time.monotonic() + 3 * BLOCKED_S
    while any(rank.stack.lines is None for rank in ranks) and time.monotonic() < until:
        time.sleep(0.02)
        for rank in ranks:
            rank.stack.read()
    return [rank.stack.lines or [] for rank in ranks]
