"""The first line of a failed job names the node, the rank and what it failed of: two hosts with two ranks each.

Over SSH every rank fails in every way in a program of torch alone. The trainer, and Slurm, have each way once.
"""

import re
import shutil
import time

import pytest
import yaml

from tests import first_failure
from tests.real.test_slurm import HOME, Slurm, sif
from tests.unit.trainer_process import TINY
from tests.unit.yolo_folder import make_yolo_set

__all__ = ["sif"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(300, func_only=True)]  # a fixture makes the SIF file
TRAIN = (
    "trainer train --data {data} --cfg {cfg} --imgsz 64 --batch 4 --epochs 50 --workers 0 --noval --seed 1"
)
LINE = re.compile(r"(n|node-)\d( on \w+)?: (rank|exit \d|lost)")


def check(text, backend, program, nodes, rank, how):
    """Compare the first line with what it must be, and print it for the table."""
    lines = [line for line in text.splitlines() if LINE.match(line)]
    assert lines, text
    print(f"FIRST | {backend} | {program} | rank {rank} | {how} | {lines[0]}")
    assert re.match(first_failure.expected(nodes[rank // 2], rank, how, program), lines[0]), text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The program, and a data set for the trainer."""
    made = tmp_path_factory.mktemp("first")
    shutil.copy(first_failure.__file__, made)
    shutil.copy(TINY, made / "tiny.yaml")
    make_yolo_set(made / "set", train=32, val=2)
    return made


def command(folder, program, rank, how):
    words = f"first_failure.py {rank} {how}"
    if program == "trainer":
        words += " " + TRAIN.format(data=folder / "set" / "data.yaml", cfg=folder / "tiny.yaml")
    return ["--command", words, "--max-restarts", "0", "--env", "OMP_NUM_THREADS=1"]


EACH_WAY = [(0, "exception"), (1, "exit"), (3, "kill"), (0, "segv"), (1, "oom")]
CASES = [("torch", rank, how) for rank in (0, 1, 3) for how in first_failure.FAILURES]
CASES += [("trainer", rank, how) for rank, how in EACH_WAY]


def limit_memory(run, engine_of, job, node):
    """Have the kernel kill what grows in a container: its limit is set once the ranks run."""
    run(f"{engine_of} update --memory 1200m --memory-swap 1200m {job}-{node}")


@pytest.mark.parametrize(("program", "rank", "how"), CASES)
def test_over_ssh_in_docker(program, rank, how, clusterctl, testbed, image_on_hosts, folder, job_name):
    nodes = {
        name: {
            "address": testbed[name].address,
            "gpus": 2,
            "runtime": "docker",
            "run_dir": "/root/clusterctl/runs",
        }
        | {"data_dir": "/root/clusterctl/data"}
        for name in ("n0", "n1")
    }
    described = {"ssh_config": str(testbed.ssh_config), "device": "cpu", "nodes": nodes}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(described))
    clusterctl.folder = folder
    assert clusterctl.run("sync", ".")[0] == 0
    launch = [
        "launch",
        "--name",
        job_name,
        "--nodes",
        "2",
        "--gpus",
        "2",
        *command(folder, program, rank, how),
    ]
    process = clusterctl.start(*launch)
    if how == "oom":
        host = f"n{rank // 2}"
        wait_for(folder / "runs" / job_name / "attempt-1" / f"{host}.log", "waits for its limit")
        limit_memory(testbed[host].run, "docker", job_name, host)
    text, _ = process.communicate(timeout=120)
    shutil.rmtree(folder / "runs" / job_name)
    check(text, "ssh", program, ["n0", "n1"], rank, how)


@pytest.mark.parametrize("program", ["torch", "trainer"])
@pytest.mark.parametrize(("rank", "how"), EACH_WAY[:-1])
def test_under_slurm_in_apptainer(rank, how, program, clusterctl, testbed, sif, folder, job_name):
    clusterctl.folder = folder
    slurm = Slurm(clusterctl, testbed)
    assert clusterctl.run("sync", ".")[0] == 0
    launch = [
        "launch",
        "--name",
        job_name,
        "--nodes",
        "2",
        "--gpus",
        "2",
        *command(folder, program, rank, how),
    ]
    code, text = clusterctl.run(*launch, timeout_s=200)
    assert code == 1, text
    slurm.login.run(f"rm -rf {HOME}/runs/{job_name}; rm -f {folder}/cluster.yaml")
    shutil.rmtree(folder / "runs" / job_name)
    check(text, "slurm", program, ["node-0", "node-1"], rank, how)


def wait_for(log, text, timeout_s=60):
    until = time.time() + timeout_s
    while not (log.exists() and text in log.read_text()):
        assert time.time() < until, f"{text!r} is not in {log}"
        time.sleep(0.1)
