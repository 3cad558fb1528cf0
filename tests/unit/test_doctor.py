"""What doctor says of what a node showed: the judging alone, on outputs as the programs print them."""

import pytest

from cluster.doctor import CHECKS, exit_code, link
from cluster.doctor.engine import versions
from cluster.doctor.findings import Finding, Seen
from cluster.doctor.network import Dialled, reachable
from cluster.doctor.probe import Facts, parse
from cluster.errors import ClusterError
from cluster.model import Node

HEALTHY = """
user=ada
uid=1000
arch=x86_64
kernel=Linux version 6.1.0-25-amd64 (debian-kernel@lists.debian.org)
memory_kb=65536000
shm_kb=32000000 32768000
nofile=1048576
memlock_kb=unlimited
has=systemd
has=ip
has=python3
has=docker
address=lo 127.0.0.1/8
address=lo ::1/128
address=eth0 10.0.0.{last}/24
address=docker0 172.17.0.1/16
speed=eth0 10000
number=10.0.0.1 10.0.0.1
route=10.0.0.1 10.0.0.1 dev eth0 src 10.0.0.{last} uid 1000 \\    cache
number=10.0.0.2 10.0.0.2
route=10.0.0.2 10.0.0.2 dev eth0 src 10.0.0.{last} uid 1000 \\    cache
number=10.0.0.3 10.0.0.3
route=10.0.0.3 10.0.0.3 dev eth0 src 10.0.0.{last} uid 1000 \\    cache
run_dir=/home/ada/clusterctl/runs
run_disk_kb=500000000 1000000000
run_inodes=6000000 6500000
writable=/home/ada
engine_version=27.5.1
engine_root=/var/lib/docker
engine_security=[name=seccomp,profile=builtin name=cgroupns]
engine_runtimes=io.containerd.runc.v2 nvidia runc
engine_store=[[Backing Filesystem extfs] [Supports d_type true]]
engine_disk_kb=500000000 1000000000
image_id=sha256:99074e3c7b214bbb041fe93a9b4f9a33cdf346e10666009f7d4051c328d3efaf
image_arch=amd64
image_layers=[sha256:aa sha256:bb]
has=nvidia-smi
gpu=0, 580.82.07, 24564, 1, NVIDIA GeForce RTX 4090
gpu=1, 580.82.07, 24564, 12, NVIDIA GeForce RTX 4090
has=nvidia-ctk
probe=end
"""


def seen(*changes, count=2, device="cuda", addresses=None, runtime="docker", **more):
    """Healthy nodes n1, n2, ...; the i-th of `changes` gives lines of the i-th node in place of those of that key."""
    nodes, facts = [], {}
    for index in range(count):
        address = addresses[index] if addresses else f"10.0.0.{index + 1}"
        nodes.append(Node(f"n{index + 1}", address, (0, 1), f"n{index + 1}", runtime=runtime))
        lines = HEALTHY.replace("{last}", str(index + 1))
        values = dict(parse(lines).values)
        for key, *given in changes[index : index + 1] and changes[index]:
            values[key] = tuple(given)
        values = {key: found for key, found in values.items() if found}
        facts[f"n{index + 1}"] = Facts(values)
    return Seen(tuple(nodes), facts, image="trainer:0.1", device=device, **more)


def bad(check, what):
    """(node, level, detail, fix) of what a check does not find in order."""
    return [(f.node, f.level, f.detail, f.fix) for f in CHECKS[check](what) if f.level != "ok"]


def one(check, what):
    (found,) = bad(check, what)
    return found


def test_healthy_nodes_have_nothing_wrong_and_what_a_login_shell_prints_is_no_fact():
    what = seen()
    assert [(check, bad(check, what)) for check in CHECKS if bad(check, what)] == []
    assert not any("Welcome" in key for key in what.facts["n1"].values)


def test_every_warning_and_failure_has_a_fix():
    broken = seen(
        [("shm_kb", "65536 65536"), ("has", "docker"), ("engine_version",), ("unwritable", "Permission denied")],
        [("run_disk_kb", "100 1000000000"), ("image_id",), ("gpu",), ("arch", "aarch64")],
        clock_s={"n1": 100.0, "n2": 0.0},
    )
    found = [finding for judge in CHECKS.values() for finding in judge(broken) if finding.level != "ok"]
    assert len(found) >= 9
    assert [finding for finding in found if not finding.fix] == []


@pytest.mark.parametrize(
    ("device", "address"), [("docker0", "172.17.0.1"), ("br-bfbf03931e11", "172.18.0.1"), ("lo", "127.0.0.1")]
)
def test_an_address_that_peers_cannot_reach_is_named_with_the_right_one(device, address):
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


def test_an_address_on_no_device_or_of_two_nodes_is_named():
    what = seen([("address", "eth0 192.168.1.7/24"), ("route",)])
    node, _, detail, fix = one("address", what)
    assert (node, "10.0.0.1 is on no device of it" in detail, "192.168.1.7" in fix) == ("n1", True, True)
    twins = bad("address", seen(addresses=["10.0.0.1", "10.0.0.1"]))
    assert [node for node, *_ in twins] == ["n1", "n2"]
    assert "also the address of n2" in twins[0][2]


def test_a_name_that_means_two_numbers_is_named_with_the_node_where_it_does():
    numbers = [("number", "gpu-a 10.0.0.1", "gpu-b 10.0.0.2")]
    hosts = [("number", "gpu-a 127.0.1.1", "gpu-b 10.0.0.2")]
    what = seen(numbers, hosts, numbers, count=3, addresses=["gpu-a", "gpu-b", "10.0.0.3"])
    found = {node: (detail, fix) for node, _, detail, fix in bad("names", what)}
    assert found["n1"][0] == "gpu-a is 10.0.0.1, but on n2: 127.0.1.1"
    assert "address: 10.0.0.1" in found["n1"][1]
    assert "n2" not in found


def test_a_port_that_takes_no_connection_is_named_with_sources_reason_and_the_rule_that_opens_it():
    tried = [
        Dialled("n1", "n2", 40123, "no answer within 5 s"),
        Dialled("n3", "n2", 40123, "no answer within 5 s"),
        Dialled("n2", "n1", 40200),
        Dialled("n3", "n1", 40200),
    ]
    n1, n2 = reachable(seen(count=2), tried, {})
    assert (n1.level, n1.detail) == ("ok", "from n2, n3")
    assert n2.level == "failure"
    assert n2.detail == "10.0.0.2, port 40123, from n1, n3: no answer within 5 s"
    assert 'ssh -t n2 "sudo iptables -I INPUT -s 10.0.0.0/24 -j ACCEPT"' in n2.fix
    (_, ufw) = reachable(seen([], [("has", "ip", "ufw")]), tried, {})
    assert "sudo ufw allow from 10.0.0.0/24" in ufw.fix
    (_, mute) = reachable(seen(), tried, {"n2": "there is no python3"})
    assert (mute.level, mute.detail) == ("warning", "not tried: there is no python3")


DENIED = (
    "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock: "
    'Get "http://%2Fvar%2Frun%2Fdocker.sock/v1.45/info": dial unix /var/run/docker.sock: connect: permission denied'
)
STOPPED = "ERROR: Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"

STOPPED_29 = (
    "failed to connect to the docker API at unix:///var/run/docker.sock; check if the path is correct and if the "
    "daemon is running: dial unix /var/run/docker.sock: connect: no such file or directory"
)


@pytest.mark.parametrize(
    ("facts", "detail", "fix"),
    [
        (
            [("engine_version",), ("engine_says", DENIED), ("socket_group", "docker")],
            "ada may not use docker: not in the group docker",
            'ssh -t n1 "sudo usermod -aG docker ada"',
        ),
        (
            [("engine_version",), ("engine_says", STOPPED)],
            "docker is installed, but its engine does not run",
            'ssh -t n1 "sudo systemctl start docker"',
        ),
        (
            [("engine_version",), ("engine_says", STOPPED_29), ("has", "ip", "docker")],
            "docker is installed, but its engine does not run",
            'ssh -t n1 "sudo service docker start"',
        ),
        ([("has", "ip")], "docker is not installed", "https://docs.docker.com/engine/install/"),
        (
            [("engine_version",), ("engine_says", "no answer within 15 s")],
            "no answer within 15 s",
            'ssh n1 "docker info"',
        ),
    ],
)
def test_a_runtime_that_does_not_serve_says_why_and_what_to_type(facts, detail, fix):
    node, level, said, shown = one("runtime", seen(facts))
    assert (node, level) == ("n1", "failure")
    assert detail in said
    assert fix in shown


def test_rootless_docker_is_recognised_and_no_runtime_needs_torch():
    rootless = [("engine_security", "[name=seccomp,profile=builtin name=rootless name=cgroupns]")]
    assert one("runtime", seen(rootless))[:2] == ("n1", "warning")
    assert bad("runtime", seen(rootless, count=1)) == []
    bare = seen([("torch", "2.6.0"), ("python", "3.12.3")], runtime="none")
    assert [node for node, *_ in bad("runtime", bare)] == ["n2"]


def test_gpus_are_compared_with_the_inventory_and_with_each_other():
    other = (
        "gpu",
        "0, 550.54.15, 24564, 1, NVIDIA GeForce RTX 4090",
        "1, 550.54.15, 24564, 1, NVIDIA GeForce RTX 4090",
    )
    assert one("gpus", seen([], [], [other], count=3)) == (
        "n3",
        "warning",
        "driver 550.54.15, most others have 580.82.07",
        "install driver 580.82.07 on n3",
    )
    single = ("gpu", "0, 580.82.07, 24564, 1, NVIDIA GeForce RTX 4090")
    node, level, detail, fix = one("gpus", seen([single]))
    assert (node, level, detail, fix) == ("n1", "failure", "no GPU 1: it has 0", "in cluster.yaml, n1: gpus: [0]")
    busy = ("gpu", "0, 580.82.07, 24564, 20480, NVIDIA GeForce RTX 4090", HEALTHY.split("gpu=")[2].splitlines()[0])
    assert "others use GPU 0 (20.0 of 24 GB)" in one("gpus", seen([busy]))[2]
    broken = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    assert "couldn't communicate" in one("gpus", seen([("gpu",), ("gpu_says", broken)]))[2]
    mismatch = "Failed to initialize NVML: Driver/library version mismatch"
    assert one("gpus", seen([("gpu",), ("gpu_says", mismatch)]))[3] == 'ssh -t n1 "sudo reboot"'
    toolkit = [("has", "ip", "docker", "nvidia-smi"), ("engine_runtimes", "io.containerd.runc.v2 runc")]
    assert "containers get no GPU" in one("gpus", seen(toolkit))[2]
    assert bad("gpus", seen([("gpu",)], device="cpu")) == []


def test_an_image_that_differs_or_is_missing_is_named_with_the_push():
    old = ("image_id", "sha256:0123456789abcdef")
    node, level, detail, fix = one("image", seen([], [old], count=3))
    assert (node, level) == ("n2", "failure")
    assert detail == "trainer:0.1 is 0123456789ab, the others' is 99074e3c7b21"
    assert fix.endswith("then: clusterctl image push n2 --image trainer:0.1")
    mine = "sha256:fedcba9876543210fedc"
    stale = bad("image", seen(image_id=mine))
    assert [(node, fix) for node, _, _, fix in stale] == [
        (name, f"clusterctl image push {name} --image trainer:0.1") for name in ("n1", "n2")
    ]
    assert one("image", seen([("image_id",)]))[2] == "trainer:0.1 is not on it"


def test_one_image_in_two_kinds_of_store_is_compared_by_its_layers():
    containerd = [
        ("engine_store", "[[driver-type io.containerd.snapshotter.v1]]"),
        ("image_id", "sha256:1111111111111"),
    ]
    assert bad("image", seen(containerd)) == []
    assert one("image", seen([*containerd, ("image_layers", "[sha256:aa sha256:cc]")], [], [], count=3))[0] == "n1"


def test_processors_must_fit_the_image_and_each_other():
    found = bad("architecture", seen([], [], [("arch", "aarch64"), ("image_arch", "arm64")], count=3))
    assert [(node, level) for node, level, *_ in found] == [("n3", "failure")]
    assert "is for amd64" in one("architecture", seen([], [("arch", "aarch64")]))[2]


def test_the_driver_must_be_new_enough_for_the_images_cuda():
    held = parse("python=3.12.3\ntorch=2.9.0\ncuda=13.0\nnccl=2.27.7\n")
    old = ("gpu", "0, 550.54.15, 24564, 1, RTX", "1, 550.54.15, 24564, 1, RTX")
    n1, n2 = versions(seen([], [old], versions=held))
    assert (n1.level, n1.detail) == ("ok", "torch 2.9.0, CUDA 13.0, NCCL 2.27.7")
    assert (n2.level, "CUDA 13.0 needs 580 or newer" in n2.detail) == ("failure", True)
    assert versions(seen([], [old], versions=held, device="cpu"))[1].level == "ok"
    assert "without CUDA" in versions(seen(versions=parse("torch=2.9.0+cpu")))[0].detail


def test_shared_memory_disk_and_limits_have_figures():
    assert one("shm", seen([("shm_kb", "65536 65536")]))[1:3] == (
        "failure",
        "/dev/shm has 64 MB free of 64 MB: loaders' workers end with 'bus error'",
    )
    assert 'sudo mount -o remount,size=31g /dev/shm"' in one("shm", seen([("shm_kb", "65536 65536")]))[3]
    assert one("shm", seen([("shm_kb", "500000 600000")]))[1] == "warning"
    assert "ls -lhS /dev/shm" in one("shm", seen([("shm_kb", "1000 32768000")]))[3]
    assert one("disk", seen([("run_disk_kb", "0 300000")]))[1:3] == (
        "failure",
        "0 MB free for /home/ada/clusterctl/runs (run_dir)",
    )
    assert one("disk", seen([("engine_disk_kb", "2097152 9000000")]))[1:3] == (
        "warning",
        "2.0 GB free for /var/lib/docker (images)",
    )
    assert "only 3 more files fit" in one("disk", seen([("run_inodes", "3 1000")]))[2]
    assert bad("disk", seen([("run_inodes", "0 0")])) == []
    assert one("limits", seen([("nofile", "1024")]))[1] == "warning"


def test_a_run_dir_that_takes_no_file_says_why():
    node, level, detail, fix = one("run_dir", seen([("unwritable", "Read-only file system")]))
    assert (node, level) == ("n1", "failure")
    assert detail == "/home/ada/clusterctl/runs cannot be written: Read-only file system"
    assert "install -d -o ada /home/ada/clusterctl/runs" in fix


def test_clocks_are_compared_with_the_median_and_small_differences_are_fine():
    node, level, detail, fix = one("clock", seen(count=3, clock_s={"n1": 0.4, "n2": 100.2, "n3": -0.3}))
    assert (node, level) == ("n2", "failure")
    assert detail.startswith("100 s ahead of the others")
    assert "timedatectl set-ntp true" in fix
    assert bad("clock", seen(clock_s={"n1": 1.9, "n2": 0.0})) == []
    assert "100 s behind" in one("clock", seen(count=3, clock_s={"n1": 0.4, "n2": -100.2, "n3": -0.3}))[2]


def test_other_users_are_a_warning_and_leftovers_are_not_jobs_that_run():
    assert one("user", seen([], [], [("uid", "1001")], count=3))[:2] == ("n3", "warning")
    held = [("container", "old-1 old-1-n1", "new-1 new-1-n1"), ("process", "new-1", "gone-2")]
    node, level, detail, fix = one("leftovers", seen(held, jobs=frozenset({"new-1"})))
    assert (node, level, detail) == ("n1", "warning", "something is left of old-1, gone-2")
    assert fix.startswith("clusterctl gc")


WSL = ("kernel", "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@941d701f84f1) (gcc (GCC) 11.2.0)")


def test_wsl_says_what_to_change_on_the_windows_side():
    nat = [WSL, ("wsl_networking", "nat"), ("address", "eth0 172.24.114.7/20")]
    found = bad("wsl", seen(nat, [], count=2))
    said = "\n".join(f"{node} {level} {detail} -> {fix}" for node, level, detail, fix in found)
    assert {node for node, *_ in found} == {"n1"}
    assert "n1 failure WSL's networking mode is nat: other nodes cannot reach this one" in said
    assert r"in %UserProfile%\.wslconfig: [wsl2] networkingMode=mirrored, then: wsl --shutdown" in said
    assert "Set-NetFirewallHyperVVMSetting" in said
    assert "/usr/lib/wsl/lib/libcuda.so.1 is not there -> on Windows: install NVIDIA's driver" in said


def test_older_wsl_without_wslinfo_is_nat_by_its_address_and_a_mirrored_one_is_fine():
    driver = ("libcuda", "/usr/lib/wsl/lib/libcuda.so.1")
    old = [WSL, driver, ("address", "lo 127.0.0.1/8", "eth0 172.24.114.7/20")]
    assert one("wsl", seen(old))[2] == "WSL's networking mode is nat: other nodes cannot reach this one"
    assert bad("wsl", seen(old, count=1)) == []
    assert bad("wsl", seen([WSL, driver, ("wsl_networking", "mirrored")])) == []
    broken = [WSL, ("gpu",), ("libcuda",), ("wsl_networking", "mirrored")]
    assert one("gpus", seen(broken))[3] == "on Windows: install NVIDIA's driver (none inside WSL), then: wsl --shutdown"


def test_the_exit_code_tells_a_lost_node_from_a_launch_that_would_fail():
    def of(*levels):
        return exit_code([Finding(check, "n1", level, "") for check, level in levels])

    assert of(("login", "ok"), ("shm", "warning")) == 0
    assert of(("login", "ok"), ("shm", "failure")) == 3
    assert of(("login", "failure"), ("shm", "failure")) == 5


def test_the_link_is_what_the_sums_took_and_a_node_that_could_not_is_named():
    text = "joined\nsum 1024 0.0002\nsum 4194304 0.004\nsum 67108864 0.0536870912\n"
    what = seen()
    measured, (said,) = link.judge(what, {"n1": text, "n2": text}, "gloo")
    assert (measured.nodes, measured.latency_s) == (2, 0.0002)
    assert measured.bytes_per_s == pytest.approx(1.25e9)
    assert (said.level, said.detail) == ("ok", "gloo: 1250 MB/s (10 Gbit/s), 0.2 ms")
    assert link.bus_bytes_per_s(1000, 4, 1.0) == 1500
    slow = "sum 1024 0.0002\nsum 4194304 0.04\n"
    _, (said,) = link.judge(what, {"n1": slow, "n2": slow}, "gloo")
    assert (said.level, "the slowest card says 10 Gbit/s" in said.detail) == ("warning", True)
    measured, (said,) = link.judge(what, {"n1": text, "n2": ClusterError("n2: no connection")}, "gloo")
    assert (measured, said.node, said.level, said.detail) == (None, "n2", "failure", "no connection")
