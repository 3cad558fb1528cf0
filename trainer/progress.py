"""How far a long loop is: bars on a terminal, and the time that was spent waiting for its items."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

Item = TypeVar("Item")


class Move(Protocol):
    """Moves a bar: by so many items or to so many; the description says what is done now."""

    def __call__(self, *, advance: float = ..., completed: float = ..., description: str = ...) -> None:
        """What is not given stays as it is."""


class Waits:
    """Adds up the time that is spent waiting for batches."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timing(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items as they come."""
        begin = time.perf_counter()
        for item in items:
            self.seconds += time.perf_counter() - begin
            yield item
            begin = time.perf_counter()


def track(items: Iterable[Item], total: int | None, what: str) -> Iterator[Item]:
    """The items, with a bar where stderr is a terminal: stdout may be piped. None is a `total` that nobody knows."""
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(stderr=True)
    yield from rich_track(items, what, total, transient=True, console=console, disable=not console.is_terminal)


@contextlib.contextmanager
def bar(total: int | None, what: str = "", shown: bool = True) -> Iterator[Move]:
    """A bar over `total` items that its block moves itself; silent where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    with Progress(
        *(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False)),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # what is piped stays where it goes
        disable=not (shown and console.is_terminal),
    ) as progress:
        yield functools.partial(progress.update, progress.add_task(what, total=total))
