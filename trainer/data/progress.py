"""Progress bars, and a timer of the time that a loop waits for its items."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


class WaitTimer:
    """Total time spent waiting for the items of an iterable."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timing(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items, adding the time until each arrives to `seconds`."""
        begin = time.perf_counter()
        for item in items:
            self.seconds += time.perf_counter() - begin
            yield item
            begin = time.perf_counter()


def track(items: Iterable[Item], total: int | None, what: str) -> Iterator[Item]:
    """Yield the items, with a bar if stderr is a terminal; `total` is None if it is unknown."""
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(stderr=True)
    yield from rich_track(items, what, total, transient=True, console=console, disable=not console.is_terminal)


@contextlib.contextmanager
def bar(total: int | None, what: str = "", shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show a bar over `total` items if stderr is a terminal; yield rich's update(advance, completed, description)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    with Progress(
        *(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False)),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # a piped stdout must not be redirected to stderr
        disable=not (shown and console.is_terminal),
    ) as progress:
        yield functools.partial(progress.update, progress.add_task(what, total=total))
