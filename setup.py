"""The long description: README.md, with links that also lead somewhere outside of the repository.

Everything else is in pyproject.toml. A package index resolves no relative links. They get the address of the repository
from `[tool.addresses]`; while that is empty, only their text remains.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent
# [text](path) and ![text](path), but neither addresses nor anchors; fenced blocks and code in backticks are skipped.
LINK = re.compile(
    r"(?P<code>^```.*?^```|`[^`\n]+`)|(?P<image>!?)\[(?P<text>[^]]*)\]\((?!\w+:|#)(?P<path>[^)]+)\)",
    re.M | re.S,
)


def described(readme: str, repository: str) -> str:
    """Return the text with absolute links into the repository, or without relative ones if `repository` is ""."""

    def replaced(link: re.Match[str]) -> str:
        if link["code"]:
            return link[0]
        if not repository:
            return "" if link["image"] else link["text"]
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({repository}/{kind}/HEAD/{link['path']})"

    return LINK.sub(replaced, readme)


def addresses() -> dict[str, str]:
    """Return the table `[tool.addresses]` of pyproject.toml. What does not exist yet is ""."""
    # not tomllib, which Python 3.10 lacks
    table = re.search(
        r"^\[tool\.addresses\]$(.*?)(?=^\[|\Z)", (ROOT / "pyproject.toml").read_text("utf-8"), re.M | re.S
    )
    found = dict(re.findall(r'^(\w+) *= *"([^"]*?)/?"', table[1] if table else "", re.M))
    return {name: found.get(name, "") for name in ("repository", "documentation", "package", "image")}


if __name__ == "__main__":
    from setuptools import setup  # not for the tests, whose Python may have no setuptools

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    known = addresses()
    setup(
        long_description=described(text, known["repository"]),
        long_description_content_type="text/markdown",
        project_urls={name.title(): known[name] for name in ("repository", "documentation") if known[name]},
    )
