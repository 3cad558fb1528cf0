"""Consoles for standard output and standard error.

What is printed on them loses its control characters, also in the cells of a table, because it may come from a node or a
job. Only the log lines of a program stay as they are, with their colours.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from cluster.errors import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.segment import Segment

#: Columns of a pipe or file: as many as its longest line needs.
_WIDE = 10_000


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return the console for standard output or standard error.

    Colours, and the folding of tables to its width, are for a terminal only. Square brackets are text, not markup.
    """
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                # rich's own sequences are in `control` and `style`.
                is_raw = segment.control or isinstance(segment.text, _LogText)
                yield segment if is_raw else Segment(printable(segment.text), segment.style)

    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if is_terminal or "COLUMNS" in os.environ else _WIDE
    return SafeConsole(highlight=False, emoji=False, markup=False, stderr=stderr, quiet=quiet, width=width)


def print_line(out: Console, *texts: str, style: str | None = None) -> None:
    """Print each text as a line without wrapping or markup."""
    for text in texts:
        out.print(printable(text), soft_wrap=True, style=style)


def show_wait(text: str, is_first: bool) -> None:
    """Print what the program waits for on stderr: once, and on a terminal repeatedly with the time that is left."""
    if is_first or sys.stderr.isatty():
        print(printable(text), file=sys.stderr, flush=True)


def print_log_line(out: Console, text: str) -> None:
    """Print a line of a program's log as it is, without wrapping."""
    from rich.control import strip_control_codes

    out.print(_LogLine(strip_control_codes(text)), soft_wrap=True)


class _LogText(str):
    """A text that is printed as it is."""

    __slots__ = ()


class _LogLine:
    """What rich prints as one _LogText."""

    def __init__(self, text: str) -> None:
        self._text = _LogText(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        yield Segment(self._text)
        yield Segment.line()
