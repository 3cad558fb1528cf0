"""The supervisor in the background: it restarts detached jobs, and one process decides at any time."""

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.conftest import ended, processes_of, wait_until
from tests.contract.sshd import TICKS, inventory


@pytest.fixture(params=["local", "ssh"])
def launch(request, clusterctl, job_name):
    """Return the arguments that launch a program on two nodes as this test's job."""
    shutil.copy(TICKS, clusterctl.folder)
    if request.param == "ssh":
        inventory(clusterctl.folder, request.getfixturevalue("sshd"), clusterctl.folder / "remote")
    words = [
        "launch",
        "--backend",
        request.param,
        "--name",
        job_name,
        "--nodes",
        "2",
        "--python",
        sys.executable,
    ]
    words = words if request.param == "ssh" else words[:-2]
    yield lambda program, *more: [*words, "--max-restarts", "1", *more, "--command", program]
    clusterctl.run("stop", job_name)


def row(clusterctl, job):
    """Return the job's row of `ps`."""
    return next(row for row in json.loads(clusterctl.expect(0, "ps", "--all", "--json")) if row["job"] == job)


def supervisor_pid(clusterctl, job):
    """Return the pid of the job's supervisor; 0 if it has none."""
    match = re.fullmatch(
        rf"pid (\d+) on {re.escape(socket.gethostname())}", row(clusterctl, job)["supervisor"]
    )
    return int(match[1]) if match else 0


def kill_a_rank(job):
    ranks = [pid for pid in processes_of(job) if b"LOCAL_RANK=" in variables_of(pid)]
    os.kill(ranks[0], signal.SIGKILL)


def variables_of(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended
        return b""


def has_ended(clusterctl, job):
    return wait_until(lambda: row(clusterctl, job)["state"] == "done", timeout_s=90, pause_s=0.5)


def test_a_followed_log_and_wait_last_until_the_restarted_job_ends(clusterctl, launch, job_name):
    (clusterctl.folder / "twice.py").write_text(
        "import os, time\n"
        "number = os.environ['CLUSTER_ATTEMPT']\n"
        "print('attempt', number, 'begins', flush=True)\n"
        "while number == '1' and not os.path.exists(os.path.join(os.environ['CLUSTER_RUN_DIR'], 'fail')):\n"
        "    time.sleep(0.1)\n"
        "assert number != '1', 'it fails once'\n"
        "print('the last word', flush=True)\n"
    )
    clusterctl.expect(0, *launch("twice.py", "--detach"))
    followed = clusterctl.start("logs", "-f", job_name)
    waiting = clusterctl.start("wait", job_name)
    seen = []
    for line in followed.stdout:
        seen.append(line)
        if "attempt 1 begins" in line:
            for folder in clusterctl.folder.glob(f"*/{job_name}"):
                (folder / "fail").touch()
    text = "".join(seen)
    ended(followed, 0, timeout_s=60)
    assert "restart 1 of 1" in text
    assert text.index("attempt 1 begins") < text.index("attempt 2 begins") < text.index("the last word")
    ended(waiting, 0, timeout_s=60, has="done in")


def exists(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def posted(clusterctl):
    """Return the events that the webhook got."""
    events = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            events.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["event"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        clusterctl.env["CLUSTERCTL_WEBHOOK"] = f"http://127.0.0.1:{server.server_address[1]}/"
        yield events
        server.shutdown()


def test_a_detached_job_is_restarted_after_the_session_of_its_launch_has_ended(
    clusterctl, launch, job_name, posted
):
    clusterctl.expect(0, *launch("ticks.py --ticks-later 5", "--detach"))  # in a session that ends with it
    pid = supervisor_pid(clusterctl, job_name)
    assert os.getsid(pid) == pid
    clusterctl.wait_for(job_name, "tick 1")
    assert f"supervisor: pid {pid} on " in clusterctl.expect(0, "status", job_name)
    kill_a_rank(job_name)
    assert has_ended(clusterctl, job_name)
    assert wait_until(lambda: not exists(pid))
    assert posted == ["restarted", "done"]
    report = (clusterctl.folder / "runs" / job_name / "report.html").read_text()
    status = clusterctl.expect(0, "status", job_name)
    logs = clusterctl.expect(0, "logs", job_name)
    for text in (report, status, logs):
        assert re.search(r"\d\d:\d\d:\d\d node-\d: .*; restart 1 of 1", text), text
        assert "attempt 2 on node-0, node-1" in text, text
    assert re.search("^supervisor [|] 20", logs, re.MULTILINE), logs
    assert row(clusterctl, job_name)["supervisor"] == ""
    assert processes_of(job_name) == []


def test_the_reason_against_a_restart_is_in_the_log_of_the_supervisor(clusterctl, launch, job_name):
    clusterctl.expect(0, *launch("ticks.py --fail-at 2", "--detach", "--max-restarts", "3"))
    clusterctl.expect(1, "wait", job_name)
    status = clusterctl.expect(0, "status", job_name)
    assert "not restarted: it failed before its first step twice" in status, status
    assert status.count("ValueError: this rank fails on purpose") >= 1


def test_stop_ends_the_supervisor(clusterctl, launch, job_name):
    clusterctl.expect(0, *launch("ticks.py", "--detach"))
    pid = supervisor_pid(clusterctl, job_name)
    clusterctl.wait_for(job_name, "tick 1")
    clusterctl.expect(0, "stop", job_name)
    assert wait_until(lambda: not exists(pid))
    assert row(clusterctl, job_name)["state"] == "stopped"
    assert "restart 1" not in clusterctl.expect(0, "status", job_name)
    assert processes_of(job_name) == []


def test_attach_only_displays_a_job_that_has_a_supervisor(clusterctl, launch, job_name):
    clusterctl.expect(0, *launch("ticks.py --ticks-later 20", "--detach"))
    pid = supervisor_pid(clusterctl, job_name)
    first, second = (clusterctl.start("attach", job_name) for _ in range(2))
    for attached in (first, second):
        assert any("tick" in line for line in attached.stdout)
    assert supervisor_pid(clusterctl, job_name) == pid
    first.send_signal(signal.SIGINT)
    ended(first, 130, has="keeps running")
    assert supervisor_pid(clusterctl, job_name) == pid
    assert clusterctl.run("supervise", job_name) == (0, "")  # a second one ends at once
    kill_a_rank(job_name)
    text = ended(second, 0, has="restart 1 of 1")
    assert text.count("attempt 2 on node-0, node-1") == 1
    assert "done in" in text
    assert not (clusterctl.folder / "runs" / job_name / "attempt-3").exists()
    assert processes_of(job_name) == []


def test_attach_leaves_a_supervisor_behind_if_there_was_none(clusterctl, launch, job_name):
    launcher = clusterctl.start(*launch("ticks.py --ticks-later 5"))
    clusterctl.wait_for(job_name, "tick 1")
    assert supervisor_pid(clusterctl, job_name) == launcher.pid
    launcher.kill()
    launcher.communicate()
    assert row(clusterctl, job_name)["supervisor"] == "none"
    clusterctl.expect(0, "status", job_name, has=f"to change that: clusterctl attach {job_name}")
    attached = clusterctl.start("attach", job_name)
    assert any("tick" in line for line in attached.stdout)
    assert supervisor_pid(clusterctl, job_name) == attached.pid
    attached.send_signal(signal.SIGINT)
    ended(attached, 130, has="keeps running")
    assert supervisor_pid(clusterctl, job_name) not in (0, attached.pid)
    kill_a_rank(job_name)
    assert has_ended(clusterctl, job_name)
    assert "attempt 2 on node-0, node-1" in clusterctl.expect(0, "status", job_name)
    assert processes_of(job_name) == []


def test_a_closed_terminal_leaves_a_supervisor_behind(clusterctl, launch, job_name):
    terminal, end = pty.openpty()

    def own_the_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    argv = [sys.executable, "-m", "cluster", *launch("ticks.py --ticks-later 5")]
    launcher = subprocess.Popen(
        argv,
        cwd=clusterctl.folder,
        env=clusterctl.env,
        stdin=end,
        stdout=end,
        stderr=end,
        preexec_fn=own_the_terminal,
    )
    os.close(end)
    shown = threading.Event()
    is_closed = threading.Event()

    def read():
        while not is_closed.is_set():
            if select.select([terminal], [], [], 0.1)[0] and b"tick 1" in os.read(terminal, 1 << 16):
                shown.set()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(read)
        try:
            assert shown.wait(60)
            assert supervisor_pid(clusterctl, job_name) == launcher.pid
        finally:
            is_closed.set()
    os.close(terminal)
    assert launcher.wait(60) == 128 + signal.SIGHUP
    assert supervisor_pid(clusterctl, job_name) not in (0, launcher.pid)
    kill_a_rank(job_name)
    assert has_ended(clusterctl, job_name)
    assert "attempt 2 on node-0, node-1" in clusterctl.expect(0, "status", job_name)
    assert processes_of(job_name) == []


def test_the_next_attempt_gets_the_secrets_of_the_launch(clusterctl, launch, job_name):
    (clusterctl.folder / "secret.py").write_text(
        "import os, time\n"
        "print('sees', os.environ['TOKEN'] == 'of the launch', flush=True)\n"
        "time.sleep(600 if os.environ['CLUSTER_ATTEMPT'] == '1' else 0)\n"
    )
    (clusterctl.folder / "tokens.env").write_text("TOKEN=of the launch\n")
    clusterctl.expect(0, *launch("secret.py", "--env-file", "tokens.env", "--detach"))
    (clusterctl.folder / "tokens.env").unlink()
    pid = supervisor_pid(clusterctl, job_name)
    for kept in ("cmdline", "environ"):
        assert b"of the launch" not in Path(f"/proc/{pid}/{kept}").read_bytes()
    clusterctl.wait_for(job_name, "sees True")
    kill_a_rank(job_name)
    assert has_ended(clusterctl, job_name)
    clusterctl.wait_for(job_name, "sees True", attempt=2)


EXITS = {
    "import sys; sys.exit(3)": "it printed no reason",
    "import sys; sys.exit('no module named x')": "no module named x",
}


@pytest.mark.parametrize("launch", ["local"], indirect=True)
@pytest.mark.parametrize("program", EXITS)
def test_a_supervisor_that_cannot_start_is_said_at_the_launch(clusterctl, launch, job_name, program):
    reason = EXITS[program]
    code = "import cluster.supervisor.background as background\nfrom cluster.cli.main import main\n"
    code += f"background._PROGRAM = {program!r}\nmain()"
    # More than a pipe holds, so the launcher is still writing when the supervisor exits.
    (clusterctl.folder / "tokens.env").write_text(f"TOKEN={'x' * 100_000}\n")
    argv = [sys.executable, "-c", code, *launch("ticks.py", "--env-file", "tokens.env", "--detach")]
    done = subprocess.run(
        argv,
        cwd=clusterctl.folder,
        env=clusterctl.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done
    assert done.stdout.count("no supervisor runs in the background") == 1
    assert re.search(rf"it exited with \d: .*{reason}", done.stdout)
    assert f"clusterctl attach {job_name}" in done.stdout
    assert row(clusterctl, job_name)["supervisor"] == "none"


@pytest.mark.parametrize("launch", ["ssh"], indirect=True)
def test_a_supervisor_waits_for_machines_that_do_not_answer(clusterctl, launch, sshd, job_name):
    launcher = clusterctl.start(*launch("ticks.py --ticks 60 --every 0.5"))
    clusterctl.wait_for(job_name, "tick 1")
    launcher.kill()
    launcher.communicate()
    sshd.stop()
    supervisor = clusterctl.start("supervise", job_name)
    log = clusterctl.folder / "runs" / job_name / "supervisor.log"
    assert wait_until(lambda: log.exists() and "trying again" in log.read_text(), timeout_s=60)
    sshd.start()
    ended(supervisor, 0)
    assert row(clusterctl, job_name)["state"] == "done"
    assert log.read_text().count("trying again") == 1
