"""Checks of doctor on recorded output of Slurm 24.11."""

import re
from dataclasses import replace

import pytest

from cluster.backends.slurm import doctor
from cluster.spec.model import Job, Machine, Queue

LOGIN = Machine("login", "", (), "ann@login", "/shared/runs", "/shared/data", "apptainer")


def job(nodes=2, gpus=1, device="cpu", runtime="apptainer", **options):
    queue = Queue(replace(LOGIN, runtime=runtime), options)
    return Job("doctor", ("true",), nodes, gpus, "/", image="/shared/t.sif", device=device, queue=queue)


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
0: common=data_dir
0: visible_gpus=
1: runtime_version=apptainer version 1.4.5
0: runtime_version=apptainer version 1.4.5
1: user=ada
1: uid=1000
1: arch=x86_64
1: shm_kb=1048576 1048576
1: nofile=20000
1: address=lo 127.0.0.1/8
1: address=eth0 172.31.2.12/24
1: number=n0 172.31.2.10
1: route=n0 172.31.2.10 dev eth0 src 172.31.2.12 uid 1000 \    cache
1: run_dir=/shared/runs
1: run_disk_kb=44237500 264212084
1: probe=end
0: user=ada
0: uid=1000
0: arch=x86_64
0: shm_kb=1048576 1048576
0: nofile=20000
0: address=lo 127.0.0.1/8
0: address=eth0 172.31.2.10/24
0: number=n2 172.31.2.12
0: route=n2 172.31.2.12 dev eth0 src 172.31.2.10 uid 1000 \    cache
0: run_dir=/shared/runs
0: run_disk_kb=44237508 264212084
0: probe=end
"""


def judged(*changes, request=None, text=JOB):
    """Return the findings that are not ok after replacing each (old, new) of `changes` in the job's output."""
    for old, new in changes:
        assert re.search(old, text, re.M), old
        text = re.sub(old, new, text, flags=re.M)
    found = doctor.judge_nodes(request or job(), *doctor.parse_job_output(text))
    assert {each.check for each in found} <= {*doctor.ORDER}
    return [
        (each.check, each.node, each.level, each.detail, each.fix) for each in found if each.level != "ok"
    ]


def one(*changes, **more):
    (found,) = judged(*changes, **more)
    assert found[4]
    return found[:4]


def test_healthy_cluster_has_no_failures_and_names_the_network_device():
    assert judged() == []
    found = doctor.judge_nodes(job(), *doctor.parse_job_output(JOB))
    assert [each.detail for each in found if each.check == "names"] == [
        "reaches n2 (172.31.2.12) over eth0, as NCCL and gloo will",
        "reaches n0 (172.31.2.10) over eth0, as NCCL and gloo will",
    ]
    assert [each.node for each in found if each.check == "shm"] == ["n0", "n2"]


@pytest.mark.parametrize(
    ("old", "new", "check", "detail"),
    [
        ("^1: common=run_dir\n", "", "common", "/shared/runs (run_dir) is not shared"),
        (
            "^1: probe=end",
            "1: unwritable=Read-only file system\n1: probe=end",
            "run_dir",
            "Read-only file system",
        ),
        ("^1: number=.*\n", "", "names", "the name n0 does not resolve"),
        ("^(1: route=n0 .* dev) eth0", r"\1 lo", "names", "n0 is 172.31.2.10 on lo: itself"),
        ("^1: runtime_version=.*\n", "", "runtime", "apptainer is not installed"),
        (
            "^1: probe=end",
            "1: image_says=FATAL:   could not open image /shared/t.sif: image format not recognized\n1: probe=end",
            "image",
            "/shared/t.sif does not run: could not open image /shared/t.sif: image format not recognized",
        ),
        ("^1: shm_kb=.*", "1: shm_kb=65536 65536", "shm", "/dev/shm has 64 MB free of 64 MB"),
        (
            "^1: run_disk_kb=.*",
            "1: run_disk_kb=1000 264212084",
            "disk",
            "0 MB free for /shared/runs (run_dir)",
        ),
    ],
)
def test_failure_on_one_node_names_the_node(old, new, check, detail):
    found = one((old, new))
    assert found[:3] == (check, "n2", "failure")
    assert detail in found[3]


def test_pyxis_is_detected_by_the_srun_option():
    pyxis = job(runtime="pyxis")
    there = ("=apptainer version 1.4.5", "=pyxis: srun has --container-image")
    assert judged(there, request=pyxis) == []
    assert one(there, ("^1: runtime_version=.*\n", ""), request=pyxis)[:3] == ("runtime", "n2", "failure")


def test_only_the_administrator_can_fix_the_nodes():
    (found,) = judged(("^1: shm_kb=.*", "1: shm_kb=65536 65536"))
    assert found[4] == "ask the administrator: sudo mount -o remount,size=50% /dev/shm"


CUDA = job(gpus=2, device="cuda")
SMI = (
    "1: gpu=0, 580.82.07, 81559, 1, NVIDIA H100\n1: gpu=1, 580.82.07, 81559, 1, NVIDIA H100\n"
    "1: listed=GPU 0: NVIDIA H100 (UUID: GPU-a)\n1: listed=GPU 1: NVIDIA H100 (UUID: GPU-b)\n"
)


def test_gpus_must_be_visible_to_the_step_and_the_driver():
    given = ("visible_gpus=", "visible_gpus=0,1")
    listed = [
        ("^1: probe=end", SMI + "1: probe=end"),
        ("^0: probe=end", re.sub("(?m)^1", "0", SMI) + "0: probe=end"),
    ]
    assert judged(given, *listed, request=CUDA) == []
    why = "Slurm allocated 2 GPUs, but nvidia-smi is not installed"
    assert one(given, listed[0], request=CUDA)[1:] == ("n0", "failure", why)
    fewer = ("^1: visible_gpus=0,1", "1: visible_gpus=0")
    assert one(given, *listed, fewer, request=CUDA)[3] == "2 GPUs requested, but CUDA_VISIBLE_DEVICES has 1"


def test_busy_nodes_are_a_warning_and_a_rejected_job_is_a_failure():
    busy = "srun: job 7 queued and waiting for resources\nsrun: error: Unable to allocate resources: "
    why = "2 nodes did not become free within 60 s: compute nodes were not checked"
    assert one(text=busy + "Requested nodes are busy\n")[2:] == ("warning", why)
    refused = one(text="srun: error: Unable to allocate resources: Invalid account\n")
    assert refused[2:] == ("failure", "did not run: Unable to allocate resources: Invalid account")


def test_node_whose_task_ended_early_is_named():
    text = JOB.replace("1: probe=end\n", "srun: error: n2: task 1: Killed\n")
    assert one(text=text) == ("job", "n2", "failure", "n2: task 1: Killed")


def test_dead_node_that_slurm_still_lists_is_reported():
    said = "srun: error: Task launch for StepId=111.0 failed on node n1: Communication connection failure\n"
    found = one(text=JOB + said + "srun: error: Application launch failed\n", request=job(3))
    why = f"1 of 3 nodes did not run the job: {said.removeprefix('srun: error: ').rstrip()}"
    assert found == ("job", "login", "failure", why)


SITE = {"partition": ["gpu*|3|2|gpu:2|1-00:00:00", "debug|3|2|gpu:2|30:00"]}


@pytest.mark.parametrize(
    ("request_", "site", "level", "detail"),
    [
        (job(partition="gpu"), SITE, "ok", "the cluster has 2 nodes"),
        (job(partition="gppu"), SITE, "failure", "no partition gppu"),
        (
            job(gpus=3, device="cuda"),
            SITE,
            "failure",
            "partition gpu: its nodes have 2 GPUs, but --gpus is 3",
        ),
        (replace(job(), image=""), SITE, "failure", "no image: apptainer has no default image"),
        (job(), {"no_program": ["sinfo"]}, "failure", "sinfo not found"),
        (job(), {"no_image": ["/shared/t.sif"]}, "failure", "no image /shared/t.sif"),
    ],
)
def test_request_is_compared_with_the_site(request_, site, level, detail):
    (found,) = doctor.judge_request(request_, site)
    assert (found.check, found.level, found.detail) == ("request", level, detail)
    assert bool(found.fix) == (level != "ok")


def test_srun_gets_only_node_options_and_gpus_once():
    given = {"partition": "gpu", "exclusive": "", "mail-user": "a@b", "begin": "now+1hour", "comment": "x"}
    assert doctor.srun(job(3, 2, "cuda", **given))[2:] == [
        *(
            "--nodes=3",
            "--ntasks-per-node=1",
            "--chdir=/tmp",
            "--gpus-per-node=2",
            "--partition=gpu",
            "--exclusive",
        )
    ]
    assert not [each for each in doctor.srun(job(1, 2, "cuda", gres="gpu:2")) if "gpus-per-node" in each]
