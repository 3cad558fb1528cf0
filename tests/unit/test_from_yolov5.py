"""Check what the page on YOLOv5 says of its options: which are the same, and which are missing."""

import re
from pathlib import Path

import pytest
import typer

from trainer.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "from-yolov5.md"
VERBS = {"train.py": "train", "val.py": "val", "detect.py": "predict", "export.py": "export"}
#: Options of YOLOv5 7.0 that have the same name here.
SAME = {
    "train.py": "--epochs --cfg --noval --noautoanchor --single-cls --multi-scale --optimizer --workers --cos-lr "
    "--label-smoothing --patience --freeze --seed --exist-ok --weights --data --hyp --batch-size --imgsz --img --rect "
    "--image-weights --sync-bn --resume --cache --device --project --name --save-period",
    "val.py": "--imgsz --batch-size --conf-thres --iou-thres --max-det --workers --single-cls --half --save-txt "
    "--save-conf --save-json --project --name --exist-ok --data --weights --task --device",
    "detect.py": "--weights --imgsz --conf-thres --iou-thres --max-det --nosave --save-txt --save-conf --project "
    "--name --exist-ok --half --source --device --classes",
    "export.py": "--weights --batch-size --dynamic --imgsz",
}
#: Options of YOLOv5 7.0 that are missing here.
MISSING = {
    "train.py": "--img-size --local_rank --nosave --noplots --evolve --evolve_population --resume_evolve --quad "
    "--ndjson-console --ndjson-file --bucket --upload_dataset --entity --bbox_interval --artifact_alias",
    "val.py": "--verbose --augment --save-hybrid --dnn",
    "detect.py": "--data --view-img --save-csv --save-crop --save-format --agnostic-nms --augment --visualize --update "
    "--line-thickness --hide-labels --hide-conf --vid-stride --dnn",
    "export.py": "--include --nms --agnostic-nms --topk-per-class --topk-all --iou-thres --conf-thres --half --int8 "
    "--per-tensor --optimize --simplify --opset --device --data --inplace --keras --cache --mlmodel --workspace "
    "--verbose",
}
_OPTION = re.compile(r"--[a-z][a-z0-9_-]*")


def options(script):
    command = typer.main.get_command(app).commands[VERBS[script]]
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)}


@pytest.mark.parametrize("script", VERBS)
def test_options_are_the_same_or_missing(script):
    assert options(script) >= {*SAME[script].split()}
    assert not options(script) & {*MISSING[script].split()}


def test_each_option_that_the_page_names_is_one_of_ours_or_of_yolov5():
    table = PAGE.read_text().partition("\n## Options\n")[2]
    rows = [line.strip("|").split("|") for line in table.splitlines() if "| `" in line]
    ours = {"--nproc-per-node"}.union(*map(options, VERBS))
    assert len(rows) > 5
    for yolov5, here in rows:
        assert {*_OPTION.findall(here)} <= ours
        assert {*_OPTION.findall(yolov5)} <= {*" ".join([*SAME.values(), *MISSING.values()]).split()}
