import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster import store
from cluster.backends import BACKENDS
from cluster.cli.main import app
from cluster.errors import ClusterError, UsageError
from cluster.spec.model import Job, JobRecord, Machine, Queue
from cluster.store import JobStore, SupervisorProcess
from cluster.supervisor.launcher import _unknown_gpus, gpus_in_use
from cluster.web.live import LiveJob, LivePage, poll_list
from cluster.web.metrics import render
from cluster.web.server import Server


def record(name, created_at=1.0, backend="compose"):
    queues = {
        "slurm": Queue(Machine("login", "", login="ann@cluster", runtime="apptainer"), {"time": "1:00:00"}),
        "kubernetes": Queue(Machine("kubernetes", "", run_dir="/runs"), {"limits": {"memory": "4Gi"}}),
    }
    job = Job(name, ("x.py",), 2, 2, "/runs", image="trainer:0.1", queue=queues.get(backend))
    return JobRecord(BACKENDS[backend].plan(job, attempt=1, port=20000), created_at, job)


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_record_comes_back_as_it_was_written(tmp_path, backend):
    JobStore(tmp_path).reserve(record("a", backend=backend))
    assert JobStore(tmp_path).load("a") == record("a", backend=backend)


@pytest.mark.parametrize("procs", [2, (2, 1), "all"])
def test_a_record_has_the_processes_of_each_node(tmp_path, procs):
    hosts = tuple(
        Machine(f"n{gpus}", "10.0.0.1", tuple(range(gpus)), login="n", run_dir="/r") for gpus in (2, 4)
    )
    job = Job("a", ("x.py",), 2, procs, "/runs", hosts=hosts)
    JobStore(tmp_path).reserve(JobRecord(BACKENDS["ssh"].plan(job, attempt=1, port=20000), 1.0, job))
    found = JobStore(tmp_path).load("a")
    assert (found.job, found.plan.job) == (job, job)
    assert found.job.procs == {2: (2, 2), (2, 1): (2, 1), "all": (2, 4)}[procs]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"state": "running"}', "\0\xff", '"x"'])
def test_what_was_seen_of_a_job_does_not_matter_if_it_cannot_be_read(tmp_path, text):
    store = JobStore(tmp_path)
    job = record("a")
    store.reserve(job)
    store.see(job, "running", {"node-0": "ready"})
    assert store.seen(job).state == "running"
    other_launch = replace(job, job=replace(job.job, launch_id="f" * 16))
    assert store.seen(other_launch) is None
    (path,) = tmp_path.glob("*.seen")
    path.write_bytes(text.encode("latin-1"))
    assert store.seen(job) is None
    store.see(job, "joining", {})
    assert store.seen(job).state == "joining"
    store.end("a", "done")
    assert not path.exists()


def test_a_name_is_given_once(tmp_path):
    JobStore(tmp_path).reserve(record("a"))
    with pytest.raises(UsageError, match="a job named a already exists"):
        JobStore(tmp_path).reserve(record("a"))


def test_half_a_record_does_not_stay(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ClusterError, match="cannot write the job's record"):
            JobStore(tmp_path).reserve(record("a"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_the_first_end_counts_also_for_a_launcher_that_has_not_heard_of_it(tmp_path):
    records = JobStore(tmp_path)
    records.reserve(record("a"))
    records.end("a", "stopped")
    records.end("a", "failed", "its nodes went away")
    records.update(replace(record("a"), created_at=9.0))
    assert (records.load("a").outcome, records.load("a").created_at) == ("stopped", 9.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "a.json"]


@pytest.mark.parametrize(
    "write", [lambda r: r.end("a", "stopped"), lambda r: r.update(replace(record("a"), created_at=9.0))]
)
def test_a_record_is_read_and_replaced_by_one_at_a_time(tmp_path, write):
    records = JobStore(tmp_path)
    records.reserve(record("a"))
    writer = threading.Thread(target=write, args=(records,))
    with (tmp_path / ".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        writer.start()
        writer.join(0.3)
        assert records.load("a") == record("a")
    writer.join()
    assert records.load("a") != record("a")


def test_jobs_are_listed_oldest_first(tmp_path):
    records = JobStore(tmp_path)
    for name, created_at in (("new", 3.0), ("old", 1.0), ("mid", 2.0)):
        records.reserve(record(name, created_at))
    assert [each.plan.job_id for each in records] == ["old", "mid", "new"]


@pytest.mark.parametrize("name", ["nothing", "../../etc/passwd", ""])
def test_an_unknown_job_is_an_error(tmp_path, name):
    JobStore(tmp_path).reserve(record("a"))
    with pytest.raises(UsageError, match="no job"):
        JobStore(tmp_path).load(name)


def test_a_job_with_a_misspelled_name_is_suggested(tmp_path):
    for name in ("digits-1a2b", "coco"):
        JobStore(tmp_path).reserve(record(name))
    with pytest.raises(UsageError) as error:
        JobStore(tmp_path).load("digit-1a2b")
    assert error.value.hint.startswith("did you mean digits-1a2b? ")


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ClusterError, match=r"a\.json"):
        JobStore(tmp_path).load("a")


@pytest.fixture(params=["half", "empty", "another version's", "a folder", "binary"])
def damaged(request, tmp_path):
    """A store with a readable record `a` and a record `b` that cannot be read."""
    JobStore(tmp_path).reserve(record("a"))
    path = tmp_path / "b.json"
    if request.param == "a folder":
        path.mkdir()
    else:
        whole = (tmp_path / "a.json").read_bytes()
        others = {
            "half": whole[: len(whole) // 2],
            "empty": b"",
            "another version's": b'{"plan": {"job": "b"}}',
        }
        path.write_bytes(others.get(request.param, b"\xff\xfe\x00"))
    return JobStore(tmp_path)


def test_a_record_that_cannot_be_read_does_not_hide_the_others(damaged, tmp_path):
    assert [each.plan.job_id for each in damaged] == ["a"]
    assert [(each.job_id, each.path) for each in damaged.unreadable()] == [("b", tmp_path / "b.json")]
    damaged.end("a", "done")
    assert damaged.load("a").outcome == "done"
    with pytest.raises(UsageError, match="no job"):
        damaged.load("c")


def test_ps_lists_a_record_that_cannot_be_read_with_its_path(damaged, tmp_path, monkeypatch):
    monkeypatch.setenv("CLUSTERCTL_STATE_DIR", str(tmp_path))
    damaged.end("a", "done")
    result = CliRunner().invoke(app, ["ps", "--all", "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["job"]: row for row in json.loads(result.output)}
    assert (rows["a"]["state"], rows["b"]["state"], rows["b"]["record"]) == (
        "done",
        "unreadable",
        f"{tmp_path}/b.json",
    )
    table = CliRunner().invoke(app, ["ps"], terminal_width=200)
    assert table.exit_code == 0
    assert f"mv {tmp_path}/b.json {tmp_path}/b.json.old" in table.output


def test_following_the_hint_keeps_the_record_and_the_rest_of_the_store(damaged, tmp_path):
    command = damaged.unreadable()[0].error.hint.rpartition(": ")[2]
    subprocess.run(command, shell=True, check=True)
    assert not damaged.unreadable()
    assert [each.plan.job_id for each in damaged] == ["a"]
    assert (tmp_path / "b.json.old").exists()


def test_the_page_of_all_jobs_lists_a_record_that_cannot_be_read(damaged, tmp_path):
    damaged.end("a", "done")
    with Server(("localhost", 0), damaged, "token") as server, server.page() as live:
        live.wait(0, timeout_s=60)
        assert 'href="jobs/a/"' in live.body
        assert f"cannot read the job record {tmp_path}/b.json" in live.body


def test_a_launch_says_that_a_job_whose_record_cannot_be_read_may_use_its_gpus(damaged, tmp_path):
    job = record("c").job
    assert _unknown_gpus(job, damaged) == []
    assert f"{tmp_path}/b.json" in _unknown_gpus(replace(job, gpus=(0, 1)), damaged)[0]
    assert gpus_in_use(damaged) == {}


SUPERVISES = """
import sys, time
from pathlib import Path
from cluster.store import JobStore
with JobStore(Path(sys.argv[1])).supervise("a", in_background=True) as is_supervisor:
    print(is_supervisor, flush=True)
    time.sleep(600)
"""


def test_the_process_that_supervises_a_job_is_known_until_it_ends(tmp_path):
    records = JobStore(tmp_path)
    assert records.supervisor_of("a") is None
    argv = [sys.executable, "-c", SUPERVISES, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "True\n"
        assert records.supervisor_of("a") == SupervisorProcess(
            process.pid, socket.gethostname(), in_background=True
        )
        with records.supervise("a") as is_supervisor:
            assert not is_supervisor
        process.send_signal(signal.SIGKILL)
    assert records.supervisor_of("a") is None
    with records.supervise("a"):
        assert records.supervisor_of("a") == SupervisorProcess(
            os.getpid(), socket.gethostname(), in_background=False
        )


@pytest.mark.parametrize("before", ["", "4194305 {host} 1\n"], ids=["empty", "of an earlier process"])
def test_a_process_that_has_just_locked_the_file_is_waited_for(tmp_path, monkeypatch, before):
    """It was taken for process 0: a signal to that goes to the whole process group. No pid is above 4194304."""
    records = JobStore(tmp_path)
    lock = tmp_path / "a.lock"
    lock.write_text(before.format(host=socket.gethostname()))
    with lock.open("r+") as file, monkeypatch.context() as patched:
        fcntl.flock(file, fcntl.LOCK_EX)
        named = f"{os.getpid()} {socket.gethostname()} 1\n"
        patched.setattr(store.time, "sleep", lambda _: lock.write_text(named))
        assert records.supervisor_of("a") == SupervisorProcess(
            os.getpid(), socket.gethostname(), in_background=True
        )


def test_a_process_that_could_not_write_who_it_is_has_no_pid(tmp_path, monkeypatch):
    """As on a full disk."""
    monkeypatch.setattr(store, "_NAMED_WITHIN_S", 0.0)
    with (tmp_path / "a.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        supervisor = JobStore(tmp_path).supervisor_of("a")
    assert (supervisor, str(supervisor)) == (
        SupervisorProcess(None, "", in_background=False),
        "another process",
    )


def test_a_job_whose_state_cannot_be_read_hides_no_other(tmp_path, monkeypatch):
    """Its backend is unknown here, which no command expects of a record."""
    monkeypatch.setenv("CLUSTERCTL_STATE_DIR", str(tmp_path))
    store = JobStore(tmp_path)
    broken = record("b")
    store.reserve(record("a"))
    store.end("a", "done")
    store.reserve(replace(broken, plan=replace(broken.plan, backend="unknown")))
    for words in (["ps"], ["ps", "--all"]):
        result = CliRunner().invoke(app, words, terminal_width=200)
        assert result.exit_code == 0, result.output
        assert "b: its state cannot be read: KeyError: 'unknown'" in result.output
    rows = [line.split()[:2] for line in result.output.splitlines()]
    assert ["a", "done"] in rows
    assert ["b", "unreachable"] in rows
    done, unreadable = (LiveJob(name, store) for name in "ab")
    poll_list([unreadable, done], store)
    assert "KeyError: 'unknown'" in unreadable.row().cause
    metrics = render([unreadable, done]).decode()
    assert 'clusterctl_job_state{backend="unknown",job="b",state="unreachable"} 1.0' in metrics
    assert 'clusterctl_job_state{backend="compose",job="a",state="done"} 1.0' in metrics
    with (live := LivePage(unreadable.body)):
        assert live.wait(0, 10.0)
        assert "KeyError" in live.body


def test_a_record_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls = []

    def watched(name, call):
        def run(first, *others, **more):
            path = str(Path(f"/proc/self/fd/{first}").readlink()) if isinstance(first, int) else str(first)
            calls.append((name, os.path.relpath(path, tmp_path)))
            return call(first, *others, **more)

        return run

    monkeypatch.setattr(os, "fsync", watched("fsync", os.fsync))
    monkeypatch.setattr(Path, "replace", watched("replace", Path.replace))
    JobStore(tmp_path).reserve(record("a"))
    partial = f"a.{os.getpid()}.tmp"
    assert calls == [("fsync", partial), ("replace", partial), ("fsync", ".")]
