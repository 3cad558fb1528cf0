"""`clusterctl bench` with real jobs on process groups of this machine."""

import csv
import json
import re
import signal
import sys

import pytest

from tests.conftest import processes_of
from tests.contract.sshd import inventory

FEW = """
from trainer.data.digits import Digits

def pages(split, imgsz):
    return Digits(split, imgsz, pages=32 if split == "train" else 4)
"""
# A trainer without torch, found before the real one: its arguments are those of the real one, or FAIL and STAY.
TRAINER = """
import json, os, sys, time

def event(name, **fields):
    fields = {"event": name, "node": int(os.environ["GROUP_RANK"]), "time": time.time(), **fields}
    print("::cluster", json.dumps(fields, separators=(",", ":")), flush=True)

world = int(os.environ["WORLD_SIZE"])
event("ready", rank=int(os.environ["RANK"]), world_size=world, backend="gloo", device="cpu")
if "STAY" in sys.argv and world > 1:
    event("progress", epoch=1, epochs=1, step=1, steps=9, loss=1.0, images_per_s=5.0, eta_s=1.0)
    time.sleep(300)
if "FAIL" in sys.argv and world > 1:
    event("failed", rank=int(os.environ["RANK"]), error="RuntimeError: not for two", hint="", echo=False, exit_code=1)
    sys.exit(1)
event("metric", epoch=1, epochs=1, images_per_s=10.0, seconds=2.0, shares={"val": 0.0})
event("done", seconds=2.0)
"""
TRAIN = ["--", "train", "--data", "few:pages", "--imgsz", "64", "--noval"]


@pytest.fixture
def quick(clusterctl):
    """The command line in a folder with a trainer of a few lines."""
    (clusterctl.folder / "trainer.py").write_text(TRAINER)
    return clusterctl


@pytest.fixture
def few(clusterctl):
    (clusterctl.folder / "few.py").write_text(FEW)
    return clusterctl


def test_two_numbers_of_nodes_are_trained_on_and_compared(few, job_name):
    files = ["--csv", "all.csv", "--markdown", "tables.md"]
    code, text = few.run(
        "bench",
        "--backend",
        "local",
        "--name",
        job_name,
        "--nodes",
        "1,2",
        *files,
        *TRAIN,
        "--batch",
        "8",
        timeout_s=250,
    )
    assert code == 0, text
    one, two = csv.DictReader((few.folder / "all.csv").read_text().splitlines())
    assert [(row["nodes"], row["ranks"], row["batch"], row["failure"]) for row in (one, two)] == [
        ("1", "1", "8", ""),
        ("2", "2", "16", ""),
    ]
    rates = [float(row["images_per_s"]) for row in (one, two)]
    assert float(two["gain"]) == pytest.approx(rates[1] / rates[0], rel=1e-4)
    # 32 pictures: the epoch's time and its speed are told by the trainer, each by itself
    assert float(one["train_s"]) == pytest.approx(32 / rates[0], rel=0.2)
    assert 0 < float(two["sync_share"]) < 1
    tables = (few.folder / "tables.md").read_text()
    assert tables in text
    assert "| bs | 1 node | 2 nodes | gain |" in tables.replace("  ", " ").replace("  ", " ")
    # each point was a job like any other: two epochs, the batch of all ranks together
    scripts = [
        few.folder / "runs" / name / "attempt-1" / "node-0.sh" for name in (f"{job_name}-1x1-b8", f"{job_name}-2x1-b16")
    ]
    assert "--epochs 2 --batch 16" in scripts[1].read_text()
    # nodes on one machine stand for devices: a process has as many threads at every point
    threads = [re.findall(r"OMP_NUM_THREADS=(\d+)", script.read_text()) for script in scripts]
    assert len(threads[0]) == 1
    assert threads[0] == threads[1]


def test_a_point_that_fails_says_why_is_not_tried_again_and_the_others_are_measured(quick, job_name):
    code, text = quick.run(
        *("bench", "--backend", "local", "--name", job_name, "--nodes", "1,2", "--rounds", "2", "--json"),
        *("--", "train", "FAIL"),
    )
    assert code == 1, text
    one, two = json.loads(text[text.index("{") :])["rows"]
    assert (one["failure"], one["images_per_s"] > 0) == ("", True)
    assert "not for two" in two["failure"]
    assert two["images_per_s"] is None
    assert sorted(path.name for path in (quick.folder / "runs").glob("*-b*")) == [
        f"{job_name}-1x1-b16",
        f"{job_name}-1x1-b16-2",
        f"{job_name}-2x1-b32",
    ]
    assert not list((quick.folder / "runs").glob("*/attempt-2"))  # what began anew would be no measurement


def test_what_makes_no_sense_is_refused_before_anything_runs(few):
    for more, said in (
        (["--strong", "--batch", "1"], "--batch 1: fewer pictures in a step than ranks, 2 on 2 nodes"),
        (["--nodes", "1,²"], "--nodes 1,²: not numbers of 1 or more"),
        (["--csv", "runs"], "--csv runs: no file in a folder that is there"),
    ):
        (few.folder / "runs").mkdir(exist_ok=True)
        code, text = few.run("bench", "--backend", "local", "--nodes", "1,2", *more, *TRAIN)
        assert code == 2, text
        assert said in text
        assert "Traceback" not in text
    assert list((few.folder / "runs").iterdir()) == []


def test_ctrl_c_stops_the_job_and_shows_what_was_measured(quick, job_name):
    process = quick.start(
        "bench", "--backend", "local", "--name", job_name, "--nodes", "1,2", "--json", "--", "train", "STAY"
    )
    quick.wait_for(f"{job_name}-2x1-b32", '"event":"ready"')
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert [row["nodes"] for row in json.loads(text[text.index("{") :])["rows"]] == [1]
    assert processes_of(f"{job_name}-2x1-b32") == []
    assert {row["job"]: row["state"] for row in json.loads(quick.run("ps", "--all", "--json")[1])} == {
        f"{job_name}-1x1-b16": "done",
        f"{job_name}-2x1-b32": "stopped",
    }


def test_machines_that_cannot_run_it_are_named(clusterctl, sshd, job_name):
    inventory(clusterctl.folder, sshd, clusterctl.folder / "remote")
    code, text = clusterctl.run("bench", "--name", job_name, "--nodes", "1,2", "--python", "/nowhere/python3", "--json")
    assert code == 1, text
    rows = json.loads(text[text.index("{") :])["rows"]
    assert all("node-0: " in row["failure"] and "/nowhere/python3" in row["failure"] for row in rows)
    assert "; node-1: " in rows[1]["failure"]


def test_a_machine_that_stops_answering_ends_it_as_its_job_may_still_run(quick, sshd, job_name):
    inventory(quick.folder, sshd, quick.folder / "remote")
    silent, job = quick.folder / "silent", f"{job_name}-1x2-b16"
    sshd.before_each_command(0, f"[ ! -e {silent} ] || kill -9 $PPID")
    command = ["bench", "--name", job_name, "--nodes", "1,2", "--gpus", "2", "--python", sys.executable]
    process = quick.start(*command, "--env", f"PYTHONPATH={quick.folder}", "--", "train", "STAY")
    quick.wait_for(job, '"event":"progress"')
    silent.touch()
    text, _ = process.communicate(timeout=100)
    silent.unlink()
    assert process.returncode == 5, text
    assert "not cleaned up: node-0" in text
    assert f"error: {job} may still run there" in text
    assert [row["job"] for row in json.loads(quick.run("ps", "--all", "--json")[1])] == [job]
    assert quick.run("stop", job)[0] == 0
    assert processes_of(job) == []
