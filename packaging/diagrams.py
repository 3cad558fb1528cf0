"""Draw the Mermaid diagrams of docs/ as SVG files, which the site shows without loading Mermaid from another host.

`make diagrams` runs this. It needs Chromium and the file mermaid.min.js, which npm installs.
"""

import hashlib
import re
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = "assets/diagrams"
BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r"^ *accTitle: *(.+)$", re.MULTILINE)


#: HTML in the drawing must be XML too, or no browser shows the file as an image.
_RENDER = """async source => {
    const element = document.createElement("div");
    element.innerHTML = (await mermaid.render("diagram", source)).svg;
    return new XMLSerializer().serializeToString(element.firstChild);
}"""


def file_of(source: str) -> str:
    """Return the path in docs/ of a drawing. It changes with the source, so no drawing is out of date."""
    return f"{FOLDER}/{hashlib.sha256(source.encode()).hexdigest()[:12]}.svg"


def title_of(source: str) -> str:
    """Return the title, which is also the alternative text of the image."""
    found = TITLE.search(source)
    if not found:
        raise SystemExit(f"a diagram has no title: add a line `accTitle: TITLE` to\n{source}")
    return found[1]


def sources() -> list[str]:
    """Return the diagrams of all pages."""
    return [
        source for page in sorted(DOCS.glob("**/*.md")) for source in BLOCK.findall(page.read_text("utf-8"))
    ]


def main(mermaid: str) -> None:
    """Draw the diagrams that have no file, and remove the files of those that no page has."""
    from playwright.sync_api import sync_playwright

    wanted = {file_of(source): source for source in sources()}
    for file in DOCS.glob(f"{FOLDER}/*.svg"):
        if f"{FOLDER}/{file.name}" not in wanted:
            file.unlink()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.set_content("<body></body>")
        page.add_script_tag(path=mermaid)
        page.evaluate("mermaid.initialize({startOnLoad: false, theme: 'neutral', fontFamily: 'sans-serif'})")
        for name, source in wanted.items():
            file = DOCS / name
            if not file.exists():
                file.parent.mkdir(exist_ok=True)
                drawing = page.evaluate(_RENDER, source)
                file.write_text(f"{drawing}\n", encoding="utf-8")
                print(f"{name}: {title_of(source)}")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
