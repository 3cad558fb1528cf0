"""Every backend, through the command line, with real processes and containers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, Clusterctl, ended, processes_of, wait_until
from tests.contract.sshd import TICKS, inventory


class Local:
    """Observes the processes of this machine, independently of the launcher."""

    name = "local"

    def remains_of(self, job):
        return processes_of(job)

    def kill_node(self, job, rank):
        for pid in processes_of(job):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            agent = b"/agent.pyz\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
            worker = any(variable.startswith(b"LOCAL_RANK=") for variable in variables)
            if agent and not worker and f"PET_NODE_RANK={rank}".encode() in variables:
                os.kill(pid, signal.SIGKILL)
                return
        raise AssertionError(f"no agent of node {rank}")


class Ssh(Local):
    """Three addresses of this machine, behind a real sshd."""

    name = "ssh"


class Compose:
    """Observes the containers and networks of the Docker Engine."""

    name = "compose"

    def remains_of(self, job):
        label = f"label=com.docker.compose.project={job}"
        return self._docker("ps", "-aq", "--filter", label) + self._docker(
            "network", "ls", "-q", "--filter", label
        )

    def kill_node(self, job, rank):
        assert self._docker("kill", f"{job}-node-{rank}")

    def _docker(self, *arguments):
        return subprocess.run(
            ["docker", *arguments], capture_output=True, text=True, check=False
        ).stdout.split()


@pytest.fixture(
    params=[Local(), Ssh(), pytest.param(Compose(), marks=pytest.mark.engine)],
    ids=lambda backend: backend.name,
)
def backend(request):
    return request.param


@pytest.fixture
def start(clusterctl, backend, job_name, request):
    """Start a program on two nodes, from the folder and with the records of a launcher."""

    def start(*more, program="ticks.py", by=clusterctl):
        shutil.copy(TICKS, by.folder)
        if backend.name == "ssh":
            inventory(by.folder, request.getfixturevalue("sshd"), by.folder / "remote")
        command = ["launch", "--backend", backend.name, "--name", job_name, "--nodes", "2"]
        command += ["--python", sys.executable] if backend.name == "ssh" else []
        return by.start(*command, "--command", program, *more)

    return start


def test_nodes_join_and_end_and_nothing_remains(clusterctl, backend, start, job_name):
    shutil.copy(ROOT / "examples" / "all_reduce.py", clusterctl.folder)
    process = start("--gpus", "2", "--logs", "all", program="all_reduce.py --ticks 1")
    text = ended(process, 0, has="2/2 nodes ready   world size 4")
    for node, rank in (("node-0", 0), ("node-1", 2)):
        assert f"{node} | tick 0: rank {rank} of 4 sees the sum 4" in text
    assert "done in" in text
    assert backend.remains_of(job_name) == []
    assert json.loads(clusterctl.run("ps", "--all", "--json")[1])[0]["state"] == "done"
    assert len(list((clusterctl.folder / f"runs/{job_name}/attempt-1/ranks").glob("node-*/*.log"))) == 4


def test_nodes_may_have_different_numbers_of_ranks(clusterctl, start, job_name):
    program = (ROOT / "examples" / "all_reduce.py").read_text()
    show = "print('local', *map(os.environ.get, ('LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'ROLE_RANK')))"
    (clusterctl.folder / "unequal.py").write_text(program.replace("rank = ", f"{show}\nrank = ", 1))
    process = start("--gpus", "2,1", "--logs", "all", program="unequal.py --ticks 1")
    text = ended(process, 0, has="2/2 nodes ready   world size 3")
    assert f"{job_name}   2 nodes with 2 and 1 processes   " in text
    lines = {line.strip() for line in text.splitlines()}
    for node, mark, local, many, rank in (
        ("node-0", "", 0, 2, 0),
        ("node-0", "[1] ", 1, 2, 1),
        ("node-1", "", 0, 1, 2),
    ):
        assert f"{node} | {mark}tick 0: rank {rank} of 3 sees the sum 3" in lines
        assert f"{node} | {mark}local {local} {many} {rank}" in lines


def test_the_sites_network_variables_reach_the_ranks(clusterctl, backend, start, request):
    """Containers of compose have network devices of their own, so no name of a device enters them."""
    variables = {"NCCL_IB_HCA": "mlx5", "FI_PROVIDER": "efa", "UCX_TLS": "rc", "OMPI_MCA_btl": "tcp"}
    variables["NCCL_SOCKET_IFNAME"] = "ib7"
    if backend.name == "ssh":
        request.getfixturevalue("sshd").set_env(**variables)
    else:
        clusterctl.env |= variables
    program = f"import os\nprint('sees', {{name: os.environ.get(name) for name in {sorted(variables)}}})\n"
    (clusterctl.folder / "show.py").write_text(program)
    text, _ = start("--logs", "all", program="show.py").communicate(timeout=120)
    if backend.name == "compose":
        variables["NCCL_SOCKET_IFNAME"] = None
    for node in ("node-0", "node-1"):
        assert f"{node} | sees {dict(sorted(variables.items()))}" in text


def test_a_killed_node_is_named_within_10_s_and_nothing_remains(clusterctl, backend, start, job_name):
    process = start()
    clusterctl.wait_for(job_name, "tick 1", node="node-1")
    killed = time.time()
    backend.kill_node(job_name, 1)
    text = ended(process, 1, timeout_s=60, has="\nnode-1: exit 137 (killed)\n")
    assert time.time() - killed < 10
    assert "node-1 | tick 1: rank 1 of 2" in text
    assert backend.remains_of(job_name) == []


def test_a_rank_that_exits_after_its_consequences_is_the_cause(clusterctl, backend, start, job_name):
    """The other ranks lose their peer and exit seconds before the failed rank."""
    (clusterctl.folder / "slow_end.py").write_text(
        "import time\n"
        "import torch\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "rank = dist.get_rank()\n"
        "try:\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "    if rank == 1:\n"
        "        raise ValueError('this is why')\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "finally:\n"
        "    dist.destroy_process_group()\n"
        "    time.sleep(2 * rank)\n"
    )
    process = start(program="slow_end.py")
    ended(process, 1, has="\nnode-1: rank 1: ValueError: this is why\n")
    assert backend.remains_of(job_name) == []


def test_a_job_outlives_its_killed_launcher(clusterctl, backend, start, job_name):
    process = start()
    clusterctl.wait_for(job_name, "tick 1")
    process.kill()
    process.communicate()
    attached = clusterctl.start("attach", job_name)
    assert "rank 0 of 2" in next(line for line in attached.stdout if "tick" in line)
    attached.send_signal(signal.SIGINT)
    assert "keeps running" in attached.communicate(timeout=30)[0]
    assert backend.remains_of(job_name) != []
    assert json.loads(clusterctl.run("status", job_name, "--json")[1])["state"] == "running"
    for said in ("No processes remain.", "It had already ended."):  # safe to repeat
        clusterctl.expect(0, "stop", job_name, has=said)
        assert backend.remains_of(job_name) == []


def test_a_name_of_a_running_job_of_another_launcher_is_refused(clusterctl, backend, start, job_name):
    process = start()
    clusterctl.wait_for(job_name, "tick 0")
    elsewhere = clusterctl.folder / "elsewhere"
    elsewhere.mkdir()
    second = start(by=Clusterctl(elsewhere))
    ended(second, 2, timeout_s=60, has=f"a job {job_name} already exists: ")
    assert not (elsewhere / "runs").exists()
    clusterctl.wait_for(job_name, "tick 4")
    assert clusterctl.run("stop", job_name)[0] == 0
    text, _ = process.communicate(timeout=60)
    assert text.endswith(f"{job_name} was stopped\n")  # by another process, so it is no failure
    assert backend.remains_of(job_name) == []


def test_ctrl_c_stops_every_node(clusterctl, backend, start, job_name):
    process = start()
    clusterctl.wait_for(job_name, "tick 0")
    process.send_signal(signal.SIGINT)
    ended(process, 130, timeout_s=60, has="stopped. No processes remain.")
    assert backend.remains_of(job_name) == []


STUBBORN = """\
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print('heard', flush=True))
print('stubborn', flush=True)
until = time.time() + 300
while time.time() < until:
    time.sleep(1)
"""


@pytest.mark.parametrize("command", ["launch", "stop"])
def test_a_second_ctrl_c_kills_ranks_that_do_not_end(clusterctl, backend, start, job_name, command):
    (clusterctl.folder / "stubborn.py").write_text(STUBBORN)
    process = start("--grace", "10m", program="stubborn.py")
    for node in ("node-0", "node-1"):
        clusterctl.wait_for(job_name, "stubborn", node=node)
    if command == "launch":
        stopping = process
        process.send_signal(signal.SIGINT)
    else:
        stopping = clusterctl.start("stop", job_name)
    assert any("up to 600 s for a checkpoint (Ctrl-C stops it now)" in line for line in stopping.stdout)
    folder = clusterctl.folder / ("remote" if backend.name == "ssh" else "runs") / job_name / "attempt-1"
    for node in ("node-0", "node-1"):  # an interrupted launcher no longer copies the logs
        assert wait_until(lambda node=node: "heard" in (folder / f"{node}.log").read_text(), 60)
    assert backend.remains_of(job_name) != []
    stopping.send_signal(signal.SIGINT)
    text = ended(stopping, 130 if command == "launch" else 0, timeout_s=60)
    assert (
        text
        == f"stopping {job_name} now (Ctrl-C again exits at once)\n{job_name}: stopped. No processes remain.\n"
    )
    assert backend.remains_of(job_name) == []
    process.communicate(timeout=60)


def test_a_stop_gives_each_rank_its_time_although_a_launcher_follows(clusterctl, backend, start, job_name):
    """The launcher sees that the other node has failed, and may not kill the one that writes a checkpoint."""
    (clusterctl.folder / "saves.py").write_text(
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    print('saving', flush=True)\n"
        "    time.sleep(4)\n"
        "    print('saved', flush=True)\n"
        "    sys.exit(75)\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(signal.SIGTERM, save)\n"
        "print('ready', flush=True)\n"
        "time.sleep(300)\n"
    )
    process = start("--grace", "1s", program="saves.py")
    for node in ("node-0", "node-1"):
        clusterctl.wait_for(job_name, "ready", node=node)
    clusterctl.expect(0, "stop", job_name, "--grace", "60s", has="No processes remain.")
    ended(process, 1, timeout_s=60, has=f"{job_name} was stopped\n")
    clusterctl.wait_for(job_name, "saved", timeout_s=0.1)
    assert backend.remains_of(job_name) == []


def test_detach_wait_and_logs(clusterctl, backend, start, job_name):
    process = start("--detach", program="ticks.py --ticks 2")
    ended(process, 0, timeout_s=60, has=f"clusterctl attach {job_name}")
    assert clusterctl.run("wait", job_name)[0] == 0
    code, text = clusterctl.run("logs", job_name, "--node", "1")
    assert (code, text.splitlines()) == (0, [f"tick {tick}: rank 1 of 2" for tick in (0, 1)])
    assert "node-0 | tick 1: rank 0 of 2" in clusterctl.run("logs", job_name)[1]
    assert clusterctl.run("attach", job_name)[0] == 0
    assert backend.remains_of(job_name) == []
