"""First failure: the first line of a failed job has node, rank and error. A job that cannot end has a line, too."""

import re
import shutil
import subprocess
import sys

import pytest

from tests import first_failure
from tests.conftest import processes_of
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


#: The last line of rank 1 hangs: it leaves a process group, or rank 0 has said that the job is done.
LAST_LINE = """
import json, os, sys, time
rank = int(os.environ["RANK"])
if sys.argv[1] == "the group":
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    if rank == 1:
        dist.distributed_c10d._unregister_all_process_groups = lambda: time.sleep(1000)
    dist.destroy_process_group()
elif rank == 0:
    print("::cluster " + json.dumps({"event": "done", "node": 0, "time": time.time(), "seconds": 1.0}), flush=True)
else:
    time.sleep(1000)
"""


@pytest.mark.parametrize("backend", ["local", "ssh"])
@pytest.mark.parametrize("kept_by", ["the group", "the program"])
def test_a_job_whose_last_line_hangs_on_a_rank_is_done(backend, kept_by, clusterctl, job_name, request):
    (clusterctl.folder / "train.py").write_text(LAST_LINE)
    command = ["launch", "--backend", backend, "--name", job_name, "--nodes", "2", "--grace", "1s"]
    if backend == "ssh":
        inventory(clusterctl.folder, request.getfixturevalue("sshd"), clusterctl.folder / "remote")
        command += ["--python", sys.executable]
    text = clusterctl.expect(0, *command, "--command", f"train.py '{kept_by}'")
    who = (
        "rank 1 did not exit after the program's end" if kept_by == "the group" else "its ranks did not exit"
    )
    assert f"node-1: {who}" in text, text
    assert "done in" in text.splitlines()[-1]
    assert not processes_of(job_name)


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
