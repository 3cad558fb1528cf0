"""Training display: a progress bar on a terminal, else plain lines."""

import math
import sys
import time
from typing import Any

PLAIN_EVERY_S = 10.0


class TrainingDisplay:
    """Output of rank 0. Under a launcher, progress is reported by events, and only one line per epoch is printed."""

    def __init__(self, *, enabled: bool, launched: bool) -> None:
        self._enabled = enabled
        self._launched = launched
        self._bar: Any = None
        self._task: Any = None
        self._last = time.monotonic()
        self._terminal = enabled and not launched and sys.stdout.isatty()

    def print(self, text: str) -> None:
        """Print one line."""
        if self._enabled:
            print(text, flush=True)

    def begin_epoch(self, epoch: int, epochs: int, steps: int) -> None:
        """Start the bar of an epoch (from 1)."""
        if not self._terminal:
            return
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("epoch {task.description}"), BarColumn(), TaskProgressColumn())
        rates = TextColumn("loss {task.fields[loss]}   {task.fields[rate]} images/s   epoch ends in")
        run = TextColumn("run in {task.fields[run]}")
        self._bar = Progress(*columns, rates, TimeRemainingColumn(), run, transient=True)
        self._task = self._bar.add_task(f"{epoch}/{epochs}", total=steps, loss="-", rate="-", run="-:--")
        self._bar.start()

    def progress(
        self,
        *,
        epoch: int,
        epochs: int,
        step: int,
        steps: int,
        loss: float,
        images_per_s: float,
        eta_s: float,
        run_eta_s: float,
    ) -> None:
        """Update the bar; without a terminal, print a line every ten seconds."""
        run = _clock(run_eta_s)
        if self._bar:
            self._bar.update(self._task, completed=step, loss=f"{loss:.3f}", rate=f"{images_per_s:.0f}", run=run)
        elif self._enabled and not self._launched and time.monotonic() - self._last > PLAIN_EVERY_S:
            self._last = time.monotonic()
            self.print(
                f"epoch {epoch}/{epochs}   step {step}/{steps}   loss {loss:.3f}   {images_per_s:.0f} images/s"
                f"   epoch ends in {eta_s:.0f} s, run in {run}"
            )

    def end_epoch(self, line: str = "") -> None:
        """Remove the bar and print the epoch's line."""
        if self._bar:
            self._bar.stop()
            self._bar = None
        if line:
            self.print(line)
        self._last = time.monotonic()


def _clock(seconds: float) -> str:
    """Format a duration: `0:42`, `1:02:05`."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
