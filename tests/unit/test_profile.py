"""`trainer profile`: a trace that other programs read, of the steps that were asked for."""

import gzip
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from tests.unit.test_bench import run
from tests.unit.yolo_folder import squares
from trainer.bench.profile import operators, table_of

SMALL = ("--device", "cpu", "--imgsz", "64", "--batch", "4", "--steps", "2", "--warmup", "1", "--precision", "fp32")


def test_the_trace_has_the_steps_of_a_training_and_the_table_its_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = squares(tmp_path / "set")
    monkeypatch.chdir(tmp_path)
    code, out, err = run(monkeypatch, capsys, "profile", *SMALL, "--data", str(data))
    assert (code, err) == (0, "")
    trace = json.loads(Path("trace.json").read_text())
    spans = Counter(event["name"] for event in trace["traceEvents"] if event.get("ph") == "X")
    assert {name: spans[name] for name in ("step", "loading", "training")} == {"step": 2, "loading": 2, "training": 2}
    assert spans["aten::convolution"] >= 2 * 60  # yolov5n has 60 convolutions
    assert spans["aten::convolution_backward"] == 2 * 60
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines()]
    assert lines[0] == ["operator", "calls a step", "CPU ms a step", "share"]
    rows = lines[2:12]
    assert next(row for row in rows if row[0] == "aten::convolution_backward")[1] == "60"
    shares = [float(row[3].rstrip("%")) for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert 50 < sum(shares) <= 100.5
    assert {p.name for p in tmp_path.iterdir()} == {"set", "trace.json"}


def test_two_ranks_and_a_packed_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "two.json.gz"
    # The third step is the first of two of its epoch, and would gather gradients without moving the weights.
    few = ("--steps", "1", "--warmup", "2", "--ranks", "2")
    arguments = ("profile", *SMALL, *few, "--data", str(squares(tmp_path / "set")), "--out", str(out))
    code, said, err = run(monkeypatch, capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    names = {row["name"] for row in json.loads(said)["operators"]}
    assert any("allreduce" in name or "all_reduce" in name for name in names)
    assert any("_fused_sgd" in name for name in names)
    with gzip.open(out) as file:
        assert json.load(file)["traceEvents"]


def test_what_cannot_be_profiled_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, said in (
        (["--data", "none.yaml"], "error: --data none.yaml: no such file"),
        (["--out", "none/trace.json"], "error: --out none/trace.json: No such file or directory"),
        (["--out", "."], "error: --out .: is a folder"),
        (["--steps", "0"], "error: --steps is 0"),
        (["--ranks", "5"], "error: --batch 4 is smaller than the number of ranks, 5"),
    ):
        code, _, err = run(monkeypatch, capsys, "profile", *SMALL, *arguments)
        assert code == 2
        assert err.startswith(said), err
        assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_on_a_gpu_operators_are_ranked_by_their_kernels_time_counted_once() -> None:
    """torch lists an operator with its kernels' time, and each kernel again."""

    def event(key: str, kind: DeviceType, cpu_us: float, device_us: float) -> SimpleNamespace:
        return SimpleNamespace(
            key=key, count=4, device_type=kind, self_cpu_time_total=cpu_us, self_device_time_total=device_us
        )

    events = [
        event("aten::add", DeviceType.CPU, 9000, 1000),
        event("aten::convolution", DeviceType.CPU, 1000, 3000),
        event("implicit_gemm_kernel", DeviceType.CUDA, 0, 3000),
        event("step", DeviceType.CPU, 50000, 4000),
    ]
    rows = operators(events, steps=2, on_device=True)
    assert [(row.name, row.calls, row.device_ms, row.share) for row in rows] == [
        ("aten::convolution", 2, 1.5, 0.75),
        ("aten::add", 2, 0.5, 0.25),
    ]
    assert [row.name for row in operators(events, steps=2, on_device=False)] == ["aten::add", "aten::convolution"]
    assert table_of(rows).splitlines()[0].split("|")[1:4] == [
        " operator          ",
        " calls a step ",
        " GPU ms a step ",
    ]
