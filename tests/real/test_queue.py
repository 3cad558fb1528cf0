"""`launch --wait`: ten launches by two users at once on three hosts with two GPUs each, which are simulated."""

import itertools
import json
import re
import signal
import threading
import time

import pytest
import yaml

from tests.conftest import Clusterctl

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
HOSTS = ("n0", "n1", "n2")
#: Nodes and GPUs per node of each launch.
SIZES = [(1, 2), (2, 1), (3, 2), (1, 1), (1, 1), (2, 2), (1, 1), (3, 1), (1, 2), (2, 1)]
#: A job begins at most this long after its GPUs are free. Ten launchers share two cores.
PATIENCE_S = 20
SLEEPER = """import os, sys, time
print("began", time.time(), flush=True)
until = time.time() + int(sys.argv[1])
while time.time() < until and not os.path.exists(f"/tmp/queue-{sys.argv[2]}-ends"):
    time.sleep(0.05)
print("ended", time.time(), flush=True)
"""


@pytest.fixture
def users(tmp_path, testbed):
    """Launchers of root and of ada, each with its own records and inventory."""
    found = []
    for user in ("root", "ada"):
        folder = tmp_path / user
        folder.mkdir()
        nodes = {
            name: {"login": f"{user}@{name}", "address": testbed[name].address, "gpus": 2, "runtime": "none"}
            | {"run_dir": f"/tmp/queue-{user}/runs", "data_dir": f"/tmp/queue-{user}/data"}
            for name in HOSTS
        }
        inventory = {"ssh_config": str(testbed.ssh_config), "device": "cpu", "nodes": nodes}
        (folder / "cluster.yaml").write_text(yaml.safe_dump(inventory))
        (folder / "sleeper.py").write_text(SLEEPER)
        found.append(Clusterctl(folder))
    for name in HOSTS:
        testbed[name].run("rm -rf /tmp/queue-* /tmp/clusterctl-gpus")
    return found


def launch(user, job, size, seconds=4, wait="5m"):
    return user.start(
        *("launch", "--name", job, "--nodes", str(size[0]), "--gpus", str(size[1]), "--wait", wait),
        *("--python", "python3", "--logs", "all", "--command", f"sleeper.py {seconds} {job}"),
    )


def end(testbed, job):
    for name in HOSTS:
        testbed[name].run(f"touch /tmp/queue-{job}-ends")


def tickets(testbed, host="n0"):
    """The names of the jobs that wait, in the order of their arrival."""
    listed = testbed[host].run("ls /tmp/clusterctl-gpus 2>/dev/null | grep ticket- || true").split()
    return [name.removeprefix("ticket-").split("-", 2)[2] for name in sorted(listed)]


def test_ten_launches_get_gpus_in_their_order_and_none_twice(users, testbed):
    arrived = {}
    has_ended = threading.Event()

    def watch():
        while not has_ended.wait(0.2):
            for name in testbed["n0"].run("ls /tmp/clusterctl-gpus 2>/dev/null || true").split():
                if name.startswith("ticket-"):
                    at, _, job = name.removeprefix("ticket-").split("-", 2)
                    arrived[job] = int(at)

    watcher = threading.Thread(target=watch)
    watcher.start()
    processes = [launch(users[k % 2], f"queued-{k}", size) for k, size in enumerate(SIZES)]
    texts = [process.communicate(timeout=300)[0] for process in processes]
    has_ended.set()
    watcher.join()
    assert [process.returncode for process in processes] == [0] * 10, texts
    assert len(arrived) == 10
    jobs = []
    for k, (text, size) in enumerate(zip(texts, SIZES, strict=True)):
        record = json.loads((users[k % 2].folder / "records" / f"queued-{k}.json").read_text())
        gpus = [(node["name"], gpu) for node in record["plan"]["nodes"] for gpu in node["gpus"]]
        assert len(gpus) == size[0] * size[1]
        began, ended = (
            [float(at) for at in re.findall(rf"{word} ([\d.]+)", text)] for word in ("began", "ended")
        )
        assert len(began) == len(ended) == len(gpus)
        jobs.append((arrived[f"queued-{k}"], f"queued-{k}", gpus, min(began), max(ended)))
    jobs.sort()
    first = min(began for *_, began, _ in jobs)
    for _, job, gpus, began, ended in jobs:
        print(
            f"{job}  {began - first:5.1f} to {ended - first:5.1f} s  {' '.join(f'{host}:{gpu}' for host, gpu in gpus)}"
        )
    for one, other in itertools.combinations(jobs, 2):
        assert one[3] <= other[3], f"{other[1]} began before {one[1]}"
        if set(one[2]) & set(other[2]):
            assert one[4] <= other[3], f"{one[1]} and {other[1]} at once on one GPU"
    for k in range(1, 10):
        nodes, per_node = SIZES[int(jobs[k][1].removeprefix("queued-"))]
        moments = sorted({jobs[k - 1][3], *(ended for *_, ended in jobs[:k] if ended > jobs[k - 1][3])})
        fits_at = next(
            moment
            for moment in moments
            if sum(
                2 - sum(host == name for *_, gpus, _, ended in jobs[:k] if ended > moment for name, _ in gpus)
                >= per_node
                for host in HOSTS
            )
            >= nodes
        )
        assert jobs[k][3] - fits_at < PATIENCE_S, (
            f"{jobs[k][1]} would fit {jobs[k][3] - fits_at:.1f} s earlier"
        )


def test_a_killed_launcher_leaves_the_queue_and_ctrl_c_too(users, testbed):
    holder = launch(users[0], "holds", (3, 2), seconds=200)
    while "began" not in (line := holder.stdout.readline()):
        assert line
    waiting = []
    for job in ("killed", "interrupted", "last"):
        waiting.append(launch(users[len(waiting) % 2], job, (1, 1)))
        until = time.time() + 60
        while job not in tickets(testbed):
            assert time.time() < until
            time.sleep(0.2)
    assert tickets(testbed) == ["killed", "interrupted", "last"]
    waiting[0].kill()
    waiting[0].communicate()
    waiting[1].send_signal(signal.SIGINT)
    text, _ = waiting[1].communicate(timeout=30)
    assert waiting[1].returncode == 130, text
    assert tickets(testbed) == ["killed", "last"]
    end(testbed, "holds")
    text, _ = waiting[2].communicate(timeout=90)
    assert waiting[2].returncode == 0, text
    assert "waiting for 1 GPU: behind killed, interrupted in the queue" in text
    assert holder.communicate(timeout=60)[0]
    assert holder.returncode == 0
    holder = launch(users[1], "holds-again", (3, 2), seconds=200)
    while "began" not in (line := holder.stdout.readline()):
        assert line
    text, _ = (late := launch(users[0], "late", (1, 1), wait="1s")).communicate(timeout=60)
    assert late.returncode == 3, text
    assert text.splitlines()[-2] == "error: the GPUs did not become free in time: held by holds-again"
    end(testbed, "holds-again")
    assert holder.communicate(timeout=60)[0]
