"""Unequal machines over SSH: two ranks on n0 and one on n1, in containers."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tests.conftest import ROOT
from tests.unit.settings import settings as small_settings
from tests.unit.trainer_process import TINY
from tests.unit.yolo_folder import make_yolo_set
from trainer.bench.processes import request_of
from trainer.bench.verify import TOLERANCES, agree, compare
from trainer.config import preset_for

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
#: Runs the rank of a measurement, as `trainer verify` does, in the ranks of this job.
RECORD = """import os, runpy, sys
sys.argv = ["trainer", "bench", "rank", sys.argv[1], os.environ["CLUSTER_RUN_DIR"] + "/found.pt"]
runpy.run_module("trainer", run_name="__main__")
"""


@pytest.fixture
def machines(clusterctl, testbed, image_on_hosts):
    """The command line in a folder whose cluster.yaml lists n0 with two GPUs, and n1 with one."""
    nodes = {
        name: {"address": testbed[name].address, "gpus": gpus, "runtime": "docker"}
        | {"run_dir": "/root/clusterctl/runs", "data_dir": "/root/clusterctl/data"}
        for name, gpus in (("n0", 2), ("n1", 1))
    }
    described = {
        "ssh_config": str(testbed.ssh_config),
        "device": "cpu",
        "image": image_on_hosts,
        "nodes": nodes,
    }
    (clusterctl.folder / "cluster.yaml").write_text(yaml.safe_dump(described))
    shutil.copy(ROOT / "examples" / "all_reduce.py", clusterctl.folder)
    (clusterctl.folder / "record.py").write_text(RECORD)
    return clusterctl


def launch(machines, job, gpus, *words, nodes=2):
    options = ["--nodes", str(nodes), "--gpus", gpus, "--env", "OMP_NUM_THREADS=1", "--logs", "all"]
    return machines.expect(0, "launch", "--name", job, *options, *words, timeout_s=300)


def test_a_program_sees_three_ranks(machines, job_name):
    text = launch(machines, job_name, "2,1", "--command", "all_reduce.py --ticks 1")
    assert f"{job_name}   2 nodes with 2 and 1 processes   ssh" in text
    assert "2/2 nodes ready   world size 3" in text
    for line in ("n0 | tick 0: rank 0", "n0 | [1] tick 0: rank 1", "n1 | tick 0: rank 2"):
        assert f"{line} of 3 sees the sum 3" in text


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_three_ranks_have_the_gradients_of_one(machines, job_name, parallel):
    """Of seven images in each step: three on one rank, and two on the others."""
    hyp = dataclasses.replace(preset_for("digits").hyp, nbs=7.0, warmup_epochs=0.0)
    usual = {"epochs": 100, "hyp": hyp, "noval": True, "sync_bn": True, "noautoanchor": True, "batch": 7}
    found = []
    for ranks, gpus, nodes, strategy in ((1, "1", 1, "ddp"), (3, "2,1", 2, parallel)):
        request = request_of(
            "verify", small_settings("digits", **usual, parallel=strategy), 1, steps=2, wide=True
        )
        (machines.folder / "request.json").write_text(json.dumps(request))
        job = f"{job_name}-{ranks}"
        launch(machines, job, gpus, "--command", "record.py request.json", nodes=nodes)
        found.append(torch.load(Path(machines.folder, "runs", job, "found.pt"), weights_only=True))
    one, three = found
    differences = [
        compare(3, step, mine, first) for step, (mine, first) in enumerate(zip(three, one, strict=True), 1)
    ]
    print(*differences, sep="\n")
    assert len(differences) == 2
    assert agree(differences, TOLERANCES["float64"]), differences
    assert one[0]["gradient"].norm() > 0


def test_the_trainer_continues_with_the_two_ranks_of_the_first_node(machines, job_name, testbed):
    """After its first checkpoint, n1 with its one rank is cut off, and --nodes 1:2 allows one node."""
    words = [
        "--nodes",
        "1:2",
        "--gpus",
        "2,1",
        "--max-restarts",
        "1",
        "--env",
        "OMP_NUM_THREADS=1",
        "--name",
        job_name,
    ]
    make_yolo_set(machines.folder / "set", train=24, val=2)
    shutil.copy(TINY, machines.folder / "tiny.yaml")
    machines.expect(0, "sync", ".")
    train = [
        "train",
        "--data",
        "set/data.yaml",
        "--cfg",
        "tiny.yaml",
        "--imgsz",
        "64",
        "--batch",
        "6",
        "--noval",
    ]
    train += ["--epochs", "150", "--workers", "0"]
    process = machines.start("launch", *words, "--", *train)
    try:
        machines.wait_for(job_name, '"event":"checkpoint"', node="n0")
        testbed.fault("cut", "n1")
        text, _ = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, text
    assert "2/2 nodes ready   world size 3   gloo" in text
    assert "attempt 2 on n0," in text
    assert "1/1 nodes ready   world size 2   gloo" in text
    logs = machines.folder / "runs" / job_name / "attempt-2" / "ranks"
    assert sorted(str(path.relative_to(logs)) for path in logs.rglob("*.log")) == ["n0/0.log", "n0/1.log"]
