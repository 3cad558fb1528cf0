"""Whole rendered plans compared with files; `make golden` rewrites them, and the diff is the review."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

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


RUNTIMES = {"trainer": "docker", "cuda": "podman", "foreign": "none"}
RUNTIMES_OF_SITES = ("docker", "podman", "none", "pyxis")
SLURM_RUNTIMES = {"trainer": "apptainer", "cuda": "apptainer", "foreign": "none"}


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


def plan(backend, name):
    job = JOBS[name]
    if backend == "compose":
        job = replace(job, image="trainer:0.1", user="1000:1000")
    if backend == "ssh":
        mounts = (*job.mounts, Mount('/data/a,b "c"', "/data/ab"))
        job = replace(job, image="trainer:0.1", hosts=hosts(job, RUNTIMES[name]), mounts=mounts, secrets=("TOKEN",))
    if backend.startswith("slurm"):
        login = Node(
            "login",
            "",
            login="ann@cluster",
            run_dir="/shared/ann/my runs" if name == "foreign" else "/shared/ann/runs",
            data_dir="" if name == "foreign" else "/shared/ann/data",
            runtime=backend.partition("-")[2] or SLURM_RUNTIMES[name],
        )
        queue = Queue(login, {"partition": "gpu", "time": "8:00:00", "comment": "it is mine"})
        job = replace(job, image="/shared/ann/trainer.sif", queue=queue, secrets=("TOKEN",), max_restarts=3)
    return BACKENDS[backend.partition("-")[0]].plan(job, attempt=1, port=29500)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *((backend, name) for backend in BACKENDS for name in JOBS),
        *((f"slurm-{runtime}", "cuda") for runtime in RUNTIMES_OF_SITES),
    ],
)
def test_plan(backend, name):
    steps = plan(backend, name).steps
    text = "".join(
        f"# ---- {step.place}: {' '.join(step.argv)}\n# ---- {path}\n{file}"
        for step in steps
        for path, file in step.files.items()
    )
    golden = HERE / f"{backend}-{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_equal_jobs_give_equal_plans(backend):
    assert plan(backend, "trainer") == plan(backend, "trainer")


def test_the_scripts_of_a_job_differ_only_in_what_is_the_nodes_own():
    scripts = [text.splitlines() for step in plan("local", "trainer").steps for text in step.files.values()]
    assert len(scripts) == 3
    for lines in zip(*scripts, strict=True):
        if len(set(lines)) > 1:
            assert re.match(r"# Node \d|export (NODE|PET_NODE_RANK|PET_LOG_DIR)=", lines[0])


def test_compose_holds_the_very_script_of_each_node():
    (step,) = plan("compose", "trainer").steps
    (text,) = step.files.values()
    document = yaml.safe_load(text)
    scripts = [document["configs"][f"node-{rank}"]["content"].replace("$$", "$") for rank in range(3)]
    assert [f"PET_NODE_RANK={rank}" in script for rank, script in enumerate(scripts)] == [True] * 3
    assert len({re.sub(r"node-\d|Node \d|PET_NODE_RANK=\d", "", script) for script in scripts}) == 1
    assert list(document["services"]) == ["node-0", "node-1", "node-2"]


def test_nodes_on_one_box_share_no_gpu():
    nodes = plan("compose", "cuda").nodes
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
