"""Ctrl-C, SIGTERM and SIGHUP: what each one does to a command, and its exit codes."""

from __future__ import annotations

import functools
import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from cluster.cli import streams
from cluster.cli.console import print_line

if TYPE_CHECKING:
    from rich.console import Console

EXIT_INTERRUPTED = 130
EXIT_HANGUP = 129
_hung_up = False
#: After a signal the main thread is woken so often, in intervals of so many seconds.
_WAKES = 3
_WAKE_S = 0.1


@functools.cache  # once in a process
def wake_main_thread() -> None:
    """From now on, have each signal end a wait of the main thread, in which Python runs its handlers.

    Python by itself does not wake it if the signal came a moment before the wait for a lock began, or in another
    thread. The handler would run when that wait ends, for example when a machine does not answer within 150 s.
    """
    received, sent = os.pipe()
    os.set_blocking(sent, False)
    signal.set_wakeup_fd(sent, warn_on_full_buffer=False)
    signal.signal(signal.SIGURG, lambda *_: None)  # not SIG_IGN, which would end no wait
    main = threading.main_thread().ident
    assert main

    def wake() -> None:
        while numbers := os.read(received, 64):
            if {*numbers} != {signal.SIGURG}:
                for _ in range(_WAKES):
                    time.sleep(_WAKE_S)
                    signal.pthread_kill(main, signal.SIGURG)

    threading.Thread(target=wake, daemon=True).start()


def on_interrupt(out: Console, message: str) -> None:
    """Raise KeyboardInterrupt on the first Ctrl-C, SIGTERM or SIGHUP. On the second, print `message` and exit at once.

    A second KeyboardInterrupt would not exit: Python waits for threads that wait for unreachable machines. After SIGHUP
    the terminal is closed, so output is discarded and more signals are ignored; see `hung_up`. A pipe that was closed
    (`streams.take`) has no more output already, and the terminal may be there.
    """

    def interrupt() -> NoReturn:
        raise KeyboardInterrupt

    def hang_up(*_: object) -> NoReturn:
        global _hung_up
        _hung_up = True
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if not streams.is_closed():
            _discard_output()
        raise KeyboardInterrupt

    on_signals(interrupt, exit_now(out, message))
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)


def hung_up() -> bool:
    """Return whether the terminal, or the pipe that reads the output, was closed. It leaves a job running."""
    return _hung_up


def interrupted() -> int:
    """Return the exit code of an interrupted launcher."""
    return EXIT_HANGUP if _hung_up else EXIT_INTERRUPTED


def on_signals(*steps: Callable[[], None]) -> None:
    """At each Ctrl-C or SIGTERM run the next one of `steps`, and the last one again and again."""
    left = [*steps]

    def handle(*_: object) -> None:
        (left.pop(0) if len(left) > 1 else left[0])()

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handle)


def exit_now(out: Console, message: str) -> Callable[[], NoReturn]:
    """Return a function that prints `message` and exits without waiting for threads."""

    def end() -> NoReturn:
        if message:
            print_line(out, message)
        out.file.flush()
        os._exit(EXIT_INTERRUPTED)

    return end


def _discard_output() -> None:
    """Send what is printed from now on nowhere, except to a file: a closed terminal or pipe would raise OSError."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
