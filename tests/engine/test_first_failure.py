"""The first line of a failed job of compose names the node, the rank and the cause; two ranks in each container."""

import re
import shutil
import subprocess

import pytest

from tests import first_failure

pytestmark = pytest.mark.engine
CASES = [(0, "exception"), (1, "exit"), (3, "kill"), (0, "segv"), (3, "oom")]


@pytest.mark.parametrize(("rank", "how"), CASES)
def test_first_failure(rank, how, clusterctl, job_name):
    shutil.copy(first_failure.__file__, clusterctl.folder)
    command = ["launch", "--backend", "compose", "--name", job_name, "--nodes", "2", "--gpus", "2"]
    process = clusterctl.start(*command, "--command", f"first_failure.py {rank} {how}")
    node = f"node-{rank // 2}"
    if how == "oom":
        clusterctl.wait_for(job_name, "waits for its limit", node=node)
        limit = ["docker", "update", "--memory", "1200m", "--memory-swap", "1200m", f"{job_name}-{node}"]
        subprocess.run(limit, check=True, capture_output=True)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 1, text
    lines = [line for line in text.splitlines() if re.match(r"node-\d: (rank|exit \d|lost)", line)]
    assert lines, text
    print(f"FIRST | compose | torch | rank {rank} | {how} | {lines[0]}")
    assert re.match(first_failure.expected(node, rank, how), lines[0]), text
