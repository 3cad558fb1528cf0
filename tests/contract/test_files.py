"""Folders synced to nodes and fetched with rsync, against a real sshd."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cluster.errors import ClusterError, UsageError
from cluster.spec.model import Machine
from cluster.transport import close_all, files, rsync
from cluster.transport.files import Difference
from tests.conftest import interrupted

NAMES = [
    *(
        "plain.txt",
        "a'; echo foo",
        'a"=0"',
        "one\ntwo",
        "$HOME `id` \\",
        "-n",
        "--delete",
        "ünïcode/ß",
        " x ",
        "*",
    ),
    *("tab\there", "deep/er/and er/-rf", ":remote:path", os.fsdecode(b"latin-\xe9")),
]


@pytest.fixture
def nodes(sshd, tmp_path):
    yield [
        sshd.node(at, f"gpu-{letter}", data_dir=f"{tmp_path}/{letter} d'") for at, letter in enumerate("ab")
    ]
    close_all()


@pytest.fixture
def folder(tmp_path):
    """A folder with every kind of name."""
    root = tmp_path / "my $data"
    for index, name in enumerate(NAMES):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(f"content {index}".encode() * (index * 100))
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("plain.txt")
    return root


def contents(root):
    """Every file's bytes, mode and link target by its relative path."""
    found = {}
    for path in sorted(Path(root).rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        elif path.is_file():
            found[name] = (path.read_bytes(), path.stat().st_mode & 0o777)
    return found


def sync(nodes, folder, **options):
    return files.sync(nodes, str(folder), copy=True, **options)


def test_a_folder_is_copied_exactly_and_a_second_sync_sends_nothing(nodes, folder):
    first = sync(nodes, folder)
    assert {name: (done.how, done.files) for name, done in first.items()} == dict.fromkeys(
        ("gpu-a", "gpu-b"), ("rsync", len(NAMES) + 2)
    )
    for node in nodes:
        assert node.mirror(str(folder)) == f"{node.data_dir}{folder}"
        assert contents(node.mirror(str(folder))) == contents(folder)
    files.check(nodes, [str(folder)])
    again = sync(nodes, folder)
    assert {(done.how, done.files, done.bytes) for done in again.values()} == {("same", 0, 0)}


def test_only_what_changed_is_sent(nodes, folder):
    (folder / "big").write_bytes(os.urandom(3_000_000))
    sync(nodes[:1], folder)
    (folder / "plain.txt").write_text("changed")
    (folder / "new").write_text("new")
    done = sync(nodes[:1], folder)["gpu-a"]
    assert (done.how, done.files) == ("rsync", 2)
    assert done.bytes < 100_000
    assert contents(nodes[0].mirror(str(folder))) == contents(folder)


def test_check_names_the_node_the_folder_and_the_first_files_that_differ(nodes, folder):
    with pytest.raises(
        ClusterError, match=r"gpu-a: .*my \$data does not exist\n +gpu-b: .* does not exist"
    ) as absent:
        files.check(nodes, [str(folder)])
    assert absent.value.hint == f"clusterctl sync '{folder}'"
    sync(nodes, folder)
    there = Path(nodes[1].mirror(str(folder)))
    (there / "plain.txt").write_text("other")
    (there / "one\ntwo").unlink()
    (there / "left over").write_text("x")
    with pytest.raises(ClusterError) as differs:
        files.check(nodes, [str(folder)])
    assert differs.value.message == (
        f"gpu-b: {folder} differs: 1 file missing ('one\\ntwo'), 1 different (plain.txt), 1 only there (left over)"
    )
    assert differs.value.hint.startswith(f"clusterctl sync '{folder}' (with --delete, ")


def test_extra_files_stay_without_delete(nodes, folder):
    sync(nodes, folder)
    there = Path(nodes[0].mirror(str(folder)))
    for name in ("-only\nthere", "sub/der/old"):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text("x")
    done = sync(nodes, folder)
    assert done["gpu-a"].left == Difference(extra=("-only\nthere", "sub/der/old"))
    assert (there / "sub/der/old").exists()
    done = sync(nodes, folder, delete=True)
    assert (done["gpu-a"].removed, done["gpu-a"].left) == (2, Difference())
    assert contents(there) == contents(folder)
    assert not (there / "sub").exists()
    files.check(nodes, [str(folder)])


def test_a_file_in_place_of_a_folder_is_replaced_only_with_delete(nodes, folder):
    sync(nodes[:1], folder)
    shutil.rmtree(folder / "deep")
    (folder / "deep").write_text("a file now")
    refused = sync(nodes[:1], folder)["gpu-a"]
    assert refused.message.startswith("gpu-a: ")
    assert refused.message.endswith("cannot be written: could not make way for new regular file: deep")
    assert "--delete" in refused.hint
    sync(nodes[:1], folder, delete=True)
    assert contents(nodes[0].mirror(str(folder))) == contents(folder)


def test_a_change_that_keeps_size_and_time_is_found_by_content(nodes, folder):
    sync(nodes[:1], folder)
    there = Path(nodes[0].mirror(str(folder))) / "ünïcode/ß"
    seen = there.stat()
    with there.open("r+b") as file:
        file.write(b"CONTENT")
    os.utime(there, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert files.differences(nodes[:1], str(folder)) == {"gpu-a": Difference(different=("ünïcode/ß",))}
    done = sync(nodes[:1], folder, checksum=True)["gpu-a"]
    assert done.files == 1
    assert contents(nodes[0].mirror(str(folder))) == contents(folder)


def test_one_file_is_synced_alone(nodes, folder, tmp_path):
    (tmp_path / "real.yaml").write_text("path: .\n")
    (tmp_path / "my.yaml").symlink_to("real.yaml")
    done = sync(nodes[:1], tmp_path / "my.yaml")["gpu-a"]
    assert done.files == 1
    there = Path(nodes[0].mirror(f"{tmp_path}/my.yaml"))
    assert there.read_text() == "path: .\n"
    assert not there.is_symlink()
    assert [path.name for path in there.parent.iterdir()] == ["my.yaml"]
    files.check(nodes[:1], [f"{tmp_path}/my.yaml"])
    (tmp_path / "real.yaml").write_text("path: x\n")
    with pytest.raises(ClusterError, match=r"1 file different \(my\.yaml\)"):
        files.check(nodes[:1], [f"{tmp_path}/my.yaml"])


def test_a_shared_folder_is_linked_not_copied(nodes, folder):
    done = files.sync(nodes, str(folder))
    assert {each.how for each in done.values()} == {"common"}
    there = Path(nodes[0].mirror(str(folder)))
    assert there.readlink() == folder
    files.check(nodes, [str(folder)])
    (folder / "new").write_text("x")
    files.check(nodes, [str(folder)])
    assert not [path for path in folder.iterdir() if path.name.startswith(".clusterctl")]
    sync(nodes[:1], folder)
    assert not there.is_symlink()
    assert contents(there) == contents(folder)


def test_a_link_to_another_folder_is_never_written_through(nodes, folder, tmp_path):
    elsewhere = tmp_path / "precious"
    elsewhere.mkdir()
    there = Path(nodes[0].mirror(str(folder)))
    there.parent.parent.mkdir(parents=True)
    there.parent.symlink_to(elsewhere)
    refused = sync(nodes[:1], folder)["gpu-a"]
    assert refused.message.startswith("gpu-a: ")
    assert "link" in refused.message
    assert not list(elsewhere.iterdir())


def test_files_with_other_times_and_the_same_content_are_no_difference(nodes, folder):
    sync(nodes[:1], folder)
    for path in folder.rglob("*.txt"):
        os.utime(path, (1e9, 1e9))
    files.check(nodes[:1], [str(folder)])
    assert not files.differences(nodes[:1], str(folder))["gpu-a"]


def test_a_missing_executable_bit_and_a_change_within_the_same_second_are_differences(nodes, folder):
    sync(nodes[:1], folder)
    there = Path(nodes[0].mirror(str(folder)))
    seen = (folder / "ünïcode/ß").stat()
    (folder / "ünïcode/ß").write_bytes((folder / "ünïcode/ß").read_bytes()[::-1])
    os.utime(folder / "ünïcode/ß", ns=(seen.st_mtime_ns // 10**9 * 10**9,) * 2)
    with pytest.raises(ClusterError, match=r"1 file different \(ünïcode/ß\)"):
        files.check(nodes[:1], [str(folder)])
    (there / "run.sh").chmod(0o644)
    with pytest.raises(ClusterError, match=r"2 files different \(run\.sh, ünïcode/ß\)"):
        files.check(nodes[:1], [str(folder)])


def test_caches_run_directories_and_special_files_are_excluded(nodes, tmp_path):
    root = tmp_path / "code"
    for inner in (".trainer-cache", "sub/__pycache__", "runs/digits"):
        (root / inner).mkdir(parents=True)
        (root / inner / "x").write_text("")
    (root / "runs" / rsync.RUNS_MARK).write_text(rsync.RUNS_RULE)
    os.mkfifo(root / "pipe")
    (root / "sub" / "y").write_text("")
    (root / "folder link").symlink_to("sub")
    assert files.differences(nodes[:1], str(root))["gpu-a"].missing == ("folder link", "sub/y")
    sync(nodes[:1], root)
    there = Path(nodes[0].mirror(str(root)))
    assert set(contents(there)) == {"folder link", "sub/y"}
    (there / "sub" / "__pycache__").mkdir()
    (there / "sub" / "__pycache__" / "z").write_text("")
    assert sync(nodes[:1], root, delete=True)["gpu-a"].how == "same"
    assert (there / "sub" / "__pycache__" / "z").exists()


def test_a_machine_without_rsync_is_named(nodes, folder, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    for name in ("ssh", "ssh-keygen"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert sync(nodes[:1], folder)["gpu-a"].message == "this machine: rsync is not installed"


def test_an_unwritable_mirror_and_a_missing_folder_are_errors(nodes, folder, tmp_path, sshd):
    (tmp_path / "file").write_text("")
    blocked = sshd.node(2, "gpu-c", data_dir=f"{tmp_path}/file/x")
    done = sync([*nodes, blocked], folder)
    assert done["gpu-a"].how == "rsync"
    assert done["gpu-c"].message == f"gpu-c: {tmp_path}/file/x{folder} cannot be written: Not a directory"
    with pytest.raises(UsageError, match="nowhere: no such file or folder"):
        sync(nodes, tmp_path / "nowhere")


def test_a_broken_transfer_leaves_complete_files_and_continues(sshd, nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(rsync, "_OPTIONS", (*rsync._OPTIONS, "--bwlimit=15m"))
    root = tmp_path / "large"
    root.mkdir()
    for index in range(6):
        (root / f"{index}.bin").write_bytes(os.urandom(10_000_000))
    there = Path(nodes[0].mirror(str(root)))
    begun = threading.Event()

    def report(node, what, now, total):
        if what == "sending" and now > 25_000_000 and not begun.is_set():
            begun.set()
            sshd.drop_sessions()

    broken = sync(nodes[:1], root, report=report)["gpu-a"]
    assert begun.is_set()
    assert isinstance(broken, ClusterError)
    assert broken.message.startswith("gpu-a")
    for path in there.glob("*.bin"):
        assert path.read_bytes() == (root / path.name).read_bytes()
    done = sync(nodes[:1], root)["gpu-a"]
    assert contents(there) == contents(root)
    assert done.bytes < 55_000_000
    assert done.files < 6


INTERRUPTED = """
import os, signal, sys, threading
from cluster.transport import files
from cluster.spec.model import Machine
begun = threading.Event()
def report(node, what, now, total):
    if what == "sending" and now > 10_000_000 and not begun.is_set():
        begun.set()
        os.kill(os.getpid(), signal.SIGINT)
node = Machine("gpu-a", "", login="h0", data_dir=sys.argv[1], ssh_config=sys.argv[2])
try:
    print(files.sync([node], sys.argv[3], copy=True, report=report), begun)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_ends_at_once_and_leaves_no_partial_file(nodes, tmp_path):
    root = tmp_path / "large"
    root.mkdir()
    for index in range(24):  # enough that the signal arrives before the last file
        (root / f"{index}.bin").write_bytes(os.urandom(10_000_000))
    done = interrupted(INTERRUPTED, nodes[0].data_dir, nodes[0].ssh_config, root, timeout_s=20)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")
    there = Path(nodes[0].mirror(str(root)))
    for path in there.glob("*.bin"):
        assert path.read_bytes() == (root / path.name).read_bytes()
    assert sync(nodes[:1], root)["gpu-a"].how == "rsync"
    assert contents(there) == contents(root)
    assert not list(there.rglob(".*"))


def test_results_are_fetched_without_excluded_files(nodes, folder, tmp_path):
    target = tmp_path / "results"
    done = files.collect(nodes[0], str(folder), str(target), exclude=["deep", "*.txt"])
    assert (done.how, done.files) == ("rsync", len(NAMES))
    expected = {name: what for name, what in contents(folder).items() if not name.startswith("deep/")}
    del expected["plain.txt"]
    assert contents(target) == expected
    assert files.collect(nodes[0], str(folder), str(target), exclude=["deep", "*.txt"]).how == "same"
    (folder / "run.sh").write_text("#!/bin/sh\nexit 3\n")
    assert files.collect(nodes[0], str(folder), str(target), exclude=["deep", "*.txt"]).files == 1
    assert (target / "run.sh").read_text() == "#!/bin/sh\nexit 3\n"
    with pytest.raises(ClusterError, match="gpu-a: /nowhere/x: no such folder"):
        files.collect(nodes[0], "/nowhere/x", str(target))


def test_a_large_result_and_many_small_ones_are_fetched(nodes, tmp_path):
    results = tmp_path / "node"
    results.mkdir()
    (results / "last.pt").write_bytes(os.urandom(30_000_000))
    for nth in range(3000):
        (results / f"{nth} with a name that fills the pipe.log").write_text(str(nth))
    assert files.collect(nodes[0], str(results), str(tmp_path / "here")).files == 3001
    assert contents(tmp_path / "here") == contents(results)


def test_results_of_this_machine_are_copied(folder, tmp_path):
    done = files.collect(Machine("here", "127.0.0.1"), str(folder), str(tmp_path / "results"))
    assert done.files == len(NAMES) + 2
    assert contents(tmp_path / "results") == contents(folder)


def test_a_checkpoint_is_sent_and_replaces_an_old_one(nodes, tmp_path):
    (tmp_path / "-last it's.pt").write_bytes(os.urandom(2_000_000))
    target = tmp_path / "node run" / "weights"
    target.mkdir(parents=True)
    (target / "-last it's.pt").write_bytes(b"old")
    files.send(nodes[0], tmp_path / "-last it's.pt", str(target))
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        "-last it's.pt": (tmp_path / "-last it's.pt").read_bytes()
    }


def clusterctl(*arguments):
    argv = [sys.executable, "-m", "cluster", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=100)


def test_the_command_prints_a_line_per_node_and_fails_while_files_differ(
    nodes, folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "cluster.yaml").write_text(
        f"device: cpu\nssh_config: {nodes[0].ssh_config}\nnodes:\n"
        + "".join(
            f'  {node.name}:\n    login: {node.login}\n    data_dir: "{node.data_dir}"\n' for node in nodes
        )
    )
    words = ["sync", folder, "--copy", "-i", tmp_path / "cluster.yaml"]
    done = clusterctl(*words)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        f"gpu-{letter}: {len(NAMES) + 2} files" for letter in "ab"
    ]
    assert " sent, " in lines[0]
    (Path(nodes[1].mirror(str(folder))) / "left over").write_text("x")
    done = clusterctl(*words, "--json")
    assert done.returncode == 3
    rows = {row["node"]: row for row in json.loads(done.stdout)}
    assert (rows["gpu-a"]["how"], rows["gpu-b"]["left"]["extra"]) == ("same", ["left over"])
    assert done.stderr == (
        f"error: gpu-b: {folder} differs: 1 file only there (left over)\n"
        f"hint: to delete the files that are only on the nodes: clusterctl sync '{folder}' --delete\n"
    )
    assert clusterctl(*words, "--delete").returncode == 0
    done = clusterctl("sync", folder, tmp_path / "nowhere", "-i", tmp_path / "cluster.yaml")
    said = f"error: this machine: {tmp_path}/nowhere: no such file or folder\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
