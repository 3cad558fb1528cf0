"""The first line of a failed job names the node, the rank and what it failed of, with two ranks on each node."""

import re
import shutil
import sys

import pytest

from tests import first_failure
from tests.contract.sshd import inventory

CASES = [(0, "exception"), (1, "exit"), (3, "kill"), (3, "segv")]


@pytest.mark.parametrize("backend", ["local", "ssh"])
@pytest.mark.parametrize(("rank", "how"), CASES)
def test_first_failure(rank, how, backend, clusterctl, job_name, request):
    shutil.copy(first_failure.__file__, clusterctl.folder)
    command = ["launch", "--backend", backend, "--name", job_name, "--nodes", "2", "--gpus", "2"]
    if backend == "ssh":
        inventory(clusterctl.folder, request.getfixturevalue("sshd"), clusterctl.folder / "remote")
        command += ["--python", sys.executable]
    code, text = clusterctl.run(*command, "--command", f"first_failure.py {rank} {how}")
    assert code == 1, text
    lines = [line for line in text.splitlines() if re.match(r"node-\d( on \w+)?: (rank|exit \d|lost)", line)]
    print(f"FIRST {backend} foreign rank {rank} {how}: {lines[0]}")
    assert re.match(first_failure.expected(f"node-{rank // 2}", rank, how), lines[0]), text
