"""Each sentence of SECURITY.md has a test, or names the code that it was read from."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text().partition("## Whom you trust")[2]
SOURCE = re.compile(r"(?:(read) )?([\w./]+)(?:::(\w+))?")


def _exists(path: str, test: str) -> bool:
    file = ROOT / path
    return file.is_file() and (
        not test or re.search(rf"^def {test}\(", file.read_text(), re.MULTILINE) is not None
    )


def test_each_claim_has_a_source_that_exists() -> None:
    comments = re.findall(r"<!-- (.*?) -->", TEXT)
    assert comments
    for comment in comments:
        sources = SOURCE.findall(comment)
        assert (
            " ".join(f"{how} {path}".strip() + (f"::{test}" if test else "") for how, path, test in sources)
            == comment
        )
        for how, path, test in sources:
            assert bool(test) == (how != "read"), comment
            assert _exists(path, test), f"{path}::{test}: no such test or file"


def test_each_paragraph_and_each_item_ends_with_its_sources() -> None:
    blocks = re.split(r"\n\n(?!<!--)|\n(?=- )", TEXT)  # a table's sources follow it
    claims = [block for block in blocks if block.strip() and not block.startswith("#")]
    assert len(claims) > 20
    for claim in claims:
        assert claim.rstrip().endswith(("-->", ":")), claim


def test_every_package_that_the_build_installs_is_pinned() -> None:
    files = [ROOT / "Makefile", ROOT / "Dockerfile", *sorted((ROOT / "packaging").glob("*.sh"))]
    texts = [file.read_text().replace("\\\n", " ") for file in files]
    commands = [line for text in texts for line in text.splitlines() if re.search(r"pip install\b.*-", line)]
    assert len(commands) >= 4
    for command in commands:
        assert any(pin in command for pin in ("--require-hashes", "--no-deps", "==")), command
