"""What is decided about folders, without a node."""

import os
import time

import pytest

from cluster import files, manifest
from cluster.errors import UsageError
from cluster.manifest import Difference, Entry, Stamp
from cluster.model import Node
from cluster.shells.openssh import destination, remote_shell
from cluster.transfer import why


def entries(**sizes):
    return {name: Entry("f", size, f"{size:064d}") for name, size in sizes.items()}


def read(root, cache, **options):
    return manifest.read_here(root, manifest.listing_here(root), cache, **options)


def test_a_mirror_is_below_the_data_dir_and_this_machine_needs_none():
    assert (
        files.mirror(Node("a", "10.0.0.1", login="a", data_dir="/big/data"), "/home/me/coco")
        == "/big/data/home/me/coco"
    )
    assert files.mirror(Node("here", "10.0.0.1", data_dir="/big/data"), "/home/me/coco") == "/home/me/coco"


def test_differences_are_counted_and_the_first_are_named():
    here, there = entries(a=1, b=2, c=3, d=4, e=5, same=6), entries(e=7, old=1, same=6)
    difference = manifest.compare(here, there)
    assert difference == Difference(("a", "b", "c", "d"), ("old",), ("e",))
    assert str(difference) == "4 files missing (a, b, c, ...), 1 different (e), 1 only there (old)"
    assert not manifest.compare(here, dict(reversed(here.items())))


def test_equal_manifests_have_one_digest_and_others_have_another():
    here = {"a": Entry("f", 1, "x"), "b": Entry("f", 2, "y")}
    assert manifest.digest(here) == manifest.digest(dict(reversed(here.items())))
    for other in (
        {"a": Entry("x", 1, "x"), "b": Entry("f", 2, "y")},
        {"a": Entry("f", 1, "y"), "b": Entry("f", 2, "x")},
        {"a": Entry("f", 1, "x")},
        {"a": Entry("f", 1, "x"), "c": Entry("f", 2, "y")},
    ):
        assert manifest.digest(other) != manifest.digest(here)


def test_room_is_needed_for_what_is_new_and_for_the_largest_change_beside_its_old_self():
    here, there = entries(new=100, grown=50, shrunk=30), entries(grown=20, shrunk=90, extra=1000)
    assert manifest.space_needed(manifest.compare(here, there), here, there) == 100 + 30 + 50
    assert manifest.space_needed(Difference(), here, here) == 0


@pytest.mark.parametrize(
    ("here", "there", "blocking"),
    [
        ({"a/b": 1}, {"a": 1}, ("a",)),
        ({"a": 1}, {"a/b/c": 1}, ("a/b/c",)),
        ({"a/b": 1}, {"ab": 1, "a/c": 1}, ()),
    ],
)
def test_a_file_where_a_folder_must_be_is_in_the_way(here, there, blocking):
    assert manifest.in_the_way(manifest.compare(entries(**here), entries(**there))) == blocking


def test_links_that_lead_out_of_the_folder_are_named():
    targets = {
        "in": "sub/x",
        "sub/up": "../y",
        "out": "/data/x",
        "sub/away": "../../y",
        "self": "/here",
        "z": "/hereby/x",
    }
    listing = {name: Stamp("l", len(target), 0, 0, target) for name, target in targets.items()}
    assert manifest.leading_out(listing, "/here") == ("out -> /data/x", "sub/away -> ../../y", "z -> /hereby/x")


@pytest.mark.parametrize(
    ("name", "is_excluded"),
    [("weights/last.pt", False), ("ranks/0.log", True), ("a/ranks/0.log", True), ("a/x.tmp", True), ("franks", False)],
)
def test_what_is_excluded_matches_a_path_or_a_name_in_it(name, is_excluded):
    assert manifest.excluded(name, ["ranks", "*.tmp"]) is is_excluded


def test_names_cannot_disturb_a_terminal():
    assert manifest.first_names(["a b", "x\x1b[2J\n", "ß", "d"]) == "a b, 'x\\x1b[2J\\n', ß, ..."


def test_a_folder_is_read_once_until_it_changes(tmp_path):
    root, cache = tmp_path / "root", tmp_path / "cache"
    root.mkdir()
    for name in ("kept", "changed"):
        (root / name).write_text("old")
        os.utime(root / name, (1e9, 1e9))
    counted = []
    first = read(root, cache, read=counted.append)
    assert sum(counted) == 6
    counted.clear()
    assert read(root, cache, read=counted.append) == first
    assert counted == []
    (root / "changed").write_text("new")
    assert read(root, cache, read=counted.append) != first
    assert sum(counted) == 3


def test_a_file_that_was_written_a_moment_ago_is_read_again(tmp_path):
    (tmp_path / "root").mkdir()
    file = tmp_path / "root" / "x"
    file.write_text("one")
    seen = file.stat()
    first = read(tmp_path / "root", tmp_path / "cache")
    file.write_text("two")
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert read(tmp_path / "root", tmp_path / "cache") != first


def test_fresh_reads_what_is_remembered_and_a_damaged_memory_is_none(tmp_path):
    (tmp_path / "root").mkdir()
    file, cache = tmp_path / "root" / "x", tmp_path / "cache"
    file.write_text("one")
    os.utime(file, (1e9, 1e9))
    first = read(tmp_path / "root", cache)
    file.write_text("two")
    os.utime(file, (1e9, 1e9))
    assert read(tmp_path / "root", cache) == first
    assert read(tmp_path / "root", cache, fresh=True) != first
    cache.write_bytes(b"\0damaged")
    assert read(tmp_path / "root", cache) != first


def test_caches_of_programs_and_what_is_no_file_are_not_content(tmp_path):
    for folder in (".trainer-cache", "sub/__pycache__"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x").write_text("")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / ".clusterctl-mark").write_text("")
    (tmp_path / "sub" / "y").write_text("")
    (tmp_path / "folder link").symlink_to("sub")
    assert set(manifest.listing_here(tmp_path)) == {"sub/y", "folder link"}


def test_what_is_remembered_survives_any_name():
    names = ["one\ntwo", "tab\there", os.fsdecode(b"latin-\xe9"), "-n"]
    known = {name: (Stamp("x", 1, time.time_ns(), 3), "0" * 64) for name in names}
    assert manifest.unpack(manifest.pack(known)) == known
    assert manifest.unpack(manifest.pack({})) == {}


def test_what_find_and_sha256sum_print_is_read_whatever_the_names():
    raw = b"f\t644\t3\t1700000000.1234567890\t7\t./one\ntwo\tthree\0\0l\t777\t1\t5.0000000000\t8\t./-l\0/to\nx\0"
    raw += b"f\t755\t0\t1.5000000000\t9\t./run\0\0"
    assert manifest.parse_listing(raw) == {
        "one\ntwo\tthree": Stamp("f", 3, 1700000000123456789, 7),
        "-l": Stamp("l", 1, 5000000000, 8, "/to\nx"),
        "run": Stamp("x", 0, 1500000000, 9),
    }
    assert manifest.parse_listing(b"") == {}
    assert manifest.parse_sums(b"a" * 64 + b"  ./one\ntwo\0" + b"b" * 64 + b"  ./-n\0") == {
        "one\ntwo": "a" * 64,
        "-n": "b" * 64,
    }


@pytest.mark.parametrize(
    ("login", "host", "port"),
    [
        ("gpu-a", "gpu-a", None),
        ("ada@gpu-a:2222", "ada@gpu-a", "2222"),
        ("ada@fe80::1", "ada@[fe80::1]", None),
    ],
)
def test_rsync_reaches_the_machine_that_the_shell_reaches(login, host, port):
    node = Node("gpu-a", "10.0.0.1", login=login, ssh_config="/my config/it's")
    assert destination(node) == host
    words = remote_shell(node)
    assert "StrictHostKeyChecking=yes" in words
    assert """-F '/my config/it'"'"'s'""" in words
    assert (f"-p {port}" in words) is bool(port)


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        (
            'rsync: [receiver] write failed on "/x/y": No space left on device (28)\n'
            "rsync error: error in file IO (code 11) at receiver.c(381) [receiver=3.2.7]\n",
            "No space left on device",
        ),
        ("mkdir: cannot create directory ‘/x’: Permission denied\n", "Permission denied"),
        (
            "tar: ./a: Cannot open: File exists\ntar: Exiting with failure status due to previous errors\n",
            "File exists",
        ),
        ("bash: line 1: tar: command not found\n", "bash: line 1: tar: command not found"),
        ("", "it ended without a word"),
    ],
)
def test_the_reason_is_taken_from_what_programs_say(errors, said):
    assert why(errors) == said


@pytest.mark.parametrize("folder", ["/", "nowhere", "bad\udce9"])
def test_what_cannot_be_synced_is_refused_before_any_node_is_asked(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad\udce9").mkdir()
    with pytest.raises(UsageError):
        files.sync([Node("a", "10.0.0.1", login="nowhere.invalid", data_dir="/d")], folder)
