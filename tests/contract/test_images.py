"""Files on their way to nodes, over a real SSH server; and the layers as a real engine has them."""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from cluster import resources, rsync
from cluster.config import DEFAULT_IMAGE
from cluster.errors import ClusterError
from cluster.images import _Layers, _Push, engine
from cluster.images.compare import chain_ids
from cluster.images.delivery import Blob, SourceError, folder_here, send
from cluster.model import Node
from cluster.shells import close_all

MB = 1 << 20
LIMIT = "--bwlimit=15m"


class Screen:
    """Remembers what it was told."""

    def __init__(self, enough=MB):
        self.notes, self.last = [], {}
        self.enough, self.reached = enough, threading.Event()

    def note(self, text):
        self.notes.append(text)

    def sent(self, node, done, total):
        self.last[node] = (done, total)
        if done > self.enough:
            self.reached.set()


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
def blob(content, tmp_path):
    """Makes what is sent; not compressed, so that its bytes are the source's."""
    (tmp_path / "here").mkdir()

    def make(source=None, packer=("cat",), digest="", unwanted=None):
        source = source or ["cat", str(content)]
        file = tmp_path / "here" / "layer.gz"
        return Blob(file, content.stat().st_size // 2, source, packer, digest, unwanted or threading.Event())

    return make


@pytest.fixture
def made(blob):
    """A blob that is complete."""
    whole = blob()
    whole.make()
    whole.made.set_result(None)
    return whole


def part_of(folder):
    """What of a transfer that broke is kept."""
    return folder / f"{rsync.OURS}partial" / "layer.gz"


def test_a_file_arrives_whole(nodes, content, made, tmp_path):
    screen = Screen()
    moved = send(nodes[0], f"{tmp_path}/node's $1 folder", [made], screen)
    assert [path.read_bytes() for path in (tmp_path / "node's $1 folder").iterdir()] == [content.read_bytes()]
    assert 6 * MB < moved < 6.1 * MB
    assert screen.last["h0"] == (6 * MB, 6 * MB)


def test_what_has_arrived_is_not_sent_again(nodes, made, tmp_path):
    send(nodes[0], str(tmp_path / "node"), [made], Screen())
    assert send(nodes[0], str(tmp_path / "node"), [made], Screen()) < 10_000


def test_a_part_is_gone_on_with(nodes, content, made, tmp_path):
    part = part_of(tmp_path / "node")
    part.parent.mkdir(parents=True)
    part.write_bytes(content.read_bytes()[: 4 * MB])
    assert 2 * MB < send(nodes[0], str(tmp_path / "node"), [made], Screen()) < 2.1 * MB
    assert (tmp_path / "node" / "layer.gz").read_bytes() == content.read_bytes()
    assert not part.parent.exists()


def test_a_part_of_something_else_is_found_out(nodes, content, made, tmp_path):
    part = part_of(tmp_path / "node")
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(4 * MB))
    send(nodes[0], str(tmp_path / "node"), [made], Screen())
    assert (tmp_path / "node" / "layer.gz").read_bytes() == content.read_bytes()


@pytest.fixture
def large(content, monkeypatch):
    """A transfer of 4 seconds, so that something can happen to the connection meanwhile."""
    content.write_bytes(os.urandom(60 * MB))
    monkeypatch.setattr(rsync, "_OPTIONS", (*rsync._OPTIONS, LIMIT))


def test_a_broken_connection_costs_only_what_was_under_way(large, nodes, content, made, sshd, tmp_path):
    screen = Screen(enough=10 * MB)
    moved = []
    thread = threading.Thread(target=lambda: moved.append(send(nodes[0], str(tmp_path / "node"), [made], screen)))
    thread.start()
    assert screen.reached.wait(20)
    sshd.drop_sessions()
    thread.join(60)
    assert not thread.is_alive()
    assert (tmp_path / "node" / "layer.gz").read_bytes() == content.read_bytes()
    assert len(screen.notes) == 1
    assert "h0: the connection broke" in screen.notes[0]
    assert moved[0] < 58 * MB, "what had arrived was sent again"


def sessions(sshd):
    pid = (sshd.folder / "pid").read_text().strip()
    return [int(each) for each in subprocess.run(["pgrep", "-P", pid], capture_output=True, check=False).stdout.split()]


def test_a_node_that_stops_responding_holds_up_no_other(large, nodes, content, made, sshd, tmp_path):
    screen = Screen(enough=10 * MB)
    hanging = threading.Thread(target=send, args=(nodes[0], str(tmp_path / "h0"), [made], screen))
    hanging.start()
    assert screen.reached.wait(20)
    stopped = sessions(sshd)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        send(nodes[1], str(tmp_path / "h1"), [made], Screen())
        assert (tmp_path / "h1" / "layer.gz").read_bytes() == content.read_bytes()
        assert hanging.is_alive()
        # ssh gives up after three ServerAliveIntervals, and the push connects again.
        hanging.join(60)
        assert not hanging.is_alive()
        assert (tmp_path / "h0" / "layer.gz").read_bytes() == content.read_bytes()
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)


INTERRUPTED = """
import os, signal, sys, threading
from pathlib import Path
from types import SimpleNamespace
from cluster import fanout, rsync
from cluster.images.delivery import Blob, send
from cluster.model import Node
rsync._OPTIONS = (*rsync._OPTIONS, "--bwlimit=15m")
begun = threading.Event()
def sent(node, done, total):
    if done > 10_000_000 and not begun.is_set():
        begun.set()
        os.kill(os.getpid(), signal.SIGINT)
source, here, there, config = sys.argv[1:]
first = Blob(Path(here, "layer.gz"), 1, ["cat", source], ["cat"], "", threading.Event())
first.make()
first.made.set_result(None)
second = Blob(Path(here, "second.gz"), 1, ["sleep", "60"], ["cat"], "", threading.Event())
compressing = threading.Thread(target=second.make)
compressing.start()
node = Node("h0", "", login="h0", ssh_config=config)
try:
    rsync.interruptible(lambda: send(node, there, [first], SimpleNamespace(note=print, sent=sent)))
except KeyboardInterrupt:
    compressing.join()
    print("interrupted", second.file.exists(), flush=True)
"""


def test_ctrl_c_ends_transfer_and_compression_and_what_has_arrived_is_kept(large, nodes, content, made, tmp_path):
    began = time.monotonic()
    (tmp_path / "interrupted").mkdir()
    words = [content, tmp_path / "interrupted", tmp_path / "node", nodes[0].ssh_config]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        # what a shell started in the background ignores SIGINT, and so would this
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.stdout == "interrupted False\n", done.stderr
    assert time.monotonic() - began < 20
    assert not (tmp_path / "node" / "layer.gz").exists()
    part = part_of(tmp_path / "node")
    until = time.monotonic() + 10
    while not part.exists() and time.monotonic() < until:
        time.sleep(0.1)
    arrived = part.stat().st_size
    assert arrived > 9 * MB
    assert send(nodes[0], str(tmp_path / "node"), [made], Screen()) < 60 * MB - arrived + 200_000
    assert (tmp_path / "node" / "layer.gz").read_bytes() == content.read_bytes()


def test_nodes_that_share_a_home_have_a_folder_each(tmp_path):
    """Two machines but for their kernels: what tells them apart is what `uname -n` says."""
    for host in ("gpu-a", "gpu-b"):
        (tmp_path / host).mkdir()
        for name, text in (("uname", f"echo {host}"), ("docker", "")):
            (tmp_path / host / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / host / name).chmod(0o755)
        env = {"HOME": str(tmp_path), "PATH": f"{tmp_path / host}:{os.environ['PATH']}"}
        argv = ["bash", "-c", resources.text("images/engine.sh"), "engine", "arrived", "docker"]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
        folder = tmp_path / ".cache" / "clusterctl" / f"layers-{host}"
        assert done.stdout == f"{folder}\n"
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_node_without_rsync_is_named_before_anything_is_compressed(monkeypatch, tmp_path):
    for name in ("bash", "docker"):
        (tmp_path / name).symlink_to(shutil.which("bash"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("cluster.shells.local.MORE_PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"^gpu-a: rsync is not installed$"):
        engine.arrived(Node("gpu-a", "", runtime="docker"))


def test_no_process_is_started_after_ctrl_c(monkeypatch):
    monkeypatch.setattr(rsync, "_interrupted", threading.Event())
    rsync._interrupted.set()
    with pytest.raises(ClusterError, match="interrupted"), rsync.started(["true"]):
        pytest.fail("a process was started after Ctrl-C")


def test_a_source_is_compressed_once_and_not_again_while_another_push_uses_the_file(tmp_path, content, blob):
    runs = tmp_path / "runs"
    source = ["bash", "-c", 'echo >>"$1"; cat "$2"', "count", str(runs), str(content)]
    for _ in range(2):
        made = blob(source, ["gzip", "-c"], f"sha256:{hashlib.sha256(content.read_bytes()).hexdigest()}")
        made.make()
        assert made.size == made.file.stat().st_size
    assert runs.read_text() == "\n"
    assert list(made.file.parent.iterdir()) == [made.file]
    assert subprocess.run(["gzip", "-dc", made.file], capture_output=True, check=True).stdout == content.read_bytes()


def test_the_last_push_removes_the_files_here(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with folder_here() as folder:
        (folder / "layer.gz").touch()
        with folder_here() as same:
            assert same == folder
        assert (folder / "layer.gz").exists()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "digest", "said"),
    [
        (["bash", "-c", "head -c 100000 /dev/urandom; echo no such layer >&2; exit 3"], "", "no such layer"),
        (["head", "-c", "100000", "/dev/zero"], "sha256:" + "0" * 64, "not what its digest says"),
    ],
)
def test_a_source_that_fails_leaves_no_file(blob, source, digest, said):
    failing = blob(source, digest=digest)
    with pytest.raises(SourceError, match=said):
        failing.make()
    assert not failing.file.exists()


def test_a_compression_that_nobody_needs_any_more_ends(blob):
    unwanted = threading.Event()
    endless = blob(["cat", "/dev/zero"], ["gzip", "-c"], unwanted=unwanted)
    threading.Timer(0.5, unwanted.set).start()
    with pytest.raises(ClusterError):
        endless.make()
    assert not endless.file.exists()


@pytest.mark.parametrize("packer", ["gzip", "zstd"])
def test_a_full_disk_here_is_named(blob, packer):
    full = blob(["cat", "/dev/urandom"], ["bash", "-c", f"{packer} -c >/dev/full"])
    with pytest.raises(ClusterError, match=r"^this machine: .*/here cannot be written: No space left on device$"):
        full.make()
    assert not full.file.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_on_a_node_is_named(nodes, made, tmp_path):
    (tmp_path / "node").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path / "node"], check=True)
    try:
        with pytest.raises(ClusterError, match=r"^h0: .*/node cannot be written: No space left on device$"):
            send(nodes[0], str(tmp_path / "node"), [made], Screen())
    finally:
        subprocess.run(["umount", tmp_path / "node"], check=True)


def test_a_node_that_cannot_keep_it_says_why(nodes, made, tmp_path):
    (tmp_path / "node").touch()
    with pytest.raises(ClusterError, match=r"^h0: .*/node cannot be written: "):
        send(nodes[0], str(tmp_path / "node"), [made], Screen())


@pytest.fixture
def image(tmp_path):
    """A small image with two layers; its engine is also the nodes' engine."""
    name, base = f"clusterctl-test-{os.getpid()}:1", f"clusterctl-test-{os.getpid()}:base"
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "code").write_bytes(os.urandom(2 * MB))
    tar = subprocess.run(["tar", "-c", "-C", tmp_path, "content"], capture_output=True, check=True).stdout
    subprocess.run(["docker", "import", "-", base], input=tar, capture_output=True, check=True)
    (tmp_path / "image" / "Dockerfile").write_text(f"FROM {base}\nCOPY code /code\nCMD x\n")
    subprocess.run(["docker", "build", "--quiet", "--tag", name, tmp_path / "image"], capture_output=True, check=True)
    yield name
    subprocess.run(["docker", "image", "rm", "--force", name, base], capture_output=True, check=False)


@pytest.mark.engine
@pytest.mark.skipif(os.geteuid() != 0, reason="the image has no python3 that reads its layers")
@pytest.mark.parametrize("read", ["layers", "whole"])
def test_pushes_at_the_same_time_do_not_destroy_each_other_s_files(read, content, image, nodes, monkeypatch, tmp_path):
    """All nodes and both pushes have one engine and one folder, as two pushes to one node have."""
    monkeypatch.setenv("HOME", str(tmp_path))
    here = engine.look(engine.HERE, image)
    layers = _Layers.of(here) if read == "layers" else None
    lacks = dataclasses.replace(here, id="", held=())
    nodes = [dataclasses.replace(node, runtime="docker") for node in nodes]
    results = []

    def run(push_nodes):
        seen = {node.name: lacks for node in push_nodes}
        results.append(_Push(image, here, seen, layers, Screen()).to(push_nodes))

    runs = [threading.Thread(target=run, args=(each,)) for each in (nodes[:2], nodes[2:])]
    for each in runs:
        each.start()
    for each in runs:
        each.join(120)
    pushed = {name: one for result in results for name, one in result.items()}
    assert {name: one.id for name, one in pushed.items()} == dict.fromkeys(("h0", "h1", "h2"), here.id)
    assert {one.missing for one in pushed.values()} == {2}
    assert list((tmp_path / ".cache" / "clusterctl" / "layers").iterdir()) == []


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
