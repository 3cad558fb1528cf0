"""Write the parts of README.md that need an address from `[tool.addresses]` of pyproject.toml."""

import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: The parts between `<!-- NAME -->` and `<!-- end -->`.
PART = re.compile(r"(<!-- (badges|install) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def badges(known: dict[str, str], version: str) -> str:
    """Return links to what exists: the documentation, the package and the container image."""
    found = ["[License: Apache-2.0](LICENSE)"]
    if known["package"]:
        found.insert(0, f"`pip install {known['package']}=={version}`")
    if known["documentation"]:
        found.insert(0, f"[Documentation]({known['documentation']})")
    if known["image"]:
        found.append(f"Container image: `{known['image']}:{version}`")
    return " · ".join(found)


def install(known: dict[str, str]) -> str:
    """Return the commands that get the program. Without an address, the reader has a clone already."""
    clone = f"git clone {known['repository']} clusterctl\ncd clusterctl\n" if known["repository"] else ""
    introduction = "" if clone else "In a clone of this repository:\n\n"
    commands = (
        "make run     # train a small detector on two nodes of this machine\nmake test    # run the tests\n"
    )
    return f"{introduction}```sh\n{clone}{commands}```"


def written(text: str, known: dict[str, str], version: str) -> str:
    """Return the text of README.md with its parts for these addresses."""
    parts = {"badges": badges(known, version), "install": install(known)}
    return PART.sub(lambda match: f"{match[1]}{parts[match[2]]}\n{match[4]}", text)


def main() -> int:
    """Write README.md; with `--check`, return 1 if that would change it."""
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    assert spec
    assert spec.loader
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    found = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert found
    before = (ROOT / "README.md").read_text("utf-8")
    after = written(before, setup.addresses(), found[1])
    if "--check" in sys.argv:
        return before != after
    (ROOT / "README.md").write_text(after, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
