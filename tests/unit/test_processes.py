"""Stopping the processes of a launch."""

import os
import signal
import subprocess

from cluster.backends import base, processes
from cluster.spec.model import Machine
from cluster.transport.local import Completed, LocalShell
from tests.conftest import wait_until


def test_a_process_whose_parent_was_stopped_before_it_could_forward_the_signal_is_asked_to_end(
    tmp_path, monkeypatch
):
    """A process that forwards the signal is not disturbed."""
    monkeypatch.setattr(processes, "reach", lambda node: LocalShell())
    job = f"stop-{os.getpid()}"
    orphan = f"trap 'touch {tmp_path}/orphan-asked; exit' TERM; touch {tmp_path}/orphan-began; while :; do sleep 0.1; done"
    script = "trap 'bash -c \"$ORPHAN\" & exit' TERM; touch $BEGAN; while :; do sleep 0.1; done"
    forwards = f"trap 'bash -c \"sleep 1; touch {tmp_path}/forwarded\"; exit' TERM; touch $BEGAN; while :; do sleep 0.1; done"
    env = {**os.environ, "CLUSTER_LAUNCH_ID": job, "CLUSTER_ATTEMPT": "1", "ORPHAN": orphan}
    began = [tmp_path / "began-0", tmp_path / "began-1"]
    started = [
        subprocess.Popen(["bash", "-c", text], env={**env, "BEGAN": str(path)})
        for text, path in zip((script, forwards), began, strict=True)
    ]
    assert wait_until(lambda: all(path.exists() for path in began))
    processes.stop(Machine("n0", "", ()), job, 30, (), timeout_s=60)
    assert [process.wait(5) for process in started] == [0, 0]
    assert (tmp_path / "orphan-asked").exists() == (tmp_path / "orphan-began").exists()
    assert (tmp_path / "forwarded").exists()


def test_one_attempt_is_stopped_while_the_next_one_keeps_running(monkeypatch):
    monkeypatch.setattr(processes, "reach", lambda node: LocalShell())
    job = f"stop-{os.getpid()}"
    first, second = (
        subprocess.Popen(
            ["sleep", "60"], env={**os.environ, "CLUSTER_LAUNCH_ID": job, "CLUSTER_ATTEMPT": attempt}
        )
        for attempt in ("1", "2")
    )
    with first, second:
        processes.stop(Machine("n0", "", ()), job, 0.5, (), timeout_s=30, attempt=1)
        assert first.wait(10) == -signal.SIGTERM
        assert second.poll() is None
        processes.stop(Machine("n0", "", ()), job, 0.5, (), timeout_s=30)
        assert second.wait(10) == -signal.SIGTERM


def test_agents_find_the_grace_before_the_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "reach", lambda node: LocalShell())
    script = "trap 'cp grace seen; exit' TERM; touch begun; while :; do sleep 0.05; done"
    job = f"grace-{os.getpid()}"
    with subprocess.Popen(
        ["bash", "-c", script], cwd=tmp_path, env={**os.environ, "CLUSTER_LAUNCH_ID": job}
    ) as process:
        assert wait_until((tmp_path / "begun").exists)
        processes.stop(Machine("n0", "", ()), job, 20.5, (), timeout_s=30, folder=str(tmp_path))
        process.wait(10)
    assert (tmp_path / "seen").read_text() == "21\n"


def test_a_grace_of_half_a_second_lets_a_process_end(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "reach", lambda node: LocalShell())
    script = "trap 'sleep 0.1; touch ended; exit' TERM; touch begun; while :; do sleep 0.05; done"
    job = f"stop-{os.getpid()}"
    with subprocess.Popen(
        ["bash", "-c", script], cwd=tmp_path, env={**os.environ, "CLUSTER_LAUNCH_ID": job}
    ) as process:
        assert wait_until((tmp_path / "begun").exists)
        processes.stop(Machine("n0", "", ()), job, 0.5, (), timeout_s=30)
        process.wait(10)
    assert (tmp_path / "ended").exists()


def test_the_folders_of_killed_agents_are_removed_of_one_attempt_or_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "reach", lambda node: LocalShell())
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    launch = f"{os.getpid():016x}"
    for name in (f"{launch}-1-a", f"{launch}-1-b", f"{launch}-2-c", f"{launch}-12-d", "0123456789abcdef-1-e"):
        (tmp_path / f"clusterctl-{name}").mkdir()

    def left():
        return sorted(path.name.removeprefix("clusterctl-") for path in tmp_path.iterdir())

    processes.stop(Machine("n0", "", ()), launch, 0, (), timeout_s=30, attempt=1)
    assert left() == sorted(["0123456789abcdef-1-e", f"{launch}-12-d", f"{launch}-2-c"])
    processes.stop(Machine("n0", "", ()), launch, 0, (), timeout_s=30)
    assert left() == ["0123456789abcdef-1-e"]


def test_lines_that_a_node_adds_to_what_it_has_left_are_ignored(monkeypatch):
    class Reached:
        def run(self, command, timeout_s):
            out = "user 0\nprocess\nprocess a\nprocess 0123456789abcdef job 0\nsilent\nx y z w v u\n\n"
            return Completed(0, out, "")

    monkeypatch.setattr(base, "reach", lambda node: Reached())
    (found,) = base.found_on(Machine("n0", "", ()), "ssh", ())
    assert (found.job, found.launch_id, found.counts["processes"]) == ("job", "0123456789abcdef", 1)
