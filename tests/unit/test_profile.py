"""`trainer profile`: the trace and the table of operators."""

import gzip
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.test_bench import run
from tests.unit.yolo_folder import squares

SMALL = ("--device", "cpu", "--imgsz", "64", "--batch", "4", "--steps", "2", "--warmup", "1", "--precision", "fp32")


def test_the_trace_has_the_steps_of_a_training_and_the_table_its_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 of two. The last step updates the weights: every second one only accumulates gradients."""
    data = squares(tmp_path / "set")
    monkeypatch.chdir(tmp_path)
    arguments = ("--ranks", "2", "--data", str(data), "--out", "trace.json.gz")
    code, out, err = run(monkeypatch, capsys, "profile", *SMALL, *arguments)
    assert (code, err) == (0, "")
    with gzip.open("trace.json.gz") as file:
        spans = Counter(event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X")
    assert {name: spans[name] for name in ("step", "loading", "training")} == {"step": 2, "loading": 2, "training": 2}
    assert spans["aten::convolution_backward"] == 2 * 60  # yolov5n has 60 convolutions
    assert any("allreduce" in name or "all_reduce" in name for name in spans)
    assert any("_fused_sgd" in name for name in spans)
    assert re.search(r"aten::convolution_backward .* 120 +\n", out)
    assert {p.name for p in tmp_path.iterdir()} == {"set", "trace.json.gz"}


def test_a_failed_profile_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")  # as /dev/null, which a failing test must not replace
    for arguments, message in (
        (["--data", "none.yaml"], "error: none.yaml: no such dataset"),
        (["--out", "none/trace.json"], "error: --out none/trace.json: No such file or directory"),
        (["--out", "."], "error: --out .: is a folder"),
        (["--out", "fifo"], "error: --out fifo: not a regular file"),
        (["--steps", "0"], "error: --steps is 0"),
        (["--ranks", "5"], "error: --batch 4 is smaller than the number of ranks, 5"),
    ):
        code, _, err = run(monkeypatch, capsys, "profile", *SMALL, *arguments)
        assert code == 2
        assert err.startswith(message), err
        assert "Traceback" not in err
    monkeypatch.setenv("RANK", "0")
    assert "start it without torchrun" in run(monkeypatch, capsys, "profile")[2]
    assert [path.name for path in tmp_path.iterdir()] == ["fifo"]
