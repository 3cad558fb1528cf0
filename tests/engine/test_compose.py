"""What only containers have: an image, an engine, a compose file that runs by itself; the rest: tests/contract."""

import os
import subprocess
import time

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.engine

EXAMPLE = (ROOT / "examples" / "all_reduce.py").read_text()


def docker(*arguments):
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False).stdout.split()


def left_of(job):
    """Containers and networks of a job, asked of the engine and not of the launcher."""
    label = f"label=com.docker.compose.project={job}"
    return docker("ps", "-aq", "--filter", label) + docker("network", "ls", "-q", "--filter", label)


def started(clusterctl, job, *more, ticks=100):
    (clusterctl.folder / "program.py").write_text(EXAMPLE)
    command = ["--backend", "compose", "--name", job, "--nodes", "2", "--command", f"program.py --ticks {ticks}"]
    return clusterctl.start("launch", *command, *more)


def test_two_containers_train_a_detector(clusterctl):
    code, text = clusterctl.run(
        *("launch", "--backend", "compose", "--name", "ct-train", "--nodes", "2", "--gpus", "2"),
        *("--", "--epochs", "1", "--batch", "64", "--imgsz", "64", "--cfg", str(ROOT / "tests" / "unit" / "tiny.yaml")),
        timeout_s=280,
    )
    assert code == 0, text
    assert "2/2 nodes ready   world size 4   gloo" in text
    assert "runs/ct-train/best.pt" in text
    run_dir = clusterctl.folder / "runs" / "ct-train"
    for name in ("results.csv", "results.png", "predictions.jpg", "best.pt", "last.pt"):
        assert (run_dir / name).stat().st_uid == os.getuid(), name
    assert left_of("ct-train") == []


def test_a_removed_container_is_lost(clusterctl):
    process = started(clusterctl, "ct-lost")
    clusterctl.wait_for("ct-lost", "tick 0")
    docker("rm", "-f", "ct-lost-node-1")
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "node-1: lost: its container is gone" in text
    assert left_of("ct-lost") == []


def test_a_frozen_node_is_named_when_time_is_up(clusterctl):
    process = started(clusterctl, "ct-frozen", "--timeout", "20")
    until = time.time() + 30
    while "ct-frozen-node-1" not in docker("ps", "--format", "{{.Names}}") and time.time() < until:
        time.sleep(0.02)
    docker("pause", "ct-frozen-node-1")
    text, _ = process.communicate(timeout=90)
    assert process.returncode == 4, text
    assert "missing: node-1: starting: its container is paused" in text
    assert left_of("ct-frozen") == []


def test_an_image_that_is_not_there_is_an_error_and_leaves_nothing(clusterctl):
    code, text = clusterctl.run("launch", "--backend", "compose", "--image", "nobody/nothing:7")
    assert code == 2
    assert text.startswith("error: this machine: no image nobody/nothing:7\nhint: make image")
    assert list(clusterctl.folder.iterdir()) == []


def test_the_plan_runs_by_itself(clusterctl):
    (clusterctl.folder / "program.py").write_text(EXAMPLE)
    (clusterctl.folder / "runs").mkdir()
    code, text = clusterctl.run(
        *("plan", "--backend", "compose", "--name", "ct-plan", "--nodes", "2", "--gpus", "2", "-o", "job.yml"),
        *("--command", "program.py --ticks 1"),
    )
    assert code == 0, text
    up = subprocess.run(
        ["docker", "compose", "-f", "job.yml", "up", "--no-color"],
        cwd=clusterctl.folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    subprocess.run(["docker", "compose", "-p", "ct-plan", "down"], check=True, capture_output=True)
    assert "tick 0: rank 3 of 4 sees the sum 4" in up.stdout, up.stdout + up.stderr
    assert up.stdout.count("exited with code 0") == 2


def test_a_container_killed_in_training_is_the_cause_and_the_others_echo_is_not_shown(clusterctl):
    process = clusterctl.start(
        "launch", "--backend", "compose", "--name", "ct-train-kill", "--nodes", "2", "--max-restarts", "0"
    )
    clusterctl.wait_for("ct-train-kill", '"event":"progress"', node="node-1")
    killed = time.time()
    docker("kill", "ct-train-kill-node-1")
    text, _ = process.communicate(timeout=60)
    assert time.time() - killed < 10
    assert process.returncode == 1
    assert "\nnode-1: exit 137 (killed)\n  node-1 | (printed nothing; last heard of in epoch 1, step " in text
    assert "Traceback" not in text
    assert left_of("ct-train-kill") == []
