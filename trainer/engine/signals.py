"""Stop signals: SIGTERM, SIGUSR1, SIGUSR2, SIGHUP and Ctrl-C stop the run after a checkpoint."""

import signal
from contextlib import AbstractContextManager
from typing import Any

from trainer import contract
from trainer.distributed.spawn import signal_handlers

# Sent before the end of a job by Slurm (--signal), container engines (stop), and agents of spot instances.
# SIGHUP says that the terminal, or the pipe that reads the output, was closed.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
_KEY = "stop"


class Stopped(Exception):
    """A signal stopped the run, by default after its checkpoint was written."""

    def __init__(
        self,
        by: int,
        when: str = "after a checkpoint",
        hint: str = "",
        exit_code: int = contract.EXIT_RUN_ME_AGAIN,
    ) -> None:
        """`when` follows "stopped by SIGTERM". `hint` is what to do next, or ""."""
        self.signal = signal.Signals(by)
        self.when = when
        self.hint = hint
        self.exit_code = exit_code
        super().__init__(self.signal.name)


class StopSignals:
    """Signals of this rank: within `handled`, a signal is only stored; a second Ctrl-C raises KeyboardInterrupt."""

    def __init__(self, store: Any = None) -> None:
        """`store` is the process group's, None for a single rank."""
        self.received = 0
        self._store = store

    def handled(self) -> AbstractContextManager[None]:
        """Store the signals inside the context."""
        return signal_handlers(self._handle, SIGNALS)

    def received_anywhere(self) -> bool:
        """Return whether any rank has received a signal, through the store instead of a collective."""
        if self._store is None:
            return bool(self.received)
        if self.received:
            self._store.set(_KEY, str(self.received))
        elif self._store.check([_KEY]):
            self.received = int(self._store.get(_KEY))
        return bool(self.received)

    def stopped(self) -> Stopped:
        """Return the exception to raise after the checkpoint, also on a rank that received no signal. A collective."""
        from trainer.distributed import comm  # imports torch, which `trainer --help` does not need

        received = comm.all_gather(self.received)
        return Stopped(self.received or next((number for number in received if number), signal.SIGTERM))

    def _handle(self, number: int, _frame: object) -> None:
        if self.received == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number  # the first one is the reason


def ignored() -> AbstractContextManager[None]:
    """Ignore the signals in processes started inside: a scheduler signals the whole process group."""
    return signal_handlers(signal.SIG_IGN, SIGNALS)
