"""Failures of a training: non-finite losses, memory, stalled and lost ranks."""

import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import DistNetworkError, DistStoreError

from tests.unit.trainer_process import TINY, Ended, Forked, exec_trainer, ranks, run, start, wait, wait_until
from tests.unit.yolo_folder import squares
from trainer import contract
from trainer.__main__ import main
from trainer.cli.bench import settings_of
from trainer.config.settings import interval
from trainer.data.formats.yolo import Yolo
from trainer.distributed import comm
from trainer.engine import watchdog
from trainer.engine.events import Events
from trainer.engine.heartbeats import Heartbeat
from trainer.engine.memory import HINT, is_out_of_memory
from trainer.engine.results import slowest_rank
from trainer.engine.watchdog import Watchdog, late, must_exit
from trainer.errors import TrainerError
from trainer.models.yolo import build_yolo, load_cfg

PLAIN = "mosaic: 0\nhsv_h: 0\nhsv_s: 0\nhsv_v: 0\nscale: 0\ntranslate: 0\nfliplr: 0\nnbs: 4\n"


def options(data: Path, *more: str) -> list[str]:
    small = ["--cfg", TINY, "--imgsz", "64", "--batch", "4", "--device", "cpu"]
    return ["train", "--data", str(data), *small, "--noval", *more]


@pytest.fixture
def fragile(tmp_path: Path) -> Path:
    """A data set with one all-white image."""
    data = squares(tmp_path / "set", train=12)
    white = np.full((64, 64, 3), 255, np.uint8)
    cv2.imwrite(str(tmp_path / "set" / "images" / "train" / "5.png"), white)
    (tmp_path / "plain.yaml").write_text(PLAIN)
    return data


def darkness(images: torch.Tensor) -> torch.Tensor:
    """Return a value of each image, which is zero of an all-white one."""
    return (1 - images.flatten(1).amin(1)).view(-1, 1, 1, 1)


def divides(nc: int) -> nn.Module:
    """A model that divides by zero when it sees an all-white image."""
    model = build_yolo(load_cfg(TINY), nc=nc)
    model.register_forward_pre_hook(lambda _, args: (args[0] / darkness(args[0]),))
    return model


def steep(nc: int) -> nn.Module:
    """A model with an infinite gradient, but a finite loss, of an all-white image."""
    model = build_yolo(load_cfg(TINY), nc=nc)
    model.model[0].register_forward_hook(
        lambda layer, args, out: out + (layer.conv.weight.sum() * darkness(args[0])).abs().sqrt()
    )
    return model


def greedy(nc: int) -> nn.Module:
    """A model whose memory ends in the backward pass."""
    model = build_yolo(load_cfg(TINY), nc=nc)

    def fail(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def watch(_layer: nn.Module, _args: object, out: torch.Tensor) -> None:
        if out.requires_grad and len(out) > 2:  # not DDP's first pass for nothing
            out.register_hook(fail)

    model.model[1].register_forward_hook(watch)
    return model


def test_a_non_finite_loss_names_its_batch(fragile: Path, tmp_path: Path) -> None:
    more = ("--cfg", f"{__name__}:divides", "--hyp", "plain.yaml", "--epochs", "1", "--precision", "fp32")
    for _, _, err in wait(start(tmp_path, ranks(2), *options(fragile, *more)), code=2):
        named = re.search(r"the loss is no longer finite \(epoch 1, step \d; the batch: (.*)\)", err)
        assert named, err
        images = named[1].split(", ")
        assert len(images) == 4
        assert any(name.endswith("images/train/5.png") for name in images)
    assert not list(tmp_path.glob("runs/*/last.pt"))


def test_non_finite_gradients_of_an_epochs_last_batch_name_it(fragile: Path, tmp_path: Path) -> None:
    """The loss is finite: without validation, only the checkpoint after the epoch would show it."""
    more = (
        "--cfg",
        f"{__name__}:steep",
        "--hyp",
        "plain.yaml",
        "--epochs",
        "1",
        "--precision",
        "fp32",
        "--seed",
        "2",
    )
    err = run(tmp_path, *options(fragile, *more), code=2).stderr
    assert re.search(
        r"the loss is no longer finite \(epoch 1, step 3; the batch: .*images/train/5.png", err
    ), err
    assert not list(tmp_path.glob("runs/*/last.pt"))


def test_such_batches_can_be_skipped_without_a_checkpoint(fragile: Path, tmp_path: Path) -> None:
    """The run returns to its start, where AdamW has no state."""
    more = (
        "--cfg",
        f"{__name__}:divides",
        "--hyp",
        "plain.yaml",
        "--epochs",
        "2",
        "--precision",
        "fp32",
        "--log-steps",
    )
    skip = ("--on-nan", "skip", "--optimizer", "AdamW")
    out = run(tmp_path, *options(fragile, *more, *skip), code=0).stdout
    assert out.count("without that batch") == 2  # one in each epoch
    assert len(torch.load(tmp_path / "runs" / "train" / "last.pt", weights_only=True)["at"]["skipped"]) == 2


SELDOM = """
from trainer.__main__ import main
import trainer.engine.loop as module
module.READBACK_EVERY["cpu"] = 20
main()
"""


def test_requests_are_handled_at_every_step_also_when_the_loss_is_read_every_20th(tmp_path: Path) -> None:
    """As on a GPU: a checkpoint is due."""
    data = squares(tmp_path / "set", train=24)
    (tmp_path / "plain.yaml").write_text(PLAIN + "warmup_epochs: 0\n")
    arguments = options(data, "--hyp", "plain.yaml", "--epochs", "1", "--save-every", "4steps")
    done = run(
        tmp_path, *arguments, "--batch", "2", program=("-c", SELDOM), code=0, **{contract.JOB_ID: "unit-job"}
    )
    lines = [line.removeprefix(contract.EVENT_MARK) for line in done.stdout.splitlines()]
    events = [json.loads(line) for line in lines if '"event":"checkpoint"' in line]
    assert [event["step"] for event in events][:2] == [4, 8]


def test_only_that_batch_is_named_and_skipped_with_accumulated_gradients(
    fragile: Path, tmp_path: Path
) -> None:
    """Four steps are accumulated, and the fifth is bad. The loss is read as rarely as on a GPU."""
    (tmp_path / "plain.yaml").write_text(PLAIN + "warmup_epochs: 0\n")
    arguments = (
        "--cfg",
        f"{__name__}:divides",
        "--hyp",
        "plain.yaml",
        "--epochs",
        "1",
        "--precision",
        "fp32",
    )
    arguments += ("--batch", "1", "--seed", "1")

    def train(name: str, *more: str) -> Ended:
        given = options(fragile, *arguments, "--log-steps", "--name", name, *more)
        return run(tmp_path, *given, program=("-c", SELDOM))

    stopped = train("stop")
    assert stopped.returncode == 2, stopped.stderr
    named = r"the loss is no longer finite \(epoch 1, step 5; the batch: \S*images/train/5.png\)"
    assert re.search(named, stopped.stderr), stopped.stderr
    assert not list(tmp_path.glob("runs/stop/*.pt"))
    skipped = train("skip", "--on-nan", "skip", "--save-every", "1steps")
    assert skipped.returncode == 0, skipped.stderr
    assert re.search(named + ": back to step 4, without", skipped.stdout), skipped.stdout
    last = torch.load(tmp_path / "runs" / "skip" / "last.pt", weights_only=True)
    assert len(last["at"]["skipped"]) == 1
    assert all(bool(value.isfinite().all()) for value in last["model"].values())
    rows = [line.split(",") for line in (tmp_path / "runs" / "skip" / "steps.csv").read_text().split()[1:]]
    assert [int(number) for number, *_ in rows] == [1, 2, 3, 4, *range(6, 13)]  # all but the fifth's loss
    assert all(np.isfinite(float(loss)) for _, *losses in rows for loss in losses)


def test_out_of_gpu_memory_names_the_rank_and_its_share_of_the_batch(tmp_path: Path) -> None:
    """Memory ends in the middle of a backward pass, where DDP waits for the other ranks' gradients."""
    data = squares(tmp_path / "set", train=16)
    arguments = options(
        data, "--cfg", f"{__name__}:greedy", "--epochs", "1", "--precision", "fp32", "--batch", "8"
    )
    for rank, (_, _, err) in enumerate(wait(start(tmp_path, ranks(2), *arguments), code=2)):
        assert f"error: rank {rank}: out of memory on cpu with 4 images of 64 x 64 px\nhint: {HINT}\n" in err
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
        (RuntimeError("Sizes of tensors must match except in dimension 1"), False),
    ],
)
def test_errors_of_host_and_gpu_memory_are_recognised(
    error: RuntimeError | MemoryError, expected: bool
) -> None:
    assert is_out_of_memory(error) is expected


def started(tmp_path: Path, errors: Path, *more: str) -> list[Forked]:
    """Two ranks under a launcher that have done their first steps; their stderr goes into files."""
    run = tmp_path / "job"
    run.mkdir()
    data = squares(tmp_path / "set", train=12)
    arguments = options(data, "--epochs", "1000", "--log-steps", *more)
    processes = []
    for rank, place in enumerate(ranks(2)):
        with errors.with_name(f"{errors.name}{rank}").open("w") as file:
            job = {contract.JOB_ID: "unit-job", contract.RUN_DIR: str(run), **place}
            processes += start(tmp_path, [job], *arguments, stderr=file)
    wait_until((run / "steps.csv").exists)
    return processes


@pytest.mark.parametrize("stopped", [1, 0])
def test_a_stalled_rank_is_named_with_all_stacks_and_ends_the_other(stopped: int, tmp_path: Path) -> None:
    """Rank 0 hosts the store: while it is frozen, no heartbeat arrives."""
    errors = tmp_path / "errors"
    processes = started(tmp_path, errors, "--stall-timeout", "2")
    try:
        processes[stopped].send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        out, _ = processes[1 - stopped].communicate(timeout=60)
        assert time.monotonic() - begin < 7
    finally:
        for p in processes:
            p.kill()
            p.wait()
    processes[stopped].communicate()
    assert processes[1 - stopped].returncode == 1
    said = errors.with_name(f"errors{1 - stopped}").read_text()
    cause = "no heartbeat from rank 1" if stopped else "the store on rank 0's machine does not answer"
    # On a busy machine the first step can take as long as the limit, and is reported too.
    reports = re.findall(r"rank \d \(pid \d+\) stalled: no step for \d s after \d+ steps; (.*)", said)
    assert reports, said
    assert reports[-1].startswith(cause), said
    assert "engine/loop.py" in said, said  # where it waits
    assert re.search(rf"error: rank {1 - stopped} exits after \d s without a step: {cause}", said)
    assert '"event":"failed"' in out
    if stopped:  # only local rank 0 writes these events
        assert '"event":"heartbeat"' in out
        assert '"event":"stalled"' in out


def test_a_job_that_was_stopped_as_a_whole_continues(tmp_path: Path) -> None:
    """Ctrl-Z and fg, `docker pause`: the time that all ranks were stopped is no stall."""
    errors = tmp_path / "errors"
    processes = started(tmp_path, errors, "--stall-timeout", "3")
    try:
        for by, wait_s in ((signal.SIGSTOP, 4.0), (signal.SIGCONT, 2.0)):
            for p in processes:
                p.send_signal(by)
            time.sleep(wait_s)
        assert [p.poll() for p in processes] == [None, None]
    finally:
        for p in processes:
            p.kill()
            p.communicate()
    said = errors.with_name("errors0").read_text() + errors.with_name("errors1").read_text()
    assert not re.search(r"stalled: .* after [1-9]\d* steps", said), said


def test_a_dead_rank_ends_the_others_with_one_line(tmp_path: Path) -> None:
    data = squares(tmp_path / "set", train=12)
    processes = start(tmp_path, ranks(2), *options(data, "--epochs", "1000", "--log-steps"))
    wait_until((tmp_path / "runs" / "train" / "steps.csv").exists)
    processes[1].kill()
    (code, _, err), _ = wait(processes)
    assert code == 1
    assert "error: another rank ended or cannot be reached: " in err
    assert "Traceback" not in err


LOST_STORE = (
    "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"
)
NO_STORE = "The client socket has timed out after 600000ms while trying to connect to (10.0.0.1, 29500)."
NO_PORT = "The server socket has failed to bind. port: 80, useIpv6: 0, code: -13, name: EACCES, message: permission denied"


@pytest.mark.parametrize(
    ("rank", "error", "echo"),
    [
        (1, DistNetworkError(LOST_STORE), True),
        (1, DistNetworkError("Connection reset by peer"), True),
        (1, DistNetworkError(NO_STORE), True),
        (0, DistStoreError("wait timeout after 600000ms, keys: /default_pg/0//cpu//0/1"), True),
        (
            0,
            RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [10.0.0.2]:37044."),
            True,
        ),
        (
            1,
            RuntimeError("[unbound_buffer.cc:78] Timed out waiting 600000ms for recv operation to complete"),
            True,
        ),
        (
            0,
            RuntimeError("NCCL error in: x.cpp:77, remote process exited or there was a network error"),
            True,
        ),
        (
            0,
            RuntimeError("NCCL communicator was aborted on rank 1.  Original reason for failure was: ..."),
            True,
        ),
        (0, DistNetworkError(NO_PORT), False),
        (1, ConnectionResetError(104, "Connection reset by peer"), False),
        (1, BrokenPipeError(32, "Broken pipe"), False),
        (1, RuntimeError("a defect"), False),
    ],
)
def test_only_a_lost_connection_to_another_rank_is_an_echo(
    rank: int,
    error: Exception,
    echo: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**_: str) -> None:
        raise error

    monkeypatch.setattr("trainer.cli.app", fail)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv(contract.JOB_ID, "unit-job")
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    out, err = capsys.readouterr()
    event = json.loads(out.removeprefix(contract.EVENT_MARK))
    assert (event["event"], event["rank"], event["echo"]) == (contract.FAILED, rank, echo)
    assert err.startswith("error: another rank ended") == echo
    assert ("Traceback" in err) != echo


class SlowStore:
    """A store whose operations take a while."""

    busy = False

    def set(self, _key: str, _value: str) -> None:
        self.busy = True
        time.sleep(0.2)
        self.busy = False

    def check(self, _keys: list[str]) -> bool:
        return False


def test_no_heartbeat_uses_the_store_after_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may exit then, and the store with it."""
    monkeypatch.setattr(watchdog, "BEAT_S", 0.01)
    store = SlowStore()
    with Watchdog(comm.World(size=2), 0, Events({}), store):
        while not store.busy:
            time.sleep(0.01)
    assert not store.busy


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    data = squares(tmp_path / "set", train=12)
    first = ranks(2)[0]
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", int(first["MASTER_PORT"])))
        taken.listen()
        ((code, _, err),) = wait(start(tmp_path, [first], *options(data, "--epochs", "1")))
    assert code == 2, err
    assert f"error: MASTER_PORT {first['MASTER_PORT']} is in use" in err
    assert "Traceback" not in err


def test_another_data_set_on_one_machine_is_an_error_on_all(tmp_path: Path) -> None:
    """Both by the number of images and by a single box."""
    for name in ("one", "two", "three"):
        squares(tmp_path / name / "set", train=8)
        (tmp_path / name / "data.yaml").write_text(
            "path: set\ntrain: images/train\nval: images/val\nnames: [a, b]\n"
        )
    (tmp_path / "two" / "set" / "images" / "train" / "3.png").unlink()
    (tmp_path / "two" / "set" / "labels" / "train" / "3.txt").unlink()
    label = tmp_path / "three" / "set" / "labels" / "val" / "1.txt"
    label.write_text(label.read_text().replace("0 ", "1 ", 1))
    said = "error: --data data.yaml: rank 1 has "
    fewer = "7 training images, rank 0 has 8"
    others = "3 validation images, rank 0 has 3"
    for other, what in (("two", fewer), ("three", others)):
        processes = []
        for place, folder in zip(ranks(2), ("one", other), strict=True):
            words = [word for word in options(Path("data.yaml"), "--epochs", "1") if word != "--noval"]
            (run,) = start(tmp_path / folder, [place], *words)
            processes.append(run)
        for _, _, err in wait(processes, code=2):
            assert said + what in err


class Slow(Yolo):
    """Images that take a tenth of a second; each process writes the numbers of its validation images to a file."""

    def image(self, index: int, min_side: int = 0) -> Any:
        time.sleep(0.1)
        if self.split == "val":
            with Path(f"seen-{os.getpid()}").open("a") as file:
                print(index, file=file)
        return super().image(index, min_side)


def slow_set(split: Any, imgsz: int) -> Slow:
    made = Slow("set/data.yaml", split)
    made.split = split
    return made


def test_validation_is_shared_by_the_ranks(tmp_path: Path) -> None:
    """One rank processes each image, so two ranks take half the time; these images are slow."""
    squares(tmp_path / "set", train=4, val=16)
    for count in (1, 2):
        # Longer than --stall-timeout, but batches arrive: no stall.
        epochs = "2" if count == 1 else "1"
        more = ("--epochs", epochs, "--batch", "2", "--stall-timeout", "5", "--name", f"of{count}")
        arguments = [o for o in options(Path(f"{__name__}:slow_set"), *more) if o != "--noval"]
        done = wait(start(tmp_path, ranks(count), *arguments), code=0)
        assert not any(re.search("stalled: .* in validation", err) for _, _, err in done), done
        assert re.search(r"all +16 +30 ", done[0][1]), done[0][1]  # images and boxes of all ranks together
        assert re.search(r"  val [1-9]\d?%", done[0][1]), done[0][
            1
        ]  # images that take seconds are seen in the share
        seen = [set(path.read_text().split()) for path in tmp_path.glob("seen-*")]
        assert sorted(map(len, seen)) == [16 // count] * count
        assert len(set.union(*seen)) == 16
        for path in tmp_path.glob("seen-*"):
            path.unlink()


def test_gradients_in_half_the_bytes_and_scaled_losses_train_nearly_the_same(tmp_path: Path) -> None:
    data = squares(tmp_path / "set", train=16)
    losses = []
    for name, count, more in (
        ("exact", 2, ["--precision", "fp32"]),
        ("half", 2, ["--precision", "fp32", "--grad-compress", "bf16"]),
        ("fp16", 2, ["--precision", "fp16"]),
    ):
        arguments = options(data, "--epochs", "1", "--log-steps", "--name", name, *more)
        wait(start(tmp_path, ranks(count), *arguments), code=0)
        rows = (tmp_path / "runs" / name / "steps.csv").read_text().split()[1:]
        losses.append([sum(map(float, row.split(",")[1:])) for row in rows])
    exact, half, fp16 = losses
    assert half != exact
    assert half == pytest.approx(exact, rel=0.05)
    assert fp16 != exact
    assert fp16 == pytest.approx(exact, rel=0.05)


def test_ranks_on_different_machines_use_a_dtype_that_all_support(tmp_path: Path) -> None:
    """One processor has bf16, the other lacks it: with different dtypes the sum of gradients would be wrong."""
    data = squares(tmp_path / "set", train=8)
    program = (
        "import os\n"
        "from trainer.__main__ import main\n"
        "import trainer.engine.trainer as module\n"
        "module.native_bf16 = lambda device: os.environ['HAS'] in ('bf16', os.environ['RANK'])\n"
        "main()\n"
    )
    for has, kind in (("bf16", "bf16"), ("0", "fp32")):
        arguments = options(data, "--epochs", "1", "--name", f"of{has}")
        processes = start(tmp_path, ranks(2), *arguments, program=("-c", program), HAS=has)
        (_, out, _), _ = wait(processes, code=0)
        assert f"2 ranks on cpu, {kind}, " in out.replace(" over gloo", "")
        assert ("has no bf16, so no rank uses it" in out) == (kind == "fp32")


def test_late_ranks_are_described() -> None:
    def beats(*states: tuple[int, str, float]) -> dict[int, Heartbeat]:
        return {k: Heartbeat(*state) for k, state in enumerate(states)}

    waiting = (7, "step", 0.0)
    assert late(beats(waiting, (7, "loading", 0.0)), 2, 10) == "rank 1 late: in loading, 7 steps done"
    assert late(beats(waiting, (6, "step", 0.0)), 2, 10) == "rank 1 late: only 6 steps done"
    assert late(beats(waiting, (7, "step", 31.0)), 2, 10).startswith("no heartbeat from rank 1")
    assert late(beats(waiting), 3, 10).startswith("no heartbeat from ranks 1, 2")
    assert "the collective itself hangs" in late(beats(waiting, waiting), 2, 10)
    assert "the store on rank 0" in late(beats((7, "step", 31.0), (7, "step", 31.0)), 2, 10)


def test_which_rank_must_exit() -> None:
    def beats(*silent_s: float) -> dict[int, Heartbeat]:
        return {k: Heartbeat(7, "step", seconds) for k, seconds in enumerate(silent_s)}

    assert must_exit(beats(0, 121), 2, 121, 120, "step")
    assert must_exit(beats(121, 121), 2, 121, 120, "validation")  # not even its own heartbeat
    assert not must_exit(beats(0, 121), 2, 119, 120, "step")  # still at work
    assert not must_exit(beats(0, 31), 2, 121, 120, "step")  # the other sent a heartbeat
    assert not must_exit(beats(0, 0), 2, 479, 120, "loading")  # slow, not lost
    assert must_exit(beats(0, 0), 2, 481, 120, "loading")
    assert not must_exit(beats(0, 0), 2, 1e6, 120, "the start")
    assert not must_exit(beats(0), 1, 1e6, 120, "loading")  # a single rank


def shares(**more: float) -> dict[str, float]:
    some = {"data": 0.05, "transfer": 0.01, "sync": 0.04, "val": 0.05, **more}
    return {**some, "compute": 1 - sum(some.values())}


def test_the_slowest_rank() -> None:
    assert slowest_rank([shares()]) is None
    assert slowest_rank([shares(), shares()]) is None
    assert slowest_rank([shares(sync=0.4), shares(data=0.4)]) == 1


def test_early_stopping_and_rare_validation_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    """Boxes too small to be found: no score rises, so the run ends two epochs after the first validation."""
    data = squares(tmp_path / "set", train=8)
    for label in (tmp_path / "set" / "labels" / "val").iterdir():
        label.write_text("0 0.5 0.5 0.02 0.02\n")
    (tmp_path / "still.yaml").write_text(PLAIN + "lr0: 1e-12\nwarmup_bias_lr: 0\n")
    more = (
        "--hyp",
        "still.yaml",
        "--epochs",
        "9",
        "--patience",
        "2",
        "--val-period",
        "2",
        "--save-period",
        "2",
    )
    arguments = [o for o in options(data, *more) if o != "--noval"]
    (_, out, _), _ = wait(start(tmp_path, ranks(2), *arguments), code=0)
    assert "epoch 4/9  mAP50" in out
    assert "epoch 3/9  loss" in out
    assert "no better score for 2 epochs" in out
    assert "epoch 5/9" not in out
    kept = sorted(p.name for p in (tmp_path / "runs" / "train").glob("epoch*.pt"))
    assert kept == ["epoch2.pt", "epoch4.pt"]


def test_intervals() -> None:
    assert [interval(text) for text in ("", "10min", "1.5h", "30 s")] == [
        (0, 0),
        (600, 0),
        (5400, 0),
        (30, 0),
    ]
    assert [interval(text) for text in ("500steps", "7")] == [(0, 500), (0, 7)]
    for text in ("soon", "0", "-5min", "1.5", "10 days"):
        with pytest.raises(TrainerError, match="--save-every"):
            interval(text)


def test_options_that_need_no_value_there() -> None:
    made = settings_of(["--cache", "--epochs", "1", "--freeze", "0", "1", "--rect"], "cpu")
    assert (made.cache, made.epochs, made.freeze, made.rect) == ("ram", 1, "0 1", True)


PROGRAM = """
import resource
from trainer.engine.memory import keep_freed_memory

kept = keep_freed_memory()
for _ in range(2):  # the first time, the pages are new
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * (40 << 20) for _ in range(3)]
    del blocks
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(kept, faults)
"""


@pytest.mark.parametrize("variables", [{}, {"MALLOC_ARENA_MAX": "2"}])
def test_freed_memory_is_there_for_the_next_step(variables: dict[str, str], tmp_path: Path) -> None:
    (done,) = wait(exec_trainer(tmp_path, [variables], program=("-c", PROGRAM)), code=0)
    kept, faults = done.stdout.split()
    assert kept == str(not variables)
    pages = 3 * (40 << 20) // os.sysconf("SC_PAGE_SIZE")
    if kept == "True":
        assert int(faults) < pages / 100
    else:
        assert int(faults) > pages / 2
