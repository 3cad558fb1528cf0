"""Sessions with a running job on every backend, without Slurm."""

import sys

from tests import sessions
from tests.contract.test_backends import backend, start

__all__ = ["backend", "start"]
NODES = ["node-0", "node-1"]


def test_sessions_with_a_running_job(clusterctl, backend, start, job_name, request):
    python = "python3" if backend.name == "compose" else sys.executable
    start("--detach").communicate(timeout=60)
    request.addfinalizer(lambda: clusterctl.run("stop", job_name))
    sessions.wait_until_it_runs(clusterctl, job_name)
    sessions.check_exec(clusterctl, job_name, NODES)
    sessions.check_top(clusterctl, job_name, NODES)
    sessions.check_cp(clusterctl, job_name, NODES)
    sessions.check_port_forward(clusterctl, job_name, NODES, python)
    sessions.check_shell(clusterctl, job_name)
    assert clusterctl.run("stop", job_name)[0] == 0
    assert backend.remains_of(job_name) == []
    sessions.check_refusals(clusterctl, job_name, NODES)


def test_bad_input_of_sessions(clusterctl, job_name):
    for words, message in (
        (["exec", "none", "--", "true"], "no job 'none'"),
        (["cp", "none"], "none: expected JOB:PATH"),
        (["port-forward", "none", "70000"], "70000: expected LOCAL:REMOTE or one port"),
        (["port-forward", "none", "a:80"], "a:80: expected LOCAL:REMOTE or one port"),
        (["tensorboard", "none"], "no job 'none'"),
    ):
        code, text = clusterctl.run(*words)
        assert (code, text.splitlines()[0]) == (2, f"error: {message}")
