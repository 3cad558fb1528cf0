"""Whole rendered plans compared with files; `make golden` rewrites them, and the diff is the review."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cluster.agent import scripts as resources
from cluster.backends import BACKENDS, script
from cluster.backends.compose import gpu_reservation
from cluster.spec.model import Job, Machine, Queue
from cluster.spec.mount import Mount

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

JOBS = {
    "trainer": Job(
        "digits", ("-m", "trainer", "train", "--device", "cpu"), 3, 2, "/home/ann/runs", device="cpu"
    ),
    "cuda": Job("coco", ("-m", "trainer", "train"), 2, 2, "/home/ann/runs", device="cuda", gpus=(0, 1, 2, 3)),
    "unequal": Job(
        "coco", ("-m", "trainer", "train"), 3, (2, 1, 1), "/home/ann/runs", device="cuda", gpus=(0, 1, 2, 3)
    ),
    "foreign": Job(
        "mine",
        ("train.py", "--note", "a'; echo foo", "--and", 'a"=0"', "--line", "one\ntwo", "--cost", "$5 @rank@"),
        2,
        1,
        "/home/ann/my runs",
        workdir="/home/ann/it's here",
        env={"NOTE": "a'; echo $HOME `id`", "LINES": "1\n2", "GLOO_SOCKET_IFNAME": "eth7"},
        mounts=(Mount("/home/ann/it's $here", "/data"),),
        prologue="module() { export LOADED=it\\'s; }\nmodule load cuda",
        says_ready=False,
    ),
}


#: The golden plans: each backend and each runtime once. The part of a script that no job changes is shown as its name.
PLANS = (
    "compose-cuda",
    "compose-unequal",
    "compose-foreign",
    "local-foreign",
    "ssh-docker-trainer",
    "ssh-podman-cuda",
    "ssh-docker-unequal",
    "slurm-apptainer-cuda",
    "slurm-docker-cuda",
    "slurm-none-foreign",
    "slurm-pyxis-cuda",
    "slurm-enroot-cuda",
    "kubernetes-cuda",
)
STATIC = (
    "agent/node.sh",
    "agent/node_start.sh",
    "agent/prologue.sh",
    "agent/own_folder.sh",
    "agent/wait.sh",
    "backends/slurm/environment.sh",
    "backends/slurm/job.sh",
    "backends/slurm/node.sh",
    "backends/batch/job.sh",
    "backends/batch/node.sh",
    "runtimes/docker.sh",
)


def hosts(job, runtime):
    return tuple(
        Machine(
            f"gpu-{letter}",
            f"10.0.0.{rank}",
            gpus=tuple(range(rank, rank + job.procs[rank])),
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
        job = replace(job, prologue="")
        job = replace(job, image="trainer:0.1", user="1000:1000", secrets=("TOKEN",))
    if backend == "ssh":
        mounts = (*job.mounts, Mount('/data/a,b "c"', "/data/ab"))
        job = replace(job, image="trainer:0.1", hosts=hosts(job, *runtime), mounts=mounts, secrets=("TOKEN",))
    if backend == "slurm":
        login = Machine(
            "login",
            "",
            login="ann@cluster",
            run_dir="/shared/ann/my runs" if name == "foreign" else "/shared/ann/runs",
            data_dir="" if name == "foreign" else "/shared/ann/data",
            runtime=runtime[0],
        )
        queue = Queue(login, {"partition": "gpu", "time": "8:00:00", "comment": "it is mine"})
        job = replace(job, image="/shared/ann/trainer.sif", queue=queue, secrets=("TOKEN",), max_restarts=3)
        job = replace(job, copies_workdir=bool(job.workdir))
    if backend == "kubernetes":
        section = {
            "namespace": "vision",
            "runs": {"claim": "runs"},
            "volumes": [{"claim": "data", "path": "/data"}],
        }
        queue = Queue(BACKENDS[backend].login_node(""), section)
        job = replace(job, image="registry.example.com/trainer:0.1", gpus=(), queue=queue, secrets=("TOKEN",))
    return BACKENDS[backend].plan(job, attempt=1, port=29500)


@pytest.mark.parametrize("case", PLANS)
def test_plan(case):
    text = "".join(
        f"# ---- {step.place}: {' '.join(step.argv)}\n# ---- {step.agent}\n# ---- {path}\n{file}"
        for step in plan(case).steps
        for path, file in step.files.items()
    )
    text = re.sub(r"(agent\.pyz: \|\n)(    .*\n)+", r"\1    # ---- the agent\n", text)
    for name in STATIC:
        text = text.replace(resources.text(name), f"# ---- {name}\n")
    golden = HERE / f"{case}.txt"
    if os.environ.get("GOLDEN") == "write":
        golden.write_text(text)
    assert text == golden.read_text()


DOCKER_COMPOSE_YML = Job(
    "digits", ("-m", "trainer", "train"), 2, 2, "./runs", image="trainer:0.1", build=".", user="0:0"
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


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("compose-cuda", ["stop_grace_period: 601s", "CLUSTER_GRACE: '600.5'"]),
        ("local-foreign", ["export CLUSTER_GRACE=600.5\n"]),
        ("ssh-docker-trainer", ["--stop-timeout 601 ", "export CLUSTER_GRACE=600.5\n"]),
        ("ssh-podman-cuda", ["--stop-timeout 601 ", "export CLUSTER_GRACE=600.5\n"]),
        ("slurm-none-foreign", ["#SBATCH --signal=B:USR2@601\n", "export CLUSTER_GRACE=600.5\n"]),
    ],
)
def test_each_layer_gets_the_grace_of_the_job(case, words, monkeypatch):
    monkeypatch.setitem(JOBS, case.rpartition("-")[2], replace(JOBS[case.rpartition("-")[2]], grace_s=600.5))
    text = next(text for step in plan(case).steps for text in step.files.values())
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("runtime", ["docker", "podman"])
def test_the_copy_of_the_working_directory_is_mounted_and_writable(runtime):
    job = replace(
        JOBS["foreign"], workdir="/home/ann/work", copies_workdir=True, image="trainer:0.1", mounts=()
    )
    made = BACKENDS["ssh"].plan(replace(job, hosts=hosts(job, runtime)), attempt=1, port=29500)
    for step in made.steps:
        (text,) = step.files.values()
        copy = "type=bind,source=/home/ann/clusterctl/runs/mine/workdir,target=/home/ann/work"
        assert f"--mount {copy} " in text
        assert "--workdir /home/ann/work " in text


SITE = {"NCCL_IB_HCA": "mlx5", "FI_PROVIDER": "efa", "UCX_TLS": "rc", "OMPI_MCA_btl": "tcp"}
#: A container runtime, or python3 on the machine. It prints the variables of the program: those that its options name.
RUNTIME = """\
import os, sys

words, env = sys.argv[1:], os.environ
if words[0] == "info":
    sys.exit()
runtime = os.path.basename(sys.argv[0])
names = [word.partition("=")[0] for option, word in zip(words, words[1:]) if option == "--env"]
names += [name for word in words if word.startswith("--container-env=") for name in word[16:].split(",")]
found = {name: env[name] for name in names if name in env}
if runtime == "apptainer":
    found = {name[13:]: value for name, value in env.items() if name.startswith("APPTAINERENV_")}
if runtime == "python3":
    found = dict(env)
print(*(f"{name}={value}" for name, value in found.items()), sep="\\n")
"""


@pytest.mark.parametrize("case", [case for case in PLANS if not case.startswith(("compose", "kubernetes"))])
def test_the_sites_network_variables_reach_the_program(case, tmp_path):
    """The rendered script runs; only the container runtime and Slurm's variables are fakes."""
    text = next(text for step in plan(case).steps for text in step.files.values())
    if case.startswith("slurm"):
        text = text.partition("node=$(cat <<'END_OF_NODE_SCRIPT'\n")[2].partition("\nEND_OF_NODE_SCRIPT")[0]
    for path in ("/home/ann", "/shared/ann"):
        text = text.replace(path, f"{tmp_path}{path}")
    text = text.replace("NODE_ADDRESS=10.0.0.0", "NODE_ADDRESS=127.0.0.1")
    for folder in ("home/ann/it's here", "shared/ann/my runs/mine/workdir"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("docker", "podman", "apptainer", "enroot", "srun", "python3"):
        (tmp_path / name).write_text(f"#!{sys.executable} -IS\n{RUNTIME}")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_NODEID": "0", "SLURMD_NODENAME": "n0", "CLUSTER_HOSTS": "127.0.0.1 127.0.0.1"}
    slurm |= {"CUDA_VISIBLE_DEVICES": "0,1", "CLUSTER_ATTEMPT": "1"} if case.startswith("slurm") else {}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TOKEN": "x", "MODULE": "x", **SITE, **slurm}
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, check=False)
    found = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert found.items() >= {**SITE, "NCCL_SOCKET_IFNAME": "=lo"}.items(), done.stdout
    assert ("MODULE" in found) == ("foreign" in case), "other variables stay outside of a container"


#: Prints its words, one per line.
WORDS = """\
import sys

if sys.argv[1] != "info":
    print(*sys.argv[1:], sep="\\n")
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "case", ["slurm-docker-cuda", "slurm-podman-cuda", "ssh-docker-trainer", "ssh-podman-cuda"]
)
def test_exec_enters_the_container_that_the_node_has_started(case, rank, tmp_path):
    """The script of the node and that of `clusterctl exec` run; only the engine and Slurm's variables are fakes."""
    engine = case.split("-")[1]
    made = plan(case)
    node = made.nodes[rank]
    on_slurm = case.startswith("slurm")
    (text,) = made.steps[0 if on_slurm else rank].files.values()
    if on_slurm:
        text = text.partition("node=$(cat <<'END_OF_NODE_SCRIPT'\n")[2].partition("\nEND_OF_NODE_SCRIPT")[0]
    *bash, enter = script.exec_command(made.job, made, node, ["nvidia-smi"], tty=False)[:3]
    (tmp_path / engine).write_text(f"#!{sys.executable} -IS\n{WORDS}")
    (tmp_path / engine).chmod(0o755)
    slurm = (
        {"SLURM_NODEID": str(rank), "CUDA_VISIBLE_DEVICES": "0,1", "CLUSTER_ATTEMPT": "1"} if on_slurm else {}
    )
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TOKEN": "x",
        "CLUSTER_HOSTS": "127.0.0.1",
        **slurm,
    }

    def run(text, *words):
        for path in ("/home/ann", "/shared/ann"):
            text = text.replace(path, f"{tmp_path}{path}")
        text = re.sub(r"NODE_ADDRESS=[\d.]+", "NODE_ADDRESS=127.0.0.1", text)
        done = subprocess.run(
            [*bash, text, *words], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    words = run(text)
    (tmp_path / script.attempt_dir(made, node.machine)[1:] / f"{node.name}.agent").write_text("1 running\n")
    assert run(enter, "exec", "nvidia-smi") == [
        "exec",
        "--interactive",
        words[words.index("--name") + 1],
        "nvidia-smi",
    ]
