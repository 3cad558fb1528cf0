"""A closed pipe is a closed terminal, and a stream that was closed before the start is /dev/null."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.contract.sshd import TICKS


@pytest.fixture
def start(clusterctl):
    """Start a command whose streams the test closes; what is left of it ends with the test."""
    started = []

    def _start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, argv=()):
        command = [*argv, sys.executable, "-m", "cluster", *words]
        options = {"cwd": clusterctl.folder, "env": clusterctl.env, "stdin": subprocess.DEVNULL}
        options |= {"text": True, "start_new_session": True}
        started.append(subprocess.Popen(command, stdout=stdout, stderr=stderr, **options))
        return started[-1]

    yield _start
    for process in started:
        process.kill()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()
        process.wait()


def _supervisor(clusterctl, job):
    about = json.loads(clusterctl.run("status", job, "--json")[1])
    return about["state"] == "running" and about["supervisor"].startswith("pid ") and about["supervisor"]


@pytest.fixture
def ticks(job_name):
    return _launch(job_name, "")


def _launch(job, options):
    return ["launch", "--backend", "local", "--name", job, "--command", f"{TICKS} {options}"]


@pytest.mark.parametrize("both", [False, True], ids=["stdout", "2>&1"])
def test_a_closed_pipe_leaves_the_job_and_a_supervisor_running(start, clusterctl, ticks, job_name, both):
    process = start(*ticks, stderr=subprocess.STDOUT if both else subprocess.PIPE)
    for _ in range(3):  # as `head -3` does
        process.stdout.readline()
    process.stdout.close()
    try:
        assert process.wait(60) == 129
        text = f"detached; {job_name} keeps running. To stop it: clusterctl stop {job_name}\n"
        assert both or text in process.stderr.read()
        assert _supervisor(clusterctl, job_name) not in (False, f"pid {process.pid}")
        attached = start("attach", job_name)
        attached.stdout.readline()
        attached.stdout.close()
        assert attached.wait(60) == 129
        assert _supervisor(clusterctl, job_name)
    finally:
        clusterctl.expect(0, "stop", job_name)


def test_after_nohup_a_closed_pipe_does_not_end_the_launcher(start, clusterctl, job_name):
    process = start(*_launch(job_name, "--ticks 12"), argv=["sh", "-c", 'trap "" HUP; exec "$@"', "sh"])
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0, process.stderr.read()
    assert json.loads(clusterctl.run("ps", "--all", "--json")[1])[0]["state"] == "done"


def test_ctrl_c_stops_the_job_although_it_ends_the_reader_too(start, clusterctl, ticks, job_name):
    process = start(*ticks)
    clusterctl.wait_for(job_name, "tick 1")
    process.stdout.close()  # tee has ended
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert json.loads(clusterctl.run("ps", "--all", "--json")[1])[0]["state"] == "stopped"


def test_stop_ends_the_job_without_a_reader(start, clusterctl, ticks, job_name):
    clusterctl.expect(0, *ticks, "--detach")
    process = start("stop", job_name)
    process.stdout.close()
    assert process.wait(60) == 0, process.stderr.read()
    assert json.loads(clusterctl.run("ps", "--all", "--json")[1])[0]["state"] == "stopped"


def test_commands_that_only_print_end_quietly(start, clusterctl, ticks, job_name):
    clusterctl.expect(0, *ticks, "--detach")
    try:
        for words in (
            ["ps"],
            ["ps", "--json"],
            ["status", job_name],
            ["status", job_name, "--json"],
            ["logs", "--follow", job_name],
            ["top", "--once", job_name],
            ["plan", "--backend", "local"],
            ["plan", "--schema"],
            ["doctor", "--help"],
            ["--version"],
        ):
            process = start(*words)
            process.stdout.close()
            assert process.wait(60) == 129, words
            assert "Traceback" not in process.stderr.read(), words
    finally:
        clusterctl.expect(0, "stop", job_name)


@pytest.mark.parametrize("redirected", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_was_closed_before_the_start_is_discarded(start, clusterctl, job_name, redirected):
    shell = ["bash", "-c", f'"$@" {redirected}', "bash"]
    process = start(*_launch(job_name, "--ticks 3"), argv=shell)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in out + errors) == (0, False), out + errors
    assert start("ps", "--all", argv=shell).wait(60) == 0
    log = clusterctl.folder / "runs" / job_name / "attempt-1" / "node-0.log"
    assert "tick 2" in log.read_text()


def test_a_full_disk_under_the_output_leaves_a_supervisor(start, clusterctl, ticks, job_name):
    with Path("/dev/full").open("w") as full:
        process = start(*ticks, stdout=full)
    try:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 129
        assert errors.startswith("error: standard output cannot be written: No space left on device\n")
        assert wait_until(lambda: _supervisor(clusterctl, job_name))
    finally:
        clusterctl.expect(0, "stop", job_name)
    with Path("/dev/full").open("w") as full:
        process = start("ps", "--all", stdout=full)
        assert process.communicate(timeout=60)[1] == errors.splitlines(keepends=True)[0]
