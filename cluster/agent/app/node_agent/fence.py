"""The fence: an agent whose job runs in a newer attempt elsewhere must not go on writing to the job's folder."""

from __future__ import annotations

import contextlib
import os

from .settings import Settings


class Fence:
    """Watches the run directory for the agents of newer attempts.

    A launcher that has lost a machine starts the next attempt on others. If that machine comes back, its ranks would
    write over the checkpoints of the new ones. A newer attempt's folder alone proves nothing: Slurm's launcher makes it
    while the old ranks may still write their checkpoint, and an attempt that is started again by hand finds the folders
    of an earlier run. What counts is a status file in it that is new, or that changes: an agent writes one every 2 s.
    """

    def __init__(self, settings: Settings) -> None:
        self._run_dir = settings.run_dir
        self._own = int(settings.attempt) if settings.attempt.isdigit() else None
        self._before = self._status_files()

    def newer_attempt(self) -> int:
        """Return the number of a newer attempt of which an agent has run since this object was made; 0 if none has."""
        now = self._status_files()
        changed = [
            attempt for (attempt, name), time in now.items() if self._before.get((attempt, name)) != time
        ]
        return max(changed, default=0)

    def _status_files(self) -> dict[tuple[int, str], int]:
        """Return the times of the newer attempts' status files, by attempt and name."""
        found: dict[tuple[int, str], int] = {}
        with contextlib.suppress(OSError):  # a disk that is full or away; the status file says so
            for folder in os.listdir(self._run_dir):
                word, _, number = folder.partition("-")
                if self._own is None or word != "attempt" or not number.isdigit() or int(number) <= self._own:
                    continue
                for name in os.listdir(os.path.join(self._run_dir, folder)):
                    if name.endswith(".json"):
                        path = os.path.join(self._run_dir, folder, name)
                        with contextlib.suppress(OSError):  # it is being replaced
                            found[int(number), name] = os.stat(path).st_mtime_ns
        return found
