"""Watchdog: reports a stalled run and the rank that the others wait for, and ends a rank that cannot continue."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from trainer import contract
from trainer.distributed import comm, neighbours
from trainer.engine.events import Events
from trainer.engine.heartbeats import Heartbeat, Heartbeats, texts_of

BEAT_S = 10.0
STEP = "step"  # the phase in which a rank can wait for others
START = "the start"  # no limit: caching images and compiling the first step can take long
ALIVE = 4  # multiple of the limit while all ranks send heartbeats: one may be slow, not broken
HINT = "see the log of that rank; --resume continues from the last checkpoint"


def late(beats: Mapping[int, Heartbeat], size: int, beat_s: float) -> str:
    """Describe the ranks that the others wait for: without heartbeat, else behind, else not in a step."""
    silent = _silent(beats, size, 3 * beat_s)
    if len(silent) == size:  # even this rank's own heartbeat
        return "the store on rank 0's machine does not answer: its process is frozen, has exited or is unreachable"
    if silent:
        return f"no heartbeat from {_ranks(silent)}: frozen, exited or unreachable"
    least = min(beat.number for beat in beats.values())
    behind = [r for r in range(size) if beats[r].number == least]
    busy = [r for r in behind if beats[r].phase != STEP]
    if busy and len(busy) < size:
        return f"{_ranks(busy)} late: in {beats[busy[0]].phase}, {least} steps done"
    if len(behind) < size:
        return f"{_ranks(behind)} late: only {least} steps done"
    return f"all ranks are in {beats[0].phase} with {least} steps done: the collective itself hangs"


def must_exit(beats: Mapping[int, Heartbeat], size: int, idle_s: float, stall_s: float, phase: str) -> bool:
    """Return whether a rank must exit that has been idle for `idle_s` seconds in `phase`.

    It must once another rank's heartbeat is missing for the limit. While all ranks send heartbeats the limit is ALIVE
    times as long, and infinite at the start.
    """
    if size == 1 or idle_s <= stall_s:
        return False
    return bool(_silent(beats, size, stall_s)) or (phase != START and idle_s > ALIVE * stall_s)


def _silent(beats: Mapping[int, Heartbeat], size: int, limit_s: float) -> list[int]:
    return [r for r in range(size) if r not in beats or beats[r].silent_s > limit_s]


def _ranks(numbers: list[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


class Watchdog:
    """Threads that send heartbeats, dump all stacks of a stalled process, and end it."""

    def __init__(
        self,
        world: comm.World,
        stall_s: float,
        events: Events,
        store: Any = None,
        near: neighbours.Neighbours | None = None,
    ) -> None:
        """`stall_s` seconds without a step are a stall; 0 disables the check.

        `store` is the process group's, and `near` the ranks that share memory, by default none.
        """
        self._world = world
        self._stall_s = stall_s
        self._events = events
        self._beat_s = min(BEAT_S, stall_s / 4) if stall_s else BEAT_S
        self._phase = START
        self._number = 0
        self._since = time.monotonic()
        self._store = store
        self._end = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        # A separate thread, because a call to a frozen master never returns.
        self._sender = threading.Thread(target=self._exchange_heartbeats, name="heartbeat", daemon=True)
        near = near or neighbours.apart(world.size, texts_of(world.size))
        self._heartbeats = Heartbeats(world.rank, near, store, self._beat_s, START, self._since)

    def __enter__(self) -> "Watchdog":
        self._watcher.start()
        if self._store is not None:
            self._sender.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._watcher.join(timeout=1)
        if self._store is not None:
            self._sender.join(timeout=1)

    def step(self, number: int) -> None:
        """Record that `number` steps of the run are finished."""
        self._number = number
        self._since = time.monotonic()
        self._phase = STEP

    def progress(self) -> None:
        """Record progress other than a step, such as a batch of a validation."""
        self._since = time.monotonic()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Set the phase of this rank inside the context."""
        before = self._phase
        self._phase = phase
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._phase = before
            self._since = time.monotonic()

    def _watch(self) -> None:
        reported = -1.0  # start of the stall that was reported last
        last = time.monotonic()
        while not self._end.wait(self._beat_s):
            last, slept_s = time.monotonic(), time.monotonic() - last
            if slept_s > 3 * self._beat_s:  # this process was stopped, so its data are stale
                self._since = last
                self._heartbeats.restart(last)
            phase = self._phase
            number = self._number
            since = self._since
            idle_s = last - since
            self._events.emit(contract.HEARTBEAT, phase=phase, step=number, idle_s=idle_s)
            if not self._stall_s or idle_s <= self._stall_s:
                continue
            beats = self._heartbeats.all(last)
            cause = late(beats, self._world.size, self._beat_s) if self._world.size > 1 else f"in {phase}"
            if reported != since:
                reported = since
                self._events.emit(contract.STALLED, phase=phase, step=number, idle_s=idle_s, late=cause)
                text = f"stalled: no step for {idle_s:.0f} s after {number} steps; {cause}; stack traces:"
                print(f"rank {self._world.rank} (pid {os.getpid()}) {text}", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(all_threads=True)
            if self._store is not None and must_exit(beats, self._world.size, idle_s, self._stall_s, phase):
                self._exit(idle_s, cause)

    def _exchange_heartbeats(self) -> None:
        while not self._end.wait(self._beat_s):
            with contextlib.suppress(Exception):  # same as a master that does not answer
                self._heartbeats.exchange(self._number, self._phase, time.monotonic())

    def _exit(self, idle_s: float, cause: str) -> None:
        """Exit at once: the main thread is blocked in a collective, which no exception interrupts."""
        error = f"rank {self._world.rank} exits after {idle_s:.0f} s without a step: {cause}"
        self._events.emit(
            contract.FAILED, rank=self._world.rank, error=error, hint=HINT, exit_code=1, echo=True
        )
        print(f"error: {error}\nhint: {HINT}", file=sys.stderr, flush=True)
        os._exit(1)
