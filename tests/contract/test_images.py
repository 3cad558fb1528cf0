"""Files on their way to nodes, over a real SSH server; and the layers as a real engine has them."""

import hashlib
import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from cluster import resources
from cluster.config import DEFAULT_IMAGE
from cluster.errors import LaunchError
from cluster.images import _Layers, engine
from cluster.images.compare import chain_ids
from cluster.images.delivery import Blob, Delivery, SourceError
from cluster.model import Node
from cluster.shells import close_all

ARRIVED = Path.home() / ".cache" / "clusterctl" / f"layers-{os.uname().nodename}"
MB = 1 << 20


class Screen:
    """Remembers what it was told."""

    def __init__(self):
        self.notes, self.last = [], {}
        self.reached = threading.Event()

    def note(self, text):
        self.notes.append(text)

    def sent(self, node, done, total):
        self.last[node] = (done, total)
        if done > MB:
            self.reached.set()


@pytest.fixture
def name():
    """A file's name of this test's own; what arrives under it is removed."""
    unique = f"test-{os.getpid()}-{time.time_ns()}.gz"
    yield unique
    for path in ARRIVED.glob(f"{unique}*"):
        path.unlink()


@pytest.fixture
def content(tmp_path):
    path = tmp_path / "content"
    path.write_bytes(os.urandom(6 * MB))
    return path


@pytest.fixture
def nodes(sshd):
    yield [Node(name, "", login=name, ssh_config=str(sshd.config)) for name in ("h0", "h1", "h2")]
    close_all()


@pytest.fixture
def blob(name, content):
    """Makes what is sent; not compressed, so that its bytes are the source's."""
    made = []

    def make(source=None, digest=""):
        made.append(Blob(name, content.stat().st_size, source or ["cat", str(content)], ["cat"], digest))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_file_arrives_whole(nodes, name, content, blob):
    screen = Screen()
    delivery = Delivery(nodes[0], [blob()], screen)
    delivery.send()
    assert (ARRIVED / name).read_bytes() == content.read_bytes()
    assert not (ARRIVED / f"{name}.part").exists()
    assert delivery.wire == 6 * MB
    assert screen.last["h0"] == (6 * MB, 6 * MB)


def test_what_has_arrived_is_not_sent_again(nodes, name, content, blob):
    Delivery(nodes[0], [blob()], Screen()).send()
    again = Delivery(nodes[0], [blob(source=["false"])], Screen())
    again.send()
    assert again.wire == 0


def test_a_part_is_gone_on_with(nodes, name, content, blob):
    ARRIVED.mkdir(parents=True, exist_ok=True)
    (ARRIVED / f"{name}.part").write_bytes(content.read_bytes()[: 4 * MB])
    delivery = Delivery(nodes[0], [blob()], Screen())
    delivery.send()
    assert delivery.wire == 2 * MB
    assert (ARRIVED / name).read_bytes() == content.read_bytes()


def test_a_part_of_something_else_is_found_out(nodes, name, content, blob):
    ARRIVED.mkdir(parents=True, exist_ok=True)
    (ARRIVED / f"{name}.part").write_bytes(bytes(4 * MB))
    Delivery(nodes[0], [blob()], Screen()).send()
    assert (ARRIVED / name).read_bytes() == content.read_bytes()


def test_a_broken_connection_costs_only_what_was_under_way(nodes, name, content, blob, sshd):
    slow = ["bash", "-c", 'head -c 4194304 "$1"; sleep 2; tail -c +4194305 "$1"', "slow", str(content)]
    screen = Screen()
    delivery = Delivery(nodes[0], [blob(source=slow)], screen)
    thread = threading.Thread(target=delivery.send)
    thread.start()
    assert screen.reached.wait(20)
    sshd.drop_sessions()
    thread.join(60)
    assert not thread.is_alive()
    assert (ARRIVED / name).read_bytes() == content.read_bytes()
    assert len(screen.notes) == 1
    assert "h0: the connection broke" in screen.notes[0]
    assert delivery.wire < 8 * MB, "what had arrived was sent again"


def test_nodes_that_share_a_home_take_the_same_file_at_the_same_time(tmp_path):
    """Two machines but for their kernels: what tells them apart is what `uname -n` says."""

    def receive(host):
        (tmp_path / host).mkdir()
        (tmp_path / host / "uname").write_text(f"#!/bin/sh\necho {host}\n")
        (tmp_path / host / "uname").chmod(0o755)
        env = {"HOME": str(tmp_path), "PATH": f"{tmp_path / host}:{os.environ['PATH']}"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        text = resources.text("images/common.sh", "images/delivery.sh")
        return subprocess.Popen(["bash", "-c", text, "delivery", "receive", "layer.gz"], env=env, **pipes)

    with receive("gpu-a") as first, receive("gpu-b") as second:
        assert (first.stdout.readline(), second.stdout.readline()) == (b"0\n", b"0\n")
        for node, sent in ((first, b"from a"), (second, b"from b")):
            assert node.communicate(sent, timeout=20) == (b"", b"")
    parts = sorted((tmp_path / ".cache" / "clusterctl").rglob("*.part"))
    assert [part.read_bytes() for part in parts] == [b"from a", b"from b"]


def test_a_source_runs_once_for_all_nodes(tmp_path, content, blob):
    runs = tmp_path / "runs"
    made = blob(source=["bash", "-c", 'echo >>"$1"; cat "$2"', "count", str(runs), str(content)])
    found = {}
    readers = [
        threading.Thread(target=lambda nth=nth: found.update({nth: b"".join(made.chunks(nth * MB))}))
        for nth in range(3)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(20)
    assert found == {nth: content.read_bytes()[nth * MB :] for nth in range(3)}
    assert runs.read_text() == "\n"
    assert made.digest == hashlib.sha256(content.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("source", "digest", "said"),
    [
        (["bash", "-c", "head -c 100000 /dev/urandom; echo no such layer >&2; exit 3"], "", "no such layer"),
        (["head", "-c", "100000", "/dev/zero"], "sha256:" + "0" * 64, "not what its digest says"),
    ],
)
def test_a_source_that_fails_leaves_nothing_that_counts_as_arrived(nodes, name, content, blob, source, digest, said):
    delivery = Delivery(nodes[0], [blob(source=source, digest=digest)], Screen())
    with pytest.raises(SourceError, match=said):
        delivery.send()
    assert not (ARRIVED / name).exists()


def test_a_node_that_cannot_keep_it_says_why(nodes, name, content, blob):
    ARRIVED.mkdir(parents=True, exist_ok=True)
    (ARRIVED / f"{name}.part").mkdir()
    try:
        with pytest.raises(LaunchError, match=r"^h0: cannot keep the image's layers: .*Is a directory"):
            Delivery(nodes[0], [blob()], Screen()).send()
    finally:
        (ARRIVED / f"{name}.part").rmdir()


@pytest.mark.engine
@pytest.mark.parametrize("user", ["root", "a member of group docker"])
def test_a_layer_is_read_from_the_engine_as_it_was_built(user, monkeypatch):
    if user == "root" and os.geteuid() != 0:
        user = "a member of group docker"
    elif user != "root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)  # who cannot read the engine's folder, asks the engine to
    here = engine.look(engine.HERE, DEFAULT_IMAGE)
    layers = _Layers.of(here)
    assert (layers.program[0] == "docker") == (user != "root")
    assert f"sha256:{hashlib.sha256(layers.config.encode()).hexdigest()}" == here.id
    assert json.loads(layers.config)["rootfs"]["diff_ids"] == list(here.layers)
    assert layers.chains == tuple(chain_ids(here.layers))
    # the last is our code, and the one that every push sends
    tar = subprocess.run([*layers.program, "layer", layers.chains[-1]], capture_output=True, check=True, timeout=120)
    assert f"sha256:{hashlib.sha256(tar.stdout).hexdigest()}" == here.layers[-1]
    assert len(tar.stdout) > layers.sizes[-1] > 0
