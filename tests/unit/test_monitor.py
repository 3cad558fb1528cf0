"""Monitoring: awake time, silent and lost machines, and node statuses from the real polling script."""

import base64
import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.agent import scripts
from cluster.agent.app.node_agent.events import event
from cluster.backends import BACKENDS, monitor
from cluster.backends.monitor import RESUME_GRACE_S, AwakeTime, NodeMonitor, _MachinePoll
from cluster.errors import UnreachableError
from cluster.spec.model import Job, JobRecord, Machine, NodeStatus
from cluster.spec.status import Failure, parse
from cluster.store import JobStore
from cluster.supervisor import job_state, jobs
from cluster.transport.local import LocalShell
from cluster.web.watch import POLL_S, PolledJob, poll_list
from tests.conftest import wait_until


def tick_for(awake, seconds, monotonic=0.0, wall=0.0):
    """Tick each second; return both clocks at the end."""
    for _ in range(seconds):
        monotonic, wall = monotonic + 1, wall + 1
        awake.tick(monotonic, wall)
    return monotonic, wall


@pytest.mark.parametrize(
    ("start", "ticks"),
    [
        pytest.param((0.0, 0.0), [(second, second) for second in range(1, 11)], id="every second"),
        pytest.param((0.0, 0.0), [(4.0, 4.0), (8.0, 8.0), (10.0, 10.0)], id="short gaps"),
        pytest.param((0.0, 7200.0), [(1.0, 3600.0), (5.0, 3604.0), (10.0, 3609.0)], id="the wall clock is set back"),
    ],
)
def test_time_while_the_launcher_runs_counts(start, ticks):
    awake = AwakeTime(*start)
    for tick in ticks:
        awake.tick(*tick)
    assert (awake.seconds, awake.suspensions) == (10, 0)


def test_neither_a_suspension_nor_the_grace_period_after_it_counts():
    for suspended in ((3600.0, 3600.0), (0.5, 3600.0)):  # Ctrl-Z; a closed lid, which may stop the monotonic clock
        awake = AwakeTime(0.0, 0.0)
        monotonic, wall = tick_for(awake, 10)
        monotonic, wall = monotonic + suspended[0], wall + suspended[1]
        awake.tick(monotonic, wall)
        assert (awake.seconds, awake.suspensions) == (10, 1)
        monotonic, wall = tick_for(awake, int(RESUME_GRACE_S), monotonic, wall)
        assert awake.seconds == 10
        tick_for(awake, 5, monotonic, wall)
        assert (awake.seconds, awake.suspensions) == (15, 1)


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
    monkeypatch.setattr(monitor, "LOST_AFTER_S", 0.5)
    monkeypatch.setattr(monitor, "reach", lambda node: NoPing())
    watcher = NodeMonitor(poll)

    def poll_three_times():
        for _ in range(3):
            assert {status.phase for status in watcher.statuses(PLAN)} == {"starting"}
            time.sleep(0.3)

    with pytest.raises(UnreachableError, match=message):
        poll_three_times()


def test_a_machine_with_a_slow_first_poll_is_not_lost_while_it_answers_pings(monkeypatch):
    monkeypatch.setattr(monitor, "LOST_AFTER_S", 2.5)
    end = threading.Event()

    def slow(plan, node):
        if node.name == "b":
            end.wait(10)
        return {node.name: NodeStatus(node.name, "joining")}

    monkeypatch.setattr(monitor, "reach", lambda node: SlowPing())
    watcher = NodeMonitor(slow)
    assert [status.phase for status in watcher.statuses(PLAN)] == ["joining", "starting"]
    end.set()


def test_a_machine_whose_first_poll_is_slow_is_neither_lost_nor_late(monkeypatch):
    """No ping is answered during the login."""
    monkeypatch.setattr(monitor, "LOST_AFTER_S", 0.5)
    end = threading.Event()

    def slow(plan, node):
        if node.name == "b":
            end.wait(10)
        return {node.name: NodeStatus(node.name, "starting")}

    monkeypatch.setattr(monitor, "reach", lambda node: NoPing())
    watcher = NodeMonitor(slow)
    hours_ago = time.time() - 7200  # `attach`
    view = job_state.start(PLAN, hours_ago)
    began = time.monotonic()
    while time.monotonic() - began < 1.5:
        view = job_state.fold(view, watcher.statuses(PLAN), [], time.time())
        assert [node.phase for node in view.nodes] == ["starting", "starting"]
        assert job_state.judge(view, time.time(), 300) == "waiting"
    end.set()
    assert wait_until(lambda: all(not status.silent for status in watcher.statuses(PLAN)))


def test_a_silent_machine_is_lost_when_another_one_answered(monkeypatch):
    monkeypatch.setattr(monitor, "LOST_AFTER_S", 0.5)

    def half(plan, node):
        if node.name == "b":
            raise UnreachableError("b: no route to host")
        return {"a": NodeStatus("a", "starting")}

    monkeypatch.setattr(monitor, "reach", lambda node: LocalShell())
    watcher = NodeMonitor(half)
    watcher.statuses(PLAN)
    time.sleep(0.6)
    assert [status.phase for status in watcher.statuses(PLAN)] == ["starting", "lost"]


def status_of(folder):
    """Return the status of node n0 from the real polling script; `folder` is the attempt's."""
    done = LocalShell().run(scripts.command("poll", str(folder), "n0", "", most=1000))
    assert not done.err
    state, why, agent, _log = done.out.split("\n")[:4]
    return monitor.status("n0", parse(agent), state, why)


def test_a_node_without_process_and_exit_code_is_lost(tmp_path):
    (tmp_path / "n0.pid").write_text("999999999")
    assert status_of(tmp_path).phase == "lost"
    assert "does not exist" in status_of(tmp_path / "absent").detail


def test_a_status_file_with_other_ends_of_lines_is_one_line(tmp_path, monkeypatch):
    """str.splitlines would find several lines, and the machine would seem not to answer."""
    monkeypatch.setattr(monitor, "reach", lambda node: LocalShell())
    job = Job("job", ("x.py",), 1, 1, str(tmp_path))
    plan = BACKENDS["local"].plan(job, attempt=1, port=20000)
    folder = Path(plan.attempt_dir)
    folder.mkdir(parents=True)
    (folder / "node-0.pid").write_text("999999999")
    (folder / "node-0.json").write_text('{"phase":"exited","exit_code":3,"reason":"a\u2028b\u0085c"}\n', "utf-8")
    _, found = monitor.poll(plan, plan.nodes[0].machine, monitor.Script("poll"))
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


def started(folder, node):
    """Start a node's script."""
    script = folder / f"{node}.sh"
    script.write_text("sleep 60 & wait")
    process = subprocess.Popen(["bash", str(script)])
    # Popen returns a moment before the kernel has set the command line, by which the script is found.
    assert wait_until(lambda: str(script).encode() in Path(f"/proc/{process.pid}/cmdline").read_bytes())
    (folder / f"{node}.pid").write_text(str(process.pid))
    return process


def running(tmp_path, **agent):
    """Start a node's script, and write `agent` to its status file."""
    process = started(tmp_path, "n0")
    (tmp_path / "n0.json").write_text(json.dumps(agent) + "\n")
    return process


def test_a_warning_of_bash_before_the_script_has_written_its_pid_is_no_end(tmp_path):
    with running(tmp_path) as script:
        (tmp_path / "n0.json").unlink()
        (tmp_path / "n0.err").write_text("bash: warning: setlocale: LC_ALL: cannot change locale\n")
        for pid in ("", None):
            (tmp_path / "n0.pid").write_text("") if pid is not None else (tmp_path / "n0.pid").unlink()
            assert status_of(tmp_path).phase == "starting"
        script.kill()
    assert status_of(tmp_path).phase == "lost"


class Watched:
    """The real polling script for the node n0, as a NodeMonitor sees it."""

    def __init__(self, folder):
        nodes = (Machine("n0", "10.0.0.1", (), "n0", "/runs", runtime="none"),)
        self.plan = BACKENDS["ssh"].plan(Job("job", ("x.py",), 1, 1, "/here", hosts=nodes), attempt=1, port=20000)
        self.monitor = NodeMonitor(lambda plan, node: {"n0": status_of(folder)})

    def status(self):
        (found,) = self.monitor.statuses(self.plan)
        return found


@pytest.mark.parametrize("step_s", [-3600.0, 0.0, 3600.0], ids=["clock set back", "clock kept", "clock set on"])
def test_an_agent_without_a_new_heartbeat_is_lost_although_its_script_runs(tmp_path, monkeypatch, step_s):
    monkeypatch.setattr(monitor, "HEARTBEAT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(monitor, "reach", lambda node: LocalShell())
    with running(tmp_path, phase="running", heartbeat=time.time() + step_s) as script:
        watched = Watched(tmp_path)
        assert watched.status().phase == "starting"
        lost = wait_until(lambda: (found := watched.status()).phase == "lost" and found)
        assert "no heartbeat of its agent" in lost.detail
        script.kill()


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0], ids=["set back", "set on, or the machine was suspended"])
def test_an_agent_whose_clock_is_set_is_not_lost(tmp_path, monkeypatch, step_s):
    monkeypatch.setattr(monitor, "HEARTBEAT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(monitor, "reach", lambda node: LocalShell())
    began = time.monotonic()
    with running(tmp_path, phase="running", heartbeat=time.time()) as script:
        watched, seen = Watched(tmp_path), set()
        while time.monotonic() - began < 2.5:
            clock = time.time() + (step_s if time.monotonic() - began > 0.5 else 0.0)
            (tmp_path / "n0.json").write_text(json.dumps({"phase": "running", "heartbeat": clock}))
            seen.add(watched.status().phase)
        script.kill()
    assert seen == {"starting"}


def test_the_agents_exit_code_counts_while_its_container_is_removed(tmp_path):
    failure = {"rank": 1, "time": 8.0, "error": "boom", "secondary": False}
    with running(tmp_path, phase="exited", exit_code=3, ended_at=9.0, heartbeat=9.0, failure=failure) as script:
        assert status_of(tmp_path) == NodeStatus("n0", "exited", 3, "", 9.0, failure=Failure(**failure))
        script.kill()


def test_a_process_whose_parent_was_stopped_before_it_could_forward_the_signal_is_asked_to_end(tmp_path, monkeypatch):
    """A process that forwards the signal is not disturbed."""
    monkeypatch.setattr(monitor, "reach", lambda node: LocalShell())
    job = f"stop-{os.getpid()}"
    orphan = (
        f"trap 'touch {tmp_path}/orphan-asked; exit' TERM; touch {tmp_path}/orphan-began; while :; do sleep 0.1; done"
    )
    script = "trap 'bash -c \"$ORPHAN\" & exit' TERM; touch $BEGAN; while :; do sleep 0.1; done"
    forwards = (
        f"trap 'bash -c \"sleep 1; touch {tmp_path}/forwarded\"; exit' TERM; touch $BEGAN; while :; do sleep 0.1; done"
    )
    env = {**os.environ, "CLUSTER_LAUNCH_ID": job, "CLUSTER_ATTEMPT": "1", "ORPHAN": orphan}
    began = [tmp_path / "began-0", tmp_path / "began-1"]
    processes = [
        subprocess.Popen(["bash", "-c", text], env={**env, "BEGAN": str(path)})
        for text, path in zip((script, forwards), began, strict=True)
    ]
    assert wait_until(lambda: all(path.exists() for path in began))
    monitor.stop(PLAN.nodes[0].machine, job, 30, (), timeout_s=60)
    assert [process.wait(5) for process in processes] == [0, 0]
    assert (tmp_path / "orphan-asked").exists() == (tmp_path / "orphan-began").exists()
    assert (tmp_path / "forwarded").exists()


def test_one_attempt_is_stopped_while_the_next_one_keeps_running(monkeypatch):
    monkeypatch.setattr(monitor, "reach", lambda node: LocalShell())
    job = f"stop-{os.getpid()}"
    first, second = (
        subprocess.Popen(["sleep", "60"], env={**os.environ, "CLUSTER_LAUNCH_ID": job, "CLUSTER_ATTEMPT": attempt})
        for attempt in ("1", "2")
    )
    with first, second:
        monitor.stop(Machine("n0", "", ()), job, 0.5, (), timeout_s=30, attempt=1)
        assert first.wait(10) == -signal.SIGTERM
        assert second.poll() is None
        monitor.stop(Machine("n0", "", ()), job, 0.5, (), timeout_s=30)
        assert second.wait(10) == -signal.SIGTERM


def test_agents_find_the_grace_before_the_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "reach", lambda node: LocalShell())
    script = "trap 'cp grace seen; exit' TERM; touch begun; while :; do sleep 0.05; done"
    job = f"grace-{os.getpid()}"
    with subprocess.Popen(
        ["bash", "-c", script], cwd=tmp_path, env={**os.environ, "CLUSTER_LAUNCH_ID": job}
    ) as process:
        assert wait_until((tmp_path / "begun").exists)
        monitor.stop(Machine("n0", "", ()), job, 20.5, (), timeout_s=30, folder=str(tmp_path))
        process.wait(10)
    assert (tmp_path / "seen").read_text() == "21\n"


def test_only_well_formed_events_of_an_agent_count_and_the_setup_is_a_phase(tmp_path):
    good = {"event": "ready", "node": 0, "time": 1.0}
    events = {"ready": good, "progress": {"event": "progress", "time": "x"}, "metric": [1], "done": {"event": 5}}
    with running(tmp_path, phase="setup", heartbeat=time.time(), events=events) as script:
        assert replace(status_of(tmp_path), heartbeat=0.0) == NodeStatus(
            "n0", "setup", events=(event(good), event({"event": "progress"}))
        )
        (tmp_path / "n0.json").write_text(json.dumps({"phase": "running", "heartbeat": time.time(), "events": "no"}))
        assert replace(status_of(tmp_path), heartbeat=0.0) == NodeStatus("n0", "starting")
        script.kill()


def test_the_state_of_a_job_is_known_without_its_logs(tmp_path):
    """Reading the log is an error, because it is a folder."""
    job = Job("job", ("-m", "trainer"), 1, 1, str(tmp_path))
    record = JobRecord(BACKENDS["local"].plan(job, attempt=1, port=20000), time.time(), job)
    store = JobStore(tmp_path / "state")
    store.reserve(record)
    folder = Path(record.plan.attempt_dir)
    (folder / "node-0.log").mkdir(parents=True)
    joining = {"event": "joining", "node": 0, "time": time.time(), "reachable": True, "listening": True}
    ready = {"event": "ready", "node": 0, "time": time.time(), "world_size": 1, "backend": "gloo", "device": "cpu"}
    metric = {"event": "metric", "node": 0, "time": time.time(), "epoch": 7, "map50": 0.5}
    with started(folder, "node-0") as process:
        seen = []
        for events in ([], [joining], [joining, ready], [joining, ready, metric]):
            agent = {"phase": "running", "heartbeat": time.time(), "events": {each["event"]: each for each in events}}
            (folder / "node-0.json").write_text(json.dumps(agent) + "\n")
            _, state, view, *_ = jobs.poll(record, store)
            seen.append((state, view.nodes[0].phase, view.ready_count))
        polled = PolledJob("job", store)
        poll_list([polled], store)
        assert polled.row().state == "running"
        time.sleep(POLL_S)
        with pytest.raises(IsADirectoryError):  # only the job's own page reads the log, for its curves
            polled.body()
        process.kill()
    waiting = ("starting", "starting", 0), ("joining", "joining", 0)
    assert seen == [*waiting, ("running", "ready", 1), ("running", "ready", 1)]
    assert view.metric.as_json() == metric


def test_a_job_whose_next_attempt_is_being_started_has_not_failed(tmp_path):
    """An attempt is recorded before its nodes have folders. Polled then, they would seem to be lost for good."""
    job, store = Job("job", ("x.py",), 1, 1, str(tmp_path)), JobStore(tmp_path / "state")
    first = JobRecord(BACKENDS["local"].plan(job, attempt=1, port=20000), time.time(), job, start_lock="job")
    store.reserve(first)
    assert jobs.poll(first, store).state == "failed"  # the process that was starting it is gone
    observer, polled = jobs.Observer("job", store), PolledJob("job", store)
    with store.watch("job"):
        _, state, view, *_ = jobs.poll(first, store)
        assert (state, [node.phase for node in view.nodes]) == ("starting", ["pending"])
        assert observer.step() == []
        poll_list([polled], store)
        assert polled.row().state == "starting"
        assert "does not exist" not in polled.body()
        folder = Path(first.plan.attempt_dir)
        folder.mkdir(parents=True)
        with started(folder, "node-0") as process:
            (folder / "node-0.log").write_text("hello\n")
            store.update(replace(first, start_lock=""))
            assert observer.step() == [("node-0", "hello")]
            assert (observer.state, observer.view.nodes[0].phase, observer.has_ended) == ("starting", "starting", False)
            process.kill()
        observer.step()
        assert (observer.state, observer.has_ended) == ("running", False)  # the supervisor may restart it
        assert jobs.poll(store.load("job"), store).state == "running"
        (folder / "node-0.log").write_text("hello\nthe last word\n")
        plan = BACKENDS["local"].plan(job, attempt=2, port=20000)
        store.update(replace(first, plan=plan))
        assert observer.step() == [("node-0", "the last word")]
        assert (observer.state, observer.has_ended) == ("starting", False)
    observer.step()
    assert (observer.state, observer.has_ended) == ("failed", True)


def test_a_later_job_of_the_same_name_has_none_of_the_statuses_of_an_earlier(monkeypatch):
    monkeypatch.setattr(monitor, "reach", lambda node: LocalShell())
    monkeypatch.setattr(monitor, "_POLL_TIMEOUT_S", 0.1)
    ready = {node.name: NodeStatus(node.name, "ready") for node in PLAN.nodes}
    answers, release = [ready], threading.Event()

    def poll(plan, machine):
        if answers:
            return answers[0]
        release.wait(20)
        return {}

    watcher = NodeMonitor(poll)
    for observe in (lambda plan: watcher.statuses(plan), lambda plan: watcher.statuses_of([plan])[0]):
        answers[:] = [ready]
        assert wait_until(lambda observe=observe: {status.phase for status in observe(PLAN)} == {"ready"})
        answers.clear()
        later = replace(PLAN, job=replace(PLAN.job, launch_id="f" * 16))
        assert {status.phase for status in observe(later)} == {"starting"}
    release.set()


def test_machines_of_200_jobs_are_forgotten_when_they_are_not_polled(monkeypatch):
    monkeypatch.setattr(monitor, "reach", lambda node: LocalShell())

    def count_after(forget_after_s):
        monkeypatch.setattr(monitor, "_FORGET_AFTER_S", forget_after_s)
        watcher = NodeMonitor(lambda plan, node: {node.name: NodeStatus(node.name, "starting")})
        for number in range(200):
            watcher.statuses(replace(PLAN, job=replace(PLAN.job, name=f"job-{number}")))
        return len(watcher._polls)

    assert [count_after(600.0), count_after(0.0)] == [400, 2]


def test_a_grace_of_half_a_second_lets_a_process_end(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "reach", lambda node: LocalShell())
    script = "trap 'sleep 0.1; touch ended; exit' TERM; touch begun; while :; do sleep 0.05; done"
    job = f"stop-{os.getpid()}"
    with subprocess.Popen(
        ["bash", "-c", script], cwd=tmp_path, env={**os.environ, "CLUSTER_LAUNCH_ID": job}
    ) as process:
        assert wait_until((tmp_path / "begun").exists)
        monitor.stop(Machine("n0", "", ()), job, 0.5, (), timeout_s=30)
        process.wait(10)
    assert (tmp_path / "ended").exists()


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

    monkeypatch.setattr(monitor, "reach", lambda node: Counting())
    plans = [
        BACKENDS["local"].plan(Job(f"job-{number}", ("x.py",), 4, 1, f"{tmp_path}/{'x' * 200}"), attempt=1, port=20000)
        for number in range(100)
    ]
    found = BACKENDS["local"].observe_all(plans)
    assert {status.detail for statuses in found for status in statuses} == {"its folder does not exist"}
    assert len(found) == 100
    assert len(ran) > 1
    assert max(ran) < 100_000
