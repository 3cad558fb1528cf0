"""Whole rendered plans compared with files; `make golden` rewrites them, and the diff is the review."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from submitit.slurm.slurm import _make_sbatch_string

from cluster import resources
from cluster.backends import BACKENDS
from cluster.backends.compose import gpu_reservation
from cluster.model import Job, Mount, Node, Queue

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

JOBS = {
    "trainer": Job("digits", ("-m", "trainer", "train", "--device", "cpu"), 3, 2, "/home/ann/runs", device="cpu"),
    "cuda": Job("coco", ("-m", "trainer", "train"), 2, 2, "/home/ann/runs", device="cuda", gpus=(0, 1, 2, 3)),
    "foreign": Job(
        "mine",
        ("train.py", "--note", "a'; echo foo", "--and", 'a"=0"', "--line", "one\ntwo", "--cost", "$5 @rank@"),
        2,
        1,
        "/home/ann/my runs",
        workdir="/home/ann/it's here",
        env={"NOTE": "a'; echo $HOME `id`", "LINES": "1\n2", "GLOO_SOCKET_IFNAME": "eth7"},
        mounts=(Mount("/home/ann/it's $here", "/data"),),
        says_ready=False,
    ),
}


#: The golden plans: each backend and each runtime once. The part of a script that no job changes is shown as its name.
PLANS = (
    "compose-cuda",
    "compose-foreign",
    "local-foreign",
    "ssh-docker-trainer",
    "ssh-podman-cuda",
    "slurm-apptainer-cuda",
    "slurm-docker-cuda",
    "slurm-none-foreign",
    "slurm-pyxis-cuda",
)
STATIC = ("agent/node.sh", "agent/batch.sh", "agent/slurm_node.sh")


def hosts(job, runtime):
    return tuple(
        Node(
            f"gpu-{letter}",
            f"10.0.0.{rank}",
            gpus=tuple(range(rank, rank + job.procs_per_node)),
            login=f"ann@gpu-{letter}",
            run_dir="/home/ann/clusterctl/runs",
            data_dir="" if runtime == "none" else "/home/ann/clusterctl/data",
            runtime=runtime,
        )
        for rank, letter in zip(range(job.nodes), "abc", strict=False)
    )


def plan(case):
    """The plan of a case `BACKEND[-RUNTIME]-JOB`."""
    backend, *runtime, name = case.split("-")
    job = JOBS[name]
    if backend == "compose":
        job = replace(job, image="trainer:0.1", user="1000:1000", secrets=("TOKEN",))
    if backend == "ssh":
        mounts = (*job.mounts, Mount('/data/a,b "c"', "/data/ab"))
        job = replace(job, image="trainer:0.1", hosts=hosts(job, *runtime), mounts=mounts, secrets=("TOKEN",))
    if backend == "slurm":
        login = Node(
            "login",
            "",
            login="ann@cluster",
            run_dir="/shared/ann/my runs" if name == "foreign" else "/shared/ann/runs",
            data_dir="" if name == "foreign" else "/shared/ann/data",
            runtime=runtime[0],
        )
        queue = Queue(login, {"partition": "gpu", "time": "8:00:00", "comment": "it is mine"})
        job = replace(job, image="/shared/ann/trainer.sif", queue=queue, secrets=("TOKEN",), max_restarts=3)
    return BACKENDS[backend].plan(job, attempt=1, port=29500)


@pytest.mark.parametrize("case", PLANS)
def test_plan(case):
    text = "".join(
        f"# ---- {step.place}: {' '.join(step.argv)}\n# ---- {step.agent}\n# ---- {path}\n{file}"
        for step in plan(case).steps
        for path, file in step.files.items()
    )
    for name in STATIC:
        text = text.replace(resources.text(name), f"# ---- {name}\n")
    golden = HERE / f"{case}.txt"
    if os.environ.get("GOLDEN") == "write":
        golden.write_text(text)
    assert text == golden.read_text()


def test_a_batch_script_is_what_submitit_renders():
    (step,) = plan("slurm-docker-cuda").steps
    (text,) = step.files.values()
    setup, command = text.partition("# setup\n")[2].split("\n\n# command\nexport SUBMITIT_EXECUTOR=slurm\n")
    assert text == _make_sbatch_string(
        command=command.removesuffix("\n"),
        folder="/shared/ann/runs/coco",
        job_name="coco",
        nodes=2,
        ntasks_per_node=1,
        partition="gpu",
        time="8:00:00",
        comment="it is mine",
        gpus_per_node=2,
        wckey=None,
        stderr_to_stdout=True,
        use_srun=False,
        setup=setup.splitlines(),
        additional_parameters={"output": "/shared/ann/runs/coco/slurm.log", "signal": "B:USR2@90", "requeue": True},
    )


@pytest.mark.parametrize("case", PLANS)
def test_equal_jobs_give_equal_plans(case):
    assert plan(case) == plan(case)


def test_the_scripts_of_a_job_differ_only_in_what_is_the_nodes_own():
    scripts = [text.splitlines() for step in plan("local-trainer").steps for text in step.files.values()]
    assert len(scripts) == 3
    for lines in zip(*scripts, strict=True):
        if len(set(lines)) > 1:
            assert re.match(r"# Node \d|export (CLUSTER_NODE|PET_NODE_RANK)=", lines[0])


def test_compose_services_differ_only_in_their_rank_and_name():
    (step,) = plan("compose-trainer").steps
    (text,) = step.files.values()
    services = yaml.safe_load(text)["services"]
    assert list(services) == ["node-0", "node-1", "node-2"]
    assert [service["environment"].pop("PET_NODE_RANK") for service in services.values()] == [0, 1, 2]
    assert [service.pop("hostname") for service in services.values()] == list(services)
    assert [service.pop("container_name") for service in services.values()] == [f"digits-{name}" for name in services]
    assert services["node-0"] == services["node-1"] == services["node-2"]


def test_nodes_on_one_box_share_no_gpu():
    nodes = plan("compose-cuda").nodes
    assert [node.gpus for node in nodes] == [(0, 1), (2, 3)]


DOCKER_COMPOSE_YML = Job(
    "digits",
    ("-m", "trainer", "train"),
    2,
    2,
    "./runs",
    image="trainer:0.1",
    build=".",
    user="0:0",
)


def test_docker_compose_yml_is_what_plan_writes():
    """The command that makes it again stands in the Makefile (`make golden`)."""
    (step,) = BACKENDS["compose"].plan(DOCKER_COMPOSE_YML, attempt=1, port=29500).steps
    (text,) = step.files.values()
    file = ROOT / "docker-compose.yml"
    if os.environ.get("GOLDEN") == "write":
        file.write_text(text)
    assert text == file.read_text()


def test_docker_compose_gpu_yml_gives_each_node_its_own_gpus():
    job = replace(DOCKER_COMPOSE_YML, gpus=(0, 1, 2, 3))
    nodes = BACKENDS["compose"].plan(job, attempt=1, port=29500).nodes
    wanted = {"services": {node.name: gpu_reservation(node) for node in nodes}}
    assert yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text()) == wanted
