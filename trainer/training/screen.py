"""What a person sees of the training: a progress bar on a terminal, else plain lines."""

from __future__ import annotations

import sys
import time
from typing import Any

PLAIN_EVERY_S = 10.0


class Screen:
    """The output of rank 0; every other rank's screen stays dark.

    With a launcher listening, the progress travels as events, so that only one line per epoch is printed here.
    """

    def __init__(self, *, lit: bool, listening: bool) -> None:
        self._lit = lit
        self._listening = listening
        self._bar: Any = None
        self._task: Any = None
        self._last = time.monotonic()
        self._terminal = lit and not listening and sys.stdout.isatty()

    def say(self, text: str) -> None:
        """One line."""
        if self._lit:
            print(text, flush=True)

    def begin_epoch(self, epoch: int, epochs: int, steps: int) -> None:
        """Show an empty bar for an epoch (from 1)."""
        if not self._terminal:
            return
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("epoch {task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("loss {task.fields[loss]}   {task.fields[rate]} img/s   epoch ends in"),
            TimeRemainingColumn(),
            transient=True,
        )
        self._task = self._bar.add_task(f"{epoch}/{epochs}", total=steps, loss="-", rate="-")
        self._bar.start()

    def progress(
        self, *, epoch: int, epochs: int, step: int, steps: int, loss: float, images_per_s: float, eta_s: float
    ) -> None:
        """Move the bar; without a terminal, a line every ten seconds."""
        if self._bar:
            self._bar.update(self._task, completed=step, loss=f"{loss:.3f}", rate=f"{images_per_s:.0f}")
        elif self._lit and not self._listening and time.monotonic() - self._last > PLAIN_EVERY_S:
            self._last = time.monotonic()
            self.say(
                f"epoch {epoch}/{epochs}   step {step}/{steps}   loss {loss:.3f}   {images_per_s:.0f} img/s"
                f"   epoch ends in {eta_s:.0f} s"
            )

    def end_epoch(self, line: str = "") -> None:
        """Take the bar away and print the epoch's line."""
        if self._bar:
            self._bar.stop()
            self._bar = None
        if line:
            self.say(line)
        self._last = time.monotonic()
