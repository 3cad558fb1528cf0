"""Folders brought to machines of their own, whose disks can be full."""

import os

import pytest

from cluster.errors import ClusterError
from cluster.spec.model import Machine
from cluster.transport import close_all, files

pytestmark = pytest.mark.real


@pytest.fixture
def nodes(testbed):
    users = {"n0": "root", "n1": "ada", "n2": "ada"}
    for name, user in users.items():
        testbed[name].run(f"install -d -o {user} '/data/sync test'")
    yield [
        Machine(
            name,
            f"172.30.0.1{name[1]}",
            login=f"{user}@{name}",
            data_dir="/data/sync test",
            ssh_config=str(testbed.ssh_config),
        )
        for name, user in users.items()
    ]
    close_all()
    for name in users:
        testbed[name].run("rm -rf '/data/sync test'")


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "set"
    (root / "images").mkdir(parents=True)
    for index in range(200):
        (root / "images" / f"it's {index}.jpg").write_bytes(os.urandom(20_000))
    return root


def test_three_machines_have_the_same_files_and_one_that_differs_is_named(testbed, nodes, folder):
    done = files.sync(nodes, str(folder))
    assert {name: (each.how, each.files) for name, each in done.items()} == dict.fromkeys(
        ("n0", "n1", "n2"), ("rsync", 200)
    )
    files.check(nodes, [str(folder)])
    there = nodes[1].mirror(str(folder))
    assert testbed["n1"].run(f'stat -c %U "{there}/images/it\'s 7.jpg"') == "ada"
    testbed["n2"].run(f'printf x >> "{there}/images/it\'s 7.jpg"')
    with pytest.raises(ClusterError) as differs:
        files.check(nodes, [str(folder)])
    assert differs.value.message == f"n2: {folder} differs: 1 file different (images/it's 7.jpg)"
    assert {name: each.files for name, each in files.sync(nodes, str(folder)).items()} == {
        "n0": 0,
        "n1": 0,
        "n2": 1,
    }
    files.check(nodes, [str(folder)])


def test_a_disk_that_fills_up_meanwhile_is_named_and_leaves_whole_files(testbed, nodes, folder):
    host = testbed["n0"]
    # Room for the bytes, but not for so many files.
    host.run("mount -t tmpfs -o size=100m,nr_inodes=60 none '/data/sync test'")
    try:
        failed = files.sync(nodes[:1], str(folder))["n0"]
        there = nodes[0].mirror(str(folder))
        assert failed.message == f"n0: {there} cannot be written: No space left on device"
        assert host.run(f"find '{there}' -type f ! -size 20000c") == ""
        host.run("mount -o remount,nr_inodes=1000 '/data/sync test'")
        assert files.sync(nodes[:1], str(folder))["n0"].how == "rsync"
        files.check(nodes[:1], [str(folder)])
    finally:
        host.run("umount '/data/sync test'")
