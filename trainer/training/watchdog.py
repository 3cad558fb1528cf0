"""Notices when a training stands still, says which rank the others wait for, and ends what cannot go on."""

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
START = "the start"  # the phase that may take long: pictures are cached, the first step is compiled
ALIVE = 4  # limits without a step until ranks end that all give signs of life; one may be slow, not broken
HINT = "what that rank died of, or stood still in, stands in its own log; --resume goes on from the last checkpoint"


@dataclass(frozen=True)
class Beat:
    """What a rank said last: steps done, what it is doing, and for how long nothing new has come from it."""

    number: int
    phase: str
    silent_s: float


def late(beats: Mapping[int, Beat], size: int, beat_s: float) -> str:
    """Which ranks the others wait for, in words: the silent ones, else those that are behind, else the busy ones."""
    silent = _silent(beats, size, 3 * beat_s)
    if len(silent) == size:  # not even this rank's own word comes back
        return "the ranks' common store, on the first machine, does not answer: frozen, ended or cut off"
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


def hopeless(beats: Mapping[int, Beat], size: int, idle_s: float, stall_s: float, phase: str) -> bool:
    """Whether a rank of several that has done nothing for `idle_s` seconds, now in `phase`, waits in vain.

    It does once another has been silent for the limit, too; while all give signs of life it has ALIVE times as long,
    and at the start for ever.
    """
    if size == 1 or idle_s <= stall_s:
        return False
    return bool(_silent(beats, size, stall_s)) or (phase != START and idle_s > ALIVE * stall_s)


def _silent(beats: Mapping[int, Beat], size: int, limit_s: float) -> list[int]:
    return [r for r in range(size) if r not in beats or beats[r].silent_s > limit_s]


def _ranks(numbers: list[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


class Watchdog:
    """Threads that tell of this rank every few seconds, dump every thread's stack when nothing moves, and end it."""

    def __init__(self, world: dist.World, stall_s: float, events: Events, store: Any = None) -> None:
        """`stall_s` seconds without a step are a stall; 0 switches the watch off. `store` is common to the ranks."""
        self._world, self._stall_s, self._events = world, stall_s, events
        self._beat_s = min(BEAT_S, stall_s / 4) if stall_s else BEAT_S
        self._phase, self._number, self._since = START, 0, time.monotonic()
        self._store = store
        self._end = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        # Of its own, because a frozen master never answers.
        self._teller = threading.Thread(target=self._tell_others, name="heartbeat", daemon=True)
        # rank -> what it said last, and when that was new
        self._seen = {rank: (json.dumps([0, START, 0]), self._since) for rank in range(world.size)}

    def __enter__(self) -> Watchdog:
        self._watcher.start()
        if self._store is not None:
            self._teller.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._watcher.join(timeout=1)
        if self._store is not None:
            self._teller.join(timeout=1)

    def step(self, number: int) -> None:
        """`number` steps of the run are done."""
        self._number, self._since, self._phase = number, time.monotonic(), STEP

    def moved(self) -> None:
        """Something was done that is no step, like a batch of a validation."""
        self._since = time.monotonic()

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
        last = time.monotonic()
        while not self._end.wait(self._beat_s):
            last, slept_s = time.monotonic(), time.monotonic() - last
            if slept_s > 3 * self._beat_s:  # this process itself was stopped: what it missed meanwhile tells nothing
                self._since = last
                self._seen.update({rank: (text, last) for rank, (text, _) in self._seen.items()})
            phase, number, since = self._phase, self._number, self._since
            idle_s = last - since
            self._events.emit(contract.HEARTBEAT, phase=phase, step=number, idle_s=idle_s)
            if not self._stall_s or idle_s <= self._stall_s:
                continue
            beats = self._beats(last)
            who = late(beats, self._world.size, self._beat_s) if self._world.size > 1 else f"in {phase}"
            if told_of != since:
                told_of = since
                self._tell(idle_s, phase, number, who)
            if self._store is not None and hopeless(beats, self._world.size, idle_s, self._stall_s, phase):
                self._give_up(idle_s, who)

    def _tell_others(self) -> None:
        count = 0
        while not self._end.wait(self._beat_s):
            count += 1
            with contextlib.suppress(Exception):  # a master that is gone is one that does not answer
                self._store.set(f"beat/{self._world.rank}", json.dumps([self._number, self._phase, count]))
                for rank in range(self._world.size):
                    key = f"beat/{rank}"
                    if self._store.check([key]) and (text := self._store.get(key).decode()) != self._seen[rank][0]:
                        self._seen[rank] = (text, time.monotonic())

    def _beats(self, now: float) -> dict[int, Beat]:
        beats = {}
        for rank, (text, at) in self._seen.items():
            number, phase, _ = json.loads(text)
            beats[rank] = Beat(number, phase, now - at)
        return beats

    def _tell(self, idle_s: float, phase: str, number: int, who: str) -> None:
        text = f"stalled: no step for {idle_s:.0f} s after {number} steps; {who}"
        self._events.emit(contract.STALLED, phase=phase, step=number, idle_s=idle_s, late=who)
        out: Any = sys.stderr
        print(f"rank {self._world.rank} (pid {os.getpid()}) {text}; what its threads are doing:", file=out, flush=True)
        faulthandler.dump_traceback(file=out, all_threads=True)

    def _give_up(self, idle_s: float, who: str) -> None:
        """End the process: its main thread waits inside a collective, where no exception reaches it."""
        error = f"no step for {idle_s:.0f} s, the end of rank {self._world.rank}: {who}"
        self._events.emit(contract.FAILED, rank=self._world.rank, error=error, hint=HINT, exit_code=1, echo=True)
        print(f"error: {error}\nhint: {HINT}", file=sys.stderr, flush=True)
        os._exit(1)
