"""Training on a data set with faults, as its user starts it."""

from pathlib import Path

import torch

from tests.unit.test_bad_data import break_labels
from tests.unit.trainer_process import TINY, Ended, run
from tests.unit.yolo_folder import make_yolo_set


def run_train(data: Path, project: Path, *more: str) -> Ended:
    arguments = ("--data", str(data), "--project", str(project), "--cfg", TINY, "--imgsz", "64", "--batch", "3")
    return run(data.parent, "train", *arguments, "--epochs", "1", "--device", "cpu", "--workers", "0", *more)


def test_a_set_with_faults_is_refused_and_nothing_is_written(tmp_path):
    data = make_yolo_set(tmp_path)
    faults = break_labels(tmp_path)
    done = run_train(data, tmp_path / "runs")
    assert done.returncode == 2
    error, hint = done.stderr.splitlines()
    assert error == f"error: 6 faults: {'; '.join(faults[:3])}; and 3 more"
    assert f"`trainer data check --data {data}`" in hint
    assert not (tmp_path / "runs").exists()


def test_without_its_faults_and_as_one_class(tmp_path):
    data = make_yolo_set(tmp_path)
    faults = break_labels(tmp_path)
    done = run_train(data, tmp_path / "runs", "--allow-bad-labels", "--single-cls")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/train"
    assert [line for line in done.stdout.splitlines() if line.startswith("left out: ")] == [
        *(f"left out: {fault}" for fault in faults[:3]),
        f"left out: 3 more, all of them in {folder / 'left_out.txt'}",
    ]
    assert (folder / "left_out.txt").read_text().splitlines() == faults
    content = torch.load(folder / "best.pt", weights_only=True)
    assert content["names"] == ["item"]
    assert next(v for k, v in content["ema"].items() if k.endswith("m.0.weight") and len(v) == 3 * 6) is not None
