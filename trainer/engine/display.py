"""Training display: a progress bar on a terminal, else plain lines."""

import math
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any

PLAIN_EVERY_S = 10.0
WIDE = 120  # columns of a terminal that has room for the parts of the loss


class TrainingDisplay:
    """Output of rank 0. Under a launcher, progress is reported by events, and only one line per epoch is printed."""

    def __init__(self, *, enabled: bool, launched: bool) -> None:
        self._enabled = enabled
        self._launched = launched
        self._bar: Any = None
        self._task: Any = None
        self._last = time.monotonic()
        self._terminal = enabled and not launched and sys.stdout.isatty()
        self._is_wide = not self._terminal or shutil.get_terminal_size().columns >= WIDE

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
        rates = TextColumn("{task.fields[losses]}   {task.fields[rate]} images/s   epoch ends in")
        run = TextColumn("run in {task.fields[run]}")
        self._bar = Progress(*columns, rates, TimeRemainingColumn(), run, transient=True)
        self._task = self._bar.add_task(
            f"{epoch}/{epochs}", total=steps, losses="loss -", rate="-", run="-:--"
        )
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
        terms: Mapping[str, float] | None = None,
        memory: int = 0,
    ) -> None:
        """Update the bar; without a terminal, print a line every ten seconds.

        `terms` are the parts of the loss by name, and `memory` is what the GPU has reserved, in bytes (0: no GPU).
        """
        run = _clock(run_eta_s)
        losses = f"loss {loss:.3f}"
        if terms and len(terms) > 1 and self._is_wide:
            parts = ", ".join(f"{name} {value:.3f}" for name, value in terms.items())
            losses += f" ({parts})"
        if memory:
            losses += f"   {memory / 1e9:.1f} GB"
        if self._bar:
            self._bar.update(self._task, completed=step, losses=losses, rate=f"{images_per_s:.0f}", run=run)
        elif self._enabled and not self._launched and time.monotonic() - self._last > PLAIN_EVERY_S:
            self._last = time.monotonic()
            self.print(
                f"epoch {epoch}/{epochs}   step {step}/{steps}   {losses}   {images_per_s:.0f} images/s"
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
