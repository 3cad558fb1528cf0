"""`clusterctl init` on three hosts, each with a docker0 of its own that has the same address everywhere."""

import pytest

from cluster.backends import BACKENDS
from cluster.spec import schema

pytestmark = pytest.mark.real


@pytest.mark.parametrize("user", ["root", "ada"])
def test_the_address_is_the_one_of_the_common_network_and_the_engine_is_found(testbed, clusterctl, user):
    hosts = [f"{user}@{name}" for name in testbed.hosts]
    code, text = clusterctl.run("init", *hosts, "--ssh-config", str(testbed.ssh_config))
    assert code == 0, text
    file = (clusterctl.folder / "cluster.yaml").read_text()
    made = schema.read(file, "cluster.yaml", BACKENDS)
    assert [node.address for node in made.machines] == [host.address for host in testbed.hosts.values()]
    assert {node.runtime for node in made.machines} == {"docker"}
    assert {node.run_dir for node in made.machines} == {
        testbed["n0"].run("echo $HOME", user) + "/clusterctl/runs"
    }
    assert made.device == "cpu"
    for host in testbed.hosts.values():
        assert "docker0" in host.run("ip -o addr show docker0")


def test_a_host_that_is_cut_off_is_named_and_nothing_is_written(testbed, clusterctl):
    testbed.fault("freeze", "n2")
    code, text = clusterctl.run("init", *testbed.hosts, "--ssh-config", str(testbed.ssh_config))
    assert (code, f"n2 (root@{testbed['n2'].address}:22): cannot be reached" in text) == (5, True), text
    assert not (clusterctl.folder / "cluster.yaml").exists()


def test_an_engine_that_the_user_may_not_use_is_an_error_with_the_group_to_join(testbed, clusterctl):
    arguments = ("init", "ada@n0", "ada@n1", "--ssh-config", str(testbed.ssh_config))
    testbed["n1"].run("gpasswd -d ada docker")
    try:
        code, text = clusterctl.run(*arguments)
    finally:
        testbed["n1"].run("gpasswd -a ada docker")
    assert (code, "n1: ada has no permission to use Docker" in text) == (3, True), text
    assert "sudo usermod -aG docker ada" in text
    assert "n0:" not in text
    code, text = clusterctl.run(*arguments)
    assert code == 0, text
