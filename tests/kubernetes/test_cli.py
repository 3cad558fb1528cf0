"""The command line on a real cluster, for a user who has rights in one namespace only."""

import os
import subprocess
import sys

import pytest
import yaml

from tests.conftest import wait_until

pytestmark = pytest.mark.kubernetes

PROGRAM = """
import os, time
print("token has", len(os.environ["TOKEN"]), flush=True)
while not os.path.exists("end"): time.sleep(0.2)
if os.environ["RANK"] == "0": open("new.txt", "w").write("new")
"""


@pytest.fixture
def clusterctl(kubectl, tmp_path):
    """Run clusterctl as ada; return its exit code and output."""
    path = f"{kubectl.folder}:{os.environ['PATH']}"
    more = {
        "PATH": path,
        "KUBECONFIG": str(kubectl.kubeconfig("ada")),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    env = {**os.environ, **more, "TOKEN": "s3cret-value"}

    def run(*words):
        argv = [sys.executable, "-m", "cluster", *words]
        done = subprocess.run(
            argv,
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            check=False,
        )
        return done.returncode, done.stdout

    yield run
    run("gc", "--job", "cli", "--yes")


def test_a_job_from_init_to_its_results(clusterctl, kubectl, tmp_path):
    assert clusterctl("init", "--backend", "kubernetes", "--device", "cpu")[0] == 0
    found = yaml.safe_load((tmp_path / "cluster.yaml").read_text())
    assert (found["backend"], found["device"]) == ("kubernetes", "cpu")
    assert (found["kubernetes"]["namespace"], found["kubernetes"]["runs"]) == ("ada", {"claim": "runs"})
    code, text = clusterctl("doctor")
    assert (code, "a job on 2 nodes would be accepted" in text) == (0, True), text
    code, text = clusterctl("doctor", "--set", "runs.claim=absent")
    assert (code, "absent" in text) == (3, True), text

    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "wait.py").write_text(PROGRAM)
    words = (
        "--nodes",
        "2",
        "--name",
        "cli",
        "--workdir",
        "code",
        "--command",
        "wait.py",
        "-e",
        "TOKEN",
        "--detach",
    )
    code, text = clusterctl("launch", *words)
    assert code == 0, text
    assert wait_until(lambda: clusterctl("logs", "cli")[1].count("token has 12") == 2, timeout_s=120)
    assert "cli is running: pods: 2" in clusterctl("gc")[1]
    assert "s3cret-value" not in kubectl(
        "get", "pods,configmaps,events", "--namespace", "ada", "--output", "yaml"
    )
    code, text = clusterctl("exec", "cli", "--node", "1", "--", "sh", "-c", "exit 7")
    assert code == 7, text
    code, text = clusterctl("exec", "cli", "--all", "--", "touch", "end")
    assert code == 0, text
    code, text = clusterctl("attach", "cli")
    assert (code, "not copied" in text) == (0, False), text
    assert (tmp_path / "runs/cli/workdir/new.txt").read_text() == "new"
    assert "no orphans" in clusterctl("gc")[1]
    assert "not copied" not in clusterctl("attach", "cli")[1]
