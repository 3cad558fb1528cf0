"""Sessions with a running job on the testbed: over SSH in Docker, and on Slurm in Apptainer."""

import shutil

import pytest
import yaml

from tests import sessions
from tests.contract.sshd import TICKS
from tests.real.test_slurm import HOME, Slurm, sif

__all__ = ["sif"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(300, func_only=True)]


def check(clusterctl, job, nodes):
    shutil.copy(TICKS, clusterctl.folder)
    code, text = clusterctl.run(
        "launch", "--name", job, "--nodes", "2", "--gpus", "1", "--detach", "--command", TICKS.name
    )
    assert code == 0, text
    try:
        sessions.wait_until_it_runs(clusterctl, job)
        sessions.check_exec(clusterctl, job, nodes)
        sessions.check_top(clusterctl, job, nodes)
        sessions.check_cp(clusterctl, job, nodes)
        sessions.check_port_forward(clusterctl, job, nodes, "python3")
        sessions.check_shell(clusterctl, job)
    finally:
        assert clusterctl.run("stop", job)[0] == 0
    sessions.check_refusals(clusterctl, job, nodes)


def test_over_ssh_in_docker(clusterctl, testbed, image_on_hosts, job_name):
    machines = {
        name: {
            "address": testbed[name].address,
            "gpus": 1,
            "runtime": "docker",
            "run_dir": "/root/clusterctl/runs",
        }
        for name in ("n0", "n1")
    }
    described = {"ssh_config": str(testbed.ssh_config), "device": "cpu", "nodes": machines}
    (clusterctl.folder / "cluster.yaml").write_text(yaml.safe_dump(described))
    check(clusterctl, job_name, ["n0", "n1"])


def test_on_slurm_in_apptainer(clusterctl, testbed, sif, job_name):
    slurm = Slurm(clusterctl, testbed)
    check(clusterctl, job_name, ["node-0", "node-1"])
    slurm.login.run(f"rm -rf {HOME}/runs/{job_name}")
