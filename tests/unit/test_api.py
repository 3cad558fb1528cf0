"""The Python interface with real ranks: result, callbacks and errors."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer_process import FORKING, TINY, processes_in, start
from tests.unit.yolo_folder import make_yolo_set
from trainer import Callback, TrainerError, contract, train
from trainer.distributed import spawn
from trainer.distributed.spawn import Line, rank_error
from trainer.inference.trained import load_trained

ROOT = Path(__file__).parents[2]
QUICK: dict[str, Any] = {"imgsz": 64, "batch": 3, "epochs": 2, "device": "cpu", "workers": 0}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("trainer.distributed.spawn.subprocess", FORKING)
    return tmp_path


class Recorder(Callback):
    def __init__(self) -> None:
        self.epochs: list[Mapping[str, Any]] = []
        self.ends: list[Mapping[str, Any]] = []

    def on_epoch_end(self, metrics: Mapping[str, Any]) -> None:
        self.epochs.append(metrics)

    def on_end(self, result: Mapping[str, Any]) -> None:
        self.ends.append(result)


def test_two_ranks_train_and_return_the_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "trainer.distributed.spawn.subprocess", subprocess
    )  # new interpreters, without forking
    recorder = Recorder()
    more = {**QUICK, "cfg": TINY, "cos_lr": True, "rect": False}
    result = train(data=make_yolo_set(folder / "data"), ranks=2, callback=recorder, **more)
    assert result.folder == folder / "runs" / "train"
    assert result.best.is_file()
    assert result.last.is_file()
    assert [row["epoch"] for row in result.history] == [1, 2]
    assert all(row["box_loss"] > 0 for row in result.history)
    assert 0 <= result.map <= result.map50 <= 1
    assert result.seconds > 0
    assert [metrics["epoch"] for metrics in recorder.epochs] == [1, 2]
    assert [end["best"] for end in recorder.ends] == ["runs/train/best.pt"]
    output = capsys.readouterr().out
    assert "2 ranks over gloo" in output
    assert "epoch 2/2" in output
    assert "::cluster" not in output


def test_custom_model_data_and_callback_by_import_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks import them from the current folder."""
    make_yolo_set(folder / "data")
    (folder / "mine.py").write_text(
        textwrap.dedent("""
        import pathlib
        from torch import nn
        from trainer import Callback
        from trainer.data.registry import open_dataset
        from trainer.models.heads import Detect

        class Net(nn.Module):
            def __init__(self, nc):
                super().__init__()
                self.body = nn.Conv2d(3, 8, 9, 8, 4)
                self.detect = Detect(nc, [[10, 13, 16, 30]], [8])
                self.detect.place([8])

            def forward(self, images):
                return self.detect([self.body(images)])

        def data(split, imgsz):
            return open_dataset("data/data.yaml", "val", imgsz=imgsz)  # two images, for both

        class Diary(Callback):
            def on_epoch_end(self, metrics):
                with open("diary.txt", "a") as file:
                    print(metrics["epoch"], metrics["box_loss"] > 0, file=file)
        """)
    )
    options = {**QUICK, "batch": 2}
    result = train(data="mine:data", cfg="mine:Net", callback="mine:Diary", ranks=2, **options)
    assert (folder / "diary.txt").read_text() == "1 True\n2 True\n"
    assert result.best.stat().st_size < 200_000  # no yolov5n

    # A checkpoint names the code of its model, but only the user may run it.
    with pytest.raises(TrainerError, match="which a checkpoint must not import") as error:
        train(data="mine:data", weights=result.best, ranks=1, **options)
    assert error.value.hint == "allow it: --cfg mine:Net"
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(TrainerError, match="which a checkpoint must not import"):
        load_trained(str(result.best))
    trained = load_trained(str(result.best), "mine:Net")
    monkeypatch.delitem(sys.modules, "mine")
    assert type(trained.model).__name__ == "Net"

    again = train(
        data="mine:data", weights=result.best, cfg="mine:Net", noval=True, **{**options, "epochs": 1}
    )
    assert again.folder.name == "train2"
    assert math.isnan(again.map50)  # no validation
    assert math.isnan(again.history[0]["map"])


def test_the_example_with_own_parts_trains(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copy(ROOT / "examples/own_parts.py", folder)
    parts = {"data": "own_parts:data", "cfg": "own_parts:Net", "callback": "own_parts:Log"}
    result = train(**parts, ranks=1, **{**QUICK, "epochs": 1, "batch": 64})
    assert "epoch 1 of 1: mAP50 " in capfd.readouterr().out
    assert result.history[0]["box_loss"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epoch": 3}, "no option 'epoch'"),
        ({"ranks": 0}, "ranks must be"),
        ({"data": lambda split, imgsz: None}, "cannot import"),
        ({"ranks": 2, "batch": 1}, "--batch 1 is smaller than the number of ranks, 2"),
        ({"cfg": "json:dumps", "data": "digits"}, "--cfg json:dumps: it must return a torch module"),
    ],
)
def test_errors_of_the_ranks_are_raised(options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(TrainerError) as error:
        train(**{**QUICK, "epochs": 1, **options})
    assert message in error.value.message
    assert not list(folder.iterdir())


def test_a_killed_rank_ends_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "PEER_GRACE_S", 1.0)
    (folder / "mine.py").write_text(
        "import os, signal, trainer\n"
        "class Fatal(trainer.Callback):\n"
        "    def __init__(self):\n"
        "        if os.environ['RANK'] == '1':\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    begin = time.monotonic()
    with pytest.raises(TrainerError, match="rank 1 ended with SIGKILL"):
        train(data=make_yolo_set(folder / "data"), callback="mine:Fatal", ranks=2, cfg=TINY, **QUICK)
    assert time.monotonic() - begin < 60  # not the timeout of the rendezvous


def test_the_first_failure_comes_before_its_consequences() -> None:
    """NCCL's watchdog aborts a rank after its peer has ended."""

    def message(codes: dict[int, int], *events: dict[str, Any]) -> str:
        lines = []
        for event in events:
            content = {"event": "failed", "hint": "", "echo": False, **event}
            lines.append(Line(event["rank"], False, contract.EVENT_MARK + json.dumps(content)))
        return rank_error(codes, lines).message

    defect = {"rank": 1, "error": "KeyError: 3", "exit_code": 1, "time": 2.0}
    lost = {"rank": 0, "error": "another rank ended: Broken pipe", "exit_code": 1, "time": 1.0, "echo": True}
    assert message({0: -signal.SIGABRT, 1: -signal.SIGKILL}) == "rank 1 ended with SIGKILL"
    assert message({0: -signal.SIGABRT, 1: 3}) == "rank 1 ended with exit 3"
    assert message({0: 1, 1: 1}, lost, defect) == "KeyError: 3"
    assert message({0: 1, 1: -signal.SIGABRT}, lost) == "rank 1 ended with SIGABRT"
    wrong = {"rank": 0, "error": "--data x", "exit_code": 2, "time": 3.0}
    assert message({0: 2, 1: 1}, defect, wrong) == "--data x"


def test_ctrl_c_ends_all_ranks(folder: Path) -> None:
    make_yolo_set(folder / "data")
    options = {**QUICK, "data": "data/data.yaml", "epochs": 1000, "cfg": TINY, "ranks": 2}
    program = f"import trainer\ntrainer.train(**{options})"
    (process,) = start(folder, [{}], program=("-c", program))
    try:
        assert process.stdout is not None
        while "epoch 1/" not in (line := process.stdout.readline()):
            assert line, process.communicate()
        assert len(processes_in(folder)) == 3
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=90)
        assert "KeyboardInterrupt" in stderr
        assert processes_in(folder) == []
    finally:
        process.kill()


def test_importing_the_package_loads_no_large_module() -> None:
    large = ("torch", "numpy", "cv2")
    program = (
        f"import sys, trainer; trainer.train, trainer.load; print([m for m in {large} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
    )
    assert done.stdout.strip() == "[]", done.stderr
