"""`trainer bench` with real ranks and a few real steps."""

import csv
import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer_process import FORKING, exec_trainer, processes_in, start, wait
from tests.unit.yolo_folder import squares
from trainer.__main__ import main

SMALL = ("--device", "cpu", "--imgsz", "64", "--steps", "2", "--warmup", "1", "--rounds", "1")


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str, str]:
    monkeypatch.setattr(sys, "argv", ["trainer", *arguments])
    monkeypatch.setattr("trainer.distributed.spawn.subprocess", FORKING)
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, *capsys.readouterr()


def test_two_numbers_of_ranks_are_measured_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch larger than the data set is a row with a failure."""
    data = squares(tmp_path / "set", train=7)
    monkeypatch.chdir(tmp_path)
    files = ("--csv", "scaling.csv", "--markdown", "scaling.md", "--plot", "scaling.png")
    arguments = ("--data", str(data), "--batch", "3,8", "--ranks", "1,2", "--precision", "fp32", "--json", *files)
    code, out, err = run(monkeypatch, capsys, "bench", "scaling", *SMALL, *arguments)
    assert (code, err) == (0, "")
    report = json.loads(out)
    one, two, *rest = report["rows"]
    assert [(r["ranks"], r["batch"], r["failure"]) for r in (one, two)] == [(1, 3, ""), (2, 6, "")]
    assert [r["failure"] for r in rest] == [f"batch {batch} is larger than the 7 training images" for batch in (8, 16)]
    for row in (one, two):
        assert row["train_epoch_s"] == pytest.approx(7 / row["train_images_per_s"])
        assert row["val_epoch_s"] == pytest.approx(3 / row["val_images_per_s"])
        assert 0 < row["data_share"] + row["sync_share"] < 0.7
        assert row["precision"] == "fp32"
    assert (one["images_per_step"], two["images_per_step"]) == (pytest.approx(7 / 3, abs=0.4), 3.5)
    assert two["gain"] == pytest.approx(two["train_images_per_s"] / one["train_images_per_s"])
    assert two["efficiency"] == pytest.approx(two["gain"] / 2)
    assert [(row["steps"], row["epoch_steps"]) for row in (one, two)] == [(2, 3), (2, 2)]
    assert one["host_bytes"] > 200e6
    assert two["host_bytes"] > 1.5 * one["host_bytes"]
    with Path("scaling.csv").open() as file:
        assert [row["batch"] for row in csv.DictReader(file)] == ["3", "6", "8", "16"]
    text = Path("scaling.md").read_text()
    assert "| ranks | batch-size | host_mem (GB) |" in text
    assert "| bs | " in text
    assert {p.name for p in tmp_path.iterdir()} == {"set", "scaling.csv", "scaling.md", "scaling.png"}


def test_bad_input_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--data", "none.yaml"], "error: none.yaml: no such dataset"),
        (["--batch", "4,x"], "error: --batch 4,x: expected comma-separated numbers"),
        (["--precision", "fp8"], "error: --precision fp8: unknown"),
        (["--steps", "0"], "error: --steps is 0"),
        (["--csv", "/none/at/all.csv"], "error: /none/at/all.csv: cannot be written"),
        (["--plot", "/tmp"], "error: /tmp: cannot be written"),
        (["--parallel", "both"], "error: --parallel both: unknown"),
    ):
        code, _, err = run(monkeypatch, capsys, "bench", "scaling", *SMALL, "--ranks", "1", *arguments)
        assert code == 2
        assert err.startswith(message), err
        assert err.count("error:") == 1
        assert "Traceback" not in err
    code, _, err = run(monkeypatch, capsys, "bench", "scaling", "--img-size", "64")
    assert code == 2
    assert "No such option" in err


def test_ctrl_c_leaves_no_rank_and_shows_what_was_measured(tmp_path: Path) -> None:
    data = squares(tmp_path / "set", train=12)
    arguments = ["bench", "scaling", *SMALL, "--data", str(data), "--batch", "2", "--ranks", "1,2", "--rounds", "500"]
    (process,) = start(tmp_path, [{}], *arguments)
    deadline = time.monotonic() + 120
    while len(processes_in(tmp_path)) < 3 and time.monotonic() < deadline:  # a second rank: one has been measured
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "|    1x |          2 |" in out
    assert processes_in(tmp_path) == []


def test_workers_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = squares(tmp_path / "set", train=12)
    arguments = ("bench", "workers", *SMALL, "--data", str(data), "--batch", "4", "--workers", "0,1")
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert (code, err) == (0, "")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    assert rows[0] == ["workers", "loader alone img/s", "training img/s", "waiting for data", "host GB"]
    assert [row[0] for row in rows[2:]] == ["0", "1"]
    assert all(float(row[1]) > float(row[2]) for row in rows[2:])  # a loader without a training is quicker


def test_strategies_are_compared_on_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = squares(tmp_path / "set", train=12)
    arguments = ("--data", str(data), "--batch", "2", "--ranks", "1,2", "--parallel", "ddp,fsdp", "--noval")
    code, out, err = run(monkeypatch, capsys, "bench", "scaling", *SMALL, *arguments)
    assert (code, err) == (0, "")
    lines = out[out.index("| strategy |") :].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert [row[:3] for row in rows[2:]] == [["ddp", "1", "2"], ["ddp", "2", "4"], ["fsdp", "2", "4"]]
    assert all(float(row[4]) > 0 for row in rows[2:])


def test_a_batch_that_does_not_fit_is_a_row(tmp_path: Path) -> None:
    """The ranks inherit the limit of this process, which has loaded the same modules."""
    data = squares(tmp_path / "set", train=64)
    program = tmp_path / "limited.py"
    program.write_text(
        "import resource\n"
        "from trainer.__main__ import main\n"
        "import trainer.bench.measure, trainer.bench.profile, trainer.bench.verify\n"
        "import trainer.cli, trainer.tasks.detection\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        f"limit = pages * {resource.getpagesize()} + (1200 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "main()\n"
    )
    arguments = ["bench", "scaling", *SMALL, "--imgsz", "320", "--batch", "1,64", "--ranks", "1", "--precision", "fp32"]
    arguments += ["--data", str(data), "--noval", "--json"]
    (done,) = wait(exec_trainer(tmp_path, [{}], *arguments, program=["limited.py"]))
    assert done.returncode == 0, done.stderr
    fits, full = json.loads(done.stdout)["rows"]
    assert fits["train_images_per_s"] > 0
    assert (full["failure"], full["train_images_per_s"]) == ("out of memory", None)
    assert not done.stderr
