"""Jobs of ssh, Slurm and Kubernetes with one name on the same three hosts: none touches what another has started."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from cluster.spec.image import DEFAULT_IMAGE
from cluster.store import JobStore
from tests.conftest import Clusterctl, wait_until
from tests.contract.sshd import TICKS
from tests.real.conftest import testbed

__all__ = ["testbed"]
pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(500, func_only=True)]

NAME = "three"
RUNS = "/shared/ada/clusterctl/runs"
SIF = "/shared/ada/clusterctl/three.sif"


class Project:
    """A folder with a cluster.yaml, a program and a job store."""

    def __init__(self, folder, testbed, inventory, env=()):
        folder.mkdir()
        self.clusterctl = Clusterctl(folder)
        self.testbed = testbed
        self.clusterctl.env |= dict(env)
        shutil.copy(TICKS, folder)
        (folder / "cluster.yaml").write_text(yaml.safe_dump({"device": "cpu", **inventory}))

    def launch(self):
        words = ("launch", "--name", NAME, "--nodes", "3", "--detach", "--python", "python3")
        self.clusterctl.expect(0, *words, "--command", "ticks.py --ticks 5000", timeout_s=240)
        self.launch_id = JobStore(self.clusterctl.folder / "records").load(NAME).job.launch_id
        assert wait_until(self.runs, timeout_s=120, pause_s=1), self.clusterctl.run("status", NAME)[1]

    def runs(self):
        """Whether the job and its three ranks run. Kubernetes may put two of them on one host."""
        state = json.loads(self.clusterctl.run("status", NAME, "--json")[1])["state"]
        return state == "running" and sum(map(len, self.processes().values())) == 3

    def processes(self):
        """Return the ranks on each host."""
        own = f"grep -lzxs CLUSTER_LAUNCH_ID={self.launch_id} /proc/[0-9]*/environ"
        script = f"for each in $({own}); do ! grep -qzs ^LOCAL_RANK= $each || echo $each; done"
        return {name: host.run(script).split() for name, host in self.testbed.hosts.items()}

    def gc(self, *more):
        """Return what gc finds, as a user who has no record of any job."""
        before = self.clusterctl.env["CLUSTERCTL_STATE_DIR"]
        self.clusterctl.env["CLUSTERCTL_STATE_DIR"] = before + "-none"
        try:
            code, text = self.clusterctl.run("gc", "--json", *more)
        finally:
            self.clusterctl.env["CLUSTERCTL_STATE_DIR"] = before
        assert code == 0, text
        return json.loads(
            text[text.index("[") :]
        )  # lines of stderr come first, such as what a long wait is for

    def orphans_of_doctor(self):
        code, text = self.clusterctl.run("doctor", "--json", timeout_s=240)
        assert text.startswith("{"), (code, text)
        return {each["detail"] for each in json.loads(text)["findings"] if each["check"] == "orphans"}


def over_ssh(folder, testbed, user):
    nodes = {
        name: {
            "login": f"{user}@{name}",
            "address": host.address,
            "run_dir": f"/data/{user}-three",
            "data_dir": f"/data/{user}-three/data",
            "runtime": "none",
            "gpus": 0,
        }
        for name, host in testbed.hosts.items()
    }
    return Project(folder, testbed, {"ssh_config": str(testbed.ssh_config), "nodes": nodes})


@pytest.fixture
def projects(kubectl, testbed, tmp_path):
    """Four jobs of the same name that run on the same hosts, by their backend and user."""
    for host in testbed.hosts.values():
        host.run(f"rm -rf /data/*-three {RUNS}/{NAME}; install -d -o ada /data/ada-three")
    testbed["n0"].run('until [ -z "$(squeue -h -u ada)" ]; do sleep 0.5; done')
    testbed["n0"].run(f"install -d -o ada -g ada /shared/ada {Path(RUNS).parent} {RUNS}")
    login = {
        "login": "ada@n0",
        "run_dir": RUNS,
        "data_dir": "/shared/ada/clusterctl/data",
        "runtime": "apptainer",
    }
    slurm = {"backend": "slurm", "image": SIF, "slurm": {"partition": "gpu", "time": "20:00"}}
    slurm |= {"ssh_config": str(testbed.ssh_config), "nodes": {"login": login}}
    cloud = {"backend": "kubernetes", "image": DEFAULT_IMAGE}
    cloud |= {"kubernetes": {"namespace": "ada", "runs": {"claim": "runs"}}}
    env = {"PATH": f"{kubectl.folder}:{os.environ['PATH']}", "KUBECONFIG": str(kubectl.kubeconfig("ada"))}
    made = {
        "ssh as ada": over_ssh(tmp_path / "ada", testbed, "ada"),
        "ssh as root": over_ssh(tmp_path / "root", testbed, "root"),
        "slurm as ada": Project(tmp_path / "slurm", testbed, slurm),
        "kubernetes as ada": Project(tmp_path / "kubernetes", testbed, cloud, env.items()),
    }
    if testbed["n0"].try_run(f"test -e {SIF}")[0]:
        made["slurm as ada"].clusterctl.expect(
            0, "image", "sif", "--image", DEFAULT_IMAGE, SIF, timeout_s=480
        )
    yield made
    for project in made.values():
        project.clusterctl.run("stop", NAME, "--grace", "0s")
    testbed["n0"].run("scancel --user ada")


def test_stop_gc_and_doctor_of_each_backend_and_user_leave_the_others_alone(projects):
    for project in projects.values():
        project.launch()
    ranks = {who: project.processes() for who, project in projects.items()}

    def untouched(*, but=()):
        for who, project in projects.items():
            if who not in but:
                assert project.processes() == ranks[who], who
                assert project.runs(), who

    for who, project in projects.items():
        for more in ((), ("--yes",)):
            found = project.gc(*more)
            assert {row["launch_id"] for row in found} <= {project.launch_id}, (who, found)
            assert not any(row["removed"] for row in found), who
        assert project.orphans_of_doctor() == {"none"}, who
        untouched()
    ended = []
    for who, project in projects.items():
        project.clusterctl.expect(0, "stop", NAME, "--grace", "1s", has="stopped. No processes remain.")
        ended.append(who)
        assert not any(project.processes().values())
        untouched(but=ended)


def test_gc_removes_a_running_job_by_its_name_only_on_its_own_backend(projects):
    for project in projects.values():
        project.launch()
    ranks = {who: project.processes() for who, project in projects.items()}
    left = [*projects]
    while left:
        who = left.pop()
        removed = projects[who].gc("--job", NAME, "--yes")
        assert {row["launch_id"] for row in removed if row["removed"]} == {projects[who].launch_id}, (
            who,
            removed,
        )
        assert wait_until(lambda who=who: not any(projects[who].processes().values()), timeout_s=30), who
        assert {other: projects[other].processes() for other in left} == {
            other: ranks[other] for other in left
        }
