"""`clusterctl init` against a real sshd. Only nvidia-smi and a broken docker are fakes."""

import json
import os
import socket
import subprocess
import threading

import pytest

from cluster.backends import BACKENDS
from cluster.errors import ClusterError
from cluster.spec import inventory, schema
from cluster.transport import close_all, discovery
from tests import nvidia_smi


@pytest.fixture(autouse=True)
def _connections():
    yield
    close_all()


def program(sshd, name, text):
    """Put a program first on the PATH of every later login."""
    (sshd.bin() / name).write_text(text)
    (sshd.bin() / name).chmod(0o755)


def machine(sshd, yaml):
    """The completed inventory of a cluster.yaml."""
    path = sshd.folder / "cluster.yaml"
    path.write_text(f"ssh_config: {sshd.config}\n{yaml}")
    return discovery.complete(discovery.load(BACKENDS, str(path)))


def test_init_writes_a_complete_file(sshd, clusterctl):
    text = clusterctl.expect(
        0, "init", "h0", "--ssh-config", str(sshd.config), "--run-dir", "~/it's here/runs"
    )
    file = clusterctl.folder / "cluster.yaml"
    made = schema.read(file.read_text(), "cluster.yaml", BACKENDS)
    assert inventory.is_complete(made)
    (node,) = made.machines
    assert (node.name, node.login, node.ssh_config) == ("h0", "h0", str(sshd.config))
    assert node.run_dir == f"{sshd.folder}/it's here/runs"
    own = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    assert f" {node.address}/" in own
    assert node.address not in ("172.17.0.1", "127.0.0.1")
    assert node.address in text
    assert f"# {os.uname().nodename}: " in file.read_text()
    assert not list(clusterctl.folder.glob(".*.tmp"))


def test_an_existing_file_is_overwritten_only_with_force(sshd, clusterctl):
    file = clusterctl.folder / "cluster.yaml"
    file.write_text("mine")
    arguments = ("init", "h0", "--ssh-config", str(sshd.config))
    code, text = clusterctl.run(*arguments)
    assert (code, file.read_text()) == (2, "mine")
    assert "overwrite this one: --force" in text
    os.mkfifo(clusterctl.folder / "fifo")  # as /dev/null, which the file would replace
    clusterctl.expect(
        2, *arguments, "--force", "-o", "fifo", has="-o fifo: expected a file, but this is not a regular file"
    )
    text = clusterctl.expect(0, *arguments, "--force", "--json")
    (found,) = json.loads(text)["nodes"]
    assert found["machine"]["address"] in file.read_text()
    assert found["free_gb"] > 0
    clusterctl.expect(2, *arguments, "-o", "no/folder/x.yaml", has="no/folder/x.yaml: No such file")


def test_one_machine_under_three_names_is_refused_and_nothing_is_written(sshd, clusterctl):
    text = clusterctl.expect(3, "init", "h0", "h1", "h2", "--ssh-config", str(sshd.config))
    assert "h1: it has the same address as h0" in text
    assert not (clusterctl.folder / "cluster.yaml").exists()


def test_every_failing_machine_is_named_with_a_hint_and_nothing_is_written(sshd, clusterctl):
    sshd.known_hosts.write_text("".join(sshd.known_hosts.read_text().splitlines(keepends=True)[:1]))
    text = clusterctl.expect(
        5, "init", "h0", "h1", "nowhere.invalid", "--ssh-config", str(sshd.config), has="h1 ("
    )
    assert f"ssh -o StrictHostKeyChecking=ask -F {sshd.config} h1" in text
    assert ": the host name nowhere.invalid does not resolve" in text
    assert "h0 (" not in text
    assert not (clusterctl.folder / "cluster.yaml").exists()


def test_a_port_without_an_sshd_is_one_error_without_a_traceback(clusterctl):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        code, text = clusterctl.run("init", f"127.0.0.1:{server.getsockname()[1]}")
    assert (code, "Traceback" in text, "error: 127.0.0.1 (" in text) == (5, False, True), text


@pytest.mark.parametrize("text", ["garbage", "Host h0\n  Port abc\n", "Match wrong\n  Port 22\n"])
def test_an_ssh_config_that_cannot_be_read_is_named(clusterctl, text):
    (clusterctl.folder / "my config").write_text(text)
    code, said = clusterctl.run("init", "h0", "--ssh-config", "my config")
    assert (code, "Traceback" in said) == (5, False), said
    assert "error: h0: ssh configuration: " in said
    assert f"{clusterctl.folder}/my config" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no machines given"),
        (("a", "a"), "a occurs twice"),
        (("a;reboot",), "'a;reboot' is not a login"),
        (("a", "--hostfile", "x"), "cannot be used together"),
        (("--hostfile", "nowhere"), "--hostfile nowhere: No such file"),
        (("a", "--ssh-config", "nowhere"), "--ssh-config"),
        (("a", "--device", "tpu"), "--device tpu: unknown"),
        (("a", "--runtime", "lxc"), "--runtime lxc: unknown"),
        (("a", "--run-dir", "runs"), "--run-dir 'runs': not an absolute path"),
    ],
)
def test_an_invalid_option_is_an_error_before_a_connection(clusterctl, arguments, message):
    clusterctl.expect(2, "init", *arguments, has=message)


def test_without_any_gpu_the_device_is_cpu_with_a_note_and_cuda_is_an_error(sshd, clusterctl):
    nvidia_smi.install(sshd.bin(), [])
    arguments = ("init", "h0", "--ssh-config", str(sshd.config))
    clusterctl.expect(0, *arguments, has="no GPU on any node: device is cpu")
    assert "device: cpu" in (clusterctl.folder / "cluster.yaml").read_text()
    clusterctl.expect(3, *arguments, "-o", "other.yaml", "--device", "cuda", has="no GPU on h0")
    assert not (clusterctl.folder / "other.yaml").exists()


def test_gpus_are_counted_and_a_failing_driver_is_an_error_with_its_message(sshd, clusterctl):
    nvidia_smi.install(
        sshd.bin(), [nvidia_smi.Gpu("GPU-0", slices=("MIG-0-a", "MIG-0-b")), *nvidia_smi.gpus(1)]
    )
    arguments = ("init", "--ssh-config", str(sshd.config), "h0")
    clusterctl.expect(0, *arguments)
    file = (clusterctl.folder / "cluster.yaml").read_text()
    assert ": 2 x NVIDIA H200 MIG 1g.18gb, 1 x NVIDIA H200, " in file
    made = schema.read(file, "cluster.yaml", BACKENDS)
    assert (made.device, made.machines[0].gpus) == ("cuda", ("MIG-0-a", "MIG-0-b", 1))
    nvidia_smi.install(sshd.bin(), [], broken=nvidia_smi.BROKEN)
    clusterctl.expect(3, *arguments, "-o", "x.yaml", has=f"h0: nvidia-smi fails: {nvidia_smi.BROKEN}")


def test_missing_values_of_cluster_yaml_are_found_and_given_ones_are_kept(sshd):
    first, second = sshd.addresses[:2]
    nvidia_smi.install(sshd.bin(), nvidia_smi.gpus(2))
    made = machine(
        sshd,
        "defaults: {runtime: none, data_dir: /var/tmp/data}\n"
        f"nodes:\n  h0: {{address: {first}, gpus: [1]}}\n  h1: {{address: {second}, run_dir: ~/r}}\n",
    )
    assert [node.address for node in made.machines] == [first, second]
    assert [node.gpus for node in made.machines] == [(1,), (0, 1)]
    home = sshd.folder
    assert [node.run_dir for node in made.machines] == [f"{home}/clusterctl/runs", f"{home}/r"]
    assert {(node.runtime, node.data_dir) for node in made.machines} == {("none", "/var/tmp/data")}


def test_the_output_of_a_login_script_is_ignored(sshd):
    program(sshd, "bash", "#!/bin/sh\necho 'Welcome to h0!'\nprintf 'a\\0b\\0'\nexec /bin/bash \"$@\"\n")
    made = machine(sshd, f"device: cpu\nnodes: {{h0: {{address: {sshd.addresses[0]}, runtime: none}}}}")
    assert made.machines[0].run_dir.endswith("/clusterctl/runs")


def test_docker_on_some_nodes_only_and_without_permission_are_errors(sshd):
    first, second = sshd.addresses[:2]
    program(
        sshd,
        "docker",
        "#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2; echo 'engine_version='; exit 1\n",
    )
    with pytest.raises(ClusterError, match=r"h1: docker does not answer \(Cannot connect") as caught:
        machine(
            sshd,
            f"device: cpu\nnodes:\n  h0: {{address: {first}, runtime: docker}}\n  h1: {{address: {second}}}\n",
        )
    assert "--runtime none for all" in caught.value.hint
    program(
        sshd,
        "docker",
        "#!/bin/sh\necho 'engine_version='\necho 'permission denied while trying to connect to the Docker daemon "
        "socket at unix:///var/run/docker.sock: connect: permission denied' >&2; exit 1\n",
    )
    with pytest.raises(ClusterError, match=r"h0: .* has no permission to use Docker") as caught:
        machine(sshd, f"device: cpu\nnodes: {{h0: {{address: {first}}}}}")
    assert "sudo usermod -aG docker" in caught.value.hint
