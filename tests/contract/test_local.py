"""The local backend with real processes: what a user sees, and that nothing is left afterwards."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, processes_of

EXAMPLE = f"{ROOT / 'examples' / 'all_reduce.py'}"
HOSTILE = ["a'; echo foo", 'a"=0"', "one\ntwo", "$HOME `id` \\", "@rank@ {run} $$"]


def launch(command, *more, name="job"):
    return ["launch", "--backend", "local", "--name", name, "--command", command, *more]


def torchrun_of(job, rank):
    """The pid of one node's torchrun."""
    for pid in processes_of(job):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        ours = f"PET_NODE_RANK={rank}".encode() in variables and b"torch.distributed.run" in words
        if ours and not any(variable.startswith(b"LOCAL_RANK=") for variable in variables):
            return pid
    raise AssertionError(f"no torchrun of node {rank}")


def test_four_ranks_on_two_nodes_meet_and_end(clusterctl):
    code, text = clusterctl.run(*launch(f"{EXAMPLE} --ticks 1", "--nodes", "2", "--gpus", "2", "--logs", "all"))
    assert code == 0, text
    assert "2/2 nodes ready   world size 4" in text
    for node, rank in (("node-0", 0), ("node-1", 2)):
        assert f"{node} | tick 0: rank {rank} of 4 sees the sum 4" in text
    assert "done in" in text
    assert processes_of("job") == []
    assert json.loads(clusterctl.run("ps", "--all", "--json")[1])[0]["state"] == "done"
    ranks = list((clusterctl.folder / "runs/job/attempt-1/ranks").glob("node-*/*/*/*/stdout.log"))
    assert len(ranks) == 4


def test_hostile_strings_arrive_as_they_are(clusterctl):
    folder = clusterctl.folder / "it's $here `now`"
    folder.mkdir()
    program = folder / "show.py"
    program.write_text(
        "import json, os, sys\n"
        "seen = [sys.argv[1:], os.environ['HOSTILE'], os.getcwd()]\n"
        "open('seen', 'w').write(json.dumps(seen))\n"
    )
    clusterctl.folder = folder
    quoted = " ".join(f"'{text}'" if "'" not in text else f'"{text}"' for text in HOSTILE)
    for text in HOSTILE:
        code, output = clusterctl.run(
            *launch(f"show.py {quoted}", "--env", f"HOSTILE={text}", name=f"job-{HOSTILE.index(text)}")
        )
        assert code == 0, output
        assert json.loads((folder / "seen").read_text()) == [HOSTILE, text, str(folder)]


def test_a_rank_that_raises_fails_the_job_with_its_traceback(clusterctl):
    code, text = clusterctl.run(*launch(f"{EXAMPLE} --ticks 60 --fail-at 1", "--nodes", "2"))
    assert code == 1, text
    assert "node-1: exit 1" in text
    assert "ValueError: this rank was told to fail" in text
    assert processes_of("job") == []


def test_a_killed_node_is_named_within_10_s_and_nothing_is_left(clusterctl):
    process = clusterctl.start(*launch(f"{EXAMPLE} --ticks 100", "--nodes", "2", "--gpus", "2"))
    clusterctl.wait_for("job", "tick 1")
    killed = time.time()
    os.kill(torchrun_of("job", 1), signal.SIGKILL)
    text, _ = process.communicate(timeout=60)
    assert time.time() - killed < 10
    assert process.returncode == 1
    assert "node-1: exit 137 (killed)" in text
    assert processes_of("job") == []


def test_a_killed_launcher_loses_nothing(clusterctl):
    process = clusterctl.start(*launch(f"{EXAMPLE} --ticks 100", "--nodes", "2"))
    clusterctl.wait_for("job", "tick 1")
    process.kill()
    process.communicate()
    assert processes_of("job") != []
    attached = clusterctl.start("attach", "job")
    line = next(line for line in attached.stdout if "tick" in line)
    assert "rank 0 of 2" in line
    attached.send_signal(signal.SIGINT)
    assert "goes on" in attached.communicate(timeout=30)[0]
    assert json.loads(clusterctl.run("status", "job", "--json")[1])["state"] == "running"
    for _ in range(2):  # safe to repeat
        code, text = clusterctl.run("stop", "job")
        assert (code, "nothing of it is running" in text) == (0, True), text
        assert processes_of("job") == []


def test_ctrl_c_stops_every_node(clusterctl):
    process = clusterctl.start(*launch(f"{EXAMPLE} --ticks 100", "--nodes", "2"))
    clusterctl.wait_for("job", "tick 0")
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; nothing of it is running" in text
    assert processes_of("job") == []


def test_detach_wait_and_logs(clusterctl):
    code, text = clusterctl.run(*launch(f"{EXAMPLE} --ticks 2", "--nodes", "2", "--detach"))
    assert (code, "clusterctl attach job" in text) == (0, True), text
    assert clusterctl.run("wait", "job")[0] == 0
    code, text = clusterctl.run("logs", "job", "--node", "1")
    assert text.splitlines() == [f"tick {tick}: rank 1 of 2 sees the sum 2" for tick in (0, 1)]
    assert "node-0 | tick 1: rank 0 of 2" in clusterctl.run("logs", "job")[1]
    assert clusterctl.run("attach", "job")[0] == 0


def test_nodes_that_do_not_meet_in_time_are_named_and_stopped(clusterctl):
    # A trainer that has half a second cannot be ready: it imports torch for longer than that.
    code, text = clusterctl.run("launch", "--backend", "local", "--name", "job", "--nodes", "2", "--timeout", "0.5")
    assert code == 4, text
    assert "0 of 2 nodes met in 0.5 s" in text
    assert "node-0" in text
    assert "node-1" in text
    assert processes_of("job") == []


def test_a_port_that_was_asked_for_and_is_taken_names_its_holder(clusterctl):
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        code, text = clusterctl.run(*launch(EXAMPLE, "--master-port", str(port)))
    assert code == 2
    assert f"port {port} is taken" in text
    assert f"pid={os.getpid()}" in text
    assert list(clusterctl.folder.iterdir()) == []


def test_an_automatic_port_that_is_taken_is_passed_over(clusterctl):
    from cluster.config import auto_port

    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier test may have used it a moment ago
        holder.bind(("", auto_port("job")))
        holder.listen()
        code, text = clusterctl.run(*launch(f"{EXAMPLE} --ticks 1"))
    assert code == 0, text
    script = (clusterctl.folder / "runs/job/attempt-1/node-0.sh").read_text()
    assert f"PET_MASTER_PORT={auto_port('job', 1)}" in script


def test_a_port_lost_between_check_and_start_is_replaced(clusterctl):
    from cluster.config import auto_port

    thief = "import socket; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); "
    thief += f"s.bind(('', {auto_port('job')})); s.listen(); input()"
    process = clusterctl.start(*launch(f"{EXAMPLE} --ticks 1"))
    until = time.time() + 20
    while not (clusterctl.folder / "runs/job/attempt-1").exists() and time.time() < until:
        time.sleep(0.005)
    with subprocess.Popen([sys.executable, "-c", thief], stdin=subprocess.PIPE) as holder:
        text, _ = process.communicate(timeout=90)
        holder.communicate(b"\n")
    assert process.returncode == 0, text
    assert f"attempt 2 with {auto_port('job', 1)}" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["launch", "--nodes", "0"], "--nodes 0"),
        (["launch", "--device", "cuda", "--backend", "local"], "no GPU"),
        (["launch", "--backend", "kubernetes"], "one of: auto, local, compose"),
        (["attach", "nothing"], "no job 'nothing'"),
        (["launch", "--name", "UPPER", "--backend", "local"], "small letters"),
    ],
)
def test_bad_input_is_one_error_line_and_leaves_nothing(clusterctl, arguments, words):
    code, text = clusterctl.run(*arguments)
    assert code == 2
    assert text.startswith("error: ")
    assert words in text
    assert "Traceback" not in text
    assert list(clusterctl.folder.iterdir()) == []


def test_an_engine_that_does_not_answer_is_an_error_for_compose_and_a_sentence_for_auto(clusterctl):
    clusterctl.env["DOCKER_HOST"] = "unix:///nowhere.sock"
    code, text = clusterctl.run("launch", "--backend", "compose")
    assert (code, "Docker Engine does not answer" in text) == (2, True), text
    assert list(clusterctl.folder.iterdir()) == []
    code, text = clusterctl.run("plan", "--nodes", "3", "--gpus", "2")
    assert (code, "The nodes are process groups on this machine" in text) == (0, True), text
    assert text.count("# ---- node-") == 3


def test_a_second_launch_of_the_same_job_gets_a_number(clusterctl):
    command = ["launch", "--backend", "local", "--command", f"{EXAMPLE} --ticks 1", "--detach"]
    for _ in range(2):
        assert clusterctl.run(*command)[0] == 0
    names = [row["job"] for row in json.loads(clusterctl.run("ps", "--all", "--json")[1])]
    assert names[1] == f"{names[0]}-2"
    for name in names:
        assert clusterctl.run("wait", name)[0] == 0
