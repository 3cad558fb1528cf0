"""The agent as a real process on this machine, with ranks that need no torch."""

import contextlib
import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.agent import scripts
from cluster.agent.app.node_agent.output import Status
from cluster.agent.app.node_agent.ranks import SECONDARY, first_failure
from cluster.agent.app.node_agent.settings import EXIT_NODE, Settings, rank_command
from cluster.agent.app.node_agent.sitecustomize import STACK_SIGNAL
from cluster.agent.app.node_agent.stacks import catches, is_same_place, place, waits_for_others
from cluster.agent.app.node_agent.usage import Usage, query_gpus
from cluster.backends import BACKENDS, logs, script
from cluster.spec.model import Job
from tests import nvidia_smi
from tests.conftest import wait_until
from trainer.distributed.spawn import free_port

AGENT = Path(scripts.__file__).parent / "app"


def change_agent(monkeypatch, folder, file, old, new):
    """Let the nodes of a test run a copy of the agent in which one constant differs."""
    copy = shutil.copytree(AGENT, folder / "app")
    text = (copy / "node_agent" / file).read_text()
    assert old in text
    (copy / "node_agent" / file).write_text(text.replace(old, new))
    monkeypatch.setattr(f"{__name__}.AGENT", copy)


@pytest.mark.parametrize(
    ("node", "ranks", "first"),
    [("0", 2, {}), ("1", 1, {"CLUSTER_FIRST_RANK": "2"}), ("2", 2, {"CLUSTER_FIRST_RANK": "3"})],
)
def test_ranks_of_unequal_nodes_are_numbered_after_those_of_the_nodes_before(tmp_path, node, ranks, first):
    begin = int(first.get("CLUSTER_FIRST_RANK", "0"))
    fails = int(node) + 1
    program = f"""
print('is', *map(os.environ.get, ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'ROLE_RANK')))
open(f"{{os.environ['CLUSTER_RUN_DIR']}}/rank-{{rank}}", "w").close()
while sum(name.startswith("rank-") for name in os.listdir(os.environ['CLUSTER_RUN_DIR'])) < {ranks}:
    time.sleep(0.01)
sys.exit(rank == {fails})
"""
    shared = {"PET_NNODES": "3", "PET_NODE_RANK": node, "CLUSTER_WORLD_SIZE": "5", "CLUSTER_NODE": "node-0"}
    code, out, status = Node(tmp_path, program, ranks=ranks, **shared, **first).end()
    for local in range(ranks):
        assert f"is {begin + local} 5 {local} {ranks} {begin + local}" in out
    assert (code, status["failure"]["rank"], status["failure"]["local_rank"]) == (1, fails, fails - begin)


class Node:
    """One node's agent, started with a program as its ranks."""

    def __init__(self, folder, program, *arguments, ranks=2, **variables):
        self.folder = folder
        script = folder / "program.py"
        script.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + program)
        environment = {
            "PATH": os.environ["PATH"],
            "PET_NNODES": "1",
            "PET_NODE_RANK": "0",
            "PET_NPROC_PER_NODE": str(ranks),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(free_port()),
            "CLUSTER_JOB_ID": "job",
            "CLUSTER_ATTEMPT": "1",
            "CLUSTER_RUN_DIR": str(folder),
            "TMPDIR": str(folder / "tmp"),
            **variables,
        }
        (folder / "tmp").mkdir(exist_ok=True)
        command = [sys.executable, str(AGENT), str(script), *arguments]
        self.errors = (folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )

    def end(self):
        """Return the exit code, the console output, and the status file."""
        with self.process:
            try:
                out, _ = self.process.communicate(timeout=120)
            except BaseException:
                self.process.kill()  # or leaving the block would wait for it
                raise
        with self.errors:
            self.errors.seek(0)
            assert self.errors.read() == ""
        return self.process.returncode, out, self.status()

    def status(self):
        return json.loads(self.path("node-0.json").read_text())

    def program(self):
        return (self.folder / "program.py").read_text().splitlines()

    def path(self, name):
        return self.folder / "attempt-1" / name

    def lines(self):
        path = self.path("node-0.log")
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, *lines):
        """Wait until the log has these lines, in any order."""
        until = time.time() + 60
        while not set(lines) <= set(self.lines()):
            assert time.time() < until, f"not in the log: {lines}"
            time.sleep(0.02)


def is_running(pid):
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


FAILURES = {
    "exception": ("raise OSError(30, 'Read-only file system', '/x')", "OSError: [Errno 30] Read-only", 1),
    "exit": ("os._exit(3)", "exit code 3", 3),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL", 137),
    "crash": ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV", 139),
}
#: The other rank fails second, after the failing one has recorded its exception or has exited.
PEER = """
folder = os.environ['CLUSTER_RUN_DIR']
pid = os.path.join(folder, 'pid')
if rank != {failing}:
    while not os.path.exists(pid):
        time.sleep(0.01)
    record = os.path.join(os.environ['PYTHONPATH'], 'rank-{failing}.json')
    while os.path.exists('/proc/' + os.readlink(pid)) and not os.path.exists(record):
        time.sleep(0.01)
    raise RuntimeError('[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:27041')
os.symlink(str(os.getpid()), pid)
"""


@pytest.mark.parametrize("how", list(FAILURES))
@pytest.mark.parametrize("failing", [0, 1])
def test_the_first_failure_is_that_of_the_rank_that_caused_it(tmp_path, how, failing):
    """Also if the other rank exits earlier than the rank that raised."""
    statement, error, code = FAILURES[how]
    slow = "import atexit; atexit.register(time.sleep, 2)\n"
    exit_code, _, status = Node(tmp_path, PEER.format(failing=failing) + slow + statement).end()
    failure = status["failure"]
    assert (failure["rank"], failure["exit_code"], failure["secondary"]) == (failing, code, False)
    assert failure["error"].startswith(error)
    assert (exit_code, status["phase"], status["exit_code"]) == (code, "exited", code)
    assert not list((tmp_path / "tmp").iterdir())


def test_the_failure_of_a_node_whose_ranks_lost_a_peer_is_secondary(tmp_path):
    _, _, status = Node(tmp_path, "raise RuntimeError('Connection closed by peer')").end()
    assert status["failure"]["secondary"]


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        (
            "RuntimeError: [gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:3216: Connection reset by peer",
            True,
        ),
        ("DistBackendError: NCCL error: ncclRemoteError: ", True),
        ("DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.", True),
        ("DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cpu//0/1", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False),
        ("ValueError: this rank fails on purpose", False),
    ],
)
def test_only_a_lost_connection_to_another_rank_is_secondary(error, secondary):
    assert bool(SECONDARY.match(error)) == secondary


def test_the_error_event_of_a_program_is_its_failure(tmp_path):
    program = """
print('::cluster {"event":"failed","error":"--batch 1: too small","hint":"--batch 2","exit_code":2}', flush=True)
sys.exit(2)
"""
    code, out, status = Node(tmp_path, program, ranks=1).end()
    assert code == 2
    assert "::cluster" not in out
    assert (status["failure"]["error"], status["failure"]["hint"]) == ("--batch 1: too small", "--batch 2")


def test_ranks_have_torchruns_variables_and_their_own_logs(tmp_path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    program = f"print(*(os.environ[name] for name in {names}), sys.argv[1:])"
    code, out, _ = Node(tmp_path, program, "--a", "$b ''").end()
    assert code == 0
    lines = [f"{rank} {rank} 2 2 0 127.0.0.1 ['--a', \"$b ''\"]" for rank in (0, 1)]
    assert sorted(out.splitlines()) == sorted([lines[0], f"[1] {lines[1]}"])
    assert [(tmp_path / f"attempt-1/ranks/node-0/{rank}.log").read_text() for rank in (0, 1)] == [
        f"{line}\n" for line in lines
    ]


def test_values_of_secrets_are_masked_in_every_log_and_in_the_failure(tmp_path):
    program = "print('the secret is hunter2!')\n"
    program += "raise ValueError('token ' + os.environ['TOKEN'])"
    node = Node(tmp_path, program, ranks=1, CLUSTER_SECRETS="TOKEN,OTHER", TOKEN="hunter2")
    code, out, status = node.end()
    assert code == 1
    assert status["failure"]["error"] == "ValueError: token ***"
    files = [path.read_text() for path in tmp_path.rglob("*.*") if path.is_file() and path.suffix != ".py"]
    assert not [text for text in [*files, out] if "hunter2" in text]
    assert "the secret is ***!\n" in node.path("node-0.log").read_text()


def test_a_secret_changes_no_event_and_no_prefix_of_the_log(tmp_path):
    """The values occur in the events and in the agent's and the setup's own prefixes."""
    values = {"A": "true", "B": "reachable", "C": "agent", "D": "setup", "E": "::cluster", "F": "joining"}
    variables = {**values, **setup_variables(tmp_path, "echo installing")}
    event = {"event": "ready", "device": "agent", "ok": True}
    program = (
        f"print('::cluster ' + {json.dumps(json.dumps(event))}, flush=True)\nraise KeyError('reachable')"
    )
    node = Node(tmp_path, program, ranks=1, CLUSTER_SECRETS=",".join(values), **variables)
    code, _, status = node.end()
    assert (code, status["failure"]["error"]) == (1, "KeyError: '***'")
    events = [found for line in node.lines() if (found := logs.event(line))]
    assert [found.kind for found in events if found.kind != "joining"] == ["setup", "ready"]
    assert [found.device for found in events if found.kind == "ready"] == ["***"]
    assert "setup: installing" in node.lines()
    assert [line for line in node.lines() if line.startswith("agent: rank 0 failed first")]


def test_a_progress_bar_is_one_line_at_a_time(tmp_path):
    program = "for k in range(3): sys.stdout.write(f'\\r{k} %')\nprint('\\rdone')"
    _, out, _ = Node(tmp_path, program, ranks=1).end()
    assert out == "done\n"


def test_a_slow_progress_bar_is_shown_before_it_ends(tmp_path, monkeypatch):
    """The test's agent writes a state of the bar after 0.1 s instead of 5."""
    change_agent(monkeypatch, tmp_path, "ranks.py", "PROGRESS_BAR_S = 5.0", "PROGRESS_BAR_S = 0.1")
    program = """
log = os.path.join(os.environ['CLUSTER_RUN_DIR'], 'attempt-1', 'node-0.log')
for k in range(4):
    sys.stdout.write(f'\\r{k} %')
    sys.stdout.flush()
    while k > 0 and f'{k - 1} %' not in open(log).read():
        time.sleep(0.05)
    time.sleep(0.2)
print()
"""
    _, out, _ = Node(tmp_path, program, ranks=1).end()
    assert out.splitlines() == ["0 %", "1 %", "2 %", "3 %"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGUSR2, 75), (signal.SIGTERM, 75), (signal.SIGINT, 75)]
)
def test_a_checkpoint_signal_reaches_the_ranks_and_exit_code_75_is_the_nodes(tmp_path, number, code):
    program = """
for number in (signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, lambda *_: sys.exit(75))
print('ready', flush=True)
time.sleep(60)
"""
    node = Node(tmp_path, program)
    node.wait_for("ready", "[1] ready")
    node.process.send_signal(number)
    assert node.end()[0] == code
    assert node.status()["failure"] is None


#: Writes a checkpoint after SIGTERM, which takes longer than the graces of 0.1 s below with their margin.
SLOW_SAVE = """
def save(*_):
    time.sleep(2)
    print('saved', flush=True)
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
print('ready', flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("job_s", "stop_s", "code"),
    [
        ("0.1", "", 137),
        ("0.1", "60", 75),
        ("60", "", 75),
        ("60", "0.1", 137),
        ("", "", 75),
        ("", "no number", 75),
    ],
)
def test_the_agent_waits_as_long_as_the_stop_or_else_the_job_says(tmp_path, monkeypatch, job_s, stop_s, code):
    """The test's agent waits 0.1 s longer instead of 10."""
    change_agent(monkeypatch, tmp_path, "settings.py", "GRACE_MARGIN_S = 10.0", "GRACE_MARGIN_S = 0.1")
    node = Node(tmp_path, SLOW_SAVE, ranks=1, CLUSTER_GRACE=job_s)
    node.wait_for("ready")
    if stop_s:
        node.path("grace").write_text(f"{stop_s}\n")
    node.process.send_signal(signal.SIGTERM)
    assert node.end()[0] == code
    assert ("saved" in node.lines()) == (code == 75)


#: Ends as its first argument says; what its second argument names then keeps the last rank.
LINGERING = """
import atexit, threading
for_ever = threading.Event().wait
how, kept_by = sys.argv[1:]
if rank == int(os.environ["WORLD_SIZE"]) - 1:
    if kept_by == "a thread":
        threading.Thread(target=for_ever).start()
    elif kept_by == "an exit function":
        atexit.register(for_ever)
    elif kept_by == "a pool":
        from concurrent.futures import ThreadPoolExecutor
        ThreadPoolExecutor().submit(for_ever)
    print("ready", flush=True)
    if how == "raises":
        raise ValueError("bad")
    sys.exit({"returns": None, "exits": 3}[how])
"""


def lingering(node):
    """Return the ranks of the node's status that have not exited although its program has ended."""
    return node.status().get("leaving") if node.path("node-0.json").exists() else None


@pytest.mark.parametrize("kept_by", ["a thread", "an exit function", "a pool"])
def test_a_rank_that_cannot_exit_is_in_the_status_and_ends_at_once_when_it_is_stopped(tmp_path, kept_by):
    node = Node(tmp_path, LINGERING, "returns", kept_by)
    assert wait_until(lambda: lingering(node) == [1])
    node.process.send_signal(signal.SIGTERM)
    code, _, status = node.end()
    assert (code, status["exit_code"], status["failure"]) == (0, 0, None)


def test_a_node_on_which_a_rank_still_works_is_not_leaving(tmp_path):
    node = Node(tmp_path, LINGERING + "else:\n    time.sleep(600)\n", "returns", "a thread")
    node.wait_for("[1] ready")
    assert wait_until(lambda: list((tmp_path / "tmp").rglob("rank-1.json.end")))
    started = node.status()["heartbeat"]
    assert wait_until(lambda: node.status()["heartbeat"] > started + 2)
    assert lingering(node) == []
    node.process.send_signal(signal.SIGTERM)
    assert node.end()[0] == 143


@pytest.mark.parametrize(
    ("how", "code", "error"), [("raises", 1, "ValueError: bad"), ("exits", 3, "exit code 3")]
)
def test_a_rank_that_has_failed_and_cannot_exit_is_killed_after_the_grace(
    tmp_path, monkeypatch, how, code, error
):
    change_agent(monkeypatch, tmp_path, "settings.py", "GRACE_MARGIN_S = 10.0", "GRACE_MARGIN_S = 0.1")
    ended = Node(tmp_path, LINGERING, how, "a thread", CLUSTER_GRACE="0.1").end()
    assert (ended[0], ended[2]["failure"]["error"]) == (code, error)
    assert "agent: rank 1 has failed, but does not exit: killing it" in ended[1]


def test_the_first_failure_is_found_when_the_agent_finds_several_ranks_dead(tmp_path):
    """The agent is suspended while both fail. It finds rank 0, the consequence, first."""
    program = """
print("ready", flush=True)
while not os.path.exists(os.path.join(os.environ['CLUSTER_RUN_DIR'], 'fail')):
    time.sleep(0.01)
if rank == 1:
    os._exit(3)
raise RuntimeError('[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:27041')
"""
    node = Node(tmp_path, program)
    node.wait_for("ready", "[1] ready")
    children = Path(f"/proc/{node.process.pid}/task/{node.process.pid}/children").read_text().split()
    node.process.send_signal(signal.SIGSTOP)
    (tmp_path / "fail").touch()
    until = time.time() + 20
    while any(is_running(pid) for pid in children):
        assert time.time() < until
        time.sleep(0.02)
    node.process.send_signal(signal.SIGCONT)
    assert node.end()[0] == 3
    failure = node.status()["failure"]
    assert (failure["rank"], failure["error"], failure["secondary"]) == (1, "exit code 3", False)


def test_the_ranks_of_a_killed_agent_are_killed(tmp_path):
    node = Node(tmp_path, "print(os.getpid(), flush=True)\ntime.sleep(60)", ranks=1)
    until = time.time() + 20
    while not (pids := [line for line in node.lines() if line.isdigit()]):
        assert time.time() < until
        time.sleep(0.02)
    with node.process, node.errors:
        node.process.kill()
    while is_running(pids[0]):
        assert time.time() < until
        time.sleep(0.02)


def test_processes_that_the_ranks_have_started_are_killed_at_the_end(tmp_path):
    program = "import subprocess\nprint(subprocess.Popen(['setsid', 'sleep', '600']).pid, flush=True)"
    code, out, _ = Node(tmp_path, program, ranks=1).end()
    assert code == 0
    assert not is_running(out.strip())


def test_the_ranks_end_after_the_nodes_script_has_died(tmp_path, monkeypatch):
    """The script's file does not change; the test's agent waits for 1 s instead of 30."""
    change_agent(monkeypatch, tmp_path, "agent.py", "SCRIPT_TIMEOUT_S = 30.0", "SCRIPT_TIMEOUT_S = 1.0")
    (tmp_path / "attempt-1").mkdir()
    (tmp_path / "attempt-1" / "node-0.alive").write_text("0")
    code, out, _ = Node(tmp_path, "time.sleep(60)", ranks=1).end()
    assert (code, "script outside of the container has died" in out) == (143, True)


def status_when(node, is_wanted):
    """Wait until the node's status is as wanted, and return it."""
    until = time.time() + 60
    while not (node.path("node-0.json").exists() and is_wanted(node.status())):
        assert time.time() < until, node.lines()
        time.sleep(0.02)
    return node.status()


def has_exited(status):
    return status["phase"] == "exited"


@pytest.mark.parametrize("how", ["collected", "SIGTERM", "time"])
def test_a_held_container_ends_when_its_files_are_collected(tmp_path, how):
    hold_s = "0.5" if how == "time" else "600"
    node = Node(tmp_path, "sys.exit(3)", ranks=1, CLUSTER_HOLD=hold_s)
    status = status_when(node, has_exited)
    assert status["exit_code"] == 3
    if how != "time":
        node.process.send_signal(signal.SIGINT)  # it stops ranks, and there are none left
        with pytest.raises(subprocess.TimeoutExpired):
            node.process.wait(1.5)
    if how == "collected":
        node.path("node-0.collected").touch()
    elif how == "SIGTERM":
        node.process.send_signal(signal.SIGTERM)
    assert node.end()[0] == 3


def test_a_pod_begins_without_the_files_that_a_volume_has_kept_of_an_earlier_job(tmp_path):
    for _ in range(2):
        node = Node(tmp_path, "print('once', flush=True)", ranks=1, CLUSTER_HOLD="600")
        status_when(node, has_exited)
        assert node.path("node-0.log").read_text().count("once") == 1
        assert node.path("ranks/node-0/0.log").read_text().count("once") == 1
        node.path("node-0.collected").touch()
        assert node.end()[0] == 0
        node.path("node-0.json").unlink()  # the next round waits for a new one


@pytest.mark.parametrize("phase", ["setup", "name", "running"])
def test_a_container_that_got_sigterm_is_not_held(tmp_path, phase):
    """The engine counts its own grace from then on."""
    variables = {"CLUSTER_HOLD": "600"}
    if phase == "setup":
        variables.update(setup_variables(tmp_path, "echo started; sleep 100"))
    elif phase == "name":
        variables.update(PET_MASTER_ADDR="no.such.invalid", CLUSTER_RENDEZVOUS_TIMEOUT="600")
    node = Node(tmp_path, "print('started', flush=True)\ntime.sleep(60)", ranks=1, **variables)
    if phase == "name":
        status_when(node, lambda status: "joining" in status["events"])
    else:
        node.wait_for("setup: started" if phase == "setup" else "started")
    node.process.send_signal(signal.SIGTERM)
    assert node.end()[0] == (143 if phase == "running" else EXIT_NODE)


@pytest.mark.parametrize("cause", ["the port", "SIGINT"])
def test_a_container_is_held_also_after_a_failed_start_and_a_stop_of_the_launcher(tmp_path, cause):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        variables = {"PET_MASTER_PORT": str(server.getsockname()[1])} if cause == "the port" else {}
        program = "print('started', flush=True)\ntime.sleep(60)"
        node = Node(tmp_path, program, ranks=1, CLUSTER_HOLD="600", **variables)
        if cause == "SIGINT":
            node.wait_for("started")
            node.process.send_signal(signal.SIGINT)
        code = status_when(node, has_exited)["exit_code"]
        with pytest.raises(subprocess.TimeoutExpired):
            node.process.wait(1.5)
        node.path("node-0.collected").touch()
        assert node.end()[0] == code == (143 if cause == "SIGINT" else EXIT_NODE)


def test_ranks_start_once_the_name_of_the_master_resolves(tmp_path, monkeypatch):
    """In the test's agent a name resolves if a file has it, as in the DNS of a cluster that does not know a new pod."""
    resolve = f"open({str(tmp_path / 'dns')!r}).read()\n                socket.getaddrinfo('127.0.0.1'"
    change_agent(monkeypatch, tmp_path, "agent.py", "socket.getaddrinfo(self._settings.master", resolve)
    variables = {"PET_MASTER_ADDR": "job-0.job", "CLUSTER_RENDEZVOUS_TIMEOUT": "600"}
    node = Node(tmp_path, "print('started')", ranks=1, **variables)
    event = status_when(node, lambda status: "joining" in status["events"])["events"]["joining"]
    assert (event["reachable"], event["listening"], event["why"]) == (
        False,
        False,
        "No such file or directory",
    )
    before = status_when(node, lambda status: True)["heartbeat"]
    assert status_when(node, lambda status: status["heartbeat"] > before)["phase"] == "starting"
    assert "started" not in node.lines()
    (tmp_path / "dns").touch()
    code, out, _ = node.end()
    assert (code, out) == (0, "started\n")


def test_a_master_whose_name_never_resolves_is_the_nodes_failure(tmp_path):
    variables = {"PET_MASTER_ADDR": "no.such.invalid", "CLUSTER_RENDEZVOUS_TIMEOUT": "1.5"}
    code, out, status = Node(tmp_path, "print('started')", ranks=1, **variables).end()
    error = status["failure"]["error"]
    assert (code, "started" in out) == (EXIT_NODE, False)
    assert re.fullmatch(r"the name no\.such\.invalid does not resolve after 1\.5 s: .+", error)


NEWER = "attempt-10"  # as text, it is less than attempt-9


def of_attempt_9(tmp_path, monkeypatch, program):
    """Start ranks as attempt 9, after an attempt 10 that does not run any more."""
    fast_agent(monkeypatch, tmp_path)
    (tmp_path / NEWER).mkdir()
    (tmp_path / NEWER / "node-0.json").write_text("{}")
    node = Node(tmp_path, program, CLUSTER_ATTEMPT="9")
    node.path = lambda name: tmp_path / "attempt-9" / name
    node.wait_for("ready", "[1] ready")
    return node


def heartbeats(node, number):
    """Wait for so many heartbeats, at each of which the agent checks for a newer attempt."""
    for _ in range(number):
        last = node.status()["heartbeat"]
        status_when(node, lambda status, last=last: status["heartbeat"] > last)


#: Ranks that would write a checkpoint after SIGTERM, which takes a second.
SAVES = """
def save(*_):
    print('saving', flush=True)
    time.sleep(1)
    print('saved', flush=True)
    sys.exit(75)

for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, save)
print('ready', flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("newer", [f"{NEWER}/node-0.json", f"{NEWER}/node-1.json", "attempt-11/node-0.json"])
def test_the_ranks_are_killed_at_once_when_an_agent_of_a_newer_attempt_runs(tmp_path, monkeypatch, newer):
    node = of_attempt_9(tmp_path, monkeypatch, SAVES)
    heartbeats(node, 2)
    path = tmp_path / newer
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"phase": "starting"}')
    code, out, status = node.end()
    why = f"attempt {path.parent.name[8:]} of this job has started"
    assert (code, status["exit_code"], status["reason"], status["failure"]) == (137, 137, why, None)
    assert f"agent: {why}: stopping the ranks" in node.lines()
    assert "saving" not in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_ranks_that_write_their_last_checkpoint_may_finish_it(tmp_path, monkeypatch, number):
    node = of_attempt_9(tmp_path, monkeypatch, SAVES)
    node.process.send_signal(number)
    node.wait_for("saving", "[1] saving")
    (tmp_path / NEWER / "node-0.json").write_text('{"phase": "starting"}')
    code, _, _ = node.end()
    assert (code, "saved" in node.lines(), "[1] saved" in node.lines()) == (75, True, True)


def test_neither_an_older_attempt_nor_a_folder_without_an_agent_stops_the_ranks(tmp_path, monkeypatch):
    """The launcher makes the folder of Slurm's next attempt while the ranks may still write their checkpoint."""
    node = of_attempt_9(tmp_path, monkeypatch, SAVES)
    for folder, name in (("attempt-2", "node-0.json"), (NEWER, "node-0.log"), ("attempt-x", "node-0.json")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text("{}")
    (tmp_path / "attempt-11").mkdir()
    heartbeats(node, 3)
    node.process.send_signal(signal.SIGTERM)
    assert node.end()[0] == 75


def test_a_port_in_use_is_the_nodes_failure_and_starts_no_rank(tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = str(server.getsockname()[1])
        code, _, status = Node(tmp_path, "print('ran')", PET_MASTER_PORT=port).end()
    assert code == EXIT_NODE
    assert (status["failure"]["rank"], "EADDRINUSE" in status["failure"]["error"]) == (None, True)


def run_node_script(
    folder, command="echo $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME", more="", runtime="none", **variables
):
    """Run a node's scripts around a command, by default one that prints the network device."""
    begin = "set -u\n" + scripts.text("agent/node_start.sh")
    text = f"{begin}runtime={runtime} enter=() arguments=(sh -c '{command}')\n{more}"
    environment = {"PATH": os.environ["PATH"], "CLUSTER_RUN_DIR": str(folder), "CLUSTER_ATTEMPT": "1"}
    environment |= {"CLUSTER_NODE": "node-1", "PET_NODE_RANK": "1", **variables}
    script = text + scripts.text("agent/wait.sh", "agent/node.sh")
    return subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=False
    )


#: A node's agent, in short. It begins once its parent forwards signals, and ends after 30 s in any case.
CHILD = """
trap 'echo >> saves' USR2
trap 'sleep 0.3; exit 75' TERM
until [ -e waits ]; do sleep 0.02; done
touch started
for _ in $(seq 600); do sleep 0.05; done
"""
PARENT = f"""
bash -c {shlex.quote(CHILD)} &
child=$!
trap 'kill -s USR2 "$child"' USR2
trap 'kill -s TERM "$child" 2>/dev/null' TERM
touch waits
wait_for "$child"
exit "$code"
"""


def test_a_script_that_waits_for_its_child_through_signals_has_the_childs_exit_code(tmp_path):
    """As node.sh and the script of a batch job wait."""
    parent = subprocess.Popen(["bash", "-c", scripts.text("agent/wait.sh") + PARENT], cwd=tmp_path)
    assert wait_until((tmp_path / "started").exists)
    saves = tmp_path / "saves"

    def has_saved_three_times():
        parent.send_signal(signal.SIGUSR2)
        return saves.exists() and len(saves.read_text()) >= 3

    assert wait_until(has_saved_three_times)
    for _ in range(20):  # the last ones while the child ends
        parent.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    assert parent.wait(40) == 75


def test_a_child_that_has_exited_before_the_wait_keeps_its_exit_code():
    script = "bash -c 'exit 3' & sleep 0.2; wait_for $!; exit \"$code\""
    assert subprocess.run(["bash", "-c", scripts.text("agent/wait.sh") + script], check=False).returncode == 3


@pytest.mark.parametrize("variable", ["CLUSTER_NODE_ADDRESS", "CLUSTER_HOSTS"])
def test_gloo_and_nccl_use_the_device_that_has_the_nodes_address(tmp_path, variable):
    listed = subprocess.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True, check=True).stdout
    # Docker's bridges and pairs may be removed by other tests.
    lines = [line for line in listed.splitlines() if not re.match(r"\d+: (br-|docker|veth)", line)]
    _, device, _, address = lines[-1].split()[:4]
    assert (
        run_node_script(tmp_path, **{variable: address.partition("/")[0]}).stdout == f"{device} ={device}\n"
    )
    assert run_node_script(tmp_path, **{variable: "127.0.1.5"}).stdout == "lo =lo\n"
    assert run_node_script(tmp_path, GLOO_SOCKET_IFNAME="x", **{variable: "127.0.1.5"}).stdout == "x =lo\n"


def test_a_peer_without_an_address_is_the_nodes_failure(tmp_path):
    done = run_node_script(tmp_path, CLUSTER_HOSTS="no.such.host.invalid here")
    assert (done.returncode, done.stdout) == (EXIT_NODE, "")
    assert (
        "node-1: the name no.such.host.invalid does not resolve"
        in (tmp_path / "attempt-1/node-1.err").read_text()
    )
    assert (tmp_path / "attempt-1/node-1.exit").read_text().startswith("71 ")


def test_a_node_takes_its_secrets_from_the_variable_of_a_slurm_job(tmp_path):
    values = scripts.exports({"TOKEN": "it's $HOME\n`id`", "OTHER": ""})
    show = 'printf %s "$TOKEN"; printenv CLUSTER_SECRET_VALUES; true'
    names = {"CLUSTER_SECRETS": "TOKEN,OTHER", "CLUSTER_SECRET_VALUES": values}
    assert run_node_script(tmp_path, show, **names).stdout == "it's $HOME\n`id`"
    missing = run_node_script(tmp_path, show, CLUSTER_SECRETS="TOKEN")
    assert (missing.returncode, "the secret TOKEN has no value" in missing.stderr) == (EXIT_NODE, True)


@pytest.mark.parametrize(
    ("arguments", "changes", "enters"),
    [
        (["/run/agent.pyz"], {}, True),
        ([], {}, False),  # a rank has its agent's variables
        (["/run/agent.pyz"], {"CLUSTER_ATTEMPT": "2"}, False),
        (["/run/agent.pyz"], {"CLUSTER_NODE": "node-1"}, False),
        (["/run/agent.pyz"], {"CLUSTER_RUN_DIR": "/runs/another"}, False),
    ],
)
def test_exec_enters_only_the_process_that_is_the_nodes_agent(tmp_path, arguments, changes, enters):
    """Another process may have the pid of an agent that was killed."""
    job = Job("job", ("x.py",), 1, 1, str(tmp_path))
    plan = BACKENDS["local"].plan(job, attempt=1, port=20000)
    variables = {"CLUSTER_RUN_DIR": plan.run_dir, "CLUSTER_ATTEMPT": "1", "CLUSTER_NODE": "node-0", **changes}
    argv = [sys.executable, "-c", "import time; time.sleep(60)", *arguments]
    with subprocess.Popen(argv, env={**variables, "PATH": os.environ["PATH"]}) as other:
        try:
            Path(plan.attempt_dir).mkdir(parents=True)
            Path(plan.attempt_dir, "node-0.agent").write_text(f"{other.pid} running\n")
            argv = script.exec_command(job, plan, plan.nodes[0], ["printenv", "CLUSTER_NODE"], tty=False)
            done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        finally:
            other.kill()
    refused = "node-0: its agent does not run on" in done.stderr
    assert (done.returncode, done.stdout, refused) == (
        (0, "node-0\n", False) if enters else (EXIT_NODE, "", True)
    ), done


def test_the_node_adds_the_date_of_an_image_file_or_the_engines_id(tmp_path):
    image = tmp_path / "an image.sif"
    image.write_text("12345")
    os.utime(image, (7, 7))
    assert (
        run_node_script(tmp_path, "echo $CLUSTER_IMAGE", CLUSTER_IMAGE=str(image)).stdout == f"{image} 5 7\n"
    )
    (tmp_path / "docker").write_text(
        "#!/bin/sh\n[ \"$*\" = 'image inspect --format {{.Id}} name:1' ] && echo sha256:12"
    )
    (tmp_path / "docker").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    function = scripts.text("runtimes/docker.sh").partition("prepare()")[0]
    shown = run_node_script(
        tmp_path, "echo $CLUSTER_IMAGE", function, "docker", PATH=path, CLUSTER_IMAGE="name:1"
    ).stdout
    assert shown == "name:1 sha256:12\n"


def test_the_images_own_sitecustomize_is_imported(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('own hook')")
    _, out, status = Node(tmp_path, "raise KeyError('x')", ranks=1, PYTHONPATH=str(tmp_path / "own")).end()
    assert "own hook" in out
    assert status["failure"]["error"] == "KeyError: 'x'"


def test_the_status_has_the_last_event_of_each_kind_without_secrets(tmp_path):
    """The launcher learns the phase from it, without the log."""
    program = """
import json
def say(**event):
    print('::cluster ' + json.dumps(event), flush=True)
if rank == 0:
    say(event='ready', node=0, time=1.5, device='hunter2 cpu', flag=True)
    for step in (1, 2, 3):
        say(event='progress', node=0, step=step, parts=['hunter2', {'a': 'hunter2'}])
    say(event='metric', node=0, text='x' * 20000)
    say(event='other', node=0)
    say(event=['odd'])
    print('::cluster [1]', flush=True)
    sys.stdin.read()
    folder = os.path.join(os.environ['CLUSTER_RUN_DIR'], 'attempt-1')
    until = time.monotonic() + 20
    while '"ready"' not in open(os.path.join(folder, 'node-0.json')).read():
        time.sleep(0.01)
        if time.monotonic() > until:
            os._exit(4)
else:
    time.sleep(0.5)
"""
    variables = setup_variables(tmp_path, "true") | {"CLUSTER_SECRETS": "TOKEN", "TOKEN": "hunter2"}
    code, _, status = Node(tmp_path, program, **variables).end()
    assert code == 0
    events = status["events"]
    assert events["ready"] == {"event": "ready", "node": 0, "time": 1.5, "device": "*** cpu", "flag": True}
    assert (events["progress"]["step"], events["progress"]["parts"]) == (3, ["***", {"a": "***"}])
    assert events["setup"]["node"] == events["joining"]["node"] == 0
    assert sorted(events) == ["joining", "progress", "ready", "setup"]


def test_values_of_events_that_do_not_fit_are_counted_and_end_nothing(tmp_path):
    program = """
print('::cluster {"event":"progress","node":0,"x":' + 600 * '[' + 600 * ']' + '}')
for step in range(3):
    print('::cluster {"event":"progress","node":0,"step":%d,"eta_s":Infinity}' % step)
print('::cluster {"event":"ready","node":0,"time":' + 5000 * '9' + '}')
print('::cluster {"event":"failed","error":"boom","time":-Infinity}', flush=True)
sys.exit(3)
"""
    node = Node(tmp_path, program, ranks=1)
    code, _, status = node.end()
    assert (code, status["failure"]["error"], status["failure"]["time"] > 1e9) == (3, "boom", True)
    assert status["events"]["progress"]["step"] == 2
    ignored = [line.partition("rank 0: ignored")[2] for line in node.lines() if "rank 0: ignored" in line]
    fields = ("eta_s of progress", "time of ready", "time of failed")
    once = [f": {field}: its value does not fit (docs/reference/contract.md)" for field in fields]
    assert ignored == [
        *once,
        " values of events: eta_s of progress (3), time of ready (1), time of failed (1)",
    ]


@pytest.mark.parametrize("record", ['{"error": 5}', '{"error": "x", "time": 1e999}', "[]", "\udcff"])
def test_a_rank_that_alters_the_record_of_its_exception_fails_by_its_exit_code(tmp_path, record):
    folder = "os.path.dirname(sys.modules['sitecustomize'].__file__)"
    write = f"open({folder} + '/rank-0.json', 'wb').write({os.fsencode(record)!r})"
    code, _, status = Node(tmp_path, f"{write}\nos._exit(3)", ranks=1).end()
    assert (code, status["failure"]["error"]) == (3, "exit code 3")


def test_shell_scripts_find_the_agents_pid_and_phase_in_a_file_of_one_line(tmp_path):
    node = Node(tmp_path, "print('begun', flush=True)\ntime.sleep(1000)", ranks=1)
    node.wait_for("begun")
    assert wait_until(lambda: node.path("node-0.agent").read_text() == f"{node.process.pid} running\n")
    node.process.terminate()
    node.end()
    assert node.path("node-0.agent").read_text() == f"{node.process.pid} exited\n"


def test_a_full_disk_stops_neither_the_ranks_nor_the_status_file(tmp_path):
    (tmp_path / "attempt-1").mkdir()
    (tmp_path / "attempt-1" / "node-0.log").symlink_to("/dev/full")
    code, out, status = Node(tmp_path, "print('hello')\nsys.exit(5)", ranks=1).end()
    assert (code, out.splitlines()[0]) == (5, "hello")
    assert "No space left on device" in status["failure"]["error"]


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--no-python"], ["--nproc-per-node", "2", "x.py"]])
def test_a_command_without_a_program_is_refused(arguments):
    with pytest.raises(SystemExit, match="agent"):
        rank_command(arguments)


def test_the_archive_runs_like_the_folder_and_has_no_dates(tmp_path, monkeypatch):
    (tmp_path / "agent.pyz").write_bytes(scripts.archive())
    monkeypatch.setattr(f"{__name__}.AGENT", tmp_path / "agent.pyz")
    code, _, status = Node(tmp_path, "raise KeyError('x')", ranks=1).end()
    assert (code, status["failure"]["error"]) == (1, "KeyError: 'x'")
    assert {entry.date_time for entry in zipfile.ZipFile(tmp_path / "agent.pyz").infolist()} == {
        (1980, 1, 1, 0, 0, 0)
    }


def test_a_status_file_on_a_full_disk_is_overwritten_in_place(tmp_path, monkeypatch):
    """Simulated: os.replace fails as on a full disk."""
    settings = Settings(
        dict.fromkeys(("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_PORT"), "1")
        | {
            "PET_MASTER_ADDR": "",
            "CLUSTER_JOB_ID": "",
            "CLUSTER_ATTEMPT": "1",
            "CLUSTER_RUN_DIR": str(tmp_path),
        }
    )
    (tmp_path / "attempt-1").mkdir()
    status = Status(settings)
    status.write(phase="running")
    monkeypatch.setattr(
        os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    status.write(phase="exited")
    assert json.loads((tmp_path / "attempt-1" / "node-1.json").read_text())["phase"] == "exited"
    assert {path.name for path in (tmp_path / "attempt-1").iterdir()} == {"node-1.json", "node-1.agent"}


def test_a_cause_comes_before_an_earlier_consequence():
    lost = {"rank": 0, "time": 1.0, "error": "RuntimeError: Connection closed by peer", "secondary": True}
    cause = {"rank": 1, "time": 2.0, "error": "exit code 3", "secondary": False}
    ranks = [SimpleNamespace(failure=lambda found=found: found) for found in (lost, cause)]
    found = first_failure(ranks)
    assert (found["rank"], [other["rank"] for other in found["others"]]) == (1, [0])


def setup_variables(tmp_path, text):
    return {"CLUSTER_SETUP": text, "CLUSTER_SETUP_DIR": str(tmp_path / "setup" / "key")}


@pytest.fixture
def folders(tmp_path):
    """Folders of two nodes that share one folder of setups."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return tmp_path / "a", tmp_path / "b"


def test_the_setup_runs_once_and_its_packages_are_the_ranks(folders, tmp_path):
    text = "echo installing; sleep 1; echo >> ../count; cd $VIRTUAL_ENV/lib/python3*/site-packages; echo X=5 > dep.py"
    # trainer is installed in editable mode.
    program = "import dep, pytest, trainer; print('rank', rank, dep.X, sys.prefix)"
    variables = setup_variables(tmp_path, f"cd {folders[0]}; {text}")
    nodes = [Node(folder, program, ranks=1, **variables) for folder in folders]
    outputs = [node.end() for node in nodes]
    assert [code for code, *_ in outputs] == [0, 0]
    assert all(f"rank 0 5 {tmp_path}/setup/key" in out for _, out, _ in outputs)
    assert sorted("setup: installing" in out for _, out, _ in outputs) == [False, True]
    assert (tmp_path / "count").read_text() == "\n"


def test_a_setup_that_fails_ends_the_node_and_the_next_job_runs_it_again(folders, tmp_path):
    variables = setup_variables(
        tmp_path, f"echo one; test -e {tmp_path}/there || {{ echo two words >&2; exit 3; }}"
    )
    code, out, status = Node(folders[0], "print('rank ran')", ranks=1, **variables).end()
    assert code == EXIT_NODE
    assert status["failure"]["error"] == "setup: exit code 3: two words"
    assert "rank ran" not in out
    (tmp_path / "there").write_text("")
    assert Node(folders[1], "print('rank ran')", ranks=1, **variables).end()[0] == 0


#: Uses its environment, then waits for the file `end`, and uses it again.
USES = """
import subprocess
def use():
    subprocess.run(['python', '-c', 'import dep; print("dep is", dep.X)'], check=True)
use()
while not os.path.exists('{end}'):
    time.sleep(0.02)
use()
print(sys.prefix)
"""


def test_another_image_gets_another_environment_while_a_job_uses_the_first(folders, tmp_path):
    text = "cd $VIRTUAL_ENV/lib/python3*/site-packages; echo \"X = '$CLUSTER_IMAGE'\" > dep.py"
    variables = setup_variables(tmp_path, text)
    end = tmp_path / "end"
    first = Node(folders[0], USES.format(end=end), ranks=1, CLUSTER_IMAGE="image 1", **variables)
    first.wait_for("dep is image 1")
    code, other, _ = Node(
        folders[1], USES.format(end="/"), ranks=1, CLUSTER_IMAGE="image 2", **variables
    ).end()
    assert (code, other.count("dep is image 2")) == (0, 2)
    end.touch()
    code, out, _ = first.end()
    assert (code, out.count("dep is image 1")) == (0, 2)
    assert out.splitlines()[-1] != other.splitlines()[-1]


def test_an_environment_in_use_is_not_made_again_before_the_last_job_ends(folders, tmp_path):
    """Its mark is removed, as after an interrupted setup, so that the second job has to make it."""
    text = "cd $VIRTUAL_ENV/lib/python3*/site-packages; echo 'X = 5' > dep.py"
    variables = setup_variables(tmp_path, text)
    end = tmp_path / "end"
    first = Node(folders[0], USES.format(end=end), ranks=1, **variables)
    first.wait_for("dep is 5")
    (made,) = tmp_path.glob("setup/key/*/setup.done")
    made.unlink()
    second = Node(folders[1], USES.format(end=end), ranks=1, **variables)
    second.wait_for(f"agent: waiting for the node or job that uses {made.parent}")
    package = next(made.parent.glob("lib/python3*/site-packages/dep.py"))
    with (made.parent / "setup.lock").open("r+") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    written = package.stat().st_mtime_ns  # a new file may get the inode of the old one
    assert not made.exists()
    end.touch()
    assert [node.end()[0] for node in (first, second)] == [0, 0]
    assert made.exists()
    assert package.stat().st_mtime_ns > written


def facts(python):
    """Return what an environment of this interpreter depends on."""
    program = "import sys; sys.path.insert(0, sys.argv[1]); from node_agent import setup\n"
    program += "print(*setup.interpreter_facts('image'), sep='\\n')"
    done = subprocess.run([python, "-c", program, AGENT], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_an_environment_depends_on_the_interpreter_and_its_packages(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    assert {platform.machine(), sys.version.replace("\n", " ")} <= set(facts(python))
    assert facts(python) != facts(sys.executable)
    before = facts(python)
    (package,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    (package / "numpy-2.4.0.dist-info").mkdir()
    assert [fact for fact in facts(python) if fact not in before] == ["numpy-2.4.0.dist-info"]


def test_sigterm_ends_a_setup(tmp_path):
    variables = setup_variables(tmp_path, "echo started; sleep 100; echo never")
    node = Node(tmp_path, "", ranks=1, **variables)
    while "setup: started" not in node.process.stdout.readline():
        pass
    assert node.status()["phase"] == "setup"
    node.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    code, _, status = node.end()
    assert code == EXIT_NODE
    assert status["failure"]["error"] == "setup: stopped"
    assert time.monotonic() - began < 5


STALL = """
def outer():
    inner()
def inner():
    print("idle", flush=True); time.sleep(100)
if rank == 0:
    outer()
until = time.monotonic() + {busy_s}
while time.monotonic() < until:
    pass
print("idle", flush=True); time.sleep(100)
"""


def stall(node, until_s, expected=None):
    """Return the status's stall as soon as it has one, or the expected one; the last one after `until_s`."""
    until = time.monotonic() + until_s
    found = []
    while time.monotonic() < until:
        if node.path("node-0.json").exists():
            found = node.status().get("stall") or []
        if found and expected in (None, found):
            break
        time.sleep(0.1)
    return found


def test_idle_ranks_are_a_stall_with_their_places(tmp_path):
    node = Node(tmp_path, STALL.format(busy_s=0), CLUSTER_STALL_TIMEOUT="1")
    expected = [
        {"collective": "", "call": "inner", "place": "program.py:7", "rank": 0},
        {"collective": "", "call": "<module>", "place": "program.py:13", "rank": 1},
    ]
    # On a busy machine, ranks that start slowly are a stall before it.
    found = stall(node, 60, expected)
    node.process.send_signal(signal.SIGTERM)
    assert node.end()[0] == 143
    assert found == expected
    log = node.path("node-0.log").read_text()
    assert "agent: rank 0: no output and no activity for 1 s" in log
    assert 'program.py", line 5 in outer' in log


#: Rank 1 does what the test says. Rank 0 polls, as a program does in a loop around `work.is_completed()`.
BUSY = """
import subprocess, threading
end, closed = time.monotonic() + 4, threading.Lock()
def spin(until):
    while time.monotonic() < until:
        pass
def deep(depth):
    deep(depth - 1) if depth else spin(time.monotonic() + 0.05)
def wait():
    closed.acquire()
    while closed.locked():
        pass
def polls():
    wait()
def computes():
    for k in range(80):
        deep(k % 40)
def prints():
    for _ in range(8):
        print("a step", flush=True)
        spin(time.monotonic() + 0.5)
def writes():
    with open("/dev/null", "wb", 0) as file:
        while time.monotonic() < end:
            file.write(bytes(1 << 20))
def waits_for_a_child():
    code = "import time; end = time.monotonic() + 4\\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", code])
def waits_for_a_thread():
    thread = threading.Thread(target=spin, args=(end,))
    thread.start()
    thread.join()
print("busy", flush=True)
done = os.path.join(os.environ["CLUSTER_RUN_DIR"], "done")
def exit_with_the_other_rank():
    while not os.path.exists(done):
        time.sleep(0.05)
    os._exit(0)
if rank == 0:
    threading.Thread(target=exit_with_the_other_rank).start()
    wait()
{how}()
open(done, "w").close()
"""


def fast_agent(monkeypatch, folder):
    """Let the test's agent write a heartbeat every 0.3 s instead of 2."""
    change_agent(monkeypatch, folder, "settings.py", "HEARTBEAT_S = 2.0", "HEARTBEAT_S = 0.3")


def test_ranks_that_poll_for_ever_are_a_stall_with_their_places(tmp_path, monkeypatch):
    fast_agent(monkeypatch, tmp_path)
    node = Node(tmp_path, BUSY.format(how="polls"), CLUSTER_STALL_TIMEOUT="1")
    found = stall(node, 120)
    node.process.send_signal(signal.SIGTERM)
    assert node.end()[0] == 143
    lines = {
        f"program.py:{number}" for number, line in enumerate(node.program(), 1) if "closed.locked()" in line
    }
    (first,) = lines
    near = {first, f"program.py:{int(first.partition(':')[2]) + 1}"}
    assert [(each["rank"], each["call"], each["busy"], each["place"] in near) for each in found] == [
        (0, "wait", True, True),
        (1, "wait", True, True),
    ]
    log = node.path("node-0.log").read_text()
    assert "agent: rank 1: no output, and busy at the same place for 1 s" in log
    assert " in polls" in log


@pytest.mark.parametrize("how", ["computes", "prints", "writes", "waits_for_a_child", "waits_for_a_thread"])
def test_a_rank_that_works_or_prints_is_no_stall(tmp_path, monkeypatch, how):
    """Of two busy ranks, one polls all the time. The other makes progress for four seconds, and exits."""
    fast_agent(monkeypatch, tmp_path)
    node = Node(tmp_path, BUSY.format(how=how), CLUSTER_STALL_TIMEOUT="1")
    code, out, status = node.end()
    assert (code, status["exit_code"]) == (0, 0)
    assert "busy at the same place" not in out


def test_a_program_with_its_own_handlers_is_asked_for_its_stack_once_at_most(tmp_path, monkeypatch):
    """It handles the agent's signal itself, and polls: only the rule for idle ranks applies."""
    fast_agent(monkeypatch, tmp_path)
    program = """
import threading
caught = []
for number in (signal.SIGUSR1, signal.SIGUSR2, 50, 51):
    signal.signal(number, lambda number, _: caught.append(number))
print("busy", flush=True)
end = time.monotonic() + 4
while time.monotonic() < end:
    pass
print("caught", caught, flush=True)
"""
    code, out, _ = Node(tmp_path, program, ranks=1, CLUSTER_STALL_TIMEOUT="1").end()
    assert (code, out.splitlines()) == (0, ["busy", "caught [50, 51]"])


def test_a_program_that_is_not_python_is_a_stall_without_a_place(tmp_path):
    node = Node(tmp_path, "os.execvp('sleep', ['sleep', '100'])", ranks=1, CLUSTER_STALL_TIMEOUT="1")
    found = stall(node, 60)
    node.process.send_signal(signal.SIGTERM)
    node.end()
    assert found == [{"collective": "", "call": "", "place": "", "rank": 0}]


def test_the_signal_for_a_stack_does_not_end_a_python_that_is_exiting(tmp_path):
    """The agent may send it just when the interpreter has removed the handlers."""
    program = """
import faulthandler
faulthandler.unregister(51)
os.kill(os.getpid(), 51)
class Last:
    def __init__(self): self.kill, self.pid = os.kill, os.getpid()
    def __del__(self): self.kill(self.pid, 50)
last = Last()  # Python deletes it after it has removed the handlers
"""
    assert Node(tmp_path, program, ranks=1, CLUSTER_STALL_TIMEOUT="100").end()[0] == 0


#: A program that makes and removes frames all the time.
RUNS = """
def made(n):
    return sum(called(i) for i in range(n))
def called(i):
    exec(compile("def f(a):\\n  return a\\nf(1)", "<string>", "exec"), {})
    return i
print("runs", flush=True)
end = time.monotonic() + 6
while time.monotonic() < end:
    made(20)
print("ends", flush=True)
"""


def test_a_running_program_survives_thousands_of_requests_for_its_stack(tmp_path):
    """As the only handler, faulthandler's would end it by SIGSEGV in about one of 20,000."""
    node = Node(tmp_path, RUNS, ranks=1, CLUSTER_STALL_TIMEOUT="100")
    assert wait_until(
        lambda: node.path("node-0.log").exists() and "runs" in node.path("node-0.log").read_text()
    )
    agent = node.process.pid
    pid = int(Path(f"/proc/{agent}/task/{agent}/children").read_text())
    (path,) = tmp_path.rglob("*.stack")
    asked = 0
    with path.open() as written:  # the agent removes it
        with contextlib.suppress(ProcessLookupError):
            while catches(pid, STACK_SIGNAL):
                os.kill(pid, STACK_SIGNAL)
                asked += 1
                time.sleep(0.0005)
        code, out, _ = node.end()
        assert (code, "ends" in out) == (0, True)
        assert asked > 1000
        assert " in called" in written.read()


def test_a_rank_that_is_blocked_in_c_is_a_stall_with_its_place(tmp_path):
    """It runs no Python, so only faulthandler's handler answers."""
    program = """
import ctypes
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
def blocked():
    lock(mutex), lock(mutex)
print("blocked", flush=True)
blocked()
"""
    node = Node(tmp_path, program, ranks=1, CLUSTER_STALL_TIMEOUT="1")
    expected = [{"collective": "", "call": "blocked", "place": "program.py:7", "rank": 0}]
    found = stall(node, 60, expected)
    node.process.send_signal(signal.SIGTERM)
    assert node.end()[0] == 143
    assert found == expected


SITE = "/x/site-packages/torch"
STACKS = {
    "all_reduce": ([f"{SITE}/distributed/distributed_c10d.py", "9", "all_reduce"], ["/a/t.py", "3", "step"]),
    "backward": (
        [f"{SITE}/autograd/graph.py", "9", "_run"],
        [f"{SITE}/_tensor.py", "9", "backward"],
        ["/a/t.py", "3", "f"],
    ),
    "": (
        ["/usr/lib/python3.11/queue.py", "9", "get"],
        [f"{SITE}/utils/data/a.py", "8", "next"],
        ["/a/t.py", "3", "f"],
    ),
}


@pytest.mark.parametrize("collective", list(STACKS))
def test_the_place_is_the_programs_newest_line(collective):
    stack = ['File "{}", line {} in {}'.format(*frame) for frame in STACKS[collective]]
    found = place([*stack, 'File "/a/t.py", line 99 in main'])
    assert found == {"collective": collective, "call": STACKS[collective][0][2], "place": "t.py:3"}
    assert place([]) == {"collective": "", "call": "", "place": ""}


FRAMES = ['File "/a/t.py", line 30 in poll', 'File "/a/t.py", line 99 in main']


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (['File "/a/t.py", line 32 in poll', FRAMES[1]], True),
        (['File "/a/t.py", line 33 in poll', FRAMES[1]], False),
        (['File "/a/t.py", line 30 in other', FRAMES[1]], False),
        ([FRAMES[0], 'File "/a/t.py", line 98 in main'], False),
        (FRAMES[:1], False),
        ([], False),
    ],
)
def test_only_the_line_of_a_short_loop_may_differ_at_one_place(other, is_same):
    assert is_same_place(FRAMES, other) == is_same
    assert not is_same_place([], [])


@pytest.mark.parametrize(
    ("path", "waits"),
    [("/usr/lib/python3.11/threading.py", True), ("/a/my_threading.py", False), ("/a/t.py", False)],
)
def test_a_rank_that_waits_for_its_threads_is_recognised(path, waits):
    assert waits_for_others([f'File "{path}", line 1 in wait', *FRAMES]) == waits


GPUS = [nvidia_smi.Gpu("GPU-aa", use=7), nvidia_smi.Gpu("GPU-bb")]


@pytest.mark.parametrize(
    ("visible", "gpus", "broken", "is_active", "uses"),
    [
        ("0,1", GPUS, {}, True, [7, 0]),
        ("GPU-bb", GPUS, {}, False, [0]),
        ("1,0", GPUS, {}, True, [0, 7]),
        ("MIG-cc", [nvidia_smi.Gpu("GPU-aa", slices=("MIG-cc",))], {}, True, [None]),
        ("0", [nvidia_smi.Gpu("GPU-aa", slices=("MIG-cc",))], {}, True, [None]),
        ("0,1", [], {"broken": nvidia_smi.BROKEN}, True, None),
        ("0,1", [], {"broken": "unexpected", "code": 0}, True, None),
    ],
)
def test_a_gpu_that_computes_or_does_not_answer_is_active(
    tmp_path, monkeypatch, visible, gpus, broken, is_active, uses
):
    nvidia_smi.install(tmp_path, gpus, **broken)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = query_gpus(visible)
    assert (None if found is None else [gpu["use"] for gpu in found]) == uses
    ended = threading.Event()
    usage = Usage([], ended)
    until = time.monotonic() + 10
    while usage._gpus == []:
        assert time.monotonic() < until
        time.sleep(0.02)
    ended.set()
    assert usage.gpus_are_active is is_active


def test_the_status_has_the_cores_and_the_memory_of_each_rank(tmp_path):
    """Rank 0 uses a fifth of a core, which a busy machine can give it; rank 1 is idle."""
    program = """
held = bytearray(300 << 20)
began, used = time.monotonic(), time.process_time()
while rank == 0:
    if time.process_time() - used > 0.2 * (time.monotonic() - began):
        time.sleep(0.01)
time.sleep(100)
"""
    node = Node(tmp_path, program)
    until = time.monotonic() + 60
    ranks = []
    # The first samples of both ranks include the start of the interpreter.
    while (
        not ranks
        or not 0.15 < ranks[0]["cpu"] < 0.25
        or ranks[0]["rss"] < 300 << 20
        or ranks[1]["cpu"] > 0.05
    ):
        assert time.monotonic() < until, ranks
        time.sleep(0.2)
        if node.path("node-0.json").exists():
            ranks = node.status().get("usage", {}).get("ranks", [])
    busy, idle = ranks
    host = node.status()["usage"]["host"]
    node.process.send_signal(signal.SIGTERM)
    node.end()
    assert (busy["rank"], idle["rank"]) == (0, 1)
    assert busy["rss"] < 400 << 20
    assert 0 < host["free"] < host["total"]


def test_plan_writes_the_archive_to_a_pipe_or_a_file_but_not_to_a_terminal(tmp_path):
    argv = [sys.executable, "-m", "cluster", "plan", "--agent"]
    assert subprocess.run(argv, capture_output=True, check=True).stdout == scripts.archive()
    subprocess.run([*argv, "-o", tmp_path / "agent.pyz"], check=True, capture_output=True)
    assert (tmp_path / "agent.pyz").read_bytes() == scripts.archive()
    leader, terminal = os.openpty()
    done = subprocess.run(argv, stdout=terminal, stderr=subprocess.PIPE, check=False)
    os.close(terminal)
    os.close(leader)
    assert (done.returncode, b"cannot be printed on a terminal" in done.stderr) == (2, True)


def test_a_script_gets_its_variables_as_they_are():
    texts = ["it's $HOME\n`id`", "", '"*" \\ é', "-n"]
    head = scripts.variables(text=texts[0], number=7, several=texts, none=())
    shown = 'printf "%s\\0" "$text" "$number" "${#none[@]}" "${several[@]}"'
    done = subprocess.run(["bash", "-c", head + shown], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0") == [texts[0], "7", "0", *texts, ""]


def test_no_secrets_remain_after_a_failed_start(tmp_path):
    """The agent in Base64 is damaged."""
    argv = scripts.command(
        "start", folder=str(tmp_path / "attempt-1"), node="n0", job="job", gpus="", secrets=1
    )
    done = subprocess.run(argv, input="export TOKEN=hush\n***\n", capture_output=True, text=True, check=False)
    assert (done.returncode, "base64: invalid input" in done.stderr) == (1, True)
    assert not (tmp_path / "attempt-1" / "n0.secrets").exists()
