"""GPUs in plan, doctor and launch, on this machine and over a real sshd. Only nvidia-smi and docker are fakes.

The product reads nothing else of a GPU: no NVML, and no file in /dev.
"""

import fcntl
import json
import platform
import re
import shutil
import sys
from contextlib import contextmanager

import pytest
import yaml

from tests import nvidia_smi
from tests.conftest import Clusterctl, ended, processes_of, wait_until
from tests.nvidia_smi import Gpu

SLICES = ("MIG-41b1ab3a-0000-0000-0000-000000000000", "MIG-41b1ab3a-0000-0000-0000-000000000001")
MIG = [Gpu("GPU-0000", slices=SLICES)]
BUSY = [Gpu("GPU-0000", memory_used=40960), Gpu("GPU-1111", memory_used=600)]
OLD = "535.183.01"

SHOW = """\
import os, sys, time
print('sees', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)
time.sleep(int(sys.argv[1]))
"""
#: docker with one image. It runs the image's python3 on the machine.
DOCKER = """#!/bin/sh
case $1 in
version) echo 27.5.1 ;;
info) printf 'engine_version=27.5.1\\nengine_security=[]\\nengine_runtimes=nvidia runc \\n' ;;
image) echo "$4" | sed 's/{{.Id}}/sha256:1234/; s/{{"\\\\n"}}/\\n/; s/{{.Architecture}}/ARCHITECTURE/' ;;
run) while [ "$1" != -c ]; do shift; done; exec python3 "$@" ;;
esac
"""

#: docker with compose. A container runs as long as the file with its project's name exists, which has its labels.
DOCKER_COMPOSE = """#!/bin/sh
labelled() { # the projects with the label in the arguments
    for word; do case $word in label=*) wanted=${word#label=} ;; esac; done
    grep -lxF "$wanted" CONTAINERS/* 2> /dev/null | sed 's:.*/::'
}
case "$*" in
"compose -p "*" up "*)
    sed -n 's/.*CLUSTER_LAUNCH_ID: /CLUSTER_LAUNCH_ID=/p' > "CONTAINERS/$3"
    echo "com.docker.compose.project=$3" >> "CONTAINERS/$3" ;;
compose*) echo 2.26.1 ;;
version*) echo 27.5.1 ;;
image*) echo sha256:1234 amd64 ;;
inspect*)
    [ -e "CONTAINERS/${4%-node-0}" ] || { echo "Error: No such container: $4" >&2; exit 1; }
    echo "[{\\"Name\\": \\"/$4\\", \\"State\\": {\\"Status\\": \\"running\\", \\"Running\\": true}}]" ;;
ps*) labelled "$@" ;;
rm*) for word; do rm -f "CONTAINERS/$word"; done ;;
wait*) while [ -e "CONTAINERS/$2" ]; do sleep 0.05; done ;;
esac
"""
#: flock that a launcher waits for after the preflight check: another job can take the GPU before it.
FLOCK = """#!/bin/sh
case $1 in --wait) touch FOLDER/asked; until [ -e FOLDER/go ]; do sleep 0.05; done ;; esac
exec FLOCK "$@"
"""


@pytest.fixture
def site(tmp_path):
    """Return a folder for PYTHONPATH: torch 2.9 with the version file of its wheel for CUDA 13."""
    folder = tmp_path / "site"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "version.py").write_text("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    (folder / "torch-2.9.0.dist-info").mkdir()
    (folder / "torch-2.9.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.9.0\n")
    return folder


class Local:
    """This machine."""

    name = "local"

    def __init__(self, folder, site):
        self._folder = folder
        self._site = site

    def has(self, gpus, driver="580.82.07"):
        """Install the GPUs."""
        nvidia_smi.install(self._folder / "bin", gpus, driver)

    def program(self, name, text):
        """Put a program before those of the machine."""
        self.bin().mkdir(exist_ok=True)
        (self.bin() / name).write_text(text)
        (self.bin() / name).chmod(0o755)

    def bin(self):
        """Return the folder of the machine's programs."""
        return self._folder / "bin"

    def log(self, user, job):
        """Return the log of the only node."""
        return user.folder / "runs" / job / "attempt-1" / "node-0.log"

    def user(self, name):
        """Return the command line of a user with a folder and records of their own."""
        folder = self._folder / name
        folder.mkdir()
        made = Clusterctl(folder)
        made.env.pop("CUDA_VISIBLE_DEVICES", None)
        made.env |= {
            "PATH": f"{self._folder / 'bin'}:{made.env['PATH']}",
            "CLUSTERCTL_LOCKS": str(self._folder / "locks"),
        }
        made.env["PYTHONPATH"] = f"{self._site}:{made.env.get('PYTHONPATH', '')}"
        (folder / "show.py").write_text(SHOW)
        self._describe(folder)
        return made

    def _describe(self, folder):
        """Write the user's cluster.yaml, if the backend has one."""


class Compose(Local):
    """Containers on this machine."""

    name = "compose"

    def __init__(self, folder, site):
        super().__init__(folder, site)
        self.containers = folder / "containers"
        self.containers.mkdir()
        self.program("docker", DOCKER_COMPOSE.replace("CONTAINERS", str(self.containers)))


class Ssh(Local):
    """Machines behind a real sshd. Their GPUs and runtime are not in cluster.yaml."""

    name = "ssh"

    def __init__(self, folder, site, sshd, runtime="none"):
        super().__init__(folder, site)
        self._sshd = sshd
        self._runtime = runtime
        python = f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n'
        architecture = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        for name, text in (("python3", python), ("docker", DOCKER.replace("ARCHITECTURE", architecture))):
            (sshd.bin() / name).write_text(text)
            (sshd.bin() / name).chmod(0o755)
        sshd.set_env(CLUSTERCTL_LOCKS=str(folder / "locks"))

    def has(self, gpus, driver="580.82.07"):
        nvidia_smi.install(self._sshd.bin(), gpus, driver)

    def bin(self):
        return self._sshd.bin()

    def log(self, user, job):
        return user.folder / "remote" / job / "attempt-1" / "h0.log"

    def _describe(self, folder):
        keys = {
            "run_dir": str(folder / "remote"),
            "runtime": self._runtime,
            "address": self._sshd.addresses[0],
        }
        (folder / ".clusterignore").write_text("/remote\n/records\n")
        described = {"ssh_config": str(self._sshd.config), "nodes": {"h0": keys}}
        (folder / "cluster.yaml").write_text(yaml.safe_dump(described))


@pytest.fixture(params=["local", "ssh", "ssh-docker"])
def machine(request, tmp_path, site):
    """Return a machine whose GPUs a test chooses."""
    if request.param == "local":
        return Local(tmp_path, site)
    sshd = request.getfixturevalue("sshd")
    return Ssh(tmp_path, site, sshd, "docker" if request.param == "ssh-docker" else "none")


def launch(machine, job, *more, seconds=0):
    return ["launch", "--backend", machine.name, "--name", job, *more, "--command", f"show.py {seconds}"]


without_container = pytest.mark.parametrize("machine", ["local", "ssh"], indirect=True)
over_ssh = pytest.mark.parametrize("machine", ["ssh", "ssh-docker"], indirect=True)


@pytest.mark.parametrize(
    ("gpus", "per_node", "ids"),
    [
        (nvidia_smi.gpus(8), 4, ["0,1,2,3", "4,5,6,7"]),
        (MIG, 1, [SLICES[0], SLICES[1]]),
        (BUSY, 1, ["0", "1"]),  # doctor warns
    ],
    ids=["8 GPUs", "MIG", "busy"],
)
def test_plan_gives_each_node_its_own_gpus_or_mig_slices(tmp_path, site, gpus, per_node, ids):
    machine = Local(tmp_path, site)
    machine.has(gpus)
    ann = machine.user("ann")
    words = ["--nodes", "2", "--gpus", str(per_node), "--command", "show.py"]
    text = ann.expect(0, "plan", "--backend", "local", *words)
    assert [line[28:] for line in text.splitlines() if line.startswith("export CUDA_VISIBLE_DEVICES=")] == ids
    assert not (ann.folder / "runs").exists()
    ann.expect(0, "plan", "--backend", "compose", *words, "-o", "job.yml")
    services = yaml.safe_load((ann.folder / "job.yml").read_text())["services"].values()
    devices = [each["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for each in services]
    assert devices == [each.split(",") for each in ids]


@over_ssh
@pytest.mark.parametrize(
    ("gpus", "count", "options"),
    [(nvidia_smi.gpus(8), 8, "0,1,2,3,4,5,6,7"), (MIG, 1, SLICES[0])],
    ids=["8 GPUs", "MIG"],
)
def test_plan_finds_the_gpus_of_a_machine(machine, gpus, count, options):
    machine.has(gpus)
    text = machine.user("ann").expect(0, "plan", "--gpus", str(count), "--command", "show.py")
    in_container = ",".join(map(str, range(count)))
    if "--gpus" in text:
        assert f"--gpus '\"device={options}\"'" in text
        options = in_container
    assert f"export CUDA_VISIBLE_DEVICES={options}\n" in text


def test_a_process_gets_one_mig_slice(tmp_path, site):
    machine = Local(tmp_path, site)
    machine.has(MIG)
    text = machine.user("ann").expect(2, "plan", "--backend", "local", "--gpus", "2", "--command", "show.py")
    assert "--gpus 2: CUDA shows a process only one MIG slice" in text


@over_ssh
@pytest.mark.parametrize(
    ("gpus", "driver", "check", "level", "detail", "fix"),
    [
        (nvidia_smi.gpus(8), "580.82.07", "gpus", "ok", "8 x NVIDIA H200, driver 580.82.07", ""),
        (MIG, "580.82.07", "gpus", "ok", "2 x NVIDIA H200 MIG 1g.18gb, driver 580.82.07", ""),
        (BUSY, "580.82.07", "gpus", "warning", "in use: GPU 0 (40.0 of 140 GB)", "nvidia-smi"),
        (
            nvidia_smi.gpus(2),
            OLD,
            "versions",
            "failure",
            f", but driver {OLD} is too old: CUDA 13.0 needs 580 or newer",
            "on h0: install a newer driver",
        ),
    ],
    ids=["8 GPUs", "MIG", "busy", "old driver"],
)
def test_doctor_reports_the_gpus(machine, gpus, driver, check, level, detail, fix):
    machine.has(gpus, driver)
    code, text = machine.user("ann").run("doctor", "--skip", "image", "--skip", "orphans", "--json")
    report = json.loads(text)
    found = {each["check"]: each for each in report["findings"]}
    assert found[check]["level"] == level
    assert found[check]["detail"].endswith(detail)
    assert fix in found[check]["fix"]
    failed = [each["check"] for each in report["findings"] if each["level"] == "failure"]
    assert (code, failed) == ((3, [check]) if level == "failure" else (0, [])), text


def test_launch_refuses_a_driver_that_is_too_old_for_the_cuda_of_torch(machine, job_name):
    machine.has(nvidia_smi.gpus(2), OLD)
    ann = machine.user("ann")
    text = ann.expect(
        2, *launch(machine, job_name), has=f"driver {OLD} is too old: CUDA 13.0 needs 580 or newer"
    )
    assert "hint: on " in text
    assert "install a newer driver (https://www.nvidia.com/drivers)" in text
    assert processes_of(job_name) == []
    assert not (ann.folder / "runs").exists()


@without_container
def test_launch_starts_on_a_new_driver_and_without_gpus_on_an_old_one(machine, job_name):
    python = ["--python", sys.executable]
    machine.has(nvidia_smi.gpus(2))
    ann = machine.user("ann")
    ann.expect(0, *launch(machine, job_name, *python), has="sees 0")
    machine.has(nvidia_smi.gpus(2), OLD)
    ann.expect(0, *launch(machine, f"{job_name}-cpu", *python, "--device", "cpu"), has="sees")


@pytest.mark.engine
def test_compose_refuses_a_driver_that_is_too_old_for_the_image(tmp_path, site, job_name):
    """The image is the real one, with wheels for CUDA 13."""
    machine = Local(tmp_path, site)
    machine.has(nvidia_smi.gpus(2), OLD)
    ann = machine.user("ann")
    text = ann.expect(2, "launch", "--backend", "compose", "--name", job_name, "--gpus", "2")
    assert f"this machine: driver {OLD} is too old: CUDA 13." in text
    assert not (ann.folder / "runs").exists()


@over_ssh
def test_a_gpu_of_cluster_yaml_that_was_divided_into_slices_is_an_error(machine, job_name):
    machine.has(MIG)
    ann = machine.user("ann")
    described = yaml.safe_load((ann.folder / "cluster.yaml").read_text())
    described["nodes"]["h0"]["gpus"] = [0]
    (ann.folder / "cluster.yaml").write_text(yaml.safe_dump(described))
    ann.expect(2, *launch(machine, job_name), has=f"h0: no GPU 0: nvidia-smi lists {', '.join(SLICES)}")


@without_container
@pytest.mark.parametrize(
    ("gpus", "ids"), [(nvidia_smi.gpus(2), ["0", "1"]), (MIG, SLICES)], ids=["GPUs", "MIG"]
)
def test_two_users_never_get_the_same_gpu_or_mig_slice(machine, gpus, ids, job_name):
    """The users share nothing but the machine: only its locks keep them apart."""
    machine.has(gpus)
    users = {name: machine.user(name) for name in ("ann", "bob", "dan", "eve")}
    options = ["--python", sys.executable, "--detach"]

    def start(name, *more):
        return users[name].start(*launch(machine, f"{job_name}-{name}", *options, *more, seconds=600))

    def sees(name):
        log = machine.log(users[name], f"{job_name}-{name}")
        found = wait_until(lambda: log.exists() and re.search(r"^sees (.*)\n", log.read_text(), re.MULTILINE))
        assert found, name
        return found[1]

    try:
        both = {name: start(name) for name in ("ann", "bob")}
        texts = {name: process.communicate(timeout=90)[0] for name, process in both.items()}
        codes = {process.returncode: name for name, process in both.items()}
        assert codes.keys() == {0, 2}, texts
        winner = codes[0]
        assert "is using its GPUs" in texts[codes[2]]
        assert sees(winner) == ids[0]
        second = start("dan", "--wait", "60s")
        ended(second, 0, timeout_s=90)
        assert sees("dan") == ids[1]
        third = start("eve", "--wait", "1s")
        ended(third, 3, timeout_s=90, has=f"held by {job_name}-{winner}, {job_name}-dan")
    finally:
        for name, each in users.items():
            each.run("stop", f"{job_name}-{name}")


@pytest.fixture(params=["local", "ssh", "compose"])
def race(request, tmp_path, site):
    """Return a machine with one GPU, which a launcher locks when the test says so, and how to launch there."""
    kinds = {"local": Local, "compose": Compose}
    name = request.param
    machine = (
        kinds[name](tmp_path, site) if name in kinds else Ssh(tmp_path, site, request.getfixturevalue("sshd"))
    )
    machine.has(nvidia_smi.gpus(1))
    machine.program("flock", FLOCK.replace("FOLDER", str(tmp_path)).replace("FLOCK", shutil.which("flock")))
    return machine


@contextmanager
def taken(folder):
    """Take the GPU after a launcher has found it free, as another job does."""
    assert wait_until((folder / "asked").exists, 60)
    with (folder / "locks" / "gpu-0.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("other\n")
        lock.flush()
        (folder / "go").touch()
        yield


def test_a_launcher_that_has_lost_a_race_waits_and_keeps_its_name(race, tmp_path, job_name):
    ann = race.user("ann")
    options = ["--wait", "60s", "--detach", *(["--python", sys.executable] if race.name != "compose" else [])]
    waiting = ann.start(*launch(race, job_name, *options))
    with taken(tmp_path):
        assert any("waiting for 1 GPU: held by other" in line for line in waiting.stdout)
    ended(waiting, 0, has=f"clusterctl attach {job_name}")
    ann.expect(0, "stop", job_name)


def test_a_launcher_that_has_lost_a_race_leaves_nothing(race, tmp_path, job_name):
    ann = race.user("ann")
    options = ["--detach", *(["--python", sys.executable] if race.name != "compose" else [])]
    losing = ann.start(*launch(race, job_name, *options))
    with taken(tmp_path):
        ended(losing, 2, has="job other is using its GPUs")
    assert json.loads(ann.run("ps", "--all", "--json")[1]) == []
    assert list(ann.folder.glob(f"*/{job_name}")) == []
    assert processes_of(job_name) == []
    ann.expect(0, *launch(race, job_name, *options))
    ann.expect(0, "stop", job_name)


def test_containers_of_compose_and_other_jobs_never_get_the_same_gpu(tmp_path, site, job_name):
    compose = Compose(tmp_path, site)
    local = Local(tmp_path, site)
    compose.has(nvidia_smi.gpus(1))
    ann = compose.user("ann")
    bob = local.user("bob")
    one = f"{job_name}-one"
    two = f"{job_name}-two"
    python = ["--python", sys.executable]
    ann.expect(0, *launch(compose, one, "--detach"))
    try:
        bob.expect(2, *launch(local, two, *python), has=f"this machine: job {one} is using its GPUs")
        bob.expect(2, *launch(compose, two), has=f"this machine: job {one} is using its GPUs")
        (compose.containers / one).unlink()  # the container has ended
        bob.expect(0, *launch(local, two, *python, "--wait", "60s", "--detach", seconds=600))
        ann.expect(2, *launch(compose, f"{one}-2"), has=f"this machine: job {two} is using its GPUs")
        assert not (compose.containers / f"{one}-2").exists()
        bob.expect(0, "stop", two)
        ann.expect(0, *launch(compose, f"{one}-3", "--detach"))
        ann.expect(0, "stop", f"{one}-3")
        bob.expect(
            0, *launch(local, f"{two}-2", *python), has="sees 0"
        )  # the lock is free when `stop` has ended
    finally:
        ann.run("stop", one)
        bob.run("stop", two)


@pytest.mark.parametrize("machine", ["ssh-docker"], indirect=True)
def test_a_file_is_synced_and_mounted_without_its_folder(machine, tmp_path, job_name):
    machine.has(nvidia_smi.gpus(1))
    ann = machine.user("ann")
    described = yaml.safe_load((ann.folder / "cluster.yaml").read_text())
    data_dir = described["nodes"]["h0"]["data_dir"] = str(tmp_path / "data")
    (ann.folder / "cluster.yaml").write_text(yaml.safe_dump(described))
    weights = tmp_path / "y.pt"
    weights.write_bytes(b"weights")
    words = ["--name", job_name, "--", "train", "--weights", "../y.pt"]
    text = ann.expect(
        3, "launch", *words, has=f"h0: {weights} does not exist\nhint: clusterctl sync {weights}\n"
    )
    assert text.count("does not exist") == 1
    ann.expect(0, "sync", "../y.pt")
    assert "does not exist" not in ann.run("launch", *words)[1]
    mirror = f"{data_dir}{weights}"
    assert [str(path) for path in (tmp_path / "data").rglob("*") if path.is_file()] == [mirror]
    text = ann.expect(0, "plan", *words)
    assert f"--mount type=bind,source={mirror},target={weights},readonly " in text
    assert f"--weights {weights} " in text
    assert f"target={tmp_path}," not in text
