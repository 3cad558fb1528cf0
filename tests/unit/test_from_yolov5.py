"""docs/from-yolov5.md says which option has which name here: each must be there, and what is missing must not."""

import re
from pathlib import Path

import pytest
import typer

from trainer.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "from-yolov5.md"
VERBS = {"train.py": "train", "val.py": "val", "detect.py": "predict", "export.py": "export"}
_OPTION = re.compile(r"--[a-z][a-z0-9_-]*")


def rows(section):
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "| `--" in line]


@pytest.mark.parametrize("section", VERBS)
def test_every_option_of_the_page_is_as_it_says(section):
    command = typer.main.get_command(app).commands[VERBS[section]]
    have = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    assert len(rows(section)) > 5
    for theirs, ours, note in rows(section):
        named = set(_OPTION.findall(theirs))
        if ours in ("missing", ""):
            assert not named & have, f"{section}: {theirs} is there"
            continue
        here = set(_OPTION.findall(ours)) | (named if ours.startswith("the same") else set())
        here |= set() if "missing" in note else set(_OPTION.findall(note))
        assert here <= have, f"{section}: {here - have} is not there"
