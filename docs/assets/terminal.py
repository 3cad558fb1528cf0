"""Convert a terminal's screen to SVG. The text with ANSI colors is read from standard input."""

import re
import sys

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

text = Text.from_ansi(sys.stdin.read().rstrip())
console = Console(record=True, width=int(sys.argv[1]), file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
console.print(text)
# Without the fonts, which rich names by their addresses: the viewer's own monospaced font is used.
code_format = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code", "Consolas"
)
print(console.export_svg(title=sys.argv[2], code_format=code_format))
