"""What doctor says of what a Slurm cluster printed: the judging alone, on the output of Slurm 24.11."""

import re
from dataclasses import replace

import pytest

from cluster.doctor import slurm
from cluster.doctor.probe import parse
from cluster.model import Node

LOGIN = Node("login", "", (), "ann@login", "/shared/runs", "/shared/data", "apptainer")
REQUEST = slurm.Request(2, 1, "cpu", {"partition": "gpu"})
ON_LOGIN = """
run_dir=/shared/runs
nearest_run_dir=/shared
data_dir=/shared/data
nearest_data_dir=/shared
has=sbatch
has=srun
has=squeue
has=scancel
has=scontrol
has=sinfo
ping=Slurmctld(primary) at n0 is UP
probe=end
"""
JOB = r"""
srun: job 39 queued and waiting for resources
srun: job 39 has been allocated resources
1: host=n2
0: host=n0
1: peer=n0
0: peer=n2
1: common=run_dir
0: common=run_dir
1: common=data_dir
1: visible_gpus=
1: tmp=/tmp
0: common=data_dir
0: visible_gpus=
0: tmp=/tmp
1: tmp_kb=44237504
0: tmp_kb=44237504
1: apptainer=apptainer version 1.4.5
0: apptainer=apptainer version 1.4.5
1: image_arch=amd64
0: image_arch=amd64
1: sif_runs=yes
1: user=ada
1: uid=1000
1: arch=x86_64
1: memory_kb=24684096
1: shm_kb=1048576 1048576
1: nofile=20000
1: memlock_kb=8192
1: has=ip
1: has=python3
1: address=lo 127.0.0.1/8
1: address=eth0 172.31.2.12/24
0: sif_runs=yes
1: number=n0 172.31.2.10
1: route=n0 172.31.2.10 dev eth0 src 172.31.2.12 uid 1000 \    cache
1: run_dir=/shared/runs
1: run_disk_kb=44237500 264212084
1: run_inodes=16116584 16777216
1: writable=/shared
1: probe=end
0: user=ada
0: uid=1000
0: arch=x86_64
0: memory_kb=24684096
0: shm_kb=1048576 1048576
0: nofile=20000
0: memlock_kb=8192
0: has=ip
0: has=python3
0: address=lo 127.0.0.1/8
0: address=eth0 172.31.2.10/24
0: number=n2 172.31.2.12
0: route=n2 172.31.2.12 dev eth0 src 172.31.2.10 uid 1000 \    cache
0: run_dir=/shared/runs
0: run_disk_kb=44237508 264212084
0: run_inodes=16116586 16777216
0: writable=/shared
0: probe=end
srun=0
back=0 run_dir
back=0 data_dir
back=1 run_dir
back=1 data_dir
"""


def judged(*changes, request=REQUEST, login=LOGIN, text=JOB):
    """Findings that are not ok, of the job's output with each (old, new) of `changes` replaced in it."""
    for old, new in changes:
        assert re.search(old, text, re.M), old
        text = re.sub(old, new, text, flags=re.M)
    found = slurm.judged(login, parse(ON_LOGIN), request, "/shared/t.sif", slurm.told(text))
    assert {each.check for each in found} <= {*slurm.ORDER}
    return [(each.check, each.node, each.level, each.detail, each.fix) for each in found if each.level != "ok"]


def one(*changes, **more):
    (found,) = judged(*changes, **more)
    assert found[4]
    return found[:4]


def test_a_cluster_that_is_well_has_nothing_wrong_and_says_which_device_leads_to_the_peers():
    assert judged() == []
    assert [each.level for each in slurm.on_login(LOGIN, parse(ON_LOGIN))] == ["ok", "ok"]
    found = slurm.judged(LOGIN, parse(ON_LOGIN), REQUEST, "/shared/t.sif", slurm.told(JOB))
    assert [each.detail for each in found if each.check == "names"] == [
        "reaches n2 (172.31.2.12) over eth0: NCCL and gloo take that",
        "reaches n0 (172.31.2.10) over eth0: NCCL and gloo take that",
    ]
    assert [each.node for each in found if each.check == "shm"] == ["n0", "n2"]


@pytest.mark.parametrize(
    ("old", "new", "check", "detail"),
    [
        ("^1: common=run_dir\n", "", "common", "/shared/runs (run_dir) is not the login node's"),
        ("^back=1 data_dir\n", "", "common", "/shared/data (data_dir): a file written here is not seen on the login"),
        ("^1: number=.*\n", "", "names", "the name n0 does not resolve"),
        ("^(1: route=n0 .* dev) eth0", r"\1 lo", "names", "n0 is 172.31.2.10 on lo: itself"),
        ("^1: apptainer=.*\n", "", "runtime", "there is no apptainer"),
        ("^1: sif_runs=yes", "1: sif_unreadable=Permission denied", "image", "/shared/t.sif: Permission denied"),
        (
            "^1: sif_runs=yes",
            "1: sif_says=FATAL:   could not open image /shared/t.sif: image format not recognized",
            "image",
            "/shared/t.sif does not run: could not open image /shared/t.sif: image format not recognized",
        ),
        ("^1: image_arch=amd64", "1: image_arch=arm64", "architecture", "x86_64, but its /shared/t.sif is for arm64"),
        ("^1: shm_kb=.*", "1: shm_kb=65536 65536", "shm", "/dev/shm has 64 MB free of 64 MB"),
        ("^1: tmp_kb=.*", "1: tmp_kb=12", "tmp", "0 MB free in /tmp"),
        ("^1: tmp_kb=.*\n", "", "tmp", "there is no /tmp"),
        ("^1: run_disk_kb=.*", "1: run_disk_kb=1000 264212084", "disk", "1 MB free for /shared/runs (run_dir)"),
    ],
)
def test_what_is_wrong_on_one_node_is_named_with_it(old, new, check, detail):
    found = one((old, new))
    assert found[:3] == (check, "n2", "failure")
    assert detail in found[3]


def test_pyxis_is_an_option_of_srun():
    pyxis = replace(LOGIN, runtime="pyxis")
    there = ("apptainer=apptainer version 1.4.5", "pyxis=pyxis: srun has --container-image")
    assert judged(there, login=pyxis) == []
    assert one(there, ("^1: pyxis=.*\n", ""), login=pyxis)[:3] == ("runtime", "n2", "failure")


CUDA = slurm.Request(2, 2, "cuda", {})
SMI = "1: gpu=0, 580.82.07, 81559, 1, NVIDIA H100\n1: gpu=1, 580.82.07, 81559, 1, NVIDIA H100\n"


def test_gpus_are_those_that_the_step_sees_and_the_driver_lists():
    given = ("visible_gpus=", "visible_gpus=0,1")
    listed = [
        ("^1: probe=end", SMI + "1: probe=end"),
        ("^0: probe=end", SMI.replace("1: gpu", "0: gpu") + "0: probe=end"),
    ]
    assert judged(given, *listed, request=CUDA) == []
    assert one(given, listed[0], request=CUDA)[1:] == ("n0", "failure", "Slurm gave 2 GPUs, but there is no nvidia-smi")
    fewer = ("^1: visible_gpus=0,1", "1: visible_gpus=0")
    assert one(given, *listed, fewer, request=CUDA)[3] == "2 GPUs asked for, and CUDA_VISIBLE_DEVICES has 1"


def test_an_image_whose_cuda_needs_a_newer_driver():
    held = "0: inside_python=3.12.3\n0: inside_torch=2.9.0\n0: inside_cuda=13.0\n0: user=ada"
    old = SMI.replace("580.82.07", "550.54.15")
    changes = [
        ("visible_gpus=", "visible_gpus=0,1"),
        ("^0: user=ada", held),
        ("^1: probe=end", old + "1: probe=end"),
        ("^0: probe=end", SMI.replace("1: gpu", "0: gpu") + "0: probe=end"),
    ]
    found = one(*changes, request=CUDA)
    assert found[:3] == ("versions", "n2", "failure")
    assert "driver 550.54.15: CUDA 13.0 needs 580 or newer" in found[3]
    without = judged(("^0: user=ada", "0: inside_python=3.12.3\n0: user=ada"))
    assert {each[:2] for each in without} == {("versions", "n0"), ("versions", "n2")}


def test_a_job_that_found_no_room_is_a_warning_and_one_that_slurm_refused_a_failure():
    busy = "srun: job 7 queued and waiting for resources\nsrun: error: Unable to allocate resources: "
    assert one(text=busy + "Requested nodes are busy\nsrun=1\n")[2:] == (
        "warning",
        "no 2 nodes are free within 60 s: compute nodes were not looked at",
    )
    refused = one(text="srun: error: Unable to allocate resources: Invalid account\nsrun=1\n")
    assert refused[2:] == ("failure", "did not run: Unable to allocate resources: Invalid account")


def test_a_node_whose_task_ended_early_is_named():
    text = JOB.replace("1: probe=end\n", "srun: error: n2: task 1: Killed\n")
    assert one(text=text) == ("job", "n2", "failure", "n2: task 1: Killed")


def test_a_node_that_died_unnoticed_by_slurm_is_not_left_out():
    said = "srun: error: Task launch for StepId=111.0 failed on node n1: Communication connection failure\n"
    found = one(text=JOB + said + "srun: error: Application launch failed\n", request=slurm.Request(3, 1, "cpu", {}))
    assert found == (
        "job",
        "login",
        "failure",
        "1 of 3 did not run it: Task launch for StepId=111.0 failed on node n1: Communication connection failure",
    )


def test_a_login_node_without_slurm_and_a_controller_that_is_down():
    def last(old, new):
        return slurm.on_login(LOGIN, parse(ON_LOGIN.replace(old, new)))[-1]

    assert last("has=srun\n", "").detail == "there is no srun"
    assert last("is UP", "is DOWN").detail == "its controller does not answer: Slurmctld(primary) at n0 is DOWN"
    found = last("probe=end", "unwritable=data_dir\nprobe=end")
    assert (found.check, found.detail) == ("common", "/shared/data (data_dir): /shared cannot be written")


SITE = {"partition": ["gpu*|3|2|gpu:2|1-00:00:00", "debug|3|2|gpu:2|30:00"]}


@pytest.mark.parametrize(
    ("request_", "level", "detail"),
    [
        (REQUEST, "ok", "2 nodes can be had, Slurm expects the start of such a job at 2026-11-21T17:39:57"),
        (slurm.Request(2, 1, "cpu", {"partition": "gppu"}), "failure", "no partition gppu"),
        (
            slurm.Request(2, 3, "cuda", {}),
            "failure",
            "partition gpu: its nodes have 2 GPUs, and --gpus 3 asks for more",
        ),
    ],
)
def test_a_request_is_held_against_what_the_site_has(request_, level, detail):
    said = "srun: Job 17 to start at 2026-11-21T17:39:57 a using 4 processors on nodes n[0-1] in partition gpu\n"
    (found,) = slurm.asked(LOGIN, request_, SITE, 0, said)
    assert (found.check, found.level, found.detail) == ("request", level, detail)
    assert bool(found.fix) == (level != "ok")


def test_nodes_that_are_down_for_a_moment_are_a_warning():
    said = "allocation failure: Requested node configuration is not available\n"
    (found,) = slurm.asked(LOGIN, REQUEST, SITE, 1, said)
    assert (found.level, found.detail) == (
        "warning",
        "Slurm would not start it now: Requested node configuration is not available",
    )


def test_srun_gets_the_options_that_concern_nodes_and_gpus_only_once():
    options = {"partition": "gpu", "exclusive": "", "mail-user": "a@b", "begin": "now+1hour", "comment": "x"}
    assert slurm.srun(slurm.Request(3, 2, "cuda", options))[2:] == [
        "--nodes=3",
        "--ntasks-per-node=1",
        "--chdir=/tmp",
        "--gpus-per-node=2",
        "--partition=gpu",
        "--exclusive",
    ]
    assert not [each for each in slurm.srun(slurm.Request(1, 2, "cuda", {"gres": "gpu:2"})) if "gpus-per-node" in each]
