"""Check the YOLOv5 tables of docs/how-to/train.md: each named option exists, each missing one does not."""

import re
from pathlib import Path

import pytest
import typer

from trainer.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train.md"
VERBS = {"train.py": "train", "val.py": "val", "detect.py": "predict", "export.py": "export"}
_OPTION = re.compile(r"--[a-z][a-z0-9_-]*")


def rows(section):
    text = PAGE.read_text().partition(f"\n### {section}\n")[2].partition("\n##")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "| `--" in line]


@pytest.mark.parametrize("section", VERBS)
def test_options_of_the_page_exist_or_are_missing_as_documented(section):
    command = typer.main.get_command(app).commands[VERBS[section]]
    have = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    assert len(rows(section)) > 5
    for yolov5, trainer, note in rows(section):
        named = set(_OPTION.findall(yolov5))
        if trainer in ("missing", ""):
            assert not named & have, f"{section}: {yolov5} exists"
            continue
        here = set(_OPTION.findall(trainer)) | (named if trainer.startswith("the same") else set())
        here |= set() if "missing" in note else set(_OPTION.findall(note))
        assert here <= have, f"{section}: {here - have} does not exist"
