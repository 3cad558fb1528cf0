"""First failure: the first line of a failed job has node, rank and error, with two ranks per node."""

import re
import shutil
import subprocess
import sys

import pytest

from tests import first_failure
from tests.contract.sshd import inventory

#: The local backend runs the same code as the one for SSH.
CASES = [
    ("local", 0, "exception"),
    *(("ssh", *case) for case in ((0, "exception"), (1, "exit"), (3, "kill"), (3, "segv"))),
    *(
        pytest.param("compose", *case, marks=pytest.mark.engine)
        for case in ((0, "exception"), (1, "exit"), (3, "kill"), (0, "segv"), (3, "oom"))
    ),
]


@pytest.mark.parametrize(("backend", "rank", "how"), CASES)
def test_first_failure(backend, rank, how, clusterctl, job_name, request):
    shutil.copy(first_failure.__file__, clusterctl.folder)
    command = ["launch", "--backend", backend, "--name", job_name, "--nodes", "2", "--gpus", "2"]
    if backend == "ssh":
        inventory(clusterctl.folder, request.getfixturevalue("sshd"), clusterctl.folder / "remote")
        command += ["--python", sys.executable]
    process = clusterctl.start(*command, "--command", f"first_failure.py {rank} {how}")
    node = f"node-{rank // 2}"
    if how == "oom":
        clusterctl.wait_for(job_name, "waits for its limit", node=node)
        limit = ["docker", "update", "--memory", "1200m", "--memory-swap", "1200m", f"{job_name}-{node}"]
        subprocess.run(limit, check=True, capture_output=True)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 1, text
    lines = [line for line in text.splitlines() if re.match(r"node-\d( on \w+)?: (rank|exit \d|lost)", line)]
    assert lines, text
    print(f"FIRST {backend} foreign rank {rank} {how}: {lines[0]}")
    assert re.match(first_failure.expected(node, rank, how), lines[0]), text
