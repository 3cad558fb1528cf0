"""Check the page on YOLOv5: each option that it calls the same exists, and each missing one does not."""

import re
from pathlib import Path

import pytest
import typer

from trainer.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "from-yolov5.md"
VERBS = {"train.py": "train", "val.py": "val", "detect.py": "predict", "export.py": "export"}
#: Options of YOLOv5 7.0 that the page does not list, because they are the same here.
SAME = {
    "train.py": "--epochs --cfg --noval --noautoanchor --single-cls --multi-scale --optimizer --workers --cos-lr "
    "--label-smoothing --patience --freeze --seed --exist-ok",
    "val.py": "--imgsz --batch-size --conf-thres --iou-thres --max-det --workers --single-cls --half --save-txt "
    "--save-conf --save-json --project --name --exist-ok",
    "detect.py": "--weights --imgsz --conf-thres --iou-thres --max-det --nosave --save-txt --save-conf --project "
    "--name --exist-ok --half",
    "export.py": "",
}
_OPTION = re.compile(r"--[a-z][a-z0-9_-]*")


def rows(section):
    text = PAGE.read_text().partition(f"\n### {section}\n")[2].partition("\n##")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "| `--" in line]


@pytest.mark.parametrize("section", VERBS)
def test_options_of_the_page_exist_or_are_missing_as_documented(section):
    command = typer.main.get_command(app).commands[VERBS[section]]
    have = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    assert {*SAME[section].split()} <= have
    assert len(rows(section)) >= 3
    for yolov5, trainer, note in rows(section):
        named = set(_OPTION.findall(yolov5))
        assert not named & {*SAME[section].split()}
        if trainer == "missing":
            assert not named & have, f"{section}: {yolov5} exists"
            continue
        here = set(_OPTION.findall(trainer)) | (named if trainer.startswith("the same") else set())
        here |= set() if re.search(r"\bno `--", note) else set(_OPTION.findall(note))
        assert here <= have, f"{section}: {here - have} does not exist"
