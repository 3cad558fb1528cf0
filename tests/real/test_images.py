"""`clusterctl image push` to engines of other machines, with interruptions and faults."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import uuid
from pathlib import Path

import pytest
import yaml

from cluster import images
from cluster.spec.model import Machine
from cluster.transport import close_all

pytestmark = pytest.mark.real

LAYERS = "~/.cache/clusterctl/layers-*"
#: Prints how many bytes have arrived, complete files and parts.
ARRIVED = f"find {LAYERS} -type f -exec cat {{}} + 2>/dev/null | wc -c"


def docker(*argv, stdin=None):
    done = subprocess.run(["docker", *argv], input=stdin, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, f"docker {argv}\n{done.stderr.decode()}"
    return done.stdout.decode().strip()


class Image:
    """An image of this machine: an incompressible base, and a last layer with our code."""

    def __init__(self, folder, megabytes):
        self.name = f"clusterctl-test-{uuid.uuid4().hex[:8]}:1"
        self.folder = folder
        (folder / "base").write_bytes(os.urandom(megabytes << 20))
        tar = subprocess.run(["tar", "-c", "-C", folder, "base"], capture_output=True, check=True).stdout
        self.base = docker("import", "-", self.name.replace(":1", ":base"), stdin=tar)
        (folder / "base").unlink()
        self.ids = []
        self.build("first")

    def build(self, text):
        """Build with a changed line of code and return the image's id."""
        (self.folder / "code").write_text(text)
        (self.folder / "Dockerfile").write_text(
            f"FROM {self.name.replace(':1', ':base')}\nCOPY code /code\nCMD x\n"
        )
        docker("build", "--quiet", "--tag", self.name, str(self.folder))
        self.ids.append(docker("image", "inspect", "--format", "{{.Id}}", self.name))
        return self.ids[-1]

    def code_on(self, host):
        """Return the file /code of the image on a host."""
        name = self.name.split(":")[0]
        text = f"docker create --name {name} {self.name} >/dev/null; docker cp {name}:/code - | tar -xO"
        return host.run(f"{text}; docker rm {name} >/dev/null")

    def id_on(self, host):
        """Return the image's id on a host, or ""."""
        code, text = host.try_run(f"docker image inspect --format '{{{{.Id}}}}' {self.name}")
        return text.strip() if code == 0 else ""


@pytest.fixture
def make_image(tmp_path, testbed):
    made = []

    def make(megabytes):
        folder = tmp_path / f"image-{len(made)}"
        folder.mkdir()
        made.append(Image(folder, megabytes))
        return made[-1]

    yield make
    testbed.fault("heal")
    for image in made:
        subprocess.run(
            ["docker", "image", "rm", "--force", *image.ids, image.base], capture_output=True, check=False
        )
        for name in ("n0", "n1"):
            testbed[name].try_run(f"docker image rm {image.name}; rm -rf {LAYERS} ~ada/.cache/clusterctl")


@pytest.fixture
def push(clusterctl, testbed):
    """Return a function that runs `clusterctl image push`, or starts it in the background."""

    def run(image, hosts, *options, start=False):
        argv = [
            "image",
            "push",
            "--image",
            image.name,
            "--hosts",
            hosts,
            "--ssh-config",
            str(testbed.ssh_config),
        ]
        return clusterctl.start(*argv, *options) if start else clusterctl.run(*argv, *options)

    return run


@pytest.fixture
def slow_rsync(clusterctl, tmp_path):
    """Make a transfer of 100 MB take 5 seconds."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "rsync").write_text(f'#!/bin/sh\nexec {shutil.which("rsync")} --bwlimit=20m "$@"\n')
    (tmp_path / "bin" / "rsync").chmod(0o755)
    clusterctl.env["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"


def json_of(text):
    return json.JSONDecoder().raw_decode(text[text.index("{\n") :])[0]


def wait_until_some_has_arrived(host):
    """Wait on the host, to act soon after the first bytes arrive."""
    host.run(f'until [ "$({ARRIVED})" -gt 4000000 ]; do sleep 0.02; done')


def test_after_a_changed_line_only_the_last_layer_is_sent(make_image, push, testbed):
    image = make_image(20)
    code, text = push(image, "n0,ada@n1", "--json")
    assert code == 0, text
    first = json_of(text)
    assert [first[name]["missing"] for name in ("n0", "n1")] == [2, 2]
    old = image.ids[-1]
    new = image.build("second")
    assert new != old
    code, text = push(image, "n0,ada@n1", "--json")
    assert code == 0, text
    for name, pushed in json_of(text).items():
        assert pushed["missing"] == 1
        assert 0 < pushed["sent"] < 0.02 * pushed["size"]
        assert image.id_on(testbed[name]) == new
        assert image.code_on(testbed[name]) == "second"
        assert testbed[name].try_run(f"docker image inspect {old}")[0] != 0, (
            "the replaced image is still there"
        )
        assert (
            testbed[name].run(f"find {LAYERS} ~ada/.cache/clusterctl/layers-* -type f 2>/dev/null || true")
            == ""
        )
    code, text = push(image, "n0,ada@n1")
    assert code == 0
    assert text.count("already") == 2


def test_interrupted_push_resumes(make_image, push, testbed, slow_rsync):
    image = make_image(100)
    process = push(image, "n1", start=True)
    wait_until_some_has_arrived(testbed["n1"])
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=20)
    assert process.returncode == 130, text
    assert "Traceback" not in text
    assert image.id_on(testbed["n1"]) == ""
    arrived = int(testbed["n1"].run(ARRIVED))
    assert arrived > 4_000_000
    code, text = push(image, "n1", "--json")
    assert code == 0, text
    pushed = json_of(text)["n1"]
    assert pushed["sent"] <= (100 << 20) + 200_000 - arrived
    assert image.id_on(testbed["n1"]) == image.ids[-1]
    assert testbed["n1"].run(f"ls {LAYERS} 2>/dev/null || true") == ""


def test_full_disk_on_one_node_does_not_stop_the_others(make_image, push, testbed):
    image = make_image(10)
    folder = "~ada/.cache/clusterctl"
    testbed["n1"].run(
        f"install -d -o ada ~ada/.cache {folder} && mount -t tmpfs -o size=1m,uid=ada none {folder}"
    )
    try:
        code, text = push(image, "n0,ada@n1", "--json")
        assert code == 3, text
        pushed = json_of(text)
        assert "No space left on device" in pushed["n1"]["error"]
        assert (pushed["n0"]["id"], pushed["n0"]["error"]) == (image.ids[-1], "")
        assert "error: n1: /home/ada/.cache/clusterctl/layers-" in text
        assert " cannot be written: No space left on device" in text
        assert image.id_on(testbed["n1"]) == ""
        assert image.id_on(testbed["n0"]) == image.ids[-1]
    finally:
        testbed["n1"].run(f"umount {folder}")


def test_nothing_is_sent_when_an_engine_does_not_answer(make_image, push, testbed):
    image = make_image(1)
    testbed["n1"].run("testbed-node stop-engine")
    code, text = push(image, "n0,n1", "--json")
    assert code == 5, text
    assert json_of(text)["n0"]["error"] == "n0: nothing was sent, because of n1"
    assert json_of(text)["n1"]["error"].startswith("n1: no engine answers: ")
    assert "hint: there: docker info" in text
    assert image.id_on(testbed["n0"]) == ""


def test_user_without_permission_gets_a_hint(make_image, push, testbed):
    image = make_image(1)
    keys = shlex.quote("/home/eve/.ssh")
    testbed["n1"].run(
        f"useradd --create-home --shell /bin/bash eve && usermod --password '*' eve && cp -r ~/.ssh {keys} && "
        f"chown -R eve: {keys}"
    )
    try:
        code, text = push(image, "eve@n1")
        assert code == 5, text
        assert "error: n1: no engine answers: " in text
        assert "hint: there: sudo usermod -aG docker" in text
    finally:
        testbed["n1"].run("userdel --remove eve")


def test_ls_shows_the_image_of_every_node(make_image, push, testbed, clusterctl):
    image = make_image(1)
    argv = ["image", "ls", "--image", image.name, "--hosts", "n0,n1", "--ssh-config", str(testbed.ssh_config)]
    push(image, "n0")
    code, text = clusterctl.run(*argv)
    assert code == 1, text
    assert [line.split()[0] + " " + " ".join(line.split()[2:]) for line in text.splitlines()] == [
        f"n0 {image.ids[0].removeprefix('sha256:')[:12]}",
        "n1 missing",
    ]
    push(image, "n1")
    code, text = clusterctl.run(*argv, "--json")
    assert code == 0
    assert json.loads(text) == {"n0": image.ids[0], "n1": image.ids[0]}


def test_without_local_zstd_layers_use_gzip(make_image, push, testbed, clusterctl, tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in os.environ["PATH"].split(":"):
        for program in Path(folder).glob("*"):
            if program.name != "zstd" and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    clusterctl.env["PATH"] = str(programs)
    image = make_image(1)
    code, text = push(image, "n0", "--json")
    assert code == 0, text
    assert image.id_on(testbed["n0"]) == image.ids[0]


def test_unreadable_layers_send_the_whole_image(make_image, testbed, monkeypatch):
    # A user who is not root reads them in a container of the image, and this image has no Python.
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    image = make_image(5)
    notes = []
    node = Machine("n0", "", login="n0", runtime="", ssh_config=str(testbed.ssh_config))
    pushed = images.push([node], image.name, notes.append, lambda *_: None)
    close_all()
    assert pushed["n0"].sent >= 5 << 20
    assert notes[0].startswith("this machine: cannot read single layers (")
    assert image.id_on(testbed["n0"]) == image.ids[0]


def test_the_sites_network_variables_enter_the_container_unless_forbidden(
    clusterctl, testbed, image_on_hosts
):
    node = {
        "address": testbed["n1"].address,
        "runtime": "docker",
        "run_dir": "/data/runs",
        "data_dir": "/data/files",
    }
    inventory = {"ssh_config": str(testbed.ssh_config), "device": "cpu", "nodes": {"n1": node}}
    (clusterctl.folder / "show.py").write_text(
        "import os\nprint(sorted(n for n in os.environ if n[:4] in ('NCCL', 'UCX_')))"
    )
    testbed["n1"].run(
        "cp .bashrc .bashrc.kept; sed -i '1i export NCCL_IB_HCA=mlx5 UCX_TLS=tcp SITE=x' .bashrc"
    )
    try:
        for more, names in (
            ({}, "['NCCL_IB_HCA', 'NCCL_SOCKET_IFNAME', 'UCX_TLS']"),
            ({"pass_env": []}, "['NCCL_SOCKET_IFNAME']"),
        ):
            (clusterctl.folder / "cluster.yaml").write_text(yaml.safe_dump(inventory | more))
            code, text = clusterctl.run("launch", "--command", "show.py")
            assert code == 0, text
            assert names in text
    finally:
        testbed["n1"].run("mv .bashrc.kept .bashrc")
