"""How long the launcher was there: what it says of a machine's silence and of a job's standstill counts from that."""

import json
import subprocess
import threading
import time

import pytest

from cluster import looks, resources
from cluster.backends import BACKENDS
from cluster.errors import UnreachableError
from cluster.looks import WAKING_S, Looks, Presence, _Look
from cluster.model import Job, Node, NodeStatus
from cluster.shells.local import LocalShell


def present_for(presence, seconds, monotonic=0.0, wall=0.0):
    """Beat each second; gives the time of both clocks at the end."""
    for _ in range(seconds):
        monotonic, wall = monotonic + 1, wall + 1
        presence.beat(monotonic, wall)
    return monotonic, wall


def test_time_in_which_the_launcher_runs_counts():
    presence = Presence(0.0, 0.0)
    present_for(presence, 100)
    assert (presence.seconds, presence.wakings) == (100, 0)


def test_a_launcher_that_is_slow_was_there():
    presence = Presence(0.0, 0.0)
    presence.beat(4.0, 4.0)
    assert (presence.seconds, presence.wakings) == (4, 0)


def test_neither_sleep_nor_the_moments_after_it_count():
    for slept in ((3600.0, 3600.0), (0.5, 3600.0)):  # Ctrl-Z; a closed lid, which may stop the first clock
        presence = Presence(0.0, 0.0)
        monotonic, wall = present_for(presence, 10)
        monotonic, wall = monotonic + slept[0], wall + slept[1]
        presence.beat(monotonic, wall)
        assert (presence.seconds, presence.wakings) == (10, 1)
        monotonic, wall = present_for(presence, int(WAKING_S), monotonic, wall)
        assert presence.seconds == 10
        present_for(presence, 5, monotonic, wall)
        assert (presence.seconds, presence.wakings) == (15, 1)


def test_a_clock_that_is_put_back_changes_nothing():
    presence = Presence(0.0, 7200.0)
    presence.beat(1.0, 3600.0)
    present_for(presence, 9, 1.0, 3600.0)
    assert (presence.seconds, presence.wakings) == (10, 0)


def test_a_machine_that_nobody_asked_was_not_silent_and_one_that_does_not_answer_is():
    look = _Look()
    look.start(LocalShell(), dict)
    assert look.answer(5) is None
    time.sleep(2)  # a stalled terminal, a program that asks now and then
    slow = threading.Event()
    look.start(LocalShell(), lambda: slow.wait(5) and {})
    assert look.silent_s < 1
    time.sleep(0.5)
    look.start(LocalShell(), dict)  # while the last one goes on
    assert look.silent_s > 0.4
    slow.set()
    look.answer(5)

    def fails():
        raise UnreachableError("gone")

    look.start(LocalShell(), fails)
    assert look.answer(5) is not None
    time.sleep(0.5)
    look.start(LocalShell(), fails)
    assert look.silent_s > 0.4


HOSTS = tuple(Node(name, f"10.0.0.{k}", (), name, "/runs", runtime="none") for k, name in enumerate("ab"))
PLAN = BACKENDS["ssh"].plan(Job("job", ("x.py",), 2, 1, "/here", hosts=HOSTS), attempt=1, port=20000)


class Mute(LocalShell):
    """A machine that cannot be asked, as one that is still being logged in to."""

    def ping(self):
        return False


class Far(LocalShell):
    """A machine that answers, though not at once."""

    def ping(self):
        time.sleep(0.1)
        return True


def test_where_no_machine_was_ever_seen_the_job_is_not_judged(monkeypatch):
    """No agent in this terminal, no VPN: that says nothing of a job that was started yesterday."""
    monkeypatch.setattr(looks, "LOST_AFTER_S", 0.5)

    def dark(plan, node):
        raise UnreachableError(f"{node.name}: no route to host")

    watch = Looks(lambda node: LocalShell(), dark)
    assert [(status.phase, "no route" in status.silent) for status in watch.statuses(PLAN)] == [("starting", True)] * 2
    time.sleep(0.6)
    with pytest.raises(UnreachableError, match="no route to host"):
        watch.statuses(PLAN)


def test_where_every_first_look_hangs_the_job_is_not_judged(monkeypatch):
    """A network that drops what is sent: not even an error comes back in time."""
    monkeypatch.setattr(looks, "LOST_AFTER_S", 0.5)
    end = threading.Event()
    watch = Looks(lambda node: Mute(), lambda plan, node: end.wait(10) and {})
    with pytest.raises(UnreachableError, match="a: does not answer"):
        watch.statuses(PLAN)
    end.set()


def test_a_machine_whose_first_look_takes_long_lives_while_it_answers(monkeypatch):
    monkeypatch.setattr(looks, "LOST_AFTER_S", 2.5)
    end = threading.Event()

    def slow(plan, node):
        if node.name == "b":
            end.wait(10)
        return {node.name: NodeStatus(node.name, "joining")}

    watch = Looks(lambda node: Far(), slow)
    assert [status.phase for status in watch.statuses(PLAN)] == ["joining", "starting"]
    end.set()


def test_a_log_that_cannot_be_copied_is_this_machines_trouble():
    def full(plan, node):
        raise OSError(28, "No space left on device", "/here/job/node.log")

    watch = Looks(lambda node: LocalShell(), full)
    with pytest.raises(UnreachableError, match=r"this machine: /here/job/node\.log: No space left on device"):
        watch.statuses(PLAN)


def test_one_machine_that_is_dark_is_lost_when_another_was_seen(monkeypatch):
    monkeypatch.setattr(looks, "LOST_AFTER_S", 0.5)

    def half(plan, node):
        if node.name == "b":
            raise UnreachableError("b: no route to host")
        return {"a": NodeStatus("a", "starting")}

    watch = Looks(lambda node: LocalShell(), half)
    watch.statuses(PLAN)
    time.sleep(0.6)
    assert [status.phase for status in watch.statuses(PLAN)] == ["starting", "lost"]


def status_of(folder):
    """The status of node n0, whose attempt's folder this is, by the real polling script."""
    poll = resources.text("agent/common.sh", "agent/poll.sh")
    done = LocalShell().run(["bash", "-c", poll, "poll", "job", "1000", str(folder), "n0", ""])
    assert not done.err
    now, state, why, agent, _log = done.out.split("\n")[:5]
    return looks.status("n0", looks.Answer(state, why, json.loads(agent or "{}")), float(now))


def test_what_has_ended_without_an_exit_code_is_lost_and_why_is_shown(tmp_path):
    (tmp_path / "n0.pid").write_text("999999999")
    assert status_of(tmp_path).phase == "lost"
    assert "does not exist" in status_of(tmp_path / "absent").detail


@pytest.mark.parametrize(("exit_code", "phase"), [("", "lost"), ("1 12.5", "exited")])
def test_a_disk_without_room_is_named_as_it_kept_the_node_from_reporting(tmp_path, exit_code, phase):
    (tmp_path / "n0.pid").write_text("999999999")
    (tmp_path / "n0.log").write_text("")
    if exit_code:
        (tmp_path / "n0.exit").write_text(exit_code)
    (tmp_path / "n0.room.tmp").symlink_to("/dev/full")  # the system's own word for it
    status = status_of(tmp_path)
    assert (status.phase, "No space left on device" in status.detail) == (phase, True)
    assert not list(tmp_path.glob("*.tmp"))


def running(tmp_path, **agent):
    """A node whose script runs, with this in its agent's status file."""
    script = tmp_path / "n0.sh"
    script.write_text("sleep 60 & wait")
    process = subprocess.Popen(["bash", str(script)])
    (tmp_path / "n0.pid").write_text(str(process.pid))
    (tmp_path / "n0.json").write_text(json.dumps(agent) + "\n")
    return process


def test_an_agent_without_a_heartbeat_is_lost_although_its_script_runs(tmp_path):
    with running(tmp_path, phase="running", heartbeat=time.time()) as script:
        assert status_of(tmp_path).phase == "starting"
        (tmp_path / "n0.json").write_text(json.dumps({"phase": "running", "heartbeat": time.time() - 70}))
        assert "no heartbeat" in status_of(tmp_path).detail
        script.kill()


def test_the_agents_word_of_an_end_counts_while_its_container_is_taken_down(tmp_path):
    failure = {"rank": 1, "time": 8.0, "error": "boom", "secondary": False}
    with running(tmp_path, phase="exited", exit_code=3, ended_at=9.0, heartbeat=9.0, failure=failure) as script:
        assert status_of(tmp_path) == NodeStatus("n0", "exited", 3, "", 9.0, failure=failure)
        script.kill()
