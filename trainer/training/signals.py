"""Turns SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C into a wish to stop, so that a checkpoint can be written first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

# Schedulers announce the end with one of these: Slurm's --signal, a container engine's stop, a spot instance's agent.
_NAMES = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")
SIGNALS: tuple[signal.Signals, ...] = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
_KEY = "stop"


class Stopped(Exception):
    """The run was told to stop and has a checkpoint to go on from."""

    def __init__(self, by: int) -> None:
        self.signal = signal.Signals(by)
        super().__init__(self.signal.name)


class StopSignals:
    """While entered: a signal is only noted, in `received`; a second Ctrl-C interrupts as usual."""

    def __init__(self, store: Any = None) -> None:
        """`store` is the ranks' common one, where there are several."""
        self.received = 0
        self._store = store
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def received_anywhere(self) -> bool:
        """Whether any rank has received one; where the ranks exchange nothing for a while, this is how they learn."""
        if self._store is None:
            return bool(self.received)
        if self.received:
            self._store.set(_KEY, str(self.received))
        elif self._store.check([_KEY]):
            self.received = int(self._store.get(_KEY))
        return bool(self.received)

    def stopped(self) -> Stopped:
        """The error to raise once the checkpoint is written, also on a rank that received nothing itself."""
        return Stopped(self.received or signal.SIGTERM)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.received == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Processes that are started inside ignore the signals for good: a scheduler sends them to a whole group."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
