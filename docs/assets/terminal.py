"""Convert a terminal's screen to SVG. The text with ANSI colors is read from standard input.

Arguments: its columns, a title, and optionally an image file whose upper part is shown below the screen.
"""

import base64
import io
import re
import sys

from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

#: Pixels of the part of the image that is shown.
SHOWN = (1300, 440)


def with_image(svg: str, path: str) -> str:
    """Return the SVG with the upper part of the image below it, as wide as the screen."""
    _, _, width, height = map(float, re.search(r'viewBox="([^"]+)"', svg)[1].split())
    part = Image.open(path).convert("RGB").crop((0, 0, *SHOWN)).resize((SHOWN[0] * 3 // 4, SHOWN[1] * 3 // 4))
    part.save(data := io.BytesIO(), "JPEG", quality=70)
    tall = width * SHOWN[1] / SHOWN[0]
    image = f'<image y="{height:.1f}" width="{width}" height="{tall:.1f}" href="data:image/jpeg;base64,'
    image += f'{base64.b64encode(data.getvalue()).decode()}"/>'
    svg = re.sub(r'viewBox="[^"]+"', f'viewBox="0 0 {width} {height + tall:.1f}"', svg, count=1)
    return svg.replace("</svg>", f"{image}</svg>")


text = Text.from_ansi(sys.stdin.read().rstrip())
console = Console(record=True, width=int(sys.argv[1]), file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
console.print(text)
# Without the fonts, which rich names by their addresses: the viewer's own monospaced font is used.
code_format = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code", "Consolas"
)
svg = console.export_svg(title=sys.argv[2], code_format=code_format)
print(with_image(svg, sys.argv[3]) if len(sys.argv) > 3 else svg)
