"""`trainer bench`, `profile` and `verify` with real ranks and a few real steps."""

import csv
import gzip
import json
import math
import os
import re
import resource
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.unit.trainer_process import exec_trainer, processes_in, start, wait
from tests.unit.yolo_folder import make_yolo_set, squares
from trainer.bench.verify import agree, compare

COMMON = ("--device", "cpu", "--imgsz", "64", "--steps", "2", "--warmup", "1")
SMALL = (*COMMON, "--rounds", "1")
PROFILED = (*COMMON, "--batch", "4", "--precision", "fp32")


def test_two_numbers_of_ranks_are_measured_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_trainer
) -> None:
    """A batch larger than the data set is a row with a failure."""
    data = squares(tmp_path / "set", train=7)
    monkeypatch.chdir(tmp_path)
    files = ("--csv", "scaling.csv", "--markdown", "scaling.md", "--plot", "scaling.png")
    arguments = (
        "--data",
        str(data),
        "--batch",
        "3,8",
        "--ranks",
        "1,2",
        "--precision",
        "fp32",
        "--json",
        *files,
    )
    code, out, err = run_trainer("bench", "scaling", *SMALL, *arguments)
    assert (code, err) == (0, "")
    report = json.loads(out)
    one, two, *rest = report["rows"]
    assert [(r["ranks"], r["batch"], r["failure"]) for r in (one, two)] == [(1, 3, ""), (2, 6, "")]
    assert [r["failure"] for r in rest] == [
        f"batch {batch} is larger than the 7 training images" for batch in (8, 16)
    ]
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


def test_ctrl_c_leaves_no_rank_and_shows_what_was_measured(tmp_path: Path) -> None:
    data = squares(tmp_path / "set", train=12)
    arguments = [
        "bench",
        "scaling",
        *SMALL,
        "--data",
        str(data),
        "--batch",
        "2",
        "--ranks",
        "1,2",
        "--rounds",
        "500",
    ]
    (process,) = start(tmp_path, [{}], *arguments)
    deadline = time.monotonic() + 120
    while (
        len(processes_in(tmp_path)) < 3 and time.monotonic() < deadline
    ):  # a second rank: one has been measured
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "|    1x |          2 |" in out
    assert processes_in(tmp_path) == []


def test_workers_are_measured(tmp_path: Path, run_trainer) -> None:
    data = squares(tmp_path / "set", train=12)
    arguments = ("bench", "workers", *SMALL, "--data", str(data), "--batch", "4", "--workers", "0,1")
    code, out, err = run_trainer(*arguments)
    assert (code, err) == (0, "")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in out.splitlines()
        if line.startswith("|")
    ]
    assert rows[0] == ["workers", "loader alone images/s", "training images/s", "waiting for data", "host GB"]
    assert [row[0] for row in rows[2:]] == ["0", "1"]
    assert all(float(row[1]) > float(row[2]) for row in rows[2:])  # a loader without a training is quicker


def test_strategies_are_compared_on_the_same_model(tmp_path: Path, run_trainer) -> None:
    data = squares(tmp_path / "set", train=12)
    arguments = ("--data", str(data), "--batch", "2", "--ranks", "1,2", "--parallel", "ddp,fsdp", "--noval")
    code, out, err = run_trainer("bench", "scaling", *SMALL, *arguments)
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
        "from trainer.__main__ import run\n"
        "import trainer.bench.measure, trainer.bench.profile, trainer.bench.verify\n"
        "import trainer.cli, trainer.detectors.yolo, trainer.tasks.detection\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        f"limit = pages * {resource.getpagesize()} + (1200 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "run()\n"
    )
    arguments = [
        "bench",
        "scaling",
        *SMALL,
        "--imgsz",
        "320",
        "--batch",
        "1,64",
        "--ranks",
        "1",
        "--precision",
        "fp32",
    ]
    arguments += ["--data", str(data), "--noval", "--json"]
    (done,) = wait(exec_trainer(tmp_path, [{}], *arguments, program=["limited.py"]))
    assert done.returncode == 0, done.stderr
    fits, full = json.loads(done.stdout)["rows"]
    assert fits["train_images_per_s"] > 0
    assert (full["failure"], full["train_images_per_s"]) == ("out of memory", None)
    assert not done.stderr


def test_the_trace_has_the_steps_of_a_training_and_the_table_its_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_trainer
) -> None:
    """Rank 0 of two. The last step updates the weights: every second one only accumulates gradients."""
    data = squares(tmp_path / "set")
    monkeypatch.chdir(tmp_path)
    arguments = ("--ranks", "2", "--data", str(data), "--out", "trace.json.gz")
    code, out, err = run_trainer("profile", *PROFILED, *arguments)
    assert (code, err) == (0, "")
    with gzip.open("trace.json.gz") as file:
        spans = Counter(event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X")
    assert {name: spans[name] for name in ("step", "loading", "training")} == {
        "step": 2,
        "loading": 2,
        "training": 2,
    }
    assert spans["aten::convolution_backward"] == 2 * 60  # yolov5n has 60 convolutions
    assert any("allreduce" in name or "all_reduce" in name for name in spans)
    assert any("_fused_sgd" in name for name in spans)
    assert re.search(r"aten::convolution_backward .* 120 +\n", out)
    assert {p.name for p in tmp_path.iterdir()} == {"set", "trace.json.gz"}


@pytest.mark.parametrize(
    "more", [[], ["--no-sync-bn"], ["--cfg", "yolo26n.yaml", "--ranks", "1,3"], ["--augment-on", "device"]]
)
def test_uneven_shares_of_a_batch_train_as_one_rank_does(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_trainer
) -> None:
    """Three images on two ranks, or on three with one without boxes. Without synchronized batch norm, it must fail."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for --augment-on device
    (tmp_path / "hyp.yaml").write_text("mosaic: 0\n")
    data = make_yolo_set(tmp_path, train=6)
    arguments = [
        "--data",
        str(data),
        "--imgsz",
        "64",
        "--batch",
        "3",
        "--ranks",
        "1,2",
        "--steps",
        "2",
        "--json",
    ]
    arguments += ["--hyp", str(tmp_path / "hyp.yaml")]
    code, out, err = run_trainer("verify", *arguments, *more)
    assert not err
    report = json.loads(out)
    several = 3 if "1,3" in more else 2
    assert [(d["ranks"], d["step"]) for d in report["differences"]] == [
        (1, 1),
        (1, 2),
        (several, 1),
        (several, 2),
    ]
    first, moved = report["differences"][2:]
    if "--no-sync-bn" in more:
        assert (code, report["agree"]) == (1, False)
        assert first["gradient_off"] > 0.01
    else:
        assert (code, report["agree"]) == (0, True)
        assert first["gradient_off"] < 1e-6
        assert first["gradient_norm"] > 10  # not clipped, which would hide a wrong scale
        assert moved["loss"] != first["loss"]  # another batch, other weights
        assert moved["gradient_off"] < 1e-4


def test_differences_are_relative_to_the_first() -> None:
    one = {"loss": torch.tensor(2.0), "gradient": torch.tensor([3.0, 4.0])}
    two = {"loss": torch.tensor(2.002), "gradient": torch.tensor([3.0, 4.5])}
    found = compare(2, 1, two, one)
    assert found.loss_off == pytest.approx(0.001, rel=1e-3)
    assert found.gradient_off == pytest.approx(0.1)
    assert found.greatest == pytest.approx(0.5)
    assert agree([found], 0.11)
    assert not agree([found], 0.09)
    assert agree([compare(1, 1, one, one)], 0)
    broken = {"loss": torch.tensor(math.nan), "gradient": torch.tensor([math.nan, 4.0])}
    assert not agree([compare(2, 1, broken, one)], 1e9)


NO_DATASET = (["--data", "none.yaml"], "none.yaml: no such dataset")
BAD: dict[tuple[str, ...], list[tuple[list[str], str]]] = {
    ("bench", "scaling", *SMALL, "--ranks", "1"): [
        NO_DATASET,
        (["--batch", "4,x"], "--batch 4,x: expected comma-separated numbers"),
        (["--precision", "fp8"], "--precision fp8: unknown"),
        (["--steps", "0"], "--steps must be"),
        (["--csv", "/none/at/all.csv"], "/none/at/all.csv: cannot be written"),
        (["--plot", "/tmp"], "/tmp: cannot be written"),
        (["--parallel", "both"], "--parallel both: unknown"),
    ],
    ("profile", *PROFILED): [
        NO_DATASET,
        (["--out", "none/trace.json"], "--out none/trace.json: No such file or directory"),
        (["--out", "."], "--out .: is a folder"),
        (["--out", "fifo"], "--out fifo: not a regular file"),
        (["--steps", "0"], "--steps must be"),
        (["--ranks", "5"], "--batch 4 is smaller than the number of ranks, 5"),
    ],
    ("verify",): [
        (["--ranks", "2", *NO_DATASET[0]], NO_DATASET[1]),
        (["--ranks", "1,9"], "--ranks 1,9: each must be from 1 to --batch 8"),
        (["--ranks", "two"], "--ranks two"),
        (["--steps", "0"], "--steps must be"),
        (["--precision", "bf16"], "--precision bf16"),
    ],
}
if not torch.cuda.is_available():  # each rank gets one of the two GPUs
    BAD["verify",] += [
        (["--device", "0,1", "--ranks", "1,2"], "--device 0: no GPU can be used on this machine")
    ]


@pytest.mark.parametrize("command", BAD)
def test_bad_input_is_one_error_and_leaves_no_file(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_trainer
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")  # as /dev/null, which a failing test must not replace
    for arguments, message in BAD[command]:
        code, _, err = run_trainer(*command, *arguments)
        assert code == 2
        assert err.startswith(f"error: {message}"), err
        assert err.count("error:") == 1
        assert "Traceback" not in err
    assert "no such option" in run_trainer("bench", "scaling", "--img-size", "64")[2]
    monkeypatch.setenv("RANK", "0")
    assert "start it without torchrun" in run_trainer("profile")[2]
    assert [path.name for path in tmp_path.iterdir()] == ["fifo"]
