"""The trainer as its users start it: real processes on a data set of a few small images."""

import contextlib
import csv
import functools
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from tests.unit.test_bad_data import break_labels
from tests.unit.trainer_process import (
    TINY,
    environment,
    exec_trainer,
    processes_in,
    ranks,
    run,
    start,
    wait,
    wait_until,
)
from tests.unit.yolo_folder import make_yolo_set, squares
from trainer import contract
from trainer.config import Hyp, load_hyp
from trainer.engine.timing import SHARES
from trainer.weights import checkpoint_file


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return squares(tmp_path_factory.mktemp("squares"))


def command(data: Path, project: Path, *more: str, cfg: str = TINY) -> list[str]:
    return [
        *("train", "--data", str(data), "--project", str(project), *(["--cfg", cfg] if cfg else [])),
        *("--imgsz", "64", "--batch", "3", "--epochs", "2", "--device", "cpu", "--workers", "0", *more),
    ]


def events_in(text: str) -> list[dict[str, object]]:
    lines = [line for line in text.splitlines() if line.startswith(contract.EVENT_MARK)]
    return [json.loads(line.removeprefix(contract.EVENT_MARK)) for line in lines]


def test_alone_and_again_from_the_checkpoint(data: Path, tmp_path: Path) -> None:
    done = run(tmp_path, *command(data, tmp_path / "runs", cfg=""), plots=True, code=0)
    assert contract.EVENT_MARK not in done.stdout
    assert "epoch 2/2  mAP50 " in done.stdout
    folder = tmp_path / "runs" / "train"
    wanted = {
        "best.pt",
        "last.pt",
        "previous.pt",
        "results.csv",
        "results.png",
        "predictions.jpg",
        "labels.png",
    }
    assert wanted <= {p.name for p in folder.iterdir()}
    assert not [p.name for p in folder.iterdir() if p.suffix == ".tmp"]
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert all(float(row["box_loss"]) > 0 and float(row["obj_loss"]) > 0 for row in rows)
    shares = [sum(float(row[k]) for k in SHARES) for row in rows]
    assert shares == pytest.approx([1, 1], abs=1e-3)
    content = torch.load(folder / "last.pt", weights_only=True)
    assert content["names"] == ["green", "red"]
    assert content["epoch"] == 2
    assert all(v.dtype in (torch.float32, torch.int64) for v in content["ema"].values())
    best = torch.load(folder / "best.pt", weights_only=True)
    assert set(best) == {*checkpoint_file.KEYS, "task", "scores"}
    assert best["scores"]["map"] == pytest.approx(max(float(row["map"]) for row in rows), abs=1e-6)
    values = sum(tensor.numel() for tensor in best["ema"].values())
    assert (folder / "best.pt").stat().st_size < 1.1 * 4 * values  # a single copy of the weights, in fp32

    # Without a validation nothing ends early, and the last epoch is the best.
    more = (
        "--weights",
        str(folder / "last.pt"),
        "--epochs",
        "3",
        "--noval",
        "--patience",
        "1",
        "--freeze",
        "0",
        "3",
    )
    more += ("--label-smoothing", "0.1", "--sync-bn")
    again = run(tmp_path, *command(data, tmp_path / "runs", *more, cfg=""), code=0)
    assert "349/349 tensors" in again.stdout
    assert "frozen: layers 0, 3 with 20," in again.stdout
    trained = torch.load(tmp_path / "runs" / "train2" / "last.pt", weights_only=True)["model"]
    assert torch.equal(trained["model.0.conv.weight"], content["ema"]["model.0.conv.weight"])
    assert not torch.equal(trained["model.1.conv.weight"], content["ema"]["model.1.conv.weight"])
    assert torch.load(tmp_path / "runs" / "train2" / "best.pt", weights_only=True)["epoch"] == 3


def test_two_ranks_under_a_launcher(data: Path, tmp_path: Path) -> None:
    """Batch 3 on two ranks: seven images in steps of 3, 2 and 2, so that the shares differ."""
    folder = tmp_path / "job"
    folder.mkdir()
    job = {contract.JOB_ID: "squares-1", contract.RUN_DIR: str(folder), contract.NODES_ON_HOST: "1"}
    ended = wait(start(tmp_path, ranks(2), *command(data, tmp_path / "unused", "--sync-bn"), **job), code=0)
    events = events_in(ended[0].stdout)
    kinds = [e["event"] for e in events]
    assert kinds[0] == "ready"
    assert {k: events[0][k] for k in ("rank", "world_size", "backend", "device")} == {
        "rank": 0,
        "world_size": 2,
        "backend": "gloo",
        "device": "cpu",
    }
    assert kinds[-1] == "done"
    # One before the validation, so that a signal costs only that, and one with the scores.
    assert [k for k in kinds if k in ("metric", "checkpoint")] == ["checkpoint", "metric", "checkpoint"] * 2
    metric = next(e for e in events if e["event"] == "metric")
    assert {
        "epoch",
        "epochs",
        "map50",
        "map",
        "box_loss",
        "obj_loss",
        "cls_loss",
        "images_per_s",
    } <= metric.keys()
    assert isinstance(metric["shares"], dict)
    assert set(metric["shares"]) == set(SHARES)
    progress = next(e for e in events if e["event"] == "progress")
    assert {
        "epoch",
        "epochs",
        "step",
        "steps",
        "loss",
        "images_per_s",
        "eta_s",
        "run_eta_s",
    } <= progress.keys()
    assert events_in(ended[1].stdout) == []  # only local rank 0 speaks
    assert events[-1]["best"] == str(folder / "best.pt")
    assert progress["run_eta_s"] > progress["eta_s"]  # the run has two epochs
    assert (folder / "best.pt").exists()
    options = yaml.safe_load((folder / "args.yaml").read_text())
    assert options["epochs"] == 2
    (tmp_path / "hyp.yaml").write_text(yaml.safe_dump(options["hyp"]))
    assert load_hyp(str(tmp_path / "hyp.yaml"), Hyp()).lr0 == options["hyp"]["lr0"]
    assert not (tmp_path / "unused").exists()


BAD = [
    (["--data", "none.yaml"], "none.yaml: no such dataset"),
    (["--cfg", "none.yaml"], "--cfg none.yaml: no such model"),
    (["--weights", "none.pt"], "none.pt: no such file"),
    (["--hyp", "none.yaml"], "none.yaml: No such file"),
    (["--device", "tpu"], "--device tpu"),
    (["--freeze", "30"], "--freeze: no layer 25"),
    (["--ranks", "0"], "--ranks must be 1 or more, not 0"),
]


NODE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
}
PLACES: list[tuple[dict[str, str], list[str], str]] = [
    *(({}, more, said) for more, said in BAD),
    ({"RANK": "0", "WORLD_SIZE": "2"}, [], "not LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    ({**NODE, "MASTER_PORT": "1"}, [], "--batch 3 is smaller than the number of ranks, 4"),
    # torchrun or a launcher has started them, and this option would have been ignored.
    (NODE, ["--ranks", "2"], "--ranks 2: RANK is set, so this is already one of 4 ranks"),
]


@pytest.mark.parametrize(("place", "more", "said"), PLACES, ids=[said for _, _, said in PLACES])
def test_bad_input_is_two_lines_and_exit_2_and_nothing_is_written(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_trainer,
    place,
    more: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for key, value in {contract.JOB_ID: "unit-job", **place}.items():
        monkeypatch.setenv(key, value)
    code, out, err = run_trainer(*command(data, tmp_path / "runs", *more, cfg=""))
    assert code == 2
    first, *rest = err.splitlines()
    assert first.startswith("error: ")
    assert said in first
    assert all(line.startswith("hint: ") for line in rest)
    assert len(rest) <= 1
    (event,) = events_in(out)
    assert event["event"] == "failed"
    assert event["error"] == first.removeprefix("error: ")
    assert not list(tmp_path.iterdir())


def test_a_single_value_for_batch_norm_is_refused_and_what_is_advised_trains(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_trainer
) -> None:
    """Seven images in steps of 3, 2 and 2 on two ranks: one of 32 px is one cell of the coarsest grid."""
    small = ("--imgsz", "32")
    for place, more in (
        ({}, (*small, "--batch", "1")),
        (ranks(2)[1], small),
        (ranks(2)[1], ("--multi-scale",)),
    ):
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            for key, value in place.items():
                patch.setenv(key, value)
            code, _, err = run_trainer(*command(data, tmp_path / "runs", *more))
        assert code == 2
        said, hint = err.splitlines()
        assert "can be one image of 32 x 32 px, and batch norm cannot" in said
        assert hint == "hint: use a larger --batch or --imgsz" + (", or --sync-bn" if place else "")
    assert not list(tmp_path.iterdir())
    for advised in ("--sync-bn", "--batch=7"):
        more = (*small, "--ranks", "2", "--epochs", "1", "--noval", advised)
        run(tmp_path, *command(data, tmp_path / "runs", *more), code=0)


def test_all_ranks_stop_where_rank_0_cannot_write(data: Path, tmp_path: Path) -> None:
    job = {contract.JOB_ID: "unit-job", contract.RUN_DIR: "/proc/self"}
    ended = wait(start(tmp_path, ranks(2), *command(data, tmp_path / "unused"), **job), code=2)
    assert all("/proc/self: cannot write there" in each.stderr for each in ended)


def test_what_the_system_refuses_is_no_defect(data: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: both are met in the middle of a checkpoint."""
    name = Path("x" * 300, "data.yaml")
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    for given, code, said in (
        (data, 1, "error: runs/train/last.pt: File too large\nhint: free space there"),
        (name, 2, f"error: {name}: File name too long\nhint: use another path"),
    ):
        done = run(tmp_path, *command(given, Path("runs"), "--noval", cfg=""), preexec_fn=limit)
        assert (done.returncode, done.stderr.startswith(said)) == (code, True), done.stderr
        assert "Traceback" not in done.stderr
    assert not list((tmp_path / "runs/train").glob("*.pt*"))


def test_it_starts_its_own_ranks(data: Path, tmp_path: Path) -> None:
    (done,) = wait(exec_trainer(tmp_path, [{}], *command(data, tmp_path / "runs", "--ranks", "2")), code=0)
    assert "2 ranks over gloo" in done.stdout
    assert (tmp_path / "runs" / "train" / "best.pt").exists()
    done = run(tmp_path, *command(data, tmp_path / "other", "--device", "0,1"))
    if not torch.cuda.is_available():
        assert done.returncode == 2
        assert done.stderr.count("--device 0,1: no GPU can be used on this machine") == 1


@pytest.mark.parametrize(
    ("name", "times", "after", "code"),
    [
        ("SIGINT", 1, "steps.csv", 130),
        ("SIGINT", 2, "steps.csv", 130),
        ("SIGINT", 1, "libtorch", 130),
        ("SIGTERM", 1, "steps.csv", 75),
        ("SIGHUP", 1, "steps.csv", 75),
        ("SIGKILL", 1, "steps.csv", -9),
    ],
)
def test_a_signal_to_its_own_ranks_leaves_none(
    data: Path, tmp_path: Path, name: str, times: int, after: str, code: int
) -> None:
    """In the middle of the training, or while the ranks still load torch; also when the parent can tell nothing."""
    folder = tmp_path / "runs" / "train"
    begin = exec_trainer if after == "libtorch" or name == "SIGKILL" else start
    more = ("--ranks", "2", "--epochs", "1000", "--noval", "--log-steps")
    (process,) = begin(tmp_path, [{}], *command(data, tmp_path / "runs", *more))

    def reached() -> bool:
        if after == "steps.csv":
            return (folder / after).exists()
        with contextlib.suppress(OSError):  # ended meanwhile
            return any(after in Path(f"/proc/{pid}/maps").read_text() for pid in processes_in(tmp_path))
        return False

    try:
        wait_until(reached, process)
        for _ in range(times):
            process.send_signal(getattr(signal, name))
            time.sleep(0.05)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code, err
    assert "Traceback" not in err
    until = time.monotonic() + 60 * (name == "SIGKILL")
    while processes_in(tmp_path) and time.monotonic() < until:
        time.sleep(0.1)
    assert not processes_in(tmp_path)
    if after == "steps.csv" and times == 1:
        assert name == "SIGKILL" or f"after a checkpoint; to continue: trainer train --resume {folder}" in err
        assert (folder / "last.pt").exists()
        assert not (folder / "best.pt").exists()  # without a validation, that is the last epoch


def test_a_closed_pipe_stops_the_training_after_a_checkpoint(data: Path, tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "trainer",
        *command(data, tmp_path / "runs", "--epochs", "1000", "--noval"),
    ]
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 75
        resume = f"trainer train --resume {tmp_path / 'runs' / 'train'}"
        assert process.stderr.read() == f"stopped by SIGHUP after a checkpoint; to continue: {resume}\n"
    assert (tmp_path / "runs" / "train" / "last.pt").exists()
    words = ["sh", "-c", 'exec "$@" >&-', "sh", *words[:3], "info", "--cfg", "yolov5n.yaml"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_names_the_defaults_and_loads_no_torch() -> None:
    program = "import sys; sys.argv = ['trainer', 'train', '--help']\n"
    program += "from trainer.__main__ import main\ntry:\n main()\nfinally:\n print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(COLUMNS="300", TERM="dumb"),
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("False")
    rows = [
        [cell.strip() for cell in line.split("|")[1:3]] for line in done.stdout.splitlines() if "|" in line
    ]
    assert ["detect", "100"] in rows
    assert ["segment digits", "5"] in rows


def test_a_current_folder_that_has_been_removed_is_one_error(tmp_path: Path) -> None:
    script = f"cd {tmp_path} && rmdir {tmp_path} && {sys.executable} -m trainer train"
    done = subprocess.run(["bash", "-c", script], env=environment(), text=True, capture_output=True)
    assert done.returncode == 2
    assert done.stderr == "error: the current folder has been removed\nhint: cd to a folder that exists\n"


@pytest.mark.parametrize("gone", ["the key", "the images"])
def test_without_validation_no_validation_images_are_needed(tmp_path: Path, gone: str) -> None:
    data = make_yolo_set(tmp_path)
    if gone == "the key":
        data.write_text(data.read_text().replace("val: images/val\n", ""))
    else:
        shutil.rmtree(tmp_path / "images/val")
    assert run(tmp_path, *command(data, tmp_path / "runs")).returncode == 2
    done = run(tmp_path, *command(data, tmp_path / "runs", "--noval", "--epochs", "1"), code=0)
    assert (tmp_path / "runs/train/best.pt").exists(), done


@pytest.mark.parametrize("seed", [2**64 - 1, 2**64])
def test_the_largest_seed_trains_and_a_larger_one_is_an_error(data: Path, tmp_path: Path, seed: int) -> None:
    done = run(tmp_path, *command(data, tmp_path / "runs", "--seed", str(seed), "--epochs", "1", "--noval"))
    assert done.returncode == (2 if seed == 2**64 else 0), done
    assert "Traceback" not in done.stderr


def test_a_set_with_faults_is_refused_and_nothing_is_written(tmp_path):
    data = make_yolo_set(tmp_path)
    faults = break_labels(tmp_path)
    done = run(tmp_path, *command(data, tmp_path / "runs"))
    assert done.returncode == 2
    error, hint = done.stderr.splitlines()
    assert error == f"error: 6 faults: {'; '.join(faults[:3])}; and 3 more"
    assert f"`trainer data check --data {data}`" in hint
    assert not (tmp_path / "runs").exists()


def test_without_its_faults_and_as_one_class(tmp_path):
    data = make_yolo_set(tmp_path)
    faults = break_labels(tmp_path)
    done = run(tmp_path, *command(data, tmp_path / "runs", "--allow-bad-labels", "--single-cls"), code=0)
    folder = tmp_path / "runs/train"
    assert [line for line in done.stdout.splitlines() if line.startswith("left out: ")] == [
        *(f"left out: {fault}" for fault in faults[:3]),
        f"left out: 3 more, all of them in {folder / 'left_out.txt'}",
    ]
    assert (folder / "left_out.txt").read_text().splitlines() == faults
    content = torch.load(folder / "best.pt", weights_only=True)
    assert content["names"] == ["item"]
    assert (
        next(v for k, v in content["ema"].items() if k.endswith("m.0.weight") and len(v) == 3 * 6) is not None
    )
