"""A job is known by its launch ID: `stop`, `gc` and `doctor` leave alone what only has its name."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from secrets import token_hex

import pytest

from cluster.backends import BACKENDS
from cluster.store import JobStore
from tests.conftest import processes_of, wait_until
from tests.contract.sshd import TICKS, inventory

OTHER_USER = 65534


@pytest.fixture
def machines(clusterctl, sshd):
    """Return the command line in a folder with a cluster.yaml of three machines and a program."""
    shutil.copy(TICKS, clusterctl.folder)
    inventory(clusterctl.folder, sshd, clusterctl.folder / "remote")
    return clusterctl


@pytest.fixture
def planted():
    """Start a process as a job of a backend would, and kill it at the end of the test."""
    started = []

    def plant(job, launch_id, backend, *before, attempt="1"):
        own = {"CLUSTER_JOB_ID": job, "CLUSTER_LAUNCH_ID": launch_id, "CLUSTER_BACKEND": backend}
        own |= {"CLUSTER_ATTEMPT": attempt} if attempt else {}
        started.append(subprocess.Popen([*before, "sleep", "300"], env={**os.environ, **own}))
        return started[-1]

    yield plant
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def launched(machine, job, *more, ticks=1000):
    """Start a job of one or two nodes, and return its launch ID."""
    words = ["launch", "--name", job, "--python", sys.executable, "--command", f"ticks.py --ticks {ticks}"]
    machine.expect(0, *words, "--device", "cpu", *more)
    return launch_id(machine, job)


def launch_id(machine, job):
    return JobStore(machine.folder / "records").load(job).job.launch_id


def gc(machine, *more):
    """Return the launches that `gc` finds, and those that it removed."""
    code, text = machine.run("gc", "--json", *more)
    assert code == 0, text
    rows = json.loads(text)
    return [row["launch_id"] for row in rows], [row["launch_id"] for row in rows if row["removed"]]


def variables(pid):
    return dict(each.partition(b"=")[::2] for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


@pytest.mark.parametrize("backend", ["local", "ssh"])
def test_every_process_of_a_job_has_its_launch_id_and_stop_leaves_a_namesake(
    machines, planted, job_name, backend
):
    launch = launched(machines, job_name, "--backend", backend, "--nodes", "2", "--detach")
    log = machines.folder / "runs" / job_name / "attempt-1" / "node-0.log"
    assert wait_until(lambda: log.exists() and "tick 1" in log.read_text())
    assert len(launch) == 16
    own = processes_of(job_name)
    assert len(own) >= 6  # of each node the script, the agent and the rank
    for pid in own:
        found = variables(pid)
        assert (found[b"CLUSTER_LAUNCH_ID"], found[b"CLUSTER_BACKEND"]) == (launch.encode(), backend.encode())
    namesake = planted(job_name, token_hex(8), backend)
    machines.expect(0, "stop", job_name, "--grace", "1s", has="stopped. No processes remain.")
    assert processes_of(job_name) == [namesake.pid]
    assert namesake.poll() is None


def test_each_launch_has_another_id_and_a_restart_the_same(machines, job_name):
    one = launched(machines, job_name, "--backend", "local", ticks=0)
    text = machines.run(
        "launch",
        "--backend",
        "local",
        "--name",
        f"{job_name}-2",
        "--python",
        sys.executable,
        "--max-restarts",
        "1",
        "--command",
        "ticks.py --ticks 3 --ticks-later 1 --fail-at 1",
    )[1]
    record = JobStore(machines.folder / "records").load(f"{job_name}-2")
    assert record.plan.attempt == 2, text
    scripts = machines.folder.glob(f"runs/{job_name}-2/attempt-*/node-0.sh")
    assert [f"CLUSTER_LAUNCH_ID={record.job.launch_id}\n" in path.read_text() for path in scripts] == [
        True,
        True,
    ]
    assert record.job.launch_id != one
    code, text = machines.run("plan", "--backend", "local", "--name", job_name, "--command", "ticks.py")
    assert (code, "CLUSTER_LAUNCH_ID=0000000000000000" in text) == (0, True)


@pytest.mark.parametrize(
    ("option", "output"), [("--yes", "node-0: removed JOB"), ("-y --json", '"removed": true')]
)
@pytest.mark.parametrize("by", ["name", "launch ID"])
def test_orphans_are_found_without_a_record_and_removed(machines, planted, option, output, by, job_name):
    launch = token_hex(8)
    orphan = planted(job_name, launch, "ssh")
    which = job_name if by == "name" else launch
    assert gc(machines, "--only", "node-0", "--job", which) == ([launch], [])
    text = machines.expect(0, "gc", "--only", "node-0", *option.split(), "--job", which)
    assert output.replace("JOB", job_name) in text
    assert orphan.wait(5) == -signal.SIGTERM


def test_gc_and_doctor_leave_what_another_backend_or_no_launcher_has_started(machines, planted, job_name):
    """A node of Slurm or Kubernetes on the same machine has no script there, and perhaps no variable of Slurm."""
    others = [planted(job_name, token_hex(8), name) for name in (*BACKENDS, "pbs") if name != "ssh"]
    others.append(planted(job_name, token_hex(8), "ssh", attempt=""))
    others.append(planted(job_name, "not an ID", "ssh"))
    assert gc(machines, "--only", "node-0", "--job", job_name, "--yes") == ([], [])
    orphan = planted(job_name, token_hex(8), "ssh")
    assert gc(machines, "--only", "node-0", "--job", job_name, "--yes")[1]
    assert orphan.wait(5) == -signal.SIGTERM
    report = machines.run("doctor", "--only", "node-0", "--json", "--skip", "link", "--skip", "versions")[1]
    (said,) = [each for each in json.loads(report)["findings"] if each["check"] == "orphans"]
    assert job_name not in said["detail"]
    assert [each.poll() for each in others] == [None] * len(others)


def test_of_several_launches_with_a_name_gc_removes_each_by_its_id(machines, planted, job_name):
    launches = [token_hex(8), token_hex(8)]
    first, second = (planted(job_name, launch, "ssh") for launch in launches)
    assert sorted(gc(machines, "--only", "node-0", "--job", job_name)[0]) == sorted(launches)
    assert gc(machines, "--only", "node-0", "--job", launches[0], "--yes")[1] == [launches[0]]
    assert (first.wait(5), second.poll()) == (-signal.SIGTERM, None)


def test_gc_of_a_job_does_not_end_the_record_of_another_one_whose_id_a_node_reports(
    machines, planted, job_name
):
    launch = launched(machines, job_name, "--backend", "ssh", "--nodes", "1", "--detach")
    machines.wait_for(job_name, "tick 0")
    planted(f"{job_name}-x", launch, "ssh")
    machines.run("gc", "--only", "node-2", "--job", f"{job_name}-x", "--yes")
    assert JobStore(machines.folder / "records").load(job_name).outcome != "stopped"
    machines.expect(0, "stop", job_name, "--grace", "0s")


@pytest.mark.skipif(os.getuid() != 0, reason="starts a process of another user")
def test_root_does_not_remove_what_another_user_has_started(machines, planted, job_name):
    """A plain `gc` does not even list it. With its name it is listed, because it may be what is meant."""
    launch = token_hex(8)
    other = planted(job_name, launch, "ssh", "setpriv", "--reuid", str(OTHER_USER), "--clear-groups")
    assert wait_until(lambda: Path(f"/proc/{other.pid}").stat().st_uid == OTHER_USER)
    assert launch not in gc(machines, "--only", "node-0")[0]
    text = machines.expect(0, "gc", "--only", "node-0", "--job", job_name, "--yes")
    assert f"{job_name} is orphaned, of user {OTHER_USER}, and left alone" in text
    assert other.poll() is None
    report = machines.run("doctor", "--only", "node-0", "--json", "--skip", "link", "--skip", "versions")[1]
    (said,) = [each for each in json.loads(report)["findings"] if each["check"] == "orphans"]
    assert job_name not in said["detail"]


@pytest.mark.skipif(os.getuid() != 0, reason="starts a process of another user")
def test_another_users_job_of_the_same_name_does_not_prevent_a_launch(machines, planted, job_name):
    other = planted(job_name, token_hex(8), "local", "setpriv", "--reuid", str(OTHER_USER), "--clear-groups")
    assert wait_until(lambda: Path(f"/proc/{other.pid}").stat().st_uid == OTHER_USER)
    launched(machines, job_name, "--backend", "local", ticks=0)
    assert other.poll() is None


def test_a_job_that_a_launcher_follows_is_no_orphan_while_no_script_runs(machines, planted, job_name):
    """Between two attempts only a rest of the first one may be there."""
    launch = launched(machines, job_name, "--nodes", "1", "--backend", "local", "--detach")
    supervisor = JobStore(machines.folder / "records").supervisor_of(job_name).pid
    os.kill(supervisor, signal.SIGSTOP)
    for pid in processes_of(job_name):
        os.kill(pid, signal.SIGKILL)
    rest = planted(job_name, launch, "local")
    (machines.folder / "cluster.yaml").unlink()

    def states():
        return [
            row["runs"] for row in json.loads(machines.run("gc", "--json")[1]) if row["launch_id"] == launch
        ]

    assert states() == [True]
    os.kill(supervisor, signal.SIGKILL)
    assert states() == [False]
    machines.expect(0, "stop", job_name, "--grace", "0s")
    assert rest.wait(5) == -signal.SIGTERM


@pytest.mark.parametrize("backend", ["local", "ssh"])
def test_stop_does_not_touch_a_job_again_that_has_ended_but_gc_finds_it(machines, planted, job_name, backend):
    launch = launched(machines, job_name, "--backend", backend, "--nodes", "1", ticks=0)
    rest = planted(job_name, launch, backend)
    machines.expect(0, "stop", job_name, has=f"{job_name}: done. It had already ended.")
    assert rest.poll() is None
    if backend == "local":  # without an inventory, gc finds the jobs of this machine
        (machines.folder / "cluster.yaml").unlink()
    assert launch in gc(machines, "--yes", "--job", launch)[1]
    assert rest.wait(5) == -signal.SIGTERM


@pytest.mark.parametrize("how", [["gc", "--yes", "--job"], ["stop", "--grace", "0s"]])
def test_a_job_that_is_ended_by_force_is_not_restarted_and_leaves_no_folder(machines, job_name, how):
    (machines.folder / "cluster.yaml").unlink()
    more = ["--backend", "local", "--nodes", "2", "--max-restarts", "1", "--detach"]
    launch = launched(machines, job_name, *more)
    machines.wait_for(job_name, "tick 0")
    hooks = f"clusterctl-{launch}-1-*"
    assert len([*Path(tempfile.gettempdir()).glob(hooks)]) == 2
    machines.expect(0, *how, job_name)
    machines.run("wait", job_name)
    record = JobStore(machines.folder / "records").load(job_name)
    assert (record.outcome, record.plan.attempt) == ("stopped", 1)
    assert not processes_of(job_name)
    assert [*Path(tempfile.gettempdir()).glob(hooks)] == []


@pytest.mark.parametrize("backend", ["local", "ssh"])
def test_a_deleted_run_folder_frees_the_name_of_a_job_that_has_ended(machines, job_name, backend):
    first = launched(machines, job_name, "--backend", backend, "--nodes", "1", ticks=0)
    again = [
        "launch",
        "--name",
        job_name,
        "--backend",
        backend,
        "--python",
        sys.executable,
        "--command",
        "ticks.py",
    ]
    machines.expect(2, *again, has=f"{job_name} already exists")
    shutil.rmtree(machines.folder / "runs" / job_name)
    shutil.rmtree(machines.folder / "remote", ignore_errors=True)
    assert launched(machines, job_name, "--backend", backend, "--nodes", "1", ticks=0) != first


@pytest.mark.parametrize("backend", ["local", "ssh"])
def test_a_job_whose_run_folder_is_deleted_while_it_runs_can_be_stopped(machines, job_name, backend):
    launched(machines, job_name, "--backend", backend, "--nodes", "1", "--detach")
    assert wait_until(lambda: (machines.folder / "runs" / job_name / "attempt-1" / "node-0.log").exists())
    os.kill(
        JobStore(machines.folder / "records").supervisor_of(job_name).pid, signal.SIGKILL
    )  # it would see the loss
    shutil.rmtree(machines.folder / "runs" / job_name)
    shutil.rmtree(machines.folder / "remote", ignore_errors=True)
    again = [
        "launch",
        "--name",
        job_name,
        "--backend",
        backend,
        "--python",
        sys.executable,
        "--command",
        "ticks.py",
    ]
    machines.expect(
        2, *again, has=f"its run directory is gone; to stop it and free its name: clusterctl stop {job_name}"
    )
    text = machines.expect(
        0, "stop", job_name, "--grace", "1s", has=f"{job_name}: stopped. No processes remain."
    )
    assert "Traceback" not in text
    assert processes_of(job_name) == []
    shutil.rmtree(machines.folder / "runs" / job_name, ignore_errors=True)
    launched(machines, job_name, "--backend", backend, "--nodes", "1", ticks=0)
