"""The Python interface with real ranks: what a program or a notebook gets back, hears and has to catch."""

import json
import math
import os
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
from trainer import Callback, TrainerError, contract, ranks, train
from trainer.api import _Told
from trainer.ranks import Line
from trainer.tasks.inference import load_trained

ROOT = Path(__file__).parents[2]
QUICK: dict[str, Any] = {"imgsz": 64, "batch": 3, "epochs": 2, "device": "cpu", "workers": 0}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("trainer.ranks.subprocess", FORKING)
    return tmp_path


class Heard(Callback):
    def __init__(self) -> None:
        self.epochs: list[Mapping[str, Any]] = []
        self.ends: list[Mapping[str, Any]] = []

    def on_epoch_end(self, metrics: Mapping[str, Any]) -> None:
        self.epochs.append(metrics)

    def on_end(self, result: Mapping[str, Any]) -> None:
        self.ends.append(result)


def test_two_ranks_train_and_the_results_come_back(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.ranks.subprocess", subprocess)  # new interpreters, as its users have
    heard = Heard()
    more = {**QUICK, "cfg": TINY, "cos_lr": True, "rect": False}
    result = train(data=make_yolo_set(place / "data"), ranks=2, callback=heard, **more)
    assert result.folder == place / "runs" / "train"
    assert result.best.is_file()
    assert result.last.is_file()
    assert [row["epoch"] for row in result.history] == [1, 2]
    assert all(row["box_loss"] > 0 for row in result.history)
    assert 0 <= result.map <= result.map50 <= 1
    assert result.seconds > 0
    assert [metrics["epoch"] for metrics in heard.epochs] == [1, 2]
    assert [end["best"] for end in heard.ends] == ["runs/train/best.pt"]
    said = capsys.readouterr().out
    assert "2 ranks over gloo" in said
    assert "epoch 2/2" in said
    assert "::cluster" not in said


def test_ones_own_model_data_and_callback_by_import_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them live in a file that only the current folder makes known, on each rank."""
    make_yolo_set(place / "data")
    (place / "mine.py").write_text(
        textwrap.dedent("""
        import pathlib
        from torch import nn
        from trainer import Callback
        from trainer.data import open_dataset
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
            return open_dataset("data/data.yaml", "val", imgsz=imgsz)  # two pictures, for both

        class Diary(Callback):
            def on_epoch_end(self, metrics):
                with open("diary.txt", "a") as file:
                    print(metrics["epoch"], metrics["box_loss"] > 0, file=file)
        """)
    )
    options = {**QUICK, "batch": 2}
    result = train(data="mine:data", cfg="mine:Net", callback="mine:Diary", ranks=2, **options)
    assert (place / "diary.txt").read_text() == "1 True\n2 True\n"
    assert result.best.stat().st_size < 200_000  # no yolov5n

    # A checkpoint names the code that made its model; only a person can have it called.
    with pytest.raises(TrainerError, match="which no checkpoint may call by itself") as error:
        train(data="mine:data", weights=result.best, ranks=1, **options)
    assert error.value.hint == "name it: --cfg mine:Net"
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(TrainerError, match="which no checkpoint may call by itself"):
        load_trained(str(result.best))
    trained = load_trained(str(result.best), "mine:Net")
    monkeypatch.delitem(sys.modules, "mine")
    assert type(trained.model).__name__ == "Net"

    again = train(data="mine:data", weights=result.best, cfg="mine:Net", noval=True, **{**options, "epochs": 1})
    assert again.folder.name == "train2"
    assert math.isnan(again.map50)  # as there was no validation
    assert math.isnan(again.history[0]["map"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epoch": 3}, "no option 'epoch'"),
        ({"ranks": 0}, "ranks is 0"),
        ({"data": lambda split, imgsz: None}, "cannot import"),
        ({"ranks": 2, "batch": 1}, "--batch 1 is smaller than the number of ranks, 2"),
        ({"cfg": "json:dumps", "data": "digits"}, "--cfg json:dumps: it must make a torch module"),
    ],
)
def test_what_was_wrong_is_raised_here(options: dict[str, Any], said: str, place: Path) -> None:
    with pytest.raises(TrainerError) as error:
        train(**{**QUICK, "epochs": 1, **options})
    assert said in error.value.message
    assert not list(place.iterdir())


def test_a_rank_that_is_lost_ends_the_others(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LOST_GRACE_S", 1.0)
    (place / "mine.py").write_text(
        "import os, signal, trainer\n"
        "class Fatal(trainer.Callback):\n"
        "    def __init__(self):\n"
        "        if os.environ['RANK'] == '1':\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    begin = time.monotonic()
    with pytest.raises(TrainerError, match="rank 1 ended with SIGKILL"):
        train(data=make_yolo_set(place / "data"), callback="mine:Fatal", ranks=2, cfg=TINY, **QUICK)
    assert time.monotonic() - begin < 60  # not the ten minutes that a rendezvous waits


def test_a_rank_that_others_failed_for_comes_before_those_that_lost_it(capsys: pytest.CaptureFixture[str]) -> None:
    """NCCL's watchdog ends by SIGABRT, without a word, a rank whose peer is gone."""

    def named(codes: dict[int, int], *events: dict[str, Any], said: str = "ProcessGroupNCCL's watchdog") -> str:
        told = _Told(2, None)
        told.line(Line(0, True, said))
        for event in events:
            told.line(Line(event["rank"], False, contract.EVENT_MARK + json.dumps({"event": "failed", **event})))
        return told.failure(codes).message

    defect = {"rank": 1, "error": "KeyError: 3", "hint": "", "exit_code": 1, "time": 2.0}
    lost = {"rank": 1, "error": "another rank ended: Broken pipe", "hint": "--resume", "exit_code": 1, "time": 1.0}
    assert named({0: -signal.SIGABRT, 1: -signal.SIGKILL}) == "rank 1 ended with SIGKILL"
    assert named({0: -signal.SIGABRT, 1: 1}, defect) == "rank 1: KeyError: 3"
    assert named({0: -signal.SIGABRT, 1: 3}) == "rank 1 ended with exit 3"
    assert named({0: -signal.SIGABRT, 1: 1}, lost) == "rank 0 ended with SIGABRT"
    assert named({0: -signal.SIGABRT, 1: 1}, defect, said="malloc(): corrupted") == "rank 0 ended with SIGABRT"


def test_ctrl_c_ends_all_ranks(place: Path) -> None:
    make_yolo_set(place / "data")
    options = {**QUICK, "data": "data/data.yaml", "epochs": 1000, "cfg": TINY, "ranks": 2}
    program = f"import trainer\ntrainer.train(**{options})"
    (process,) = start(place, [{}], program=("-c", program))
    try:
        assert process.stdout is not None
        while "epoch 1/" not in (line := process.stdout.readline()):
            assert line, process.communicate()
        assert len(processes_in(place)) == 3
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=90)
        assert "KeyboardInterrupt" in stderr
        assert processes_in(place) == []
    finally:
        process.kill()


def test_importing_the_package_costs_nothing() -> None:
    program = "import sys, trainer; trainer.train; print([m for m in ('torch', 'numpy', 'cv2') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True
    )
    assert done.stdout.strip() == "[]", done.stderr
