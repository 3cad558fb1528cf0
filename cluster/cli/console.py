"""Consoles for standard output and standard error."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return the console for standard output or standard error, with colours on a terminal only."""
    from rich.console import Console

    return Console(highlight=False, emoji=False, stderr=stderr, quiet=quiet)


def print_line(out: Console, *texts: str, style: str | None = None) -> None:
    """Print each text as a line without wrapping or markup."""
    for text in texts:
        out.print(text, markup=False, highlight=False, soft_wrap=True, style=style)
