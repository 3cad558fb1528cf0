"""Checks of doctor on recorded facts of nodes."""

import os
import subprocess
from dataclasses import replace

import pytest

from cluster.backends.base import FoundJob
from cluster.checks import network
from cluster.checks.findings import Facts, Finding, NodeFacts, judge, parse
from cluster.checks.network import judge_connections
from cluster.doctor import CHECKS, exit_code, here, orphans
from cluster.errors import ClusterError, UnreachableError
from cluster.spec.model import Inventory, Machine

HEALTHY = """
user=ada
uid=1000
arch=x86_64
kernel=Linux version 6.1.0-25-amd64 (debian-kernel@lists.debian.org)
shm_kb=32000000 32768000
nofile=1048576
has=docker
address=lo 127.0.0.1/8
address=lo ::1/128
address=eth0 10.0.0.{last}/24
address=docker0 172.17.0.1/16
number=10.0.0.1 10.0.0.1
route=10.0.0.1 10.0.0.1 dev eth0 src 10.0.0.{last} uid 1000 \\    cache
number=10.0.0.2 10.0.0.2
route=10.0.0.2 10.0.0.2 dev eth0 src 10.0.0.{last} uid 1000 \\    cache
number=10.0.0.3 10.0.0.3
route=10.0.0.3 10.0.0.3 dev eth0 src 10.0.0.{last} uid 1000 \\    cache
run_dir=/home/ada/clusterctl/runs
run_disk_kb=500000000 1000000000
engine_version=27.5.1
engine_security=[name=seccomp,profile=builtin name=cgroupns]
engine_runtimes=io.containerd.runc.v2 nvidia runc
image_id=sha256:99074e3c7b214bbb041fe93a9b4f9a33cdf346e10666009f7d4051c328d3efaf
image_arch=amd64
python=3.12.3
torch=2.9.0
cuda=13.0
nccl=2.27.7
has=nvidia-smi
gpu=0, 580.82.07, 24564, 1, NVIDIA GeForce RTX 4090
gpu=1, 580.82.07, 24564, 12, NVIDIA GeForce RTX 4090
listed=GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-{last}0)
listed=GPU 1: NVIDIA GeForce RTX 4090 (UUID: GPU-{last}1)
has=nvidia-ctk
probe=end
"""


def seen(*changes, count=2, device="cuda", addresses=None, runtime="docker", **more):
    """Return the facts of healthy nodes n1, n2, ... with the values in the i-th of `changes` replaced on node i."""
    nodes = []
    facts = {}
    for index in range(count):
        address = addresses[index] if addresses else f"10.0.0.{index + 1}"
        nodes.append(Machine(f"n{index + 1}", address, (0, 1), f"n{index + 1}", runtime=runtime))
        lines = HEALTHY.replace("{last}", str(index + 1))
        values = dict(parse(lines).values)
        for key, *given in changes[index : index + 1] and changes[index]:
            values[key] = tuple(given)
        values = {key: found for key, found in values.items() if found}
        facts[f"n{index + 1}"] = Facts(values)
    return NodeFacts(tuple(nodes), facts, image="trainer:0.1", device=device, **more)


def bad(check, what):
    """Return (node, level, detail, fix) of each finding that is not ok."""
    found = [each for each in judge({check: CHECKS[check]}, what) if each.level != "ok"]
    assert all(each.fix for each in found)
    return [(each.node, each.level, each.detail, each.fix) for each in found]


def one(check, what):
    (found,) = bad(check, what)
    return found


def test_healthy_nodes_have_no_failures():
    assert [each for each in judge(CHECKS, seen()) if each.level != "ok"] == []


@pytest.mark.parametrize(
    ("device", "address"), [("docker0", "172.17.0.1"), ("br-bfbf03931e11", "172.18.0.1"), ("lo", "127.0.0.1")]
)
def test_unreachable_address_suggests_the_right_one(device, address):
    what = seen(
        [
            ("number", f"{address} {address}", "10.0.0.2 10.0.0.2"),
            ("address", f"{device} {address}/16", "eth0 10.0.0.1/24"),
        ],
        [("number", f"{address} {address}", "10.0.0.2 10.0.0.2")],
        addresses=[address, "10.0.0.2"],
    )
    node, level, detail, fix = one("address", what)
    assert (node, level) == ("n1", "failure")
    assert f"{address} is on {device}" in detail
    assert fix == "in cluster.yaml, n1: address: 10.0.0.1"


def test_address_on_no_device_or_used_twice_fails():
    route = "10.0.0.2 10.0.0.2 dev eth0 src 192.168.1.7 uid 1000"
    node, _, detail, fix = one("address", seen([("address", "eth0 192.168.1.7/24"), ("route", route)]))
    assert (node, detail) == ("n1", "10.0.0.1 is on no network device of this node")
    assert fix == "in cluster.yaml, n1: address: 192.168.1.7"
    twins = bad("address", seen(addresses=["10.0.0.1", "10.0.0.1"]))
    assert [node for node, *_ in twins] == ["n1", "n2"]
    assert "also the address of n2" in twins[0][2]


def test_name_with_two_numbers_fails_and_names_the_node():
    numbers = [("number", "gpu-a 10.0.0.1", "gpu-b 10.0.0.2")]
    hosts = [("number", "gpu-a 127.0.1.1", "gpu-b 10.0.0.2")]
    what = seen(numbers, hosts, numbers, count=3, addresses=["gpu-a", "gpu-b", "10.0.0.3"])
    found = {node: (detail, fix) for node, _, detail, fix in bad("names", what)}
    assert found["n1"][0] == "gpu-a is 10.0.0.1, but on n2: 127.0.1.1"
    assert "address: 10.0.0.1" in found["n1"][1]
    assert "n2" not in found


def test_blocked_port_reports_sources_reason_and_firewall_rule():
    what = seen(count=2)
    n2 = what.nodes[1]
    facts = what.facts["n2"]
    assert judge_connections(n2, facts, {"n1": "", "n3": ""})[:2] == ("ok", "from n1, n3")
    level, detail, fix = judge_connections(
        n2, facts, dict.fromkeys(("n1", "n3"), "no answer within 5 s") | {"n4": ""}
    )
    assert (level, detail) == ("failure", "10.0.0.2, a random port, from n1, n3: no answer within 5 s")
    assert 'ssh -t n2 "sudo iptables -I INPUT -s 10.0.0.0/24 -j ACCEPT"' in fix


DENIED = (
    "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock: "
    'Get "http://%2Fvar%2Frun%2Fdocker.sock/v1.45/info": dial unix /var/run/docker.sock: connect: permission denied'
)
STOPPED = (
    "ERROR: Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
)

STOPPED_29 = (
    "failed to connect to the docker API at unix:///var/run/docker.sock; check if the path is correct and if the "
    "daemon is running: dial unix /var/run/docker.sock: connect: no such file or directory"
)


def test_rootless_docker_warns_and_runtime_none_requires_torch():
    rootless = [("engine_security", "[name=seccomp,profile=builtin name=rootless name=cgroupns]")]
    assert one("runtime", seen(rootless))[:2] == ("n1", "warning")
    assert bad("runtime", seen(rootless, count=1)) == []
    bare = seen([], [("torch",)], runtime="none")
    assert [node for node, *_ in bad("runtime", bare)] == ["n2"]


def test_gpus_are_compared_with_other_nodes():
    other = ("gpu", *(f"{gpu}, 550.54.15, 24564, 1, NVIDIA GeForce RTX 4090" for gpu in (0, 1)))
    found = one("gpus", seen([], [], [other], count=3))
    assert found[:3] == ("n3", "warning", "driver 550.54.15, but most nodes have 580.82.07")
    assert found[3] == "install driver 580.82.07 on n3"
    assert bad("gpus", seen([("gpu",)], device="cpu")) == []


def test_missing_or_different_image_suggests_a_push():
    old = ("image_id", "sha256:0123456789abcdef")
    node, level, detail, fix = one("image", seen([], [old], count=3))
    assert (node, level) == ("n2", "failure")
    assert detail == "trainer:0.1 is 0123456789ab, but on most nodes it is 99074e3c7b21"
    assert fix.endswith("then: clusterctl image push n2 --image trainer:0.1")
    mine = "sha256:fedcba9876543210fedc"
    stale = bad("image", seen(image_id=mine))
    assert [fix for *_, fix in stale] == [f"clusterctl image push n{n} --image trainer:0.1" for n in (1, 2)]
    assert {level for _, level, *_ in stale} == {"warning"}  # a launch runs the image that all nodes have
    assert {level for _, level, *_ in bad("image", seen([], [old], image_id=mine))} == {"failure"}


def test_driver_and_cpu_must_support_the_image():
    assert bad("architecture", seen([], [("arch", "aarch64"), ("image_arch", "arm64")])) == []
    old = ("gpu", "0, 550.54.15, 24564, 1, RTX", "1, 550.54.15, 24564, 1, RTX")
    node, level, detail, _ = one("versions", seen([], [old]))
    assert (node, level) == ("n2", "failure")
    assert detail.startswith(
        "torch 2.9.0, CUDA 13.0, NCCL 2.27.7, but driver 550.54.15 is too old: CUDA 13.0 needs 580"
    )
    assert bad("versions", seen([], [old], device="cpu")) == []
    assert bad("versions", seen([], [old, ("compat", "yes")])) == []


WSL = ("kernel", "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@941d701f84f1) (gcc (GCC) 11.2.0)")
WSL_DRIVER = ("libcuda", "/usr/lib/wsl/lib/libcuda.so.1")
NAT = [WSL, WSL_DRIVER, ("wsl_networking", "nat")]
WITHOUT_DRIVER = [WSL, ("gpu",), ("wsl_networking", "mirrored")]
NO_ENGINE = ("engine_version",)
RUNS = "/home/ada/clusterctl/runs"


@pytest.mark.parametrize(
    ("check", "facts", "found", "fix"),
    [
        (
            "runtime",
            [NO_ENGINE, ("engine_says", DENIED)],
            "ada has no permission to use docker: not in",
            "usermod -aG docker ada",
        ),
        (
            "runtime",
            [NO_ENGINE, ("engine_says", STOPPED)],
            "docker is installed, but",
            "sudo service docker start",
        ),
        (
            "runtime",
            [NO_ENGINE, ("engine_says", STOPPED_29)],
            "docker is installed, but",
            "sudo service docker start",
        ),
        (
            "runtime",
            [NO_ENGINE, ("engine_says", "no answer in 15 s")],
            "docker: no answer in 15 s",
            'n1 "docker info"',
        ),
        ("runtime", [("has",)], "docker is not installed", "https://docs.docker.com/engine/install/"),
        ("gpus", [("listed", "GPU 0: RTX (UUID: GPU-10)")], "no GPU 1: the node has 0", "n1: gpus: [0]"),
        (
            "gpus",
            [("gpu",), ("gpu_says", "NVML failed")],
            "2 GPUs in the inventory, but NVML failed",
            "ubuntu-drivers",
        ),
        (
            "gpus",
            [("has", "docker", "nvidia-smi"), ("engine_runtimes", "runc")],
            "containers cannot use",
            "nvidia-ctk",
        ),
        (
            "gpus",
            [("gpu", "0, 580.82.07, 24564, 20480, RTX")],
            "warning: in use: GPU 0 (20.0 of 24 GB)",
            "nvidia-smi",
        ),
        (
            "gpus",
            WITHOUT_DRIVER,
            "2 GPUs in the inventory",
            "on Windows: install NVIDIA's driver (none inside WSL)",
        ),
        ("image", [("image_id",)], "no image trainer:0.1 on this node", "clusterctl image push n1"),
        (
            "architecture",
            [("arch", "aarch64")],
            "aarch64, but trainer:0.1 is for amd64",
            "--platform linux/arm64",
        ),
        ("versions", [("cuda",)], "torch 2.9.0, NCCL 2.27.7: a build of torch without CUDA", "a CUDA build"),
        ("versions", [("torch",)], "no torch in trainer:0.1, which has python 3.12.3", "another image"),
        (
            "shm",
            [("shm_kb", "65536 65536")],
            "/dev/shm has 64 MB free of 64 MB: dataloader",
            "size=50% /dev/shm",
        ),
        ("shm", [("shm_kb", "1000 32768000")], "/dev/shm has 0 MB free of 32000 MB", "ls -lhS /dev/shm"),
        ("disk", [("run_disk_kb", "0 300000")], f"0 MB free for {RUNS} (run_dir)", "df -h"),
        (
            "limits",
            [("nofile", "1024")],
            "warning: 1024 open files: too few for many workers",
            "- nofile 65536",
        ),
        (
            "run_dir",
            [("unwritable", "Read-only")],
            f"{RUNS} cannot be written: Read-only",
            f"install -d -o ada {RUNS}",
        ),
        (
            "wsl",
            NAT,
            "WSL's networking mode is nat: other nodes",
            "networkingMode=mirrored, then: wsl --shutdown",
        ),
        ("wsl", NAT, "WSL's networking mode is nat: other nodes cannot", "Set-NetFirewallHyperVVMSetting"),
        (
            "wsl",
            WITHOUT_DRIVER,
            "WSL has no CUDA driver: /usr/lib/wsl",
            "on Windows: install NVIDIA's driver",
        ),
    ],
)
def test_a_fault_of_one_node_is_found_with_its_fix(check, facts, found, fix):
    node, level, detail, shown = one(check, seen(facts))
    assert node == "n1"
    assert (detail if level == "failure" else f"{level}: {detail}").startswith(found)
    assert fix in shown


def test_clocks_are_compared_with_the_median():
    node, level, detail, fix = one("clock", seen(count=3, clock_s={"n1": 0.4, "n2": 100.2, "n3": -0.3}))
    assert (node, level) == ("n2", "failure")
    assert detail.startswith("100 s ahead of the others")
    assert fix == "set the clock of n2, for example: timedatectl set-ntp true, or chronyd"
    assert bad("clock", seen(clock_s={"n1": 1.9, "n2": 0.0})) == []
    assert "100 s behind" in one("clock", seen(count=3, clock_s={"n1": 0.4, "n2": -100.2, "n3": -0.3}))[2]


def test_other_users_warn():
    assert one("user", seen([], [], [("uid", "1001")], count=3))[:2] == ("n3", "warning")


def test_orphans_are_what_gc_would_remove():
    old, new = (
        FoundJob("n1", "ssh", job, "a" * 16, "1000", True, job == "new", {}) for job in ("old", "new")
    )
    level, detail, fix = orphans.judge([old, new, replace(old, job="bobs", is_own=False)])
    assert (level, detail, fix) == ("warning", "orphans of old", "clusterctl gc")
    assert orphans.judge([new]).level == "ok"
    assert (
        orphans.judge(UnreachableError("squeue does not answer")).detail
        == "not checked: squeue does not answer"
    )


def test_wsl_with_mirrored_networking_or_a_single_node_is_no_fault():
    assert bad("wsl", seen(NAT, count=1)) == []
    assert bad("wsl", seen([WSL, WSL_DRIVER, ("wsl_networking", "mirrored")])) == []


def test_exit_code_distinguishes_unreachable_nodes_from_failures():
    def of(*levels):
        return exit_code([Finding(check, "n1", level, "") for check, level in levels])

    assert of(("login", "ok"), ("shm", "warning")) == 0
    assert of(("login", "ok"), ("shm", "failure")) == 3
    assert of(("login", "failure"), ("shm", "failure")) == 5


def test_link_is_computed_from_the_all_reduce_and_a_failed_node_is_named():
    text = "joined\nsum 1024 0.0002\nsum 67108864 0.0536870912\n"
    what = seen()
    (said,) = network.judge_link(what, {"n1": text, "n2": text}, "gloo")
    assert (said.level, said.detail) == ("ok", "gloo: 1250 MB/s (10 Gbit/s), 0.2 ms")
    (said,) = network.judge_link(seen(count=4), dict.fromkeys(("n1", "n2", "n3", "n4"), text), "gloo")
    assert said.detail.startswith("gloo: 1875 MB/s")
    (said,) = network.judge_link(what, {"n1": text, "n2": ClusterError("n2: no connection")}, "gloo")
    assert (said.node, said.level, said.detail) == ("n2", "failure", "no connection")


def test_the_transport_of_nccl_is_named_and_must_be_infiniband_where_nodes_have_it():
    """Lines of NCCL's log."""
    text = "joined\nsum 1024 0.0002\nsum 67108864 0.0536870912\n"
    for network_name, infiniband, level in (
        ("IB", True, "ok"),
        ("Socket", False, "ok"),
        ("Socket", True, "failure"),
    ):
        log = f"n1:7:9 [0] NCCL INFO NET/IB : No device.\nn1:7:9 [0] NCCL INFO Using network {network_name}\n{text}"
        what = seen(*[[("infiniband", "yes")]] * 2) if infiniband else seen()
        (said,) = network.judge_link(what, {"n1": log, "n2": log}, "nccl")
        assert said.level == level
        assert said.detail.startswith(f"nccl over {network_name}: 1250 MB/s (10 Gbit/s), 0.2 ms")
    assert "libibverbs1" in said.fix
    command = network._all_reduce_command(what.nodes[0], what, "doctor-1", gpus=True)
    assert "/dev/infiniband" in command


@pytest.mark.parametrize(
    ("runtime", "options", "visible"),
    [
        ("docker", ["--gpus", '"device=3"'], "0"),
        ("podman", ["--device", "nvidia.com/gpu=3"], "0"),
        ("none", [], "3"),
    ],
)
def test_the_link_is_measured_on_the_first_gpu_of_the_node(runtime, options, visible):
    what = seen()
    node = replace(what.nodes[0], gpus=(3, 5), runtime=runtime)
    words = list(network._all_reduce_command(node, what, "doctor-1", gpus=True))
    assert [word for word in words if word in options] == options
    assert any(word.endswith(f"CUDA_VISIBLE_DEVICES={visible}") for word in words)


SSH = Inventory((Machine("gpu-a", "10.0.0.1", login="gpu-a"),))


def test_a_program_that_this_machine_lacks_is_a_failure(monkeypatch, tmp_path):
    (tmp_path / "ssh").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = here.examine(SSH)
    assert (finding.check, finding.node, finding.level) == ("here", "this machine", "failure")
    assert (finding.detail, finding.fix) == ("rsync is not installed", "sudo apt-get install rsync")
    (tmp_path / "rsync").touch(mode=0o755)
    assert [finding.level for finding in here.examine(SSH)] == ["ok"]
    (finding,) = here.examine(replace(SSH, backend="kubernetes"))
    assert (finding.level, "kubectl" in finding.detail) == ("failure", True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_of_this_machine_is_a_failure(monkeypatch, tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True)
    try:
        monkeypatch.chdir(tmp_path)
        details = [finding.detail for finding in here.examine(SSH)]
    finally:
        monkeypatch.undo()
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert f"1 MB free for the results in {tmp_path}" in details
