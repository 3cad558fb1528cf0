"""`trainer bench` on the ranks of a launched job: real jobs on process groups of this machine."""

import csv
import signal

import pytest

from tests.conftest import processes_of

FEW = """
import os, signal
from pathlib import Path
from trainer.data.formats.digits import Digits

def pages(split, imgsz):
    return Digits(split, imgsz, pages=12 if split == "train" else 4)

def fatal(split, imgsz):
    seen = Path("seen")
    if split == "train" and os.environ.get("RANK") == "1":
        if seen.exists():
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is short
        seen.touch()
    return pages(split, imgsz)
"""
SMALL = ["--imgsz", "64", "--batch", "4", "--steps", "2", "--warmup", "1", "--noval", "--precision", "fp32"]


@pytest.fixture
def launch(clusterctl, job_name):
    """The words that launch `trainer bench scaling` on two nodes."""
    (clusterctl.folder / "few.py").write_text(FEW)
    job = [
        "launch",
        "--backend",
        "local",
        "--name",
        job_name,
        "--nodes",
        "2",
        "--",
        "bench",
        "scaling",
        *SMALL,
    ]
    return lambda *more: [*job, *more]


def test_one_and_two_nodes_are_compared_and_a_rank_that_is_killed_is_a_row(clusterctl, launch, job_name):
    files = ["--csv", "all.csv", "--markdown", "tables.md"]
    code, text = clusterctl.run(
        *launch("--data", "few:fatal", "--batch", "4,5", "--rounds", "1", *files), timeout_s=250
    )
    assert code == 0, text
    folder = clusterctl.folder / "runs" / job_name
    rows = list(csv.DictReader((folder / "all.csv").read_text().splitlines()))
    killed = "out of memory, probably: the system killed a rank"
    assert [(row["ranks"], row["batch"], row["failure"]) for row in rows] == [
        *(("1", "4", ""), ("2", "8", ""), ("1", "5", ""), ("2", "10", killed))
    ]
    rates = [float(row["train_images_per_s"]) for row in rows[:3]]
    assert float(rows[1]["gain"]) == pytest.approx(rates[1] / rates[0], rel=1e-4)
    assert 0 < float(rows[1]["sync_share"]) < 1
    assert (folder / "tables.md").read_text() in text


def test_bad_input_fails_on_rank_0_and_ends_the_other_ranks(clusterctl, launch, job_name):
    code, text = clusterctl.run(*launch("--rounds", "0"))
    assert code == 2, text
    assert "--rounds must be 1 or more, not 0" in text
    assert "node-1: exited: exit 0" in text
    assert processes_of(job_name) == []


def test_ctrl_c_stops_the_job_and_logs_what_was_measured(clusterctl, launch, job_name):
    process = clusterctl.start(*launch("--data", "few:pages", "--ranks", "1", "--rounds", "500"))
    clusterctl.wait_for(job_name, "images/s", timeout_s=250)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert "|    1x |          4 |" in clusterctl.run("logs", job_name)[1]
    assert processes_of(job_name) == []
