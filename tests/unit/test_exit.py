"""The end of a trainer's process: nothing that is left of it keeps it."""

from __future__ import annotations

import gc
import shutil
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.unit import test_classification, test_segmentation
from tests.unit.settings import settings
from tests.unit.trainer_process import TINY, call, exec_trainer, processes_in, ranks, start, wait, wait_until
from tests.unit.yolo_folder import squares
from trainer.distributed import comm
from trainer.tasks import open_task

NETS = {"detect": TINY, "classify": "mobilenet_v3_small", "segment": "lraspp_mobilenet_v3_large"}
END_S = 60  # an end that waits for something takes forever
KEPT: list[object] = []  # until the process ends


def make_set(folder: Path, task: str, val: int) -> Path:
    """Return a data set with `val` validation images, at least one for each of the two classes to classify."""
    if task == "segment":
        return test_segmentation.folders(folder, train=6, val=val)
    if task == "classify":
        test_classification.folders(folder, train=3, val=val)
        shutil.rmtree(folder / "train/red")
        shutil.rmtree(folder / "test/red")
        for path in sorted((folder / "test/green").glob("*.png"))[1:]:
            path.unlink()
        for path in sorted((folder / "test/dark").glob("*.png"))[max(val - 1, 1) :]:
            path.unlink()
        return folder
    data = squares(folder, train=6, val=val)
    (folder / "labels/val/0.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    return data


def command(data: Path, task: str = "detect", *more: str) -> list[str]:
    options = [
        "--task",
        task,
        "--cfg",
        NETS[task],
        "--data",
        str(data),
        "--project",
        "runs",
        "--precision",
        "fp32",
    ]
    options += ["--imgsz", "64", "--batch", "6", "--epochs", "1", "--device", "cpu", "--workers", "1"]
    return ["train", *options, *more]


def load_and_exit(task: str, data: str, rank: str, world: str) -> None:
    """Load as a training does on a rank, and exit without closing a loader."""
    opened = open_task(settings(data, task, cfg=NETS[task], batch=6))
    opened.build(print)
    share = {"rank": int(rank), "world": int(world), "local_size": int(world), "workers": 1, "stride": 32}
    train = opened.train_loader(share, torch.device("cpu"))
    val = opened.val_loader(share)
    KEPT.extend((train, val))
    next(train.epoch(0))
    print(sum(len(batch.ids) for batch in val))


@pytest.mark.parametrize("task", NETS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_rank_exits_with_any_number_of_validation_images(tmp_path: Path, task: str, world: int) -> None:
    """A rank may have no batch of them."""
    for count in (1, 3, 15, 16, 17):
        data = make_set(tmp_path / f"set{count}", task, count)
        started = [
            start(
                tmp_path, [{}], task, data, str(rank), str(world), program=("-c", _calling("load_and_exit"))
            )[0]
            for rank in range(world)
        ]
        ended = wait(started, END_S, code=0)
        assert sum(int(each.stdout) for each in ended) == max(count, 2 if task == "classify" else 1)
        assert not processes_in(tmp_path)


def _calling(name: str) -> str:
    return f"import sys; from tests.unit.test_exit import {name} as p; p(*sys.argv[1:])"


@pytest.mark.parametrize(
    ("task", "world", "count"), [("detect", 2, 1), ("classify", 3, 2), ("segment", 3, 1)]
)
def test_a_training_exits_although_a_rank_has_no_validation_image(
    tmp_path: Path, task: str, world: int, count: int
) -> None:
    data = make_set(tmp_path / "set", task, count)
    wait(start(tmp_path, [{}], *command(data, task, "--ranks", str(world))), END_S, code=0)
    assert (tmp_path / "runs/train/best.pt").exists()
    assert not processes_in(tmp_path)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGKILL, 1)]
)
def test_a_stopped_training_exits_although_a_rank_has_no_validation_image(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """SIGKILL ends one rank alone."""
    data = make_set(tmp_path / "set", "detect", 1)
    started = start(tmp_path, ranks(2), *command(data, "detect", "--epochs", "1000", "--patience", "0"))
    wait_until((tmp_path / "runs/train/results.csv").exists, *started)
    started[1].send_signal(number)
    first, second = wait(started, END_S)
    assert first.returncode == code, first.stderr
    assert second.returncode == (-signal.SIGKILL if number == signal.SIGKILL else code)
    wait_until(lambda: not processes_in(tmp_path), timeout_s=END_S)


def test_the_server_of_the_tests_outlives_a_client_that_is_killed_while_it_connects(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]
    wait(start(tmp_path, [{}], program=("-c", "pass")), END_S, code=0)


def drop_in_a_cycle(data: str) -> None:
    """Drop a loader of whose workers nothing knows any more, except the garbage collection, which does not run."""
    gc.disable()
    share = {"rank": 0, "world": 1, "local_size": 1, "workers": 1, "stride": 32}
    opened = open_task(settings(data, cfg=TINY))
    opened.build(print)
    loader = opened.val_loader(share)
    next(iter(loader))
    loader.itself = loader


def fail_in_a_pass(data: str) -> None:
    """Exit while a traceback refers to a pass."""
    share = {"rank": 0, "world": 1, "local_size": 1, "workers": 1, "stride": 32}
    opened = open_task(settings(data, cfg=TINY))
    opened.build(print)
    loader = opened.val_loader(share)
    batches = iter(loader)
    try:
        next(batches)
        raise ValueError
    except ValueError as error:
        KEPT.extend((error, batches))


@pytest.mark.parametrize("program", [drop_in_a_cycle, fail_in_a_pass])
def test_a_program_exits_with_a_pass_that_was_not_finished(
    tmp_path: Path, program: Callable[[str], None]
) -> None:
    data = make_set(tmp_path / "set", "detect", 15)
    wait(start(tmp_path, [{}], data, program=("-c", _calling(program.__name__))), END_S, code=0)
    assert not processes_in(tmp_path)


HANGING = """
import atexit, threading
from trainer import __main__ as entry

def of_a_library():
    threading.Event().wait()

atexit.register(of_a_library)
entry.EXIT_LIMIT_S = 0.5
entry.run()
"""


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["train", "--epochs", "-1"], 2)])
def test_an_exit_function_that_hangs_is_named(tmp_path: Path, arguments: list[str], code: int) -> None:
    (done,) = wait(
        exec_trainer(tmp_path, [{"RANK": "3"}], *arguments, program=("-c", HANGING)), END_S, code=code
    )
    assert "rank 3: ended after 0 s in an exit function of a library: wait (threading.py:" in done.stderr


def leave_a_hanging_group(problem: str) -> None:
    """Leave a process group that hangs, or fails."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    comm.LEAVE_LIMIT_S = 0.5

    def destroy() -> None:
        if problem == "fails":
            raise RuntimeError("NCCL is broken\nand more")
        time.sleep(1000)

    dist.destroy_process_group = destroy
    comm.leave()
    print("left")


@pytest.mark.parametrize(
    ("problem", "said"), [("fails", "NCCL is broken"), ("hangs", "not possible within 0 s")]
)
def test_a_group_that_cannot_be_left_keeps_no_rank(tmp_path: Path, problem: str, said: str) -> None:
    (done,) = call(leave_a_hanging_group, tmp_path, [{}], problem)
    assert done.stdout == "left\n"
    assert done.stderr == f"rank 0: exiting without leaving the process group: {said}\n"
