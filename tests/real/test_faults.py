"""Faults on three real hosts: the job completes, the launcher reports the fault, and no process remains.

After a restart on the same number of ranks, the weights equal those of an undisturbed run.
"""

import re
import shutil
import signal
import time

import pytest
import torch
import yaml

from tests.conftest import ROOT, Clusterctl
from tests.unit.yolo_folder import make_yolo_set

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
SMALLEST = ROOT / "trainer" / "models" / "yolov5n.yaml"
HOSTS = ("n0", "n1", "n2")


class Cluster:
    """One folder with a cluster.yaml of the three hosts and a small data set that they all have."""

    def __init__(self, clusterctl, testbed, run_dir="/root/clusterctl/runs"):
        self.clusterctl = clusterctl
        self.testbed = testbed
        self.folder = clusterctl.folder
        self.processes = []
        clusterctl.env["CLUSTERCTL_STATE_DIR"] = f"{self.folder}-records"
        nodes = {
            name: {"address": testbed[name].address, "gpus": 2, "runtime": "docker", "run_dir": run_dir}
            | {"data_dir": "/root/clusterctl/data"}
            for name in HOSTS
        }
        text = yaml.safe_dump({"ssh_config": str(testbed.ssh_config), "device": "cpu", "nodes": nodes})
        (self.folder / "cluster.yaml").write_text(text)
        self.data = make_yolo_set(self.folder / "set", train=32, val=2)
        tiny = yaml.safe_load((SMALLEST).read_text()) | {"width_multiple": 0.05, "depth_multiple": 0.1}
        (self.folder / "set" / "tiny.yaml").write_text(yaml.safe_dump(tiny))
        for host in HOSTS:  # the tests use job names again
            testbed[host].run("rm -rf /root/clusterctl/runs /data/runs")
        code, text = clusterctl.run("sync", str(self.folder / "set"))
        assert code == 0, text

    def launch(self, job, *options, epochs=20):
        """Start training on two nodes; 8 steps an epoch, a checkpoint every third."""
        arguments = [
            "--data",
            str(self.data),
            "--cfg",
            str(self.folder / "set" / "tiny.yaml"),
            "--imgsz",
            "64",
        ]
        arguments += ["--batch", "4", "--epochs", str(epochs), "--workers", "0", "--save-every", "3steps"]
        arguments += ["--noval", "--seed", "1", "--stall-timeout", "20"]
        command = [
            "launch",
            "--name",
            job,
            "--nodes",
            "2",
            "--gpus",
            "1",
            "--env",
            "OMP_NUM_THREADS=1",
            *options,
        ]
        self.process = self.clusterctl.start(*command, "--", "train", *arguments)
        self.processes.append(self.process)
        self.job = job
        return self.process

    def log(self, node="n0", attempt=1):
        path = self.folder / "runs" / self.job / f"attempt-{attempt}" / f"{node}.log"
        return path.read_text() if path.exists() else ""

    def until_step(self, attempt=1, timeout_s=150):
        """Wait until an attempt has made some steps."""
        until = time.time() + timeout_s
        while '"checkpoint"' not in self.log(attempt=attempt):
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.time() < until, f"no step: {self.log(attempt=attempt)}"
            time.sleep(0.1)

    def end(self, timeout_s=240):
        """Return the launcher's exit code and output."""
        text, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, text

    def left(self, hosts=HOSTS):
        """Return the job's containers and processes on the hosts, without the launcher."""
        script = (
            f"docker ps -aq --filter label=CLUSTER_JOB_ID={self.job};"
            f"grep -lzxs CLUSTER_JOB_ID={self.job} /proc/[0-9]*/environ; true"
        )
        return {host: text for host in hosts if (text := self.testbed[host].run(script))}

    def wait_until_all_have_ended(self, timeout_s=90):
        """On a host that was unreachable, the ranks end by the stall timeout."""
        until = time.time() + timeout_s
        while self.left():
            assert time.time() < until, self.left()
            time.sleep(1)

    def weights(self):
        """Return the tensors of the newest local checkpoint."""
        kept = torch.load(self.folder / "runs" / self.job / "last.pt", weights_only=True, map_location="cpu")
        return {f"{part}.{name}": value for part in ("model", "ema") for name, value in kept[part].items()}


@pytest.fixture
def cluster(clusterctl, testbed, image_on_hosts):
    made = Cluster(clusterctl, testbed)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.kill()
            process.communicate()
        process.stdout.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, testbed, image_on_hosts):
    """The weights of a run without faults."""
    made = Cluster(Clusterctl(tmp_path_factory.mktemp("undisturbed")), testbed)
    made.launch("undisturbed")
    code, text = made.end()
    assert code == 0, text
    return made.weights()


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def kill_rank(cluster):
    cluster.testbed["n1"].run("kill -9 $(pgrep -f '[p]ython3 -u -m trainer' | tail -n 1)")


def restart_engine(cluster):
    cluster.testbed.fault("restart-engine", "n1")


#: The fault, the launcher's message, and the nodes of the next attempt.
FAULTS = {
    "a rank is killed": (kill_rank, r"n1: ", "n0, n1"),
    "a container is killed": (
        lambda cluster: cluster.testbed["n1"].run(f"docker kill {cluster.job}-n1"),
        r"n1: exit 137 \(killed\)",
        "n0, n1",
    ),
    # SIGTERM to its containers, so the ranks write a checkpoint; the host may be unavailable while the engine starts
    "the engine is restarted": (restart_engine, r"stopped by SIGTERM after a checkpoint", "n0, n[12]"),
    "a host is killed": (
        lambda cluster: cluster.testbed.fault("kill", "n1"),
        r"n1: .*not answered",
        "n0, n2",
    ),
    "the master's host is killed": (
        lambda cluster: cluster.testbed.fault("kill", "n0"),
        r"n0: .*not answered",
        "n2, n1",
    ),
    "a host freezes": (
        lambda cluster: cluster.testbed.fault("freeze", "n1"),
        r"n1: .*not answered",
        "n0, n2",
    ),
    "a host is cut off": (
        lambda cluster: cluster.testbed.fault("cut", "n1"),
        r"n1: .*not answered",
        "n0, n2",
    ),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_job_restarts_after(fault, cluster, undisturbed):
    act, message, nodes = FAULTS[fault]
    cluster.launch(f"ft-{list(FAULTS).index(fault)}", "--spares", "1")
    cluster.until_step()
    began = time.time()
    act(cluster)
    acted_s = time.time() - began
    seen_s = None
    lines = []
    for line in cluster.process.stdout:
        lines.append(line)
        if seen_s is None and "restart 1 of 3" in line:
            seen_s = time.time() - began
        if "attempt 2 on" in line:
            again_s = time.time() - began
    text = "".join(lines)
    assert cluster.process.wait(30) == 0, text
    assert re.search(message + r".*; restart 1 of 3", text), text
    assert re.search(f"attempt 2 on {nodes}", text), text
    print(
        f"FAULT {fault}: done in {acted_s:.1f} s, seen after {seen_s:.1f} s, next attempt after {again_s:.1f} s"
    )
    assert same(cluster.weights(), undisturbed)
    cluster.testbed.fault("heal")
    cluster.wait_until_all_have_ended()


@pytest.mark.parametrize("fault", ["cut off for 5 s", "every SSH connection drops"])
def test_a_job_survives_a_short_network_failure_without_a_restart(fault, cluster, undisturbed):
    cluster.launch("ft-short")
    cluster.until_step()
    if fault == "cut off for 5 s":
        cluster.testbed.fault("cut", "n1", "5")
    else:
        for host in HOSTS:
            cluster.testbed.fault("drop-ssh", host)
    code, text = cluster.end()
    assert code == 0, text
    assert "restart" not in text
    assert same(cluster.weights(), undisturbed)
    for node in ("n0", "n1"):  # no line lost, none doubled
        there = cluster.testbed[node].run(f"cat /root/clusterctl/runs/ft-short/attempt-1/{node}.log")
        assert cluster.log(node).strip() == there
    assert cluster.left() == {}


def test_a_full_disk_is_named_and_leaves_no_half_written_checkpoint(clusterctl, testbed, image_on_hosts):
    cluster = Cluster(clusterctl, testbed, run_dir="/data/runs")
    cluster.launch("ft-full", "--max-restarts", "0", epochs=50)
    cluster.until_step()
    testbed.fault("fill", "n0")
    code, text = cluster.end()
    assert code == 1, text
    assert re.search(r"n0: .*(No space left|disk)", text), text
    testbed.fault("empty", "n0")
    assert testbed["n0"].run("find /data/runs/ft-full -name '*.tmp' -o -name '*.partial'") == ""
    assert cluster.left() == {}


def test_after_a_killed_launcher_attach_fetches_the_results(cluster, undisturbed):
    cluster.launch("ft-orphan")
    cluster.until_step()
    cluster.process.kill()
    cluster.process.communicate()
    code, text = cluster.clusterctl.run("attach", "ft-orphan", timeout_s=200)
    assert code == 0, text
    assert "done in" in text
    assert same(cluster.weights(), undisturbed)
    assert cluster.left() == {}


def test_a_detached_job_is_restarted_after_the_log_out(cluster, undisturbed):
    """Launch, detach, log out, kill a node's container at night, and find the job trained to its end."""
    cluster.launch("ft-night", "--detach")  # in a session of its own, which ends with it
    code, text = cluster.end()
    assert code == 0, text
    print(text)
    until = time.time() + 150
    while '"checkpoint"' not in cluster.log():
        assert time.time() < until, cluster.log()
        time.sleep(0.1)
    print(cluster.clusterctl.run("ps")[1])
    cluster.testbed["n1"].run("docker kill ft-night-n1")
    while not (cluster.folder / "runs" / "ft-night" / "report.html").exists():
        assert time.time() < until, cluster.clusterctl.run("status", "ft-night")
        time.sleep(0.5)
    for words in (["ps", "--all"], ["status", "ft-night"]):
        print(cluster.clusterctl.run(*words)[1])
    report = (cluster.folder / "runs" / "ft-night" / "report.html").read_text()
    print(
        re.sub(
            r"\n\s*\n+", "\n", re.sub("<[^>]*>", "\n", report.partition("<h1>")[2].partition("<h2>Curves")[0])
        )
    )
    status = cluster.clusterctl.run("status", "ft-night")[1]
    assert re.search(r"n1: exit 137 \(killed\); restart 1 of 3", status), status
    assert "attempt 2 on n0, n1" in report
    assert same(cluster.weights(), undisturbed)
    assert cluster.left() == {}


def test_a_container_ends_after_the_nodes_script_was_killed(cluster):
    """Without launcher and script, the agent stops the container."""
    cluster.launch("ft-script", "--nodes", "1", epochs=5000)
    cluster.until_step()
    cluster.process.kill()
    cluster.process.communicate()
    cluster.testbed["n0"].run("kill -9 $(cat /root/clusterctl/runs/ft-script/attempt-1/n0.pid)")
    assert cluster.testbed["n0"].run("docker ps -q --filter label=CLUSTER_JOB_ID=ft-script")
    cluster.wait_until_all_have_ended(60)
    assert "the node's script outside of the container has died" in cluster.testbed["n0"].run(
        "cat /root/clusterctl/runs/ft-script/attempt-1/n0.log"
    )


def test_a_checkpoint_is_copied_from_a_machine_without_engine(cluster):
    cluster.launch("ft-bring", "--nodes", "1", "--spares", "1", epochs=50)
    cluster.until_step()
    cluster.testbed["n0"].run("docker kill ft-bring-n0; mv /usr/bin/docker /usr/bin/docker.away")
    try:
        code, text = cluster.end()
    finally:
        cluster.testbed["n0"].run("mv /usr/bin/docker.away /usr/bin/docker")
    assert code == 0, text
    assert "copied the newest checkpoint from n0 to n1" in text
    assert "attempt 2 on n1" in text
    assert re.search(r"resuming in epoch \d+ after step \d+", text), text


@pytest.fixture
def another_image_on_n2(testbed, image_on_hosts):
    """Another image under the name of the job's."""
    image = image_on_hosts
    change = f"id=$(docker create {image}) && docker commit -m other $id {image} && docker rm $id"
    testbed["n2"].run(f"docker tag {image} kept:1 && {change}")
    yield
    testbed["n2"].run(f"docker tag kept:1 {image} && docker rmi kept:1")


def test_a_spare_with_another_image_is_reported_at_the_start_and_skipped(another_image_on_n2, cluster):
    cluster.launch("ft-spares", "--nodes", "1:2", "--spares", "1", epochs=50)
    cluster.until_step()
    cluster.testbed["n1"].run("docker kill ft-spares-n1; mv /usr/bin/docker /usr/bin/docker.away")
    try:
        code, text = cluster.end()
    finally:
        cluster.testbed["n1"].run("mv /usr/bin/docker.away /usr/bin/docker")
    assert code == 0, text
    assert re.search(r"spare not usable: n2: its image \S+ is \w+, but on n0 it is \w+", text), text
    assert "not used: n2: its image" in text
    assert re.search(r"attempt 2 on n0,? \d", text), text


@pytest.mark.parametrize("moment", ["rendezvous", "training"])
def test_ctrl_c_stops_every_node(moment, cluster):
    cluster.launch("ft-stop", epochs=50)
    if moment == "training":
        cluster.until_step()
    else:
        while not cluster.log("n1"):
            time.sleep(0.1)
    cluster.process.send_signal(signal.SIGINT)
    code, text = cluster.end(60)
    assert code == 130, text
    assert "stopped. No processes remain." in text
    assert cluster.left() == {}


def test_a_second_launch_on_the_same_gpus_is_refused_with_the_name_of_the_first(cluster):
    cluster.launch("ft-first", "--gpus", "2", epochs=50)
    while not cluster.log("n1"):
        time.sleep(0.1)
    first = cluster.process
    cluster.job = "ft-second"
    cluster.launch("ft-second", "--gpus", "2")
    code, text = cluster.end(60)
    assert code == 2, text
    assert "n0: job ft-first is using its GPUs" in text
    assert cluster.left() == {}
    assert cluster.clusterctl.run("stop", "ft-first")[0] == 0
    first.communicate(timeout=60)
    cluster.job = "ft-first"
    assert cluster.left() == {}


def test_a_repeated_error_of_the_program_ends_the_restarts(cluster):
    shutil.copy(ROOT / "examples" / "all_reduce.py", cluster.folder)
    launch = ["launch", "--name", "ft-bug", "--nodes", "2", "--max-restarts", "5"]
    command = "all_reduce.py --ticks 3 --fail-at 1"
    code, text = cluster.clusterctl.run(*launch, "--command", command, timeout_s=200)
    cluster.job = "ft-bug"
    assert code == 1, text
    assert text.count("restart 1 of 5") == 1
    assert "restart 2 of 5" not in text
    assert "ValueError: this rank fails on purpose" in text
    assert cluster.left() == {}
