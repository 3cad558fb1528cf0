"""Progress bars, and work in threads."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

THREADS = 8  # more than cores: the work is I/O
Item = TypeVar("Item")


def track(items: Iterable[Item], total: int | None, what: str) -> Iterator[Item]:
    """Yield the items, with a bar if stderr is a terminal; `total` is None if it is unknown."""
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(stderr=True)
    yield from rich_track(
        items, what, total, transient=True, console=console, disable=not console.is_terminal
    )


def in_threads(function: Callable[[Any], Item], items: Sequence[Any], what: str) -> Iterator[Item]:
    """Yield the results of `function` for all items, in order, with a bar."""
    with ThreadPoolExecutor(THREADS) as pool:
        yield from track(pool.map(function, items), len(items), what)


@contextlib.contextmanager
def bar(total: int | None, what: str = "", shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show a bar over `total` items if stderr is a terminal; yield rich's update(advance, completed, description)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    with Progress(
        *(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
        ),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # a piped stdout must not be redirected to stderr
        disable=not (shown and console.is_terminal),
    ) as progress:
        yield functools.partial(progress.update, progress.add_task(what, total=total))
