"""Transfer of layers over a real SSH server, and layers read from a real engine."""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.agent import scripts
from cluster.errors import ClusterError, UnreachableError
from cluster.images import Blob, Layers, chain_ids, engine, send, send_missing
from cluster.spec.image import DEFAULT_IMAGE
from cluster.spec.model import Machine
from cluster.transport import close_all, interruption, process, rsync
from tests.conftest import interrupted, wait_until

MB = 1 << 20
LIMIT = "--bwlimit=15m"


class Progress:
    """Records the progress of a push."""

    def __init__(self, enough=MB):
        self.last = {}
        self.enough = enough
        self.reached = threading.Event()

    def __call__(self, node, what, done, total):
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
    yield [sshd.node(number) for number in range(3)]
    close_all()


@pytest.fixture
def blob(content, tmp_path):
    """Return a factory of blobs without compression, so that their bytes are the source's."""
    (tmp_path / "here").mkdir()

    def make(source=None, packer=("cat",)):
        source = source or ["cat", str(content)]
        file = tmp_path / "here" / "layer.gz"
        return Blob(file, content.stat().st_size // 2, source, packer)

    return make


@pytest.fixture
def made(blob):
    """Return a complete blob."""
    whole = blob()
    whole.make()
    whole.made.set_result(None)
    return whole


def part_of(folder):
    """Return the partial file of a broken transfer."""
    return folder / f"{rsync.PREFIX}partial" / "layer.gz"


def test_a_file_arrives_whole_and_is_not_sent_again(nodes, content, made, tmp_path):
    progress = Progress()
    folder = tmp_path / "node's $1 folder"
    moved = send(nodes[0], str(folder), [made], progress)
    assert [path.read_bytes() for path in folder.iterdir()] == [content.read_bytes()]
    assert 6 * MB < moved < 6.1 * MB
    assert progress.last["h0"] == (6 * MB, 6 * MB)
    assert send(nodes[0], str(folder), [made], Progress()) < 10_000


@pytest.fixture
def large(content, monkeypatch):
    """Make a transfer take 4 seconds."""
    content.write_bytes(os.urandom(60 * MB))
    monkeypatch.setattr(rsync, "_OPTIONS", (*rsync._OPTIONS, LIMIT))


def test_partial_file_of_a_broken_connection_is_resumed(large, nodes, content, made, sshd, tmp_path):
    progress = Progress(enough=10 * MB)
    folder = str(tmp_path / "node")
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, nodes[0], folder, [made], progress)
        assert progress.reached.wait(20)
        sshd.drop_sessions()
        with pytest.raises(UnreachableError, match="h0: the connection broke"):
            sending.result(60)
    assert wait_until(part_of(tmp_path / "node").exists)
    assert send(nodes[0], folder, [made], Progress()) < 52 * MB, "what had arrived was sent again"
    assert (tmp_path / "node" / "layer.gz").read_bytes() == content.read_bytes()
    assert not part_of(tmp_path / "node").parent.exists()


def sessions(sshd):
    pid = (sshd.folder / "pid").read_text().strip()
    return [
        int(each)
        for each in subprocess.run(["pgrep", "-P", pid], capture_output=True, check=False).stdout.split()
    ]


def test_node_that_stops_responding_does_not_block_others(large, nodes, content, made, sshd, tmp_path):
    progress = Progress(enough=10 * MB)
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(send, nodes[0], str(tmp_path / "h0"), [made], progress)
        assert progress.reached.wait(20)
        stopped = sessions(sshd)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            send(nodes[1], str(tmp_path / "h1"), [made], Progress())
            assert (tmp_path / "h1" / "layer.gz").read_bytes() == content.read_bytes()
            assert not hanging.done()
            # ssh gives up after three ServerAliveIntervals.
            with pytest.raises(UnreachableError):
                hanging.result(60)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGKILL)


INTERRUPTED = """
import os, signal, sys, threading
from pathlib import Path
from cluster.transport import process, rsync
from cluster.images import Blob, send
from cluster.spec.model import Machine
rsync._OPTIONS = (*rsync._OPTIONS, "--bwlimit=15m")
begun = threading.Event()
def sent(node, what, done, total):
    if done > 10_000_000 and not begun.is_set():
        begun.set()
        os.kill(os.getpid(), signal.SIGINT)
source, here, there, config = sys.argv[1:]
first = Blob(Path(here, "layer.gz"), 1, ["cat", source], ["cat"])
first.make()
first.made.set_result(None)
second = Blob(Path(here, "second.gz"), 1, ["sleep", "60"], ["cat"])
compressing = threading.Thread(target=second.make)
compressing.start()
node = Machine("h0", "", login="h0", ssh_config=config)
try:
    process.interruptible(lambda: send(node, there, [first], sent))
except KeyboardInterrupt:
    compressing.join()
    print("interrupted", flush=True)
"""


def test_ctrl_c_ends_transfer_and_compression_and_keeps_the_partial_file(
    large, nodes, content, made, tmp_path
):
    (tmp_path / "interrupted").mkdir()
    words = [content, tmp_path / "interrupted", tmp_path / "node", nodes[0].ssh_config]
    done = interrupted(INTERRUPTED, *words, timeout_s=50)
    assert done.stdout == "interrupted\n", done.stderr
    assert not (tmp_path / "node" / "layer.gz").exists()
    part = part_of(tmp_path / "node")
    assert wait_until(part.exists)
    arrived = part.stat().st_size
    assert arrived > 9 * MB
    assert send(nodes[0], str(tmp_path / "node"), [made], Progress()) < 60 * MB - arrived + 200_000
    assert (tmp_path / "node" / "layer.gz").read_bytes() == content.read_bytes()


def test_nodes_that_share_a_home_use_separate_folders(tmp_path):
    """Simulate two machines by different outputs of `uname -n`."""
    for host in ("gpu-a", "gpu-b"):
        (tmp_path / host).mkdir()
        for name, text in (("uname", f"echo {host}"), ("docker", "")):
            (tmp_path / host / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / host / name).chmod(0o755)
        env = {"HOME": str(tmp_path), "PATH": f"{tmp_path / host}:{os.environ['PATH']}"}
        argv = scripts.bash("images/engine.sh", "folder", engines=["docker", "", ""])
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
        folder = tmp_path / ".cache" / "clusterctl" / f"layers-{host}"
        assert done.stdout == f"{folder}\n"
        assert folder.stat().st_mode & 0o777 == 0o700


def test_node_without_rsync_fails_before_compression(monkeypatch, tmp_path):
    for name in ("bash", "docker"):
        (tmp_path / name).symlink_to(shutil.which("bash"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("cluster.transport.local.MORE_PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"^gpu-a: rsync is not installed$"):
        engine.make_folder(Machine("gpu-a", "", runtime="docker"))


def test_no_process_is_started_after_ctrl_c(monkeypatch):
    monkeypatch.setattr(interruption, "interrupted", threading.Event())
    interruption.interrupted.set()
    with pytest.raises(ClusterError, match="interrupted"), process.started(["true"]):
        pytest.fail("a process was started after Ctrl-C")


def test_complete_blob_has_the_compressed_source(content, blob):
    made = blob(packer=["gzip", "-c"])
    made.make()
    assert made.size == made.file.stat().st_size
    assert (
        subprocess.run(["gzip", "-dc", made.file], capture_output=True, check=True).stdout
        == content.read_bytes()
    )


def test_failed_source_is_reported(blob):
    failing = blob(["bash", "-c", "head -c 100000 /dev/urandom; echo no such layer >&2; exit 3"])
    with pytest.raises(ClusterError, match="no such layer"):
        failing.make()


def test_full_local_disk_is_reported(blob):
    full = blob(["cat", "/dev/urandom"], ["bash", "-c", "gzip -c >/dev/full"])
    with pytest.raises(
        ClusterError, match=r"^this machine: .*/here cannot be written: No space left on device$"
    ):
        full.make()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_full_disk_on_a_node_is_reported(nodes, made, tmp_path):
    (tmp_path / "node").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path / "node"], check=True)
    try:
        with pytest.raises(ClusterError, match=r"^h0: .*/node cannot be written: No space left on device$"):
            send(nodes[0], str(tmp_path / "node"), [made], Progress())
    finally:
        subprocess.run(["umount", tmp_path / "node"], check=True)


@pytest.fixture
def image(tmp_path):
    """A small image with two layers; its engine is also the nodes' engine."""
    name = f"clusterctl-test-{os.getpid()}:1"
    base = f"clusterctl-test-{os.getpid()}:base"
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "code").write_bytes(os.urandom(2 * MB))
    tar = subprocess.run(["tar", "-c", "-C", tmp_path, "content"], capture_output=True, check=True).stdout
    subprocess.run(["docker", "import", "-", base], input=tar, capture_output=True, check=True)
    (tmp_path / "image" / "Dockerfile").write_text(f"FROM {base}\nCOPY code /code\nCMD x\n")
    subprocess.run(
        ["docker", "build", "--quiet", "--tag", name, tmp_path / "image"], capture_output=True, check=True
    )
    yield name
    subprocess.run(["docker", "image", "rm", "--force", name, base], capture_output=True, check=False)


@pytest.mark.engine
@pytest.mark.skipif(os.geteuid() != 0, reason="the image has no python3 that reads its layers")
@pytest.mark.parametrize("read", ["layers", "whole"])
def test_concurrent_pushes_keep_each_others_files(read, content, image, nodes, monkeypatch, tmp_path):
    """All nodes share one engine and one folder, as in two pushes to one node."""
    monkeypatch.setenv("HOME", str(tmp_path))
    here = engine.inspect(engine.HERE, image)
    layers = Layers.of(here) if read == "layers" else None
    nodes = [dataclasses.replace(node, runtime="docker") for node in nodes]
    results = []

    def run(push_nodes):
        counts = {node.name: 2 for node in push_nodes}
        folders = {node.name: engine.make_folder(node) for node in push_nodes}
        results.append(
            send_missing(image, here, layers, "gz", counts, folders, push_nodes, print, Progress())
        )

    runs = [threading.Thread(target=run, args=(each,)) for each in (nodes[:2], nodes[2:])]
    for each in runs:
        each.start()
    for each in runs:
        each.join(120)
    pushed = {name: one for result in results for name, one in result.items()}
    assert {name: str(one) for name, one in pushed.items() if isinstance(one, ClusterError)} == {}
    assert {name: one.id for name, one in pushed.items()} == dict.fromkeys(("h0", "h1", "h2"), here.id)
    assert {one.missing for one in pushed.values()} == {2}


@pytest.mark.engine
@pytest.mark.skipif(os.geteuid() != 0, reason="the image has no python3 that reads its layers")
def test_files_that_another_push_replaces_meanwhile_are_loaded(content, image, nodes, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    here = engine.inspect(engine.HERE, image)
    node = dataclasses.replace(nodes[0], runtime="docker")
    folder = engine.make_folder(node)
    loads = engine.load

    def load(there, name, files, *more):
        """Load the files while equal ones take their places, as rsync puts them there."""
        ended = threading.Event()

        def replace():
            copies = [shutil.copy(f"{folder}/{file}", tmp_path / f"copy-{file}") for file in files]
            while not ended.is_set():
                for file, copy in zip(files, copies, strict=True):
                    Path(shutil.copy(copy, f"{copy}.new")).replace(f"{folder}/{file}")

        with ThreadPoolExecutor(1) as pool:
            replacing = pool.submit(replace)
            try:
                return loads(there, name, files, *more)
            finally:
                ended.set()
                replacing.result()

    monkeypatch.setattr(engine, "load", load)
    arguments = (
        image,
        here,
        Layers.of(here),
        "gz",
        {node.name: 2},
        {node.name: folder},
        [node],
        print,
        Progress(),
    )
    assert send_missing(*arguments)[node.name].id == here.id


@pytest.mark.engine
@pytest.mark.parametrize("user", ["root", "a member of group docker"])
def test_layer_from_the_engine_has_its_original_digest(user, monkeypatch):
    if user == "root" and os.geteuid() != 0:
        user = "a member of group docker"
    elif user != "root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)  # other users read the layers in a container
    here = engine.inspect(engine.HERE, DEFAULT_IMAGE)
    layers = Layers.of(here)
    assert (layers.program[0] == "docker") == (user != "root")
    assert f"sha256:{hashlib.sha256(layers.config.encode()).hexdigest()}" == here.id
    assert json.loads(layers.config)["rootfs"]["diff_ids"] == list(here.layers)
    assert layers.chains == tuple(chain_ids(here.layers))
    # The last layer has our code; every push sends it.
    tar = subprocess.run(
        [*layers.program, "layer", layers.chains[-1]], capture_output=True, check=True, timeout=120
    )
    assert f"sha256:{hashlib.sha256(tar.stdout).hexdigest()}" == here.layers[-1]
    assert len(tar.stdout) > layers.sizes[-1] > 0
