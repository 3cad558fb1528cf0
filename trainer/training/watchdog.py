"""Notices when a training stands still, and says which rank the others wait for."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from trainer import contract, dist
from trainer.events import Events

BEAT_S = 10.0
STEP = "step"  # the phase in which a rank may be waiting for others


@dataclass(frozen=True)
class Beat:
    """What a rank said last: steps done, what it is doing, and for how long nothing new has come from it."""

    number: int
    phase: str
    silent_s: float


def late(beats: Mapping[int, Beat], size: int, beat_s: float) -> str:
    """Which ranks the others wait for, in words: the silent ones, else those that are behind, else the busy ones."""
    silent = [r for r in range(size) if r not in beats or beats[r].silent_s > 3 * beat_s]
    if silent:
        return f"{_ranks(silent)} gave no sign of life: frozen, ended or cut off"
    least = min(beat.number for beat in beats.values())
    behind = [r for r in range(size) if beats[r].number == least]
    busy = [r for r in behind if beats[r].phase != STEP]
    if busy and len(busy) < size:
        return f"{_ranks(busy)} late: in {beats[busy[0]].phase}, {least} steps done"
    if len(behind) < size:
        return f"{_ranks(behind)} late: only {least} steps done"
    return f"all ranks are in {beats[0].phase} with {least} steps done: the exchange itself stands still"


def _ranks(numbers: list[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


class Watchdog:
    """A thread that tells of this rank every few seconds, and dumps every thread's stack when nothing moves."""

    def __init__(self, world: dist.World, stall_s: float, events: Events, store: Any = None) -> None:
        """`stall_s` seconds without a step are a stall; 0 switches the watch off. `store` is common to the ranks."""
        self._world, self._stall_s, self._events = world, stall_s, events
        self._beat_s = min(BEAT_S, stall_s / 4) if stall_s else BEAT_S
        self._phase, self._number, self._since = "the start", 0, time.monotonic()
        self._store = store
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._seen: dict[int, tuple[str, float]] = {}  # rank -> what it said last, and when that was new

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._thread.join(timeout=1)

    def step(self, number: int) -> None:
        """`number` steps of the run are done."""
        self._number, self._since, self._phase = number, time.monotonic(), STEP

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Inside, this rank is busy with `phase`."""
        before, self._phase, self._since = self._phase, phase, time.monotonic()
        try:
            yield
        finally:
            self._phase, self._since = before, time.monotonic()

    def _watch(self) -> None:
        told_of = -1.0  # the moment since which nothing moves, once it was told
        count = 0
        while not self._end.wait(self._beat_s):
            count += 1
            phase, number, since = self._phase, self._number, self._since
            idle_s = time.monotonic() - since
            self._events.emit(contract.HEARTBEAT, phase=phase, step=number, idle_s=idle_s)
            with contextlib.suppress(Exception):  # a master that is gone is told of by the ranks' own errors
                self._exchange(json.dumps([number, phase, count]))
            if self._stall_s and idle_s > self._stall_s and told_of != since:
                told_of = since
                self._tell(idle_s, phase, number)

    def _exchange(self, mine: str) -> None:
        if self._store is None:
            return
        self._store.set(f"beat/{self._world.rank}", mine)
        for rank in range(self._world.size):
            key = f"beat/{rank}"
            if self._store.check([key]):
                text = self._store.get(key).decode()
                if self._seen.get(rank, ("", 0.0))[0] != text:
                    self._seen[rank] = (text, time.monotonic())

    def _tell(self, idle_s: float, phase: str, number: int) -> None:
        now = time.monotonic()
        beats = {}
        for rank, (text, at) in self._seen.items():
            steps, what, _ = json.loads(text)
            beats[rank] = Beat(steps, what, now - at)
        who = late(beats, self._world.size, self._beat_s) if self._world.size > 1 else f"in {phase}"
        text = f"stalled: no step for {idle_s:.0f} s after {number} steps; {who}"
        self._events.emit(contract.STALLED, phase=phase, step=number, idle_s=idle_s, late=who)
        out: Any = sys.stderr
        print(f"rank {self._world.rank} (pid {os.getpid()}) {text}; what its threads are doing:", file=out, flush=True)
        faulthandler.dump_traceback(file=out, all_threads=True)
