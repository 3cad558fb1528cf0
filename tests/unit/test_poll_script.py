"""Node statuses from the real polling script."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.agent.app.node_agent.events import event
from cluster.backends import BACKENDS, poll_script
from cluster.spec.model import Job
from cluster.spec.node_status import NodeStatus
from cluster.spec.status import Failure
from cluster.transport.local import LocalShell
from tests.unit.node_scripts import running, status_of


def test_a_node_without_process_and_exit_code_is_lost(tmp_path):
    (tmp_path / "n0.pid").write_text("999999999")
    assert status_of(tmp_path).phase == "lost"
    assert "does not exist" in status_of(tmp_path / "absent").detail


def test_a_status_file_with_other_ends_of_lines_is_one_line(tmp_path, monkeypatch):
    """str.splitlines would find several lines, and the machine would seem not to answer."""
    monkeypatch.setattr(poll_script, "reach", lambda node: LocalShell())
    job = Job("job", ("x.py",), 1, 1, str(tmp_path))
    plan = BACKENDS["local"].plan(job, attempt=1, port=20000)
    folder = Path(plan.attempt_dir)
    folder.mkdir(parents=True)
    (folder / "node-0.pid").write_text("999999999")
    (folder / "node-0.json").write_text(
        '{"phase":"exited","exit_code":3,"reason":"a\u2028b\u0085c"}\n', "utf-8"
    )
    _, found = poll_script.poll(plan, plan.nodes[0].machine, poll_script.Script("poll"))
    assert (found["node-0"].exit_code, found["node-0"].detail) == (3, "a b c")


@pytest.mark.parametrize(("exit_code", "phase"), [("", "lost"), ("1 12.5", "exited")])
def test_a_full_disk_is_reported_as_the_reason(tmp_path, exit_code, phase):
    (tmp_path / "n0.pid").write_text("999999999")
    (tmp_path / "n0.log").write_text("")
    if exit_code:
        (tmp_path / "n0.exit").write_text(exit_code)
    (tmp_path / "n0.room.tmp").symlink_to("/dev/full")  # the kernel's error message
    status = status_of(tmp_path)
    assert (status.phase, "No space left on device" in status.detail) == (phase, True)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_warning_of_bash_before_the_script_has_written_its_pid_is_no_end(tmp_path):
    with running(tmp_path) as script:
        (tmp_path / "n0.json").unlink()
        (tmp_path / "n0.err").write_text("bash: warning: setlocale: LC_ALL: cannot change locale\n")
        for pid in ("", None):
            (tmp_path / "n0.pid").write_text("") if pid is not None else (tmp_path / "n0.pid").unlink()
            assert status_of(tmp_path).phase == "starting"
        script.kill()
    assert status_of(tmp_path).phase == "lost"


def test_the_agents_exit_code_counts_while_its_container_is_removed(tmp_path):
    failure = {"rank": 1, "time": 8.0, "error": "boom", "secondary": False}
    with running(
        tmp_path, phase="exited", exit_code=3, ended_at=9.0, heartbeat=9.0, failure=failure
    ) as script:
        assert status_of(tmp_path) == NodeStatus("n0", "exited", 3, "", 9.0, failure=Failure(**failure))
        script.kill()


def test_only_well_formed_events_of_an_agent_count_and_the_setup_is_a_phase(tmp_path):
    good = {"event": "ready", "node": 0, "time": 1.0}
    events = {
        "ready": good,
        "progress": {"event": "progress", "time": "x"},
        "metric": [1],
        "done": {"event": 5},
    }
    with running(tmp_path, phase="setup", heartbeat=time.time(), events=events) as script:
        assert replace(status_of(tmp_path), heartbeat=0.0) == NodeStatus(
            "n0", "setup", events=(event(good), event({"event": "progress"}))
        )
        (tmp_path / "n0.json").write_text(
            json.dumps({"phase": "running", "heartbeat": time.time(), "events": "no"})
        )
        assert replace(status_of(tmp_path), heartbeat=0.0) == NodeStatus("n0", "starting")
        script.kill()


def test_the_advice_of_docker_is_not_the_reason(tmp_path):
    (tmp_path / "n0.pid").write_text("999999999")
    (tmp_path / "n0.exit").write_text("125 12.5")
    error = "docker: Error response from daemon: No such image: x:1"
    for advice in ("See 'docker run --help'.", "\nRun 'docker run --help' for more information"):
        (tmp_path / "n0.err").write_text(f"{error}\n{advice}\n")
        assert status_of(tmp_path).detail == error


def test_the_arguments_of_very_many_jobs_take_several_commands(monkeypatch, tmp_path):
    """All of a command is one argument of ssh, of which Linux takes 128 KB."""
    ran = []

    class Counting(LocalShell):
        def run(self, argv, **more):
            ran.append(sum(map(len, argv)))
            return super().run(argv, **more)

    monkeypatch.setattr(poll_script, "reach", lambda node: Counting())
    plans = [
        BACKENDS["local"].plan(
            Job(f"job-{number}", ("x.py",), 4, 1, f"{tmp_path}/{'x' * 200}"), attempt=1, port=20000
        )
        for number in range(100)
    ]
    found = BACKENDS["local"].observe_all(plans)
    assert {status.detail for statuses in found for status in statuses} == {"its folder does not exist"}
    assert len(found) == 100
    assert len(ran) > 1
    assert max(ran) < 100_000
