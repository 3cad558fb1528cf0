"""The monitor: silent, lost and frozen machines."""

import base64
import json
import threading
import time
from dataclasses import replace

import pytest

from cluster.backends import BACKENDS, node_monitor
from cluster.backends.node_monitor import NodeMonitor, _MachinePoll
from cluster.errors import UnreachableError
from cluster.spec.model import Job, Machine
from cluster.spec.node_status import NodeStatus
from cluster.supervisor import job_state
from cluster.transport.local import LocalShell
from tests.conftest import wait_until
from tests.unit.node_scripts import running, status_of


def test_only_a_machine_that_does_not_answer_a_poll_is_silent():
    poll = _MachinePoll()
    poll.start(dict)
    assert poll.wait(LocalShell(), 5) is None
    time.sleep(2)  # a stalled terminal, or a program that polls now and then
    slow = threading.Event()
    poll.start(lambda: slow.wait(5) and {})
    assert poll.silent_s < 1
    time.sleep(0.5)
    poll.start(dict)  # while the last poll runs
    assert poll.silent_s > 0.4
    slow.set()
    poll.wait(LocalShell(), 5)

    def fails():
        raise UnreachableError("gone")

    poll.start(fails)
    assert poll.wait(LocalShell(), 5) is not None
    time.sleep(0.5)
    poll.start(fails)
    assert poll.silent_s > 0.4


HOSTS = tuple(Machine(name, f"10.0.0.{k}", (), name, "/runs", runtime="none") for k, name in enumerate("ab"))


PLAN = BACKENDS["ssh"].plan(Job("job", ("x.py",), 2, 1, "/here", hosts=HOSTS), attempt=1, port=20000)


class SlowPing(LocalShell):
    """A machine that answers pings after a delay."""

    def ping(self):
        time.sleep(0.1)
        return True


class NoPing(LocalShell):
    """A machine that answers no ping, as during the login."""

    def ping(self):
        return False


def unreachable(plan, node):
    raise UnreachableError(f"{node.name}: no route to host")


def full(plan, node):
    raise OSError(28, "No space left on device", "/here/job/node.log")


@pytest.mark.parametrize(
    ("poll", "message"),
    [
        # no SSH agent in this terminal, or no VPN: the job may run well
        (unreachable, "a: no route to host"),
        # the network drops packets, so that no error arrives in time
        (lambda plan, node: time.sleep(2) or {}, "a: does not answer"),
        (full, r"this machine: /here/job/node\.log: No space left on device"),
        # what a node has sent is no Base64
        (lambda plan, node: base64.b64decode("x"), "the nodes' answer cannot be read: Error: Invalid base64"),
    ],
)
def test_without_any_answer_the_state_of_the_job_is_unknown(poll, message, monkeypatch):
    monkeypatch.setattr(node_monitor, "LOST_AFTER_S", 0.5)
    monkeypatch.setattr(node_monitor, "reach", lambda node: NoPing())
    monitor = NodeMonitor(poll)

    def poll_three_times():
        for _ in range(3):
            assert {status.phase for status in monitor.statuses(PLAN)} == {"starting"}
            time.sleep(0.3)

    with pytest.raises(UnreachableError, match=message):
        poll_three_times()


def test_a_machine_with_a_slow_first_poll_is_not_lost_while_it_answers_pings(monkeypatch):
    monkeypatch.setattr(node_monitor, "LOST_AFTER_S", 2.5)
    end = threading.Event()

    def slow(plan, node):
        if node.name == "b":
            end.wait(10)
        return {node.name: NodeStatus(node.name, "joining")}

    monkeypatch.setattr(node_monitor, "reach", lambda node: SlowPing())
    monitor = NodeMonitor(slow)
    assert [status.phase for status in monitor.statuses(PLAN)] == ["joining", "starting"]
    end.set()


def test_a_machine_whose_first_poll_is_slow_is_neither_lost_nor_late(monkeypatch):
    """No ping is answered during the login."""
    monkeypatch.setattr(node_monitor, "LOST_AFTER_S", 0.5)
    end = threading.Event()

    def slow(plan, node):
        if node.name == "b":
            end.wait(10)
        return {node.name: NodeStatus(node.name, "starting")}

    monkeypatch.setattr(node_monitor, "reach", lambda node: NoPing())
    monitor = NodeMonitor(slow)
    hours_ago = time.time() - 7200  # `attach`
    view = job_state.start(PLAN, hours_ago)
    began = time.monotonic()
    while time.monotonic() - began < 1.5:
        view = job_state.fold(view, monitor.statuses(PLAN), [], time.time())
        assert [node.phase for node in view.nodes] == ["starting", "starting"]
        assert job_state.judge(view, time.time(), 300) == "waiting"
    end.set()
    assert wait_until(lambda: all(not status.silent for status in monitor.statuses(PLAN)))


def test_a_silent_machine_is_lost_when_another_one_answered(monkeypatch):
    monkeypatch.setattr(node_monitor, "LOST_AFTER_S", 0.5)

    def half(plan, node):
        if node.name == "b":
            raise UnreachableError("b: no route to host")
        return {"a": NodeStatus("a", "starting")}

    monkeypatch.setattr(node_monitor, "reach", lambda node: LocalShell())
    monitor = NodeMonitor(half)
    monitor.statuses(PLAN)
    time.sleep(0.6)
    assert [status.phase for status in monitor.statuses(PLAN)] == ["starting", "lost"]


class Watched:
    """The real polling script for the node n0, as a NodeMonitor sees it."""

    def __init__(self, folder):
        nodes = (Machine("n0", "10.0.0.1", (), "n0", "/runs", runtime="none"),)
        self.plan = BACKENDS["ssh"].plan(
            Job("job", ("x.py",), 1, 1, "/here", hosts=nodes), attempt=1, port=20000
        )
        self.monitor = NodeMonitor(lambda plan, node: {"n0": status_of(folder)})

    def status(self):
        (found,) = self.monitor.statuses(self.plan)
        return found


@pytest.mark.parametrize(
    "step_s", [-3600.0, 0.0, 3600.0], ids=["clock set back", "clock kept", "clock set on"]
)
def test_an_agent_without_a_new_heartbeat_is_lost_although_its_script_runs(tmp_path, monkeypatch, step_s):
    monkeypatch.setattr(node_monitor, "HEARTBEAT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(node_monitor, "reach", lambda node: LocalShell())
    with running(tmp_path, phase="running", heartbeat=time.time() + step_s) as script:
        watched = Watched(tmp_path)
        assert watched.status().phase == "starting"
        lost = wait_until(lambda: (found := watched.status()).phase == "lost" and found)
        assert "no heartbeat of its agent" in lost.detail
        script.kill()


@pytest.mark.parametrize(
    "step_s", [-3600.0, 3600.0], ids=["set back", "set on, or the machine was suspended"]
)
def test_an_agent_whose_clock_is_set_is_not_lost(tmp_path, monkeypatch, step_s):
    monkeypatch.setattr(node_monitor, "HEARTBEAT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(node_monitor, "reach", lambda node: LocalShell())
    began = time.monotonic()
    with running(tmp_path, phase="running", heartbeat=time.time()) as script:
        watched = Watched(tmp_path)
        seen = set()
        while time.monotonic() - began < 2.5:
            clock = time.time() + (step_s if time.monotonic() - began > 0.5 else 0.0)
            (tmp_path / "n0.json").write_text(json.dumps({"phase": "running", "heartbeat": clock}))
            seen.add(watched.status().phase)
        script.kill()
    assert seen == {"starting"}


def test_a_later_job_of_the_same_name_has_none_of_the_statuses_of_an_earlier(monkeypatch):
    monkeypatch.setattr(node_monitor, "reach", lambda node: LocalShell())
    monkeypatch.setattr(node_monitor, "TIMEOUT_S", 0.1)
    ready = {node.name: NodeStatus(node.name, "ready") for node in PLAN.nodes}
    answers = [ready]
    release = threading.Event()

    def poll(plan, machine):
        if answers:
            return answers[0]
        release.wait(20)
        return {}

    monitor = NodeMonitor(poll)
    for observe in (
        lambda plan: monitor.statuses(plan),
        lambda plan: monitor.statuses_of([plan])[0],
    ):
        answers[:] = [ready]
        assert wait_until(lambda observe=observe: {status.phase for status in observe(PLAN)} == {"ready"})
        answers.clear()
        later = replace(PLAN, job=replace(PLAN.job, launch_id="f" * 16))
        assert {status.phase for status in observe(later)} == {"starting"}
    release.set()


def test_machines_of_200_jobs_are_forgotten_when_they_are_not_polled(monkeypatch):
    monkeypatch.setattr(node_monitor, "reach", lambda node: LocalShell())

    def count_after(forget_after_s):
        monkeypatch.setattr(node_monitor, "_FORGET_AFTER_S", forget_after_s)
        monitor = NodeMonitor(lambda plan, node: {node.name: NodeStatus(node.name, "starting")})
        for number in range(200):
            monitor.statuses(replace(PLAN, job=replace(PLAN.job, name=f"job-{number}")))
        return len(monitor._polls)

    assert [count_after(600.0), count_after(0.0)] == [400, 2]
