"""Convert a terminal's screen to SVG. The text with ANSI colours is read from standard input."""

import sys

from rich.console import Console
from rich.text import Text

text = Text.from_ansi(sys.stdin.read().rstrip())
console = Console(record=True, width=int(sys.argv[1]), file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
console.print(text)
print(console.export_svg(title=sys.argv[2]))
