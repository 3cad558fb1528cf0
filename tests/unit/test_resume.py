"""A run that is killed or stopped, and resumed, equals an uninterrupted run."""

import csv
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.unit.settings import settings
from tests.unit.trainer_process import TINY, Forked, call, exec_trainer, ranks, start, wait, wait_until
from tests.unit.trainer_process import run as train
from tests.unit.yolo_folder import squares
from trainer import contract
from trainer.distributed import comm
from trainer.distributed.comm import World
from trainer.engine import checkpoints
from trainer.engine.events import Events
from trainer.engine.trainer import Trainer
from trainer.models.yolo import build_yolo, load_cfg


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return squares(tmp_path_factory.mktemp("squares"), train=26)


def options(data: Path, *more: str) -> list[str]:
    """Batches of 5 that the warm-up gathers in pairs from step 6 on, so that a kill can fall between two moves."""
    hyp = data.parent / "hyp.yaml"
    hyp.write_text("nbs: 60\nwarmup_epochs: 0.01\nema_tau: 10\nmixup: 0.5\n")
    return [
        *("train", "--data", str(data), "--hyp", str(hyp), "--cfg", TINY, "--imgsz", "64", "--batch", "5"),
        *("--epochs", "3", "--device", "cpu", "--log-steps", "--project", "runs", *more),
    ]


def ranks_of(path: Path) -> int:
    """Return the number of ranks that have written a checkpoint; 0 without one."""
    return len(content(path)["ranks"]) if path.exists() else 0


def content(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Bit for bit."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}.{k}")
    else:
        assert a == b or (a != a and b != b), f"{where}: {a} {b}"


def steps(run: Path) -> list[str]:
    return (run / "steps.csv").read_text().splitlines()


def untimed(run: Path) -> list[dict[str, str]]:
    """results.csv without what a clock measured."""
    timed = {"images_per_s", "seconds", "data", "transfer", "compute", "sync", "val"}
    with (run / "results.csv").open() as file:
        return [{k: v for k, v in row.items() if k not in timed} for row in csv.DictReader(file)]


def kill_after(processes: list[Forked], run: Path, rows: int, by: int = signal.SIGKILL) -> None:
    """Send every process a signal as soon as the log of steps has so many rows."""
    wait_until(lambda: (run / "steps.csv").exists() and len(steps(run)) > rows, *processes)
    for p in processes:
        p.send_signal(by)


def assert_resumes(folder: Path, cfg: str, *more: str) -> Path:
    """Kill two ranks that train a detector after their first step, and compare the resumed run with a whole one.

    Return the whole run.
    """
    data = squares(folder / "squares", train=8)
    hyp = folder / "hyp.yaml"
    hyp.write_text("ema_tau: 5\nwarmup_epochs: 0\nnbs: 0\n")
    options = ["train", "--data", str(data), "--cfg", cfg, "--hyp", str(hyp), "--imgsz", "64", "--batch", "4"]
    options += ["--epochs", "2", "--device", "cpu", "--log-steps", "--exist-ok", *more]
    wait(start(folder, ranks(2), *options, "--name", "whole"), code=0)
    whole = folder / "runs/whole"
    cut = folder / "runs/cut"
    processes = start(folder, ranks(2), *options, "--name", "cut", "--save-every", "1steps")
    kill_after(processes, cut, 1)
    wait(processes)
    wait(start(folder, ranks(2), *options, "--name", "cut", "--resume", str(cut)), code=0)
    assert steps(cut) == steps(whole)
    assert len(steps(cut)) == 1 + 4
    before, after = (content(run / "last.pt") for run in (whole, cut))
    for key in ("model", "ema", "updates", "optimizer"):
        assert_same(before[key], after[key], key)
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cfg", "optimizer"), [("yolov8n.yaml", "SGD"), ("yolo11n.yaml", "AdamW"), ("yolo26n.yaml", "MuSGD")]
)
def test_the_families_with_model_files_resume_bit_for_bit(cfg: str, optimizer: str, tmp_path: Path) -> None:
    assert_resumes(tmp_path, cfg, "--optimizer", optimizer)


def test_a_resumed_loss_has_the_weights_of_its_epoch(tmp_path: Path) -> None:
    """Of YOLO26, whose two matchings have other weights in each epoch."""
    options: dict[str, Any] = {"data": str(squares(tmp_path / "squares")), "cfg": "yolo26n.yaml", "epochs": 3}

    def started() -> Trainer:
        training = Trainer(settings(**options), World(), torch.device("cpu"), Events({}))
        training.start()
        return training

    training = started()
    assert training.task.criterion().shares.tolist() == pytest.approx([0.8, 0.2])
    training.begin_epoch()
    resumed = started()
    resumed.load_state_dict(training.state_dict())
    for each in (training, resumed):
        assert each.task.criterion().shares.tolist() == pytest.approx([0.45, 0.55])


def slow(nc: int) -> nn.Module:
    """A network with time for a kill in each of its steps and validations."""
    model = build_yolo(load_cfg(TINY), nc=nc)
    model.register_forward_pre_hook(lambda layer, _: time.sleep(0.05 if layer.training else 0.5))
    return model


def _with_dropout(model: Any) -> nn.Module:
    model.model[1].register_forward_hook(lambda layer, _, out: F.dropout(out, 0.1, layer.training))
    return model


def dropout(nc: int) -> nn.Module:
    """A network that draws random numbers."""
    return _with_dropout(build_yolo(load_cfg(TINY), nc=nc))


def slow_dropout(nc: int) -> nn.Module:
    return _with_dropout(slow(nc))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_run_killed_at_any_step_and_resumed_equals_an_uninterrupted_one(
    data: Path, tmp_path: Path, count: int
) -> None:
    """Two kills at arbitrary steps; the network has a dropout, which draws random numbers."""
    begin = exec_trainer if count == 2 else start  # so that the seeds of the hashes of strings differ, too
    wait(
        begin(tmp_path, ranks(count), *options(data, "--cfg", f"{__name__}:dropout", "--name", "whole")),
        code=0,
    )
    cut = [
        *options(data, "--cfg", f"{__name__}:slow_dropout", "--name", "cut"),
        "--save-every",
        "3steps",
        "--exist-ok",
    ]
    run = tmp_path / "runs" / "cut"
    processes = start(tmp_path, ranks(count), *cut)
    kill_after(processes, run, 4)
    wait(processes)
    processes = start(tmp_path, ranks(count), *cut, "--resume", str(run))
    kill_after(processes, run, 10)
    wait(processes)
    ended = wait(start(tmp_path, ranks(count), *cut, "--resume", str(run)), code=0)
    assert re.search(r"resuming in epoch \d after step \d of 6", ended[0][1])

    assert steps(run) == steps(tmp_path / "runs" / "whole")
    assert len(steps(run)) == 1 + 18
    before, after = (content(tmp_path / "runs" / name / "last.pt") for name in ("whole", "cut"))
    for key in ("model", "ema", "updates", "optimizer", "scaler", "at", "total", "ranks", "epoch", "step"):
        assert_same(before[key], after[key], key)
    assert untimed(run) == untimed(tmp_path / "runs" / "whole")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_a_signal_ends_it_with_a_checkpoint_and_75(data: Path, tmp_path: Path, name: str) -> None:
    """One of two ranks gets the signal; both stop after the same step, and no step is repeated."""
    run = tmp_path / "job"
    run.mkdir()
    job = {contract.JOB_ID: "squares-1", contract.RUN_DIR: str(run), contract.NODES_ON_HOST: "1"}
    processes = start(tmp_path, ranks(2), *options(data, "--epochs", "100", "--workers", "1"), **job)
    try:
        wait_until(lambda: (run / "steps.csv").exists() and len(steps(run)) > 2)
        before = time.monotonic()
        processes[1].send_signal(getattr(signal, name))
        ended = wait(processes)
        assert time.monotonic() - before < 10
    finally:
        for p in processes:
            p.kill()
    assert [code for code, _, _ in ended] == [75, 75], ended
    assert all(f"stopped by {name} after" in error for _, _, error in ended)
    assert '"event":"failed"' in ended[0][1]
    assert '"exit_code":75' in ended[0][1]
    done = content(run / "last.pt")
    assert done["step"] >= len(steps(run)) - 1
    assert done["at"]["last_move"] == done["step"] - 1  # no accumulated gradients


def test_another_number_of_ranks_resumes_in_the_same_order(data: Path, tmp_path: Path) -> None:
    """From two ranks to four and to one: the losses equal those of an uninterrupted run, except for rounding.

    The weights hardly change and batch norm is synchronized, so that a loss depends on the step's images alone.
    """
    (tmp_path / "still.yaml").write_text("nbs: 10\nwarmup_epochs: 0\nlr0: 1e-12\nmixup: 0.5\n")
    still = ["--hyp", "still.yaml", "--precision", "fp32", "--sync-bn"]
    wait(start(tmp_path, ranks(2), *options(data, "--name", "whole", *still)))
    run = tmp_path / "runs" / "cut"
    still += ["--cfg", f"{__name__}:slow"]
    cut = [*options(data, "--name", "cut", *still, "--save-every", "1steps", "--exist-ok")]
    for count, rows, more in ((2, 4, []), (4, 9, ["--resume", str(run)]), (1, 99, ["--resume", str(run)])):
        processes = start(tmp_path, ranks(count), *cut, *more)
        if rows < 99:
            wait_until(lambda count=count: ranks_of(run / "last.pt") == count, *processes)
            kill_after(processes, run, rows)
        ended = wait(processes)
    assert ended[0][0] == 0, ended
    assert "the checkpoint was written by 4 ranks, and this training has 1" in ended[0][1]
    one, other = (
        [[float(x) for x in row.split(",")] for row in steps(tmp_path / "runs" / n)[1:]]
        for n in ("whole", "cut")
    )
    assert [row[0] for row in one] == [row[0] for row in other] == [float(k) for k in range(1, 19)]
    for a, b in zip(one, other, strict=True):
        assert b[1:] == pytest.approx(a[1:], rel=1e-4)


def test_the_later_of_two_checkpoints_of_one_step_is_of_the_later_epoch_then_of_the_later_attempt() -> None:
    before = {"step": 12, "epoch": 1, "attempt": 2}
    after = {"step": 12, "epoch": 2, "attempt": 2}
    once_more = {**after, "attempt": 3}
    assert (
        checkpoints.progress_of({"step": 11, "epoch": 1, "attempt": 4})
        < checkpoints.progress_of(before)
        < checkpoints.progress_of(after)
    )
    assert checkpoints.progress_of(after) < checkpoints.progress_of(once_more)


def test_a_torn_checkpoint_gives_way_to_the_one_before(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "train"
    train(tmp_path, *options(data, "--epochs", "1", "--patience", "7"), code=0)
    whole = (run / "last.pt").read_bytes()
    (run / "last.pt").write_bytes(whole[: len(whole) // 2])
    assert content(run / "previous.pt")["step"] == 6
    again = ["train", "--resume", "--project", "runs", "--ranks", "1", "--save-period", "1"]
    out = train(tmp_path, *again, code=0).stdout
    assert "resuming in epoch 1 after step 6 of 6" in out
    once_more = train(tmp_path, *again, code=0).stdout
    assert "nothing left to train after epoch 1/1" in once_more
    assert "resuming" not in once_more
    kept = content(run / "last.pt")["settings"]
    assert (kept["patience"], kept["log_steps"], kept["save_period"]) == (
        7,
        True,
        1,
    )  # the last one is what was typed


def test_an_epoch_without_its_best_checkpoint_is_finished_again(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "train"
    (run / "best.pt").mkdir(parents=True)  # where the rename fails, as if it was killed there
    once = [*options(data, "--epochs", "1"), "--exist-ok"]
    err = train(tmp_path, *once, code=1).stderr
    assert "error: runs/train/best.pt: Is a directory" in err
    assert "Traceback" not in err
    (run / "best.pt").rmdir()
    out = train(tmp_path, *once, "--resume", str(run), code=0).stdout
    assert "resuming in epoch 1 after step 6 of 6" in out
    assert_same(content(run / "best.pt")["ema"], content(run / "last.pt")["ema"])


def test_resuming_with_another_batch_or_changed_data_is_refused(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data.parent, tmp_path / "set")
    (tmp_path / "set" / "data.yaml").write_text(
        data.read_text().replace(str(data.parent), str(tmp_path / "set"))
    )
    train(tmp_path, *options(tmp_path / "set" / "data.yaml", "--epochs", "1"), code=0)
    (tmp_path / "set" / "images" / "train" / "3.png").unlink()
    (tmp_path / "set" / "labels" / "train" / "3.txt").unlink()
    for more, said in (
        (["runs/train", "--batch", "4"], "--batch 4: the checkpoint was written with 5"),
        (["--project", "none"], "--resume: no last.pt in any folder of none"),
        (["runs/train"], "has other images or labels than when the checkpoint was written"),
    ):
        assert said in train(tmp_path, "train", "--resume", *more, code=2).stderr


@pytest.mark.parametrize(
    ("old", "new"), [("[16, 3, 2]]  # 2", "[16, 3, 1]]  # 2"), ("width_multiple: 1", "width_multiple: 2")]
)
def test_resuming_with_an_edited_model_file_is_refused(
    data: Path, tmp_path: Path, old: str, new: str
) -> None:
    """Also one whose weights have the same shapes; and after a launcher's restart, without --resume."""
    model = tmp_path / "model.yaml"
    text = Path(TINY).read_text()
    model.write_text(text)
    train(tmp_path, *options(data, "--cfg", "model.yaml", "--epochs", "1"), code=0)
    model.write_text(text.replace(old, new))
    said = "error: model.yaml describes another model than when the checkpoint was written"
    assert said in train(tmp_path, "train", "--resume", "runs/train", code=2).stderr
    again = options(data, "--cfg", "model.yaml", "--epochs", "1")
    restarted = {contract.RUN_DIR: str(tmp_path / "runs" / "train"), contract.ATTEMPT: "2"}
    assert said in wait(start(tmp_path, [restarted], *again), code=2)[0].stderr
    model.write_text(text)
    train(tmp_path, "train", "--resume", "runs/train", code=0)


@pytest.mark.parametrize("again", ["resume", "restart"])
def test_a_run_is_resumed_without_its_model_file_and_initial_weights(
    data: Path, tmp_path: Path, again: str
) -> None:
    model = tmp_path / "model.yaml"
    model.write_text(Path(TINY).read_text())
    train(tmp_path, *options(data, "--cfg", "model.yaml", "--epochs", "1"), code=0)
    (tmp_path / "runs/train/best.pt").rename(tmp_path / "first.pt")
    words = options(data, "--cfg", "model.yaml", "--weights", "first.pt", "--epochs", "2", "--name", "second")
    train(tmp_path, *words, code=0)
    run = tmp_path / "runs/second"
    whole = torch.load(run / "last.pt", weights_only=True)
    earlier = torch.load(run / "previous.pt", weights_only=True)  # before the last validation
    assert earlier["epoch"] < whole["epoch"]
    (run / "previous.pt").rename(run / "last.pt")
    model.unlink()
    (tmp_path / "first.pt").unlink()
    if again == "resume":
        train(tmp_path, "train", "--resume", "runs/second", code=0)
    else:
        wait(start(tmp_path, [{contract.RUN_DIR: str(run), contract.ATTEMPT: "2"}], *words), code=0)
    resumed = torch.load(run / "last.pt", weights_only=True)
    assert resumed["step"] == whole["step"]
    assert_same(resumed["model"], whole["model"], "model")


def test_a_new_run_needs_its_model_file_and_its_weights(data: Path, tmp_path: Path) -> None:
    assert (
        "--cfg model.yaml: no such model"
        in train(tmp_path, *options(data, "--cfg", "model.yaml"), code=2).stderr
    )
    assert "first.pt: no such file" in train(tmp_path, *options(data, "--weights", "first.pt"), code=2).stderr


def print_whether_it_writes(*folders: str) -> None:
    world = comm.world_of(os.environ)
    comm.join(world, torch.device("cpu"))
    print(checkpoints.is_writer(Path(folders[world.rank]), world))
    comm.leave()


@pytest.mark.parametrize("folders", [["one", "one"], ["one", "other", "other"]])
def test_of_nodes_with_a_common_folder_one_writes(tmp_path: Path, folders: list[str]) -> None:
    """Two writers in containers with equal pids could use the same temporary file."""
    for name in folders:
        (tmp_path / name).mkdir(exist_ok=True)
    ended = call(print_whether_it_writes, tmp_path, ranks(len(folders), nodes=len(folders)), *folders)
    writes = [name not in folders[:rank] for rank, name in enumerate(folders)]
    assert [out for _, out, _ in ended] == [f"{each}\n" for each in writes], ended
    assert not [*tmp_path.glob("*/.*")]


def test_every_node_keeps_a_checkpoint_of_its_own_disk(data: Path, tmp_path: Path) -> None:
    """Two nodes with a disk each; the master's is lost, and the run resumes from the other's."""
    folders = [tmp_path / "disk-0", tmp_path / "disk-1"]
    for folder in folders:
        folder.mkdir()

    def launch(attempt: int, epochs: str) -> list[tuple[int, str, str]]:
        places = ranks(2, nodes=2)
        jobs = [
            {**place, contract.RUN_DIR: str(folder), contract.JOB_ID: "j", contract.ATTEMPT: str(attempt)}
            for place, folder in zip(places, folders, strict=True)
        ]
        return wait(start(tmp_path, jobs, *options(data, "--epochs", epochs, "--save-every", "2steps")))

    assert [code for code, _, _ in launch(1, "3")] == [0, 0]
    contents = [content(folder / "last.pt") for folder in folders]
    assert_same(*contents)
    best = content(folders[0] / "best.pt")
    for path in folders[0].iterdir():
        path.unlink()
    (folders[1] / "last.pt").unlink()  # leaves the checkpoint before the last validation
    (code, out, err), _ = launch(2, "3")
    assert code == 0, err
    assert "resuming in epoch 3 after step 6 of 6" in out
    assert_same(content(folders[0] / "last.pt")["model"], contents[0]["model"])
    assert_same(content(folders[0] / "best.pt"), best)

    # The other node was killed when the master had written its last two checkpoints: the same step, an epoch apart.
    (folders[1] / "last.pt").unlink()
    before = content(folders[1] / "previous.pt")
    assert before["step"] == contents[0]["step"]
    torch.save({**best, "epoch": best["epoch"] - 1}, folders[1] / "best.pt")
    ended = launch(3, "3")
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert_same(content(folders[1] / "best.pt"), best)


def test_a_new_run_in_a_used_folder_renames_the_old_checkpoints(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "train"
    once = options(data, "--epochs", "1", "--exist-ok")
    train(tmp_path, *once, code=0)
    stale = run / ".last.pt.0123abcd.tmp"  # of one that was killed
    stale.touch()
    last = (run / "last.pt").read_bytes()
    best = (run / "best.pt").read_bytes()
    processes = start(tmp_path, ranks(1), *once)
    wait_until(lambda: not (run / "last.pt").exists())
    processes[0].kill()
    wait(processes)
    assert not stale.exists()  # another temporary file may have been open when the process was killed
    assert (run / "before.pt").read_bytes() == last
    assert (run / "before-best.pt").read_bytes() == best
    for path, said in (
        (run, "no checkpoint found"),
        (run / "before.pt", "a run is resumed from its last.pt"),
    ):
        assert said in train(tmp_path, *once, "--resume", str(path), code=2).stderr
    (run / "last.pt").write_bytes(b"begun by mistake")
    assert checkpoints.set_aside(run) == "before2.pt"
    assert (run / "before.pt").read_bytes() == last
    (run / "best.pt").write_bytes(best)  # all that its user kept of a run
    assert checkpoints.set_aside(run) == "before3-best.pt"
    assert (run / "before3-best.pt").read_bytes() == best
    assert checkpoints.set_aside(run) == ""


def test_weights_without_a_state_are_not_resumed_but_say_what_to_do(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "train"
    train(tmp_path, *options(data, "--epochs", "1"), code=0)
    hint = "start a new run from these weights: --weights runs/train/"

    def refused(path: str) -> str:
        return train(tmp_path, "train", "--resume", path, code=2).stderr

    said = refused("runs/train/best.pt")
    assert "error: --resume runs/train/best.pt: it has only weights, without the optimizer's state\n" in said
    assert f"hint: resume from last.pt, or {hint}best.pt\n" in said
    (run / "previous.pt").unlink()
    (run / "last.pt").unlink()
    for path in ("runs/train", "runs/train/last.pt"):
        said = refused(path)
        assert f"error: --resume {path}: no last.pt, and best.pt has only weights\n" in said
        assert f"hint: restore last.pt, or {hint}best.pt\n" in said
    shutil.copy(run / "best.pt", run / "last.pt")
    assert "error: --resume runs/train/last.pt: it has only weights" in refused("runs/train")
    train(tmp_path, *options(data, "--epochs", "1", "--weights", "runs/train/best.pt"), code=0)


def test_the_newest_run_is_that_of_the_newest_checkpoint(tmp_path: Path) -> None:
    """A long epoch lies between the two of a run."""
    now = time.time()
    for name, ages_s in (("long", (60, 7200)), ("short", (3600, 3700))):
        (tmp_path / name).mkdir()
        for file, age_s in zip(("last.pt", "previous.pt"), ages_s, strict=True):
            (tmp_path / name / file).touch()
            os.utime(tmp_path / name / file, (now - age_s, now - age_s))
    assert checkpoints.find("last", str(tmp_path)).name == "long"


def test_a_job_resumes_from_another_jobs_folder_with_a_moved_data_set(data: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    second = tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    job = {contract.JOB_ID: "first", contract.RUN_DIR: str(first)}
    arguments = options(data, "--save-every", "2steps")
    train(tmp_path, *arguments, **job, code=0)
    wanted = content(first / "last.pt")["model"]
    (first / "last.pt").unlink()  # leaves the checkpoint before the last validation, which is not the best
    before = content(first / "previous.pt")
    before["at"]["best"] = 2.0
    torch.save(before, first / "previous.pt")
    moved = tmp_path / "moved"
    shutil.copytree(data.parent, moved)
    (moved / "data.yaml").write_text(data.read_text().replace(str(data.parent), str(moved)))
    job = {contract.JOB_ID: "second", contract.RUN_DIR: str(second)}
    again = ["train", "--resume", str(first), "--data", str(moved / "data.yaml")]
    out = train(tmp_path, *again, **job, code=0).stdout
    assert "resuming in epoch 3 after step 6 of 6" in out
    assert_same(content(second / "last.pt")["model"], wanted)
    assert (second / "best.pt").read_bytes() == (first / "best.pt").read_bytes()


def test_unreadable_checkpoints_do_not_start_a_new_run(data: Path, tmp_path: Path) -> None:
    (tmp_path / "last.pt").write_bytes(b"torn")
    job = {contract.JOB_ID: "squares-1", contract.RUN_DIR: str(tmp_path), contract.ATTEMPT: "2"}
    assert (
        "its last.pt and previous.pt cannot be read" in train(tmp_path, *options(data), **job, code=2).stderr
    )
    assert (tmp_path / "last.pt").read_bytes() == b"torn"


def test_ranks_with_different_settings_do_not_start(data: Path, tmp_path: Path) -> None:
    arguments = options(data)
    train(tmp_path, *arguments, "--name", "there", code=0)
    for more, said in (
        (["--val-period", "2"], "--val-period is 1 on rank 0 and 2 on rank 1"),
        (["--resume", "runs/there"], "--resume is False on rank 0 and True on rank 1"),
        (["--exist-ok"], "--exist-ok is False on rank 0 and True on rank 1"),
    ):
        places = ranks(2)
        processes = start(tmp_path, places[:1], *arguments) + start(tmp_path, places[1:], *arguments, *more)
        for code, _, err in wait(processes):
            assert (code, f"error: {said}" in err) == (2, True), err


def test_a_node_whose_disk_has_another_run_of_that_name_keeps_it(data: Path, tmp_path: Path) -> None:
    places = ranks(2, nodes=2)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    kept = tmp_path / "b" / "runs" / "train" / "results.csv"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    arguments = options(data)
    processes = start(tmp_path / "a", places[:1], *arguments) + start(tmp_path / "b", places[1:], *arguments)
    for code, _, err in wait(processes):
        assert (code, "runs/train exists on rank 1, but is new on rank 0's machine" in err) == (2, True), err
    assert kept.read_text() == "mine"


def test_a_run_that_stopped_early_is_not_continued(data: Path, tmp_path: Path) -> None:
    hyp = tmp_path / "still.yaml"
    hyp.write_text("lr0: 0\nwarmup_epochs: 0\n")
    arguments = [*options(data, "--epochs", "9", "--patience", "1"), "--hyp", str(hyp)]
    for more in ([], ["--resume", "runs/train"]):
        assert "no better score for 1 epochs" in train(tmp_path, *arguments, *more, code=0).stdout
        assert content(tmp_path / "runs" / "train" / "last.pt")["epoch"] == 2
