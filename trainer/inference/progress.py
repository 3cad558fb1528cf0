"""How far a long loop is: a bar on a terminal, and the time that was spent waiting for its items."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


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
    """The items, with a bar where stderr is a terminal: stdout may be piped."""
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(stderr=True)
    yield from rich_track(items, what, total, transient=True, console=console, disable=not console.is_terminal)
