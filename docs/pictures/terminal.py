"""A terminal's screen as an SVG: reads text with ANSI colours from standard input.

docs/pictures/make.sh makes every picture of the documentation again.
"""

import sys

from rich.console import Console
from rich.text import Text

text = Text.from_ansi(sys.stdin.read().rstrip())
console = Console(record=True, width=int(sys.argv[1]), file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
console.print(text)
print(console.export_svg(title=sys.argv[2]))
