"""What is decided about folders, without a node."""

import os

import pytest

from cluster.errors import UsageError
from cluster.spec.model import Machine
from cluster.transport import files
from cluster.transport.files import Difference
from cluster.transport.openssh import Ssh
from cluster.transport.rsync import Rsync, at, reason


def test_a_mirror_is_below_the_data_dir_and_this_machine_needs_none():
    assert (
        Machine("a", "10.0.0.1", login="a", data_dir="/big/data").mirror("/home/me/coco")
        == "/big/data/home/me/coco"
    )
    assert Machine("here", "10.0.0.1", data_dir="/big/data").mirror("/home/me/coco") == "/home/me/coco"


def test_differences_are_counted_and_the_first_are_named():
    difference = Difference(("a", "b", "c", "d"), ("old",), ("e",))
    assert str(difference) == "4 files missing (a, b, c, ...), 1 different (e), 1 only there (old)"
    assert not Difference()
    harmless = "4 files different (a b, 'x\\x1b[2J\\n', ß, ...)"
    assert str(Difference(different=("a b", "x\x1b[2J\n", "ß", "d"))) == harmless


def test_links_that_lead_out_of_the_folder_are_named(tmp_path):
    root = tmp_path / "here"
    (root / "sub").mkdir(parents=True)
    targets = {
        "in": "sub/x",
        "sub/up": "../y",
        "out": "/data/x",
        "sub/away": "../../y",
        "self": root,
        "z": f"{root}by/x",
    }
    for name, target in targets.items():
        (root / name).symlink_to(target)
    assert files.links_leading_out(str(root)) == ("out -> /data/x", "sub/away -> ../../y", f"z -> {root}by/x")


@pytest.mark.parametrize(
    ("login", "host", "port"),
    [
        ("gpu-a", "gpu-a", None),
        ("ada@gpu-a:2222", "ada@gpu-a", "2222"),
        ("ada@fe80::1", "ada@[fe80::1]", None),
        ("ada@[fe80::1]:2222", "ada@[fe80::1]", "2222"),
    ],
)
def test_rsync_reaches_the_machine_that_the_shell_reaches(login, host, port):
    node = Machine("gpu-a", "10.0.0.1", login=login, ssh_config="/my config/it's")
    assert at(node) == f"{host}:"
    words = Ssh(node).remote_shell()
    for option in ("StrictHostKeyChecking=yes", "RemoteCommand=none", "RequestTTY=no"):
        assert f"-o {option} " in words
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
        ("tar: ./a: Cannot open: File exists\ntar: Exiting with failure status due to ...\n", "File exists"),
        ("bash: line 1: tar: command not found\n", "bash: line 1: tar: command not found"),
        (
            'bash: /greeting: No such file or directory\nrsync: [Receiver] mkdir "/a" failed: Not a directory (20)\n',
            "Not a directory",
        ),
        (
            "protocol version mismatch -- is your shell clean?\n(see the rsync manpage for an explanation)\n"
            "rsync error: protocol incompatibility (code 2) at compat.c(625) [sender=3.5.0]\n",
            "protocol version mismatch -- is your shell clean?",
        ),
        (
            "bash: warning: setlocale: LC_ALL: cannot change locale (de_DE)\n"
            "ada@gpu-a: Permission denied (publickey).\n"
            "rsync: connection unexpectedly closed (0 bytes received so far) [sender]\n"
            "rsync error: error in rsync protocol data stream (code 12) at io.c(285) [sender=3.5.0]\n",
            "ada@gpu-a: Permission denied (publickey).",
        ),
        ("", "no reason was printed"),
    ],
)
def test_the_reason_is_taken_from_what_programs_say(errors, said):
    assert reason(errors) == said


@pytest.mark.parametrize("folder", ["/", "nowhere", "bad\udce9"])
def test_what_cannot_be_synced_is_refused_before_any_node_is_asked(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad\udce9").mkdir()
    with pytest.raises(UsageError):
        files.sync([Machine("a", "10.0.0.1", login="nowhere.invalid", data_dir="/d")], folder)


#: The first run fails as two runs at once may, the next succeeds.
CONFLICT = """#!/bin/sh
[ ! -e "$0.ran" ] || exit 0
: > "$0.ran"
echo 'got a block match with no basis file for "/data/a" [Receiver]' >&2
exit 2
"""


def test_rsync_runs_again_after_a_conflict_with_another_run(tmp_path, monkeypatch):
    (tmp_path / "rsync").write_text(CONFLICT)
    (tmp_path / "rsync").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = Rsync(Machine("gpu-a", ""), ["--", "/data/", "/copy/"])
    run("gpu-a: /copy cannot be written", "this machine: /data cannot be read")
    assert run.code == 0
    assert (tmp_path / "rsync.ran").exists()
