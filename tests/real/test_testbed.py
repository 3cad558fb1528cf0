"""The testbed: services of its hosts, effect and undoing of each fault, removal."""

import os
import queue
import shlex
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.real.conftest import TESTBED, Host, script

pytestmark = pytest.mark.real

TICKS = "while :; do echo tick; sleep 0.1; done"


class Lines:
    """Output lines of a running process, read with a timeout."""

    def __init__(self, process):
        self.process = process
        self.lines = queue.Queue()
        self.reader = threading.Thread(target=lambda: [self.lines.put(line) for line in process.stdout])
        self.reader.start()

    def end(self):
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()

    def receives_within(self, timeout_s):
        try:
            self.lines.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True

    def drain(self):
        while self.receives_within(0.0001):
            pass


@pytest.fixture
def ticking(testbed):
    """An SSH session that prints ten lines a second; ended after the test."""
    started = []

    def start(host):
        started.append(Lines(testbed[host].start(TICKS)))
        assert started[-1].receives_within(10)
        return started[-1]

    yield start
    for lines in started:
        lines.end()


def test_three_hosts_with_an_engine_each_for_root_and_an_ordinary_user(testbed):
    engines = set()
    for host in testbed.hosts.values():
        assert host.run("hostname -i; id -un") == f"{host.address}\nroot"
        assert host.run("id -un; id -u; umask", user="ada") == "ada\n1000\n0002"
        assert host.run("docker info --format '{{.Name}}'", user="ada") == host.name
        engines.add(host.run("docker info --format '{{.ID}}'"))
        assert host.run("rsync --version | head -c 5; python3 -c 'print(1)'") == "rsync1"
    assert len(engines) == 3


def test_slurm_reaches_all_hosts_and_allocates_two_gpus_each(testbed):
    answers = testbed["n1"].run("srun -N3 hostname", user="ada")
    assert sorted(answers.split()) == ["n0", "n1", "n2"]
    gpus = testbed["n0"].run("srun -N3 --gpus-per-node 2 sh -c 'echo $CUDA_VISIBLE_DEVICES'", user="ada")
    assert gpus.split() == ["0,1"] * 3
    code, text = testbed["n0"].try_run("srun --gpus-per-node 3 true", user="ada")
    assert code != 0, text


def test_batch_jobs_read_and_write_the_common_folder(testbed):
    name = f"/shared/test-{os.getpid()}"
    run = testbed["n2"].run
    touch = f"srun sh -c 'touch {name}/$SLURMD_NODENAME'"
    run(
        f"mkdir {name} && cd {name} && sbatch --wait -p debug -N3 -o log --wrap {shlex.quote(touch)}",
        user="ada",
    )
    assert testbed["n0"].run(f"ls {name}; rm -r {name}") == "log\nn0\nn1\nn2"


def test_an_ordinary_user_runs_an_apptainer_image_on_all_hosts(testbed):
    name = f"/shared/sif-{os.getpid()}"
    shell_alone = "mkdir -p root && cp --parents -L /bin/sh $(ldd /bin/sh | grep -o '/[^ ]*') root"
    testbed["n0"].run(
        f"mkdir {name} && cd {name} && {shell_alone} && apptainer build sh.sif root", user="ada"
    )
    text = testbed["n0"].run(
        f"srun -N3 apptainer -s exec {name}/sh.sif /bin/sh -c 'echo $SLURMD_NODENAME'", user="ada"
    )
    assert sorted(text.split()) == ["n0", "n1", "n2"]
    testbed["n0"].run(f"rm -r {name}")


def test_every_host_has_the_image_and_runs_it_at_its_own_address(testbed, image_on_hosts):
    ids = {
        host.run(f"docker image inspect --format '{{{{.Id}}}}' {image_on_hosts}")
        for host in testbed.hosts.values()
    }
    here = ["docker", "image", "inspect", "--format", "{{.Id}}", image_on_hosts]
    assert ids == {subprocess.run(here, capture_output=True, text=True, check=True).stdout.strip()}
    for host in testbed.hosts.values():
        seen = host.run(f"docker run --rm --network host --ipc host {image_on_hosts} hostname -i", user="ada")
        assert host.address in seen.split()


def test_kill_ends_everything_and_start_boots_the_host_again(testbed, image_on_hosts):
    n1 = testbed["n1"]
    n1.run(
        f"docker rm -f sleeper; docker run -d --name sleeper {image_on_hosts} sleep 1000; touch /root/kept"
    )
    testbed.fault("kill", "n1")
    assert n1.try_run("true")[0] == 255
    testbed.fault("start", "n1")
    assert n1.run("docker ps -q; ls /root/kept") == "/root/kept"
    assert n1.run("docker rm sleeper; rm /root/kept") == "sleeper"
    assert testbed["n0"].run("srun -w n1 hostname", user="ada") == "n1"


def test_freeze_suspends_the_hosts_containers_until_thaw(testbed, ticking, image_on_hosts):
    n1 = testbed["n1"]
    n1.run(f"docker rm -f ticker; docker run -d --name ticker {image_on_hosts} sh -c '{TICKS}'")
    lines = ticking("n1")
    count = "docker logs ticker | wc -l"
    testbed.fault("freeze", "n1")
    frozen_at = time.monotonic()
    lines.drain()
    assert not lines.receives_within(3)
    testbed.fault("thaw", "n1")
    frozen_s = time.monotonic() - frozen_at
    assert lines.receives_within(3)
    seconds = float(
        n1.run("docker inspect --format '{{.State.StartedAt}}' ticker | xargs -I@ date -d @ +%s.%N")
    )
    age_s = float(n1.run("date +%s.%N")) - seconds
    assert int(n1.run(count)) < (age_s - frozen_s + 1) * 10
    n1.run("docker rm -f ticker")


def test_a_cut_connection_hangs_until_the_host_joins_again(testbed, ticking):
    lines = ticking("n1")
    testbed.fault("cut", "n1")
    lines.drain()
    assert not lines.receives_within(2)
    assert lines.process.poll() is None
    assert testbed["n0"].try_run("ping -c 1 -W 1 n1")[0] == 1
    assert testbed["n0"].try_run("ping -c 1 -W 1 n2")[0] == 0
    testbed.fault("join", "n1")
    assert lines.receives_within(10)


def test_a_slow_host_sends_at_the_given_rate(testbed):
    def seconds():
        started = time.monotonic()
        testbed["n1"].run("head -c 4000000 /dev/urandom | base64 -w0")
        return time.monotonic() - started

    testbed.fault("slow", "n1", "10mbit")
    slow = seconds()
    assert slow > 4  # 5.4 MB
    testbed.fault("fast", "n1")
    assert seconds() < slow / 2


def test_a_full_disk_rejects_writes_until_it_is_emptied(testbed):
    write = "dd if=/dev/zero of=/data/mine bs=1k count=100"
    testbed.fault("fill", "n2")
    code, text = testbed["n2"].try_run(write)
    assert code == 1
    assert "No space left on device" in text
    testbed.fault("empty", "n2")
    testbed["n2"].run(f"{write} && rm /data/mine")


def test_dropped_sessions_end_and_new_ones_are_taken(testbed, ticking):
    lines = ticking("n0")
    testbed.fault("drop-ssh", "n0")
    assert lines.process.wait(timeout=5) == 255
    assert testbed["n0"].run("echo again") == "again"


def test_a_restarted_engine_ends_its_containers_and_answers_again(testbed, image_on_hosts):
    n2 = testbed["n2"]
    n2.run(f"docker rm -f sleeper; docker run -d --name sleeper {image_on_hosts} sleep 1000")
    testbed.fault("restart-engine", "n2")
    assert n2.run("docker inspect --format '{{.State.Status}}' sleeper") == "exited"
    n2.run("docker rm sleeper")


def test_an_unknown_host_and_an_unknown_fault_are_refused(testbed):
    for arguments, message in (
        (["cut", "n7"], "no host n7; the hosts are n0 n1 n2"),
        (["burn", "n1"], "testbed/fault.sh freeze n1"),
    ):
        done = subprocess.run([TESTBED / "fault.sh", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert message in done.stderr


@pytest.fixture
def second(tmp_path):
    """The environment of a second testbed with one host; removed after the test."""
    name = f"clusterctl-testbed-{os.getpid()}"
    state = str(tmp_path / "state")
    env = {
        **os.environ,
        "TESTBED_NAME": name,
        "TESTBED_NET": "172.30.9",
        "TESTBED_HOSTS": "n0",
        "TESTBED_STATE": state,
    }
    yield env
    script("down.sh", env=env)


def docker(*arguments):
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout


def test_down_leaves_nothing_and_up_and_down_may_be_repeated(second):
    name = second["TESTBED_NAME"]
    state = Path(second["TESTBED_STATE"])
    kinds = (["ps", "-a"], ["network", "ls"], ["volume", "ls"])

    def resources():
        return [docker(*kind, "-q", "--filter", f"label={name}") for kind in kinds]

    script("up.sh", env=second)
    script("up.sh", env=second)
    assert all(resources())
    login = ["ssh", "-F", state / "ssh_config", "n0", "hostname"]
    assert subprocess.run(login, capture_output=True, text=True, check=True).stdout == "n0\n"
    script("down.sh", env=second)
    script("down.sh", env=second)
    assert resources() == ["", "", ""]
    assert not state.exists()


def test_an_image_is_copied_by_links_or_by_load_and_only_if_it_differs(second):
    image = f"{second['TESTBED_NAME']}:1"
    script("up.sh", env=second)
    n0 = Host("n0", "172.30.9.10", Path(second["TESTBED_STATE"]) / "ssh_config")
    ids = []
    try:
        for options, text in (([], "one"), (["--load"], "two"), ([], "three")):
            ids.append(script("small-image.sh", image, text).strip())
            script("image.sh", *options, image, env=second)
            assert n0.run(f"docker image inspect --format '{{{{.Id}}}}' {image}") == ids[-1]
            assert n0.run(f"docker run --rm {image} tail -n 1 /opt/project/trainer/__init__.py") == text
        # a hard-linked image can be saved like any other
        assert int(n0.run(f"docker save {image} | wc -c")) > 20_000_000
        engine = n0.run("pidof dockerd")
        script("image.sh", image, env=second)
        assert n0.run("pidof dockerd") == engine
    finally:
        docker("image", "rm", *ids)
