"""Faults planted in a Slurm cluster, one at a time: doctor names each with its node and what to type."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from cluster import doctor
from cluster.model import Inventory, Node
from cluster.shells import close_all
from tests.conftest import ROOT

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def inventory(testbed):
    """The cluster as an ordinary user sees it, with a tiny SIF on its common disk."""
    name = f"/shared/doctor-{os.getpid()}"
    programs = "cp --parents -L /bin/sh /bin/true $(ldd /bin/sh | grep -o '/[^ ]*') root"
    make = f"mkdir -p {name}/root && cd {name} && {programs} && apptainer build small.sif root && rm -r root"
    testbed["n0"].run(make, user="ada")
    login = Node("login", "", (), "ada@n0", f"{name}/runs", f"{name}/data", "apptainer", str(testbed.ssh_config))
    yield Inventory((login,), "slurm", {"partition": "debug"}, image=f"{name}/small.sif", device="cpu")
    close_all()
    testbed["n0"].run(f"rm -r {name}")


@pytest.fixture(autouse=True)
def no_files_left(testbed):
    yield
    for host in testbed.hosts.values():
        assert host.run("find /shared /home/ada -name '.clusterctl-doctor*'") == ""
    assert testbed["n0"].run("squeue --noheader --name clusterctl-doctor") == ""


def changed(inventory, **fields):
    return replace(inventory, nodes=(replace(inventory.nodes[0], **fields),))


def failures(inventory, **options):
    """(check, node): the finding, for everything that would stop a launch."""
    report = doctor.examine(inventory, **options)
    assert report.seconds < 60
    return {(each.check, each.node): each for each in report.findings if each.level == "failure"}


def test_a_cluster_that_is_well_has_no_failure_and_every_node_is_looked_at(inventory):
    report = doctor.examine(inventory, nodes=3)
    assert [each for each in report.findings if each.level == "failure"] == []
    for check in ("job", "common", "names", "runtime", "image", "architecture", "shm", "tmp", "disk"):
        assert {each.node for each in report.findings if each.check == check} == {"n0", "n1", "n2"}
    assert all("over eth0" in each.detail for each in report.findings if each.check == "names")


def test_a_run_dir_that_each_host_has_of_its_own(inventory):
    found = failures(changed(inventory, run_dir="/home/ada/runs"), nodes=3)
    assert sorted(found) == [("common", "n1"), ("common", "n2")]  # n0 is the login node itself
    assert "/home/ada/runs (run_dir) is not the login node's" in found["common", "n1"].detail
    assert "run_dir" in found["common", "n1"].fix


def test_no_sif_and_a_file_that_is_none(inventory):
    missing = inventory.image + ".not"
    found = failures(inventory, image=missing)
    assert {check for check, _ in found} == {"image"}
    assert len(found) == 2
    assert all(f"{missing}: No such file or directory" in each.detail for each in found.values())
    assert all(each.fix.startswith(f"clusterctl image sif {missing}") for each in found.values())
    found = failures(inventory, image="/etc/passwd")
    assert all("image format not recognized" in each.detail for each in found.values())
    assert len(found) == 2


def test_what_the_site_has_not_is_said_before_any_job(inventory):
    found = failures(replace(inventory, options={"partition": "gppu"}))
    assert list(found) == [("request", "login")]
    assert (found["request", "login"].detail, found["request", "login"].fix) == (
        "no partition gppu",
        "one of: gpu, debug",
    )
    found = failures(replace(inventory, device="cuda"), gpus=3)
    assert "its nodes have 2 GPUs, and --gpus 3 asks for more" in found["request", "login"].detail
    found = failures(replace(inventory, options={"partition": "debug", "time": "31"}))
    assert found["request", "login"].fix == "at most 30 minutes"


def test_a_runtime_that_is_not_on_the_nodes(inventory):
    found = failures(changed(inventory, runtime="podman"))
    assert {check for check, _ in found} == {"runtime"}
    assert [each.detail for each in found.values()] == ["podman is not installed"] * 2


def test_gpus_that_slurm_gives_and_no_driver_lists(inventory):
    found = failures(replace(inventory, device="cuda"), gpus=2)
    assert {check for check, _ in found} == {"gpus"}
    assert {each.detail for each in found.values()} == {"Slurm gave 2 GPUs, but there is no nvidia-smi"}


def test_one_node_whose_shared_memory_is_small(inventory, testbed):
    testbed["n1"].run("mount -o remount,size=64m /dev/shm")
    try:
        found = failures(inventory, nodes=3)
    finally:
        testbed["n1"].run("mount -o remount,size=1g /dev/shm")
    assert list(found) == [("shm", "n1")]
    assert "/dev/shm has 64 MB free of 64 MB" in found["shm", "n1"].detail


def test_a_host_that_died_a_moment_ago(inventory, testbed):
    testbed.fault("kill", "n2")
    try:
        found = failures(inventory, nodes=3)
    finally:
        testbed.fault("heal", "n2")
        ready = "until [ $(sinfo -h -N -p debug -t idle -r | wc -l) = 3 ]; do sleep 1; done"
        testbed["n0"].run(ready, timeout_s=120)
    assert list(found) == [("job", "login")]
    assert "1 of 3 did not run it" in found["job", "login"].detail
    assert "on node n2" in found["job", "login"].detail


def test_ctrl_c_while_the_job_waits_takes_it_out_of_the_queue(inventory, testbed, tmp_path):
    n0, login = testbed["n0"], inventory.nodes[0]
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
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
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


def wait_for(true, timeout_s=15):
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until
        time.sleep(0.2)


def test_a_controller_that_does_not_answer(inventory, testbed):
    testbed["n0"].run("scontrol shutdown slurmctld; while pidof slurmctld; do sleep 0.2; done")
    try:
        found = failures(inventory)
    finally:
        testbed["n0"].run("slurmctld; until scontrol ping | grep -q UP; do sleep 0.2; done")
        testbed["n0"].run("until [ $(sinfo -h -N -p debug -t idle -r | wc -l) = 3 ]; do sleep 1; done", timeout_s=120)
    assert list(found) == [("slurm", "login")]
    assert "is DOWN" in found["slurm", "login"].detail
