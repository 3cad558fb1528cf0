"""A rank: its process, output and failure; the first failure and the exit code of a node."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Iterable

from .events import MOST_NAME, Event, Failed, event, load, read, required, text, timestamp
from .masking import split_event
from .output import EVENT_MAX_BYTES, Log, Status
from .settings import EXIT_RUN_ME_AGAIN, SIGNALS, Fields
from .sitecustomize import BLOCKED_SIGNAL, STACK_SIGNAL
from .stacks import Stack

#: A progress bar overwrites its line. Its state is written to the log at this interval.
PROGRESS_BAR_S = 5.0
#: Errors of gloo, NCCL and torch's TCPStore after the loss of a peer: a consequence of another rank's failure.
SECONDARY = re.compile(
    r"Dist(Store|Network)Error: |(RuntimeError|DistBackendError): .*(Connection (was likely )?(closed|reset|refused)"
    r"|Broken pipe|Socket closed|[Tt]imed out waiting|remote process exited|ncclRemoteError"
    r"|NCCL communicator was aborted)"
)
LIBC = ctypes.CDLL(None)
#: How many fields of events are counted by their names.
_MOST_MISFITS = 32


@dataclass(frozen=True)
class Raised:
    """The uncaught exception of a rank, as sitecustomize.py records it, and its time in seconds since 1970."""

    error: str = required(text)
    time: float = required(timestamp)


class Misfits:
    """Counts the values of a rank's events that do not fit, which the launcher drops."""

    def __init__(self, number: int, log: Log) -> None:
        self._number = number
        self._log = log
        self._counts: dict[str, int] = {}

    def add(self, found: Event) -> None:
        """Count the values of an event, and report each field once."""
        for name in found.misfits:
            where = "{} of {}".format(text(name[:MOST_NAME]), found.kind)
            if where not in self._counts and len(self._counts) == _MOST_MISFITS:
                where = "other fields"
            if where not in self._counts:
                self._report("ignored: %s: its value does not fit (docs/reference/contract.md)" % where)
            self._counts[where] = self._counts.get(where, 0) + 1

    def end(self) -> None:
        """Report the counts at the end of the rank's output."""
        if self._counts:
            counts = ", ".join("%s (%d)" % each for each in self._counts.items())
            self._report("ignored values of events: " + counts)

    def _report(self, what: str) -> None:
        self._log.message("rank %d: %s" % (self._number, what))


def in_rank() -> None:
    """Unblock signals, and have the kernel kill the rank when the agent dies; runs between fork and exec."""
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for number in (STACK_SIGNAL, BLOCKED_SIGNAL):  # a Python that starts or exits has no handler
        signal.signal(number, signal.SIG_IGN)


class Rank:
    """One rank: its process, its output, and its exit `code` (negative: the number of a signal)."""

    def __init__(
        self,
        number: int,
        local_rank: int,
        command: list[str],
        environment: dict[str, str],
        log: Log,
        status: Status,
    ) -> None:
        self.number = number
        self.local_rank = local_rank
        self.code: int | None = None
        self.ended_at = 0.0
        self.event: Failed | None = None
        self.stopped_before = False
        self.failed_since: float | None = None
        self.is_overdue = False
        self.out_of_memory = False
        self.output_at = time.monotonic()
        self._record = environment["CLUSTER_RANK_RECORD"]
        self.process = subprocess.Popen(
            command, env=environment, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, preexec_fn=in_rank
        )
        self.stack = Stack(self._record + ".stack", self.process.pid)
        self.reader = threading.Thread(target=self.read, args=(log, status), daemon=True)
        self.reader.start()

    def read(self, log: Log, status: Status) -> None:
        """Copy the rank's output to the log, line by line, and its events to the status, until the output ends."""
        assert self.process.stdout is not None
        out = self.process.stdout.fileno()
        misfits = Misfits(self.number, log)
        pending = b""
        written = time.monotonic()
        for chunk in iter(lambda: os.read(out, 1 << 16), b""):
            self.output_at = time.monotonic()
            *lines, pending = (pending + chunk).split(b"\n")
            if b"\r" in pending and time.monotonic() - written > PROGRESS_BAR_S:
                bar, _, pending = pending.rpartition(b"\r")
                lines += [bar] if bar else []
            for line in lines:
                self._line(line, log, status, misfits)
                written = time.monotonic()
        if pending:
            self._line(pending, log, status, misfits)
        misfits.end()

    def _line(self, line: bytes, log: Log, status: Status, misfits: Misfits) -> None:
        line = line.rstrip(b"\r").rsplit(b"\r", 1)[
            -1
        ]  # a progress bar overwrites its line; keep the last state
        _, fields = split_event(line)
        found = event(fields)
        if isinstance(found, Failed) and found.error:
            self.event = found
        elif fields is not None and len(line) <= EVENT_MAX_BYTES:
            with contextlib.suppress(RecursionError):  # nested too deeply, so no event of the contract
                status.record(log.masked_event(fields))
        log.line(line, self.local_rank)
        if found is not None:
            misfits.add(found)

    def exception(self) -> Raised | None:
        """Return the uncaught exception that the rank recorded, or None."""
        with contextlib.suppress(OSError, ValueError), open(self._record) as file:
            return read(Raised, load(file.read()))
        return None

    def program_code(self) -> int | None:
        """Return the exit code that the rank's Python announced at the end of its program, or None."""
        with contextlib.suppress(OSError, ValueError), open(self._record + ".end") as file:
            return int(file.read())
        return None

    @property
    def has_ended(self) -> bool:
        """Whether the rank has exited with 0, or its program has ended so."""
        return self.code == 0 or (self.code is None and self.program_code() == 0)

    def failure(self) -> Fields | None:
        """Return the rank's failure (rank, time, error, hint, exit_code, secondary), or None."""
        if self.code in (None, 0, EXIT_RUN_ME_AGAIN):
            return None
        found: Fields = {
            "rank": self.number,
            "local_rank": self.local_rank,
            "time": self.ended_at,
            "hint": "",
        }
        found.update(exit_code=self.code if self.code > 0 else 128 - self.code, secondary=False)
        raised = self.exception()
        number = -self.code
        if self.event is not None:
            found.update(error=self.event.error, hint=self.event.hint or "", secondary=bool(self.event.echo))
            if self.event.time is not None:
                found["time"] = min(self.ended_at, self.event.time)
        elif raised is not None:  # also if the rank was stopped after it had raised
            found.update(error=raised.error, time=raised.time, secondary=bool(SECONDARY.match(raised.error)))
            found["exit_code"] = max(1, self.code)
        elif self.stopped_before and number in (
            signal.SIGTERM,
            signal.SIGKILL,
            signal.SIGINT,
            signal.SIGUSR2,
        ):
            return None
        elif number > 0:
            name = signal_name(number)
            found["error"] = (
                "out of memory: the kernel killed it" if self.out_of_memory else "killed by " + name
            )
            found["secondary"] = number == signal.SIGABRT  # torch aborts a rank that has lost its peers
        else:
            found["error"] = "exit code %d" % self.code
            found["secondary"] = self.stopped_before
        return found


def signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number


def first_failure(ranks: Iterable[Rank]) -> Fields | None:
    """Return the first failure of a node's ranks, causes first, or None. Its `others` are the rest, in order."""
    failures = [found for found in (rank.failure() for rank in ranks) if found is not None]
    failures.sort(key=lambda found: (found["secondary"], found["time"]))
    others = [{"rank": found["rank"], "error": found["error"]} for found in failures[1:]]
    return dict(failures[0], others=others) if failures else None


def exit_code(ranks: Iterable[Rank], failure: Fields | None, checkpoint_requested: bool) -> int:
    """Return the node's exit code from its ranks' codes."""
    codes = [rank.code for rank in ranks if rank.code]
    if not codes:
        return 0
    if checkpoint_requested or (failure is None and EXIT_RUN_ME_AGAIN in codes):
        return EXIT_RUN_ME_AGAIN
    if failure is not None:
        return int(failure["exit_code"])
    return codes[0] if codes[0] > 0 else 128 - codes[0]
