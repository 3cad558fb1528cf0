"""The supervisor's log of a job: what it did, one line with the time for each note, in the job's run directory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cluster.errors import printable
from cluster.spec.model import Plan
from cluster.supervisor.display import Display
from cluster.supervisor.job_state import JobView
from cluster.transport import inside

NAME = "supervisor.log"
_TIME = "%Y-%m-%d %H:%M:%S "


def path(plan: Plan) -> Path:
    """Return the path of a job's log of notes."""
    return Path(plan.run_dir, NAME)


def add(plan: Plan, *texts: str) -> None:
    """Append notes. A full disk must not end the supervision, so a note that cannot be written is lost."""
    with suppress(OSError), inside.open_file(plan.run_dir, NAME, "ab") as file:
        for text in texts:
            line = printable(" ".join(text.split()))
            file.write(f"{time.strftime(_TIME)}{line}\n".encode("utf-8", "replace"))


def text(plan: Plan) -> str:
    """Return all notes, "" if there are none."""
    return "\n".join(Reader(plan).lines())


class Reader:
    """Reads a growing log of notes."""

    def __init__(self, plan: Plan) -> None:
        self._run_dir = plan.run_dir
        self._seen = 0

    def lines(self) -> list[str]:
        """Return the lines that have been completed since the last call; none before the first note."""
        with suppress(OSError), inside.open_file(self._run_dir, NAME) as file:
            file.seek(self._seen)
            complete: bytes = file.read().rpartition(b"\n")[0]
            self._seen += len(complete) + 1 if complete else 0
            # The job can write to the file, too.
            return [printable(line) for line in complete.decode(errors="replace").splitlines()]
        return []


class _Wrapped(Display):
    """Shows a job on another display."""

    def __init__(self, show: Display, plan: Plan) -> None:
        self._show = show
        self._plan = plan

    def begin(self, plan: Plan) -> None:
        """Prepare for a new attempt."""
        self._show.begin(plan)

    def show(self, view: JobView, lines: Sequence[tuple[str, str]]) -> None:
        """Draw the view and the new log lines."""
        self._show.show(view, lines)

    def note(self, text: str) -> None:
        """Print a sentence."""
        self._show.note(text)


class Kept(_Wrapped):
    """The display of the process that decides: its notes are kept in the log."""

    def note(self, text: str) -> None:
        """Keep a sentence, and print it."""
        add(self._plan, text)
        super().note(text)


class Copied(_Wrapped):
    """The display of a process that only follows the job: it prints all notes of the one that decides."""

    def __init__(self, show: Display, plan: Plan) -> None:
        super().__init__(show, plan)
        self._notes = Reader(plan)

    def show(self, view: JobView, lines: Sequence[tuple[str, str]]) -> None:
        """Print the new notes, and draw the job."""
        self.update()
        super().show(view, lines)

    def note(self, text: str) -> None:
        """Print nothing: the other process has the same sentence in its log."""

    def update(self) -> None:
        """Print the new notes."""
        for line in self._notes.lines():
            super().note(line)
