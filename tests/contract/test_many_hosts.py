"""Sixty-four machines at once behind one real sshd: all start, each logged into once, none turned away for good.

It is the launcher that is tested: the program is a shell script in place of the agent, because 64 times torch is more
than a machine holds. The figures are in benchmarks/hosts.py.
"""

import json
import re

import pytest

from tests.conftest import processes_of
from tests.contract.sshd import Sshd, addresses, inventory

HOSTS = 64
# Says to the launcher's check that it has torch; then runs until it is stopped.
PROGRAM = """#!/bin/sh
case $1 in -c | -IS) exit 0 ;; esac
exec sleep 300
"""


@pytest.fixture
def many(tmp_path, worker):
    server = Sshd(tmp_path / "sshd", addresses(worker, HOSTS), bare=True)
    yield server
    server.stop()


def test_64_hosts_start_each_over_one_connection_though_sshd_turns_many_away(clusterctl, many, tmp_path, job_name):
    remote = tmp_path / "remote"
    # The folder of the program as all of these machines see it: the same one.
    clusterctl.folder = tmp_path / "work"
    clusterctl.folder.mkdir()
    mirror = remote / "data" / str(clusterctl.folder).lstrip("/")
    mirror.parent.mkdir(parents=True)
    mirror.symlink_to(clusterctl.folder)
    inventory(clusterctl.folder, many, remote)
    program = clusterctl.folder / "program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    arguments = ["--nodes", str(HOSTS), "--python", str(program), "--command", "it.py", "--name", job_name, "--detach"]
    try:
        code, text = clusterctl.run("launch", *arguments)
        assert code == 0, text
        log = (many.folder / "log").read_text()
        assert log.count("Accepted publickey") == HOSTS
        # else nothing was tested of what many logins at once meet
        assert re.search(r"drop connection .* past MaxStartups", log)
        assert len(list((remote / job_name / "attempt-1").glob("node-*.sh"))) == HOSTS
        code, text = clusterctl.run("status", job_name, "--json")
        nodes = json.loads(text)["nodes"]
        assert len(nodes) == HOSTS
        assert {node["phase"] for node in nodes} <= {"starting", "joining"}
    finally:
        code, text = clusterctl.run("stop", job_name)
    assert (code, text) == (0, f"{job_name}: stopped; nothing of it is running\n")
    assert processes_of(job_name) == []
