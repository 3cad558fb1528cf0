"""Consoles for standard output and standard error."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

#: Columns of a pipe or file: as many as its longest line needs.
_WIDE = 10_000


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return the console for standard output or standard error.

    Colours, and the folding of tables to its width, are for a terminal only.
    """
    from rich.console import Console

    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if is_terminal or "COLUMNS" in os.environ else _WIDE
    return Console(highlight=False, emoji=False, stderr=stderr, quiet=quiet, width=width)


def print_line(out: Console, *texts: str, style: str | None = None) -> None:
    """Print each text as a line without wrapping or markup."""
    for text in texts:
        out.print(text, markup=False, highlight=False, soft_wrap=True, style=style)
