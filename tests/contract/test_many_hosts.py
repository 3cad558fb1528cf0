"""A launch on 64 machines behind one real sshd: all start, each over one connection.

The program is a shell script in place of the agent, because 64 agents with torch exceed the memory of one machine.
"""

import json
import re

import pytest

from tests.conftest import processes_of
from tests.contract.sshd import Sshd, addresses, inventory

HOSTS = 64
# Passes the preflight check for torch, then runs until it is stopped.
PROGRAM = """#!/bin/sh
case $1 in -c | -IS) exit 0 ;; esac
exec sleep 300
"""


@pytest.fixture
def many(tmp_path, worker):
    server = Sshd(tmp_path / "sshd", addresses(worker, HOSTS), startups="5:50:100")
    yield server
    server.stop()


def test_64_hosts_start_over_two_connections_each_although_sshd_drops_some(
    clusterctl, many, tmp_path, job_name
):
    remote = tmp_path / "remote"
    # All machines share one copy of the program's folder.
    clusterctl.folder = tmp_path / "work"
    clusterctl.folder.mkdir()
    mirror = remote / "data" / str(clusterctl.folder).lstrip("/")
    mirror.parent.mkdir(parents=True)
    mirror.symlink_to(clusterctl.folder)
    inventory(clusterctl.folder, many, remote)
    program = clusterctl.folder / "program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (clusterctl.folder / "it.py").touch()
    arguments = [
        "--nodes",
        str(HOSTS),
        "--python",
        str(program),
        "--command",
        "it.py",
        "--name",
        job_name,
        "--detach",
    ]
    try:
        clusterctl.expect(0, "launch", *arguments)
        log = (many.folder / "log").read_text()
        # one for commands, one for rsync, which brings the working directory
        assert log.count("Accepted publickey") == 2 * HOSTS
        # else sshd's limit was not reached, and nothing was tested
        assert re.search(r"drop connection .* past MaxStartups", log)
        assert len(list((remote / job_name / "attempt-1").glob("node-*.sh"))) == HOSTS
        nodes = json.loads(clusterctl.expect(0, "status", job_name, "--json"))["nodes"]
        assert len(nodes) == HOSTS
        assert {node["phase"] for node in nodes} <= {"starting", "joining"}
    finally:
        code, text = clusterctl.run("stop", job_name)
    assert (code, text.splitlines()[-1]) == (0, f"{job_name}: stopped. No processes remain.")
    assert processes_of(job_name) == []
