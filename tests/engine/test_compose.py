"""Backend compose with real containers, as far as tests/contract does not cover it."""

import os
import shutil
import subprocess
import time
from secrets import token_hex

import pytest

from cluster.store import JobStore
from tests.conftest import ROOT
from tests.unit.yolo_folder import squares

pytestmark = pytest.mark.engine

TINY = str(ROOT / "tests" / "unit" / "tiny.yaml")
EXAMPLE = (ROOT / "examples" / "all_reduce.py").read_text()


def docker(*arguments):
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False).stdout.split()


def left_of(job):
    """Return a job's containers and networks, from the engine."""
    label = f"label=com.docker.compose.project={job}"
    return docker("ps", "-aq", "--filter", label) + docker("network", "ls", "-q", "--filter", label)


def started(clusterctl, job, *more, ticks=100):
    (clusterctl.folder / "program.py").write_text(EXAMPLE)
    command = [
        "--backend",
        "compose",
        "--name",
        job,
        "--nodes",
        "2",
        "--command",
        f"program.py --ticks {ticks}",
    ]
    return clusterctl.start("launch", *command, *more)


def test_two_containers_train_a_detector(clusterctl):
    data = squares(clusterctl.folder / "set", train=16)
    code, text = clusterctl.run(
        *("launch", "--backend", "compose", "--name", "ct-train", "--nodes", "2", "--gpus", "2"),
        *("--", "--data", str(data), "--epochs", "1", "--batch", "8", "--imgsz", "64", "--cfg", TINY),
        timeout_s=280,
    )
    assert code == 0, text
    assert "2/2 nodes ready   world size 4   gloo" in text
    assert "runs/ct-train/best.pt" in text
    run_dir = clusterctl.folder / "runs" / "ct-train"
    for name in ("results.csv", "results.png", "predictions.jpg", "best.pt", "last.pt"):
        assert (run_dir / name).stat().st_uid == os.getuid(), name
    assert left_of("ct-train") == []


@pytest.mark.parametrize(("mask", "wanted"), [(0o077, 0o600), (0o002, 0o664)])
def test_ranks_in_containers_have_the_launchers_umask(clusterctl, job_name, mask, wanted):
    path = "os.environ['CLUSTER_RUN_DIR'] + '/result', os.environ['CLUSTER_CACHE_DIR'] + '/result'"
    (clusterctl.folder / "program.py").write_text(f"import os\nfor path in ({path}):\n    open(path, 'w')\n")
    options = ["--backend", "compose", "--device", "cpu", "--name", job_name, "--nodes", "1"]
    mask = os.umask(mask)
    try:
        code, text = clusterctl.run("launch", *options, "--command", "program.py")
    finally:
        os.umask(mask)
    assert code == 0, text
    runs = clusterctl.folder / "runs"
    for path in (runs / job_name / "result", runs / job_name / "attempt-1" / "node-0.log"):
        assert path.stat().st_mode & 0o777 == wanted, path
    own = runs / ".cache" / str(os.getuid())
    assert (own.stat().st_mode & 0o777, (own / "result").stat().st_mode & 0o777) == (0o700, wanted)


def test_a_detached_job_is_restarted(clusterctl):
    process = started(clusterctl, "ct-night", "--detach", "--max-restarts", "1", ticks=30)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    clusterctl.wait_for("ct-night", "tick 0")
    print(clusterctl.run("ps")[1])
    docker("kill", "ct-night-node-1")
    code, text = clusterctl.run("wait", "ct-night")
    assert code == 0, text
    status = clusterctl.run("status", "ct-night")[1]
    print(clusterctl.run("ps", "--all")[1], status)
    assert "node-1: exit 137 (killed); restart 1 of 1" in status
    assert "attempt 2 on node-0, node-1" in (clusterctl.folder / "runs/ct-night/report.html").read_text()
    assert left_of("ct-night") == []


def test_a_removed_container_is_lost(clusterctl):
    process = started(clusterctl, "ct-lost")
    clusterctl.wait_for("ct-lost", "tick 0")
    docker("rm", "-f", "ct-lost-node-1")
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "node-1: lost: its container is gone" in text
    assert left_of("ct-lost") == []


def test_a_frozen_node_is_named_after_the_rendezvous_timeout(clusterctl):
    (clusterctl.folder / "sitecustomize.py").write_text(
        "import time\ntime.sleep(8)\n"
    )  # the agents start late
    process = started(clusterctl, "ct-frozen", "--rendezvous-timeout", "20", "--env", "PYTHONPATH=.")
    until = time.time() + 30
    while "ct-frozen-node-1" not in docker("ps", "--format", "{{.Names}}") and time.time() < until:
        time.sleep(0.02)
    docker("pause", "ct-frozen-node-1")
    text, _ = process.communicate(timeout=90)
    assert process.returncode == 4, text
    assert "missing: node-1: starting: its container is paused" in text
    assert left_of("ct-frozen") == []


def test_a_missing_image_is_an_error_and_nothing_is_written(clusterctl):
    code, text = clusterctl.run("launch", "--backend", "compose", "--image", "no-such/image:7")
    assert code == 2
    assert text.startswith(
        "error: this machine has no image no-such/image:7\nhint: docker pull no-such/image:7"
    )
    assert list(clusterctl.folder.iterdir()) == []


FOREIGN = """
services:
  web: {image: "trainer:0.1", entrypoint: [sleep, "600"], stop_grace_period: 0s, pull_policy: never}
"""


@pytest.fixture
def foreign(tmp_path):
    """Start a foreign compose project, and remove it at the end of the test."""
    started = []
    file = tmp_path / "foreign.yaml"
    file.write_text(FOREIGN)

    def start(name):
        started.append(name)
        words = ["docker", "compose", "-p", name, "-f", str(file), "up", "-d", "--no-build"]
        subprocess.run(words, check=True, capture_output=True)
        return docker(
            "ps", "-q", "--filter", f"label=com.docker.compose.project={name}", "--filter", "name=web"
        )

    yield start
    for name in started:
        subprocess.run(["docker", "compose", "-p", name, "down", "-t", "0"], check=True, capture_output=True)


def test_a_foreign_project_of_the_same_name_keeps_everything(clusterctl, foreign):
    started(clusterctl, "ct-name", "--detach").communicate(timeout=60)
    clusterctl.wait_for("ct-name", "tick 0")
    (web,) = foreign("ct-name")
    clusterctl.expect(0, "stop", "ct-name", "--grace", "1s", has="stopped. No processes remain.")
    clusterctl.expect(0, "stop", "ct-name", has="It had already ended.")
    assert docker("inspect", "--format", "{{.State.Running}}", web) == ["true"]
    assert docker("ps", "-q", "--filter", "label=com.docker.compose.project=ct-name") == [web]
    text = clusterctl.expect(0, "gc", "--job", "ct-name", "--yes")
    assert "no orphans" in text
    left = docker("network", "ls", "-q", "--filter", "label=com.docker.compose.project=ct-name")
    assert len(left) == 1  # the foreign container is in it
    shutil.rmtree(clusterctl.folder / "runs")
    words = ["launch", "--backend", "compose", "--name", "ct-name", "--command", "program.py"]
    clusterctl.expect(2, *words, has=f"a job ct-name already exists: container {web}")
    assert docker("inspect", "--format", "{{.State.Running}}", web) == ["true"]


def test_a_foreign_project_that_appears_before_a_restart_is_not_taken_over(clusterctl, foreign):
    """compose would replace its network, or a service of it that has the name of a node."""
    started(clusterctl, "ct-twice", "--detach", "--max-restarts", "1").communicate(timeout=60)
    clusterctl.wait_for("ct-twice", "tick 0")
    (web,) = foreign("ct-twice")
    docker("kill", "ct-twice-node-1")
    assert clusterctl.run("wait", "ct-twice")[0] != 0
    assert "this machine: a job ct-twice already exists: container" in clusterctl.run("status", "ct-twice")[1]
    assert docker("inspect", "--format", "{{.State.Running}}", web) == ["true"]


def test_gc_removes_this_users_launches_by_their_ids_and_leaves_the_others(clusterctl):
    process = started(clusterctl, "ct-gc", "--detach")
    process.communicate(timeout=60)
    clusterctl.wait_for("ct-gc", "tick 0")
    launch = JobStore(clusterctl.folder / "records").load("ct-gc").job.launch_id
    (held,) = docker("ps", "-q", "--filter", f"label=CLUSTER_LAUNCH_ID={launch}", "--filter", "name=node-0")
    assert docker("inspect", "--format", '{{index .Config.Labels "CLUSTER_UID"}}', held) == [str(os.getuid())]
    others = {}
    for backend, user in (("compose", "65534"), ("compose", ""), ("ssh", str(os.getuid())), ("slurm", "0")):
        labels = {"JOB_ID": "ct-gc", "LAUNCH_ID": token_hex(8), "BACKEND": backend, "UID": user}
        words = [word for label, value in labels.items() for word in ("--label", f"CLUSTER_{label}={value}")]
        (made,) = docker(
            "run", "-d", *words, "--stop-timeout", "0", "--entrypoint", "sleep", "trainer:0.1", "600"
        )
        others[made] = backend, user
    try:
        clusterctl.env["DOCKER_HOST"] = "unix:///nowhere/docker.sock"
        clusterctl.expect(
            5, "gc", "--job", "ct-gc", "--yes", has="docker does not answer, so it is not known"
        )
        del clusterctl.env["DOCKER_HOST"]
        clusterctl.expect(2, "gc", "--job", "ct-gc", has="nothing was removed")
        text = clusterctl.expect(0, "gc", "--job", "ct-gc", "--yes", has="this machine: removed ct-gc\n")
        assert f"(launch {launch})" in text
        assert "ct-gc is orphaned, of user 65534, and left alone" in text
        assert docker("ps", "-aq", "--filter", f"label=CLUSTER_LAUNCH_ID={launch}") == []
        assert docker("network", "ls", "-q", "--filter", f"label=CLUSTER_LAUNCH_ID={launch}") == []
        assert docker("inspect", "--format", "{{.State.Running}}", *others) == ["true"] * len(others)
    finally:
        docker("rm", "-f", *others)


def test_the_plan_runs_without_the_launcher(clusterctl):
    (clusterctl.folder / "program.py").write_text(EXAMPLE)
    (clusterctl.folder / "runs").mkdir()
    code, text = clusterctl.run(
        *(
            "plan",
            "--backend",
            "compose",
            "--name",
            "ct-plan",
            "--nodes",
            "2",
            "--gpus",
            "2",
            "-o",
            "job.yml",
        ),
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


def test_a_job_file_builds_its_image_and_its_setup_runs_in_the_container(clusterctl):
    (clusterctl.folder / "Dockerfile").write_text("FROM trainer:0.1\nENV MARK=built\n")
    (clusterctl.folder / "program.py").write_text(
        "import os, dep\nprint(os.environ['MARK'], dep.X, flush=True)\n"
    )
    (clusterctl.folder / "job.yaml").write_text(
        "build: .\nbackend: compose\ndevice: cpu\ncommand: program.py\nimage: ct-built:latest\n"
        "setup: cd $VIRTUAL_ENV/lib/python3*/site-packages; echo X=5 > dep.py\n"
    )
    try:
        code, text = clusterctl.run("launch", "job.yaml", "--name", "ct-built", timeout_s=200)
        assert code == 0, text
        assert "built 5" in text
        code, text = clusterctl.run("launch", "job.yaml", "--name", "ct-built-2", "--build", "nowhere")
        assert (code, "--build nowhere: no Dockerfile" in text) == (2, True), text
    finally:
        docker("image", "rm", "ct-built:latest")
    assert left_of("ct-built") == []
