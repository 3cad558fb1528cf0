"""doctor on a Slurm cluster with one fault at a time: it must name the fault, the node and the fix."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from cluster import doctor
from cluster.backends.slurm import doctor as slurm_doctor
from cluster.spec.model import Inventory, Machine
from cluster.transport import close_all
from tests.conftest import ROOT

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def inventory(testbed):
    """Return the inventory of an ordinary user, with a small SIF on the shared disk."""
    name = f"/shared/doctor-{os.getpid()}"
    programs = "cp --parents -L /bin/sh /bin/true $(ldd /bin/sh | grep -o '/[^ ]*') root"
    make = f"mkdir -p {name}/root && cd {name} && {programs} && apptainer build small.sif root && rm -r root"
    testbed["n0"].run(make, user="ada")
    login = Machine(
        "login", "", (), "ada@n0", f"{name}/runs", f"{name}/data", "apptainer", str(testbed.ssh_config)
    )
    yield Inventory(
        (login,),
        "slurm",
        is_assigned=True,
        settings={"partition": "debug"},
        image=f"{name}/small.sif",
        device="cpu",
    )
    close_all()
    testbed["n0"].run(f"rm -r {name}")


@pytest.fixture(autouse=True)
def no_files_left(testbed):
    yield
    for host in testbed.hosts.values():
        wait_for(lambda host=host: host.run("find /shared /home/ada -name '.clusterctl-doctor*'") == "")
    wait_for(lambda: testbed["n0"].run("squeue --noheader --name clusterctl-doctor") == "")


def changed(inventory, **fields):
    return replace(inventory, machines=(replace(inventory.machines[0], **fields),))


def failures(inventory, **options):
    """Return the failures by (check, node)."""
    report = doctor.examine(inventory, **options)
    assert report.seconds < 60
    return {(each.check, each.node): each for each in report.findings if each.level == "failure"}


def test_healthy_cluster_has_no_failures_and_every_node_is_checked(inventory):
    report = doctor.examine(inventory, nodes=3)
    assert [each for each in report.findings if each.level == "failure"] == []
    for check in ("job", "common", "names", "runtime", "image", "shm", "disk", "run_dir"):
        assert {each.node for each in report.findings if each.check == check} == {"n0", "n1", "n2"}
    assert all("over eth0" in each.detail for each in report.findings if each.check == "names")


def test_run_dir_that_is_not_shared(inventory):
    found = failures(changed(inventory, run_dir="/home/ada/runs"), nodes=3)
    assert sorted(found) == [("common", "n1"), ("common", "n2")]  # n0 is the login node itself
    assert "/home/ada/runs (run_dir) is not shared" in found["common", "n1"].detail
    assert "run_dir" in found["common", "n1"].fix


def test_missing_and_invalid_sif(inventory):
    missing = inventory.image + ".not"
    found = failures(inventory, image=missing)
    assert list(found) == [("request", "login")]
    assert found["request", "login"].detail == f"no image {missing}"
    assert found["request", "login"].fix.startswith("clusterctl image sif")
    found = failures(inventory, image="/etc/passwd")
    assert {check for check, _ in found} == {"image"}
    assert all("image format not recognized" in each.detail for each in found.values())
    assert len(found) == 2


def test_unsatisfiable_request_fails_before_any_job(inventory):
    found = failures(replace(inventory, settings={"partition": "gppu"}))
    assert list(found) == [("request", "login")]
    assert (found["request", "login"].detail, found["request", "login"].fix) == (
        "no partition gppu",
        "one of: gpu, debug",
    )
    found = failures(replace(inventory, device="cuda"), gpus=3)
    assert "its nodes have 2 GPUs, but --gpus is 3" in found["request", "login"].detail
    found = failures(replace(inventory, settings={"partition": "debug", "time": "31"}))
    assert found["request", "login"].fix == "use at most 30 minutes"


def test_host_that_just_died(inventory, testbed, monkeypatch):
    """Slurm does not know it yet: the host is killed just before the job is submitted."""
    run = slurm_doctor._run_job

    def kill_first(*arguments):
        testbed.fault("kill", "n2")
        return run(*arguments)

    monkeypatch.setattr(slurm_doctor, "_run_job", kill_first)
    try:
        found = failures(inventory, nodes=3)
    finally:
        testbed.fault("heal", "n2")
        ready = "until [ $(sinfo -h -N -p debug -t idle -r | wc -l) = 3 ]; do sleep 1; done"
        testbed["n0"].run(ready, timeout_s=120)
    assert list(found) == [("job", "login")]
    assert "1 of 3 nodes did not run the job" in found["job", "login"].detail
    assert "on node n2" in found["job", "login"].detail


def test_ctrl_c_cancels_a_pending_job(inventory, testbed, tmp_path):
    n0 = testbed["n0"]
    login = inventory.machines[0]
    (tmp_path / "cluster.yaml").write_text(
        f"backend: slurm\nssh_config: {testbed.ssh_config}\ndevice: cpu\nimage: {inventory.image}\n"
        f"nodes:\n  login: {{login: ada@n0, run_dir: {login.run_dir}, data_dir: {login.data_dir}}}\n"
    )
    queued = "squeue --noheader --name clusterctl-doctor --states pending"
    other = n0.run("sbatch --parsable -o /dev/null --exclusive -N3 --wrap 'sleep 100'", user="ada")
    wait_for(lambda: n0.run(f"squeue --noheader --job {other} --states running"))
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster", "doctor"],
        cwd=tmp_path,
        env={**os.environ, "CLUSTERCTL_STATE_DIR": str(tmp_path / "state"), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        wait_for(lambda: n0.run(queued))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, b"Traceback" in errors) == (130, False)
        wait_for(lambda: not n0.run(queued))
    finally:
        process.kill()
        n0.run(f"scancel {other}; while squeue --noheader --me | grep -q .; do sleep 0.2; done", user="ada")


def wait_for(true, timeout_s=60):
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until
        time.sleep(0.2)


def test_controller_that_does_not_answer(inventory, testbed):
    testbed["n0"].run("scontrol shutdown slurmctld; while pidof slurmctld; do sleep 0.2; done")
    try:
        found = failures(inventory)
    finally:
        testbed["n0"].run("slurmctld; until scontrol ping | grep -q UP; do sleep 0.2; done")
        testbed["n0"].run(
            "until [ $(sinfo -h -N -p debug -t idle -r | wc -l) = 3 ]; do sleep 1; done", timeout_s=120
        )
    assert list(found) == [("request", "login")]
    assert "Slurm does not answer" in found["request", "login"].detail
