"""A real sshd for tests, on loopback addresses, with its own keys and configuration."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from cluster.spec.model import Machine
from tests.conftest import wait_until

#: A program without torch, for jobs that run, fail or stop.
TICKS = Path(__file__).with_name("ticks.py")


class Sshd:
    """One server for any number of 127.x.y.z addresses; `config` is the ssh_config that reaches them.

    Its folder is the home folder of each login, because bash reads the user's `.bashrc` at every command.
    """

    def __init__(
        self,
        folder: Path,
        addresses: list[str],
        *,
        trusted: bool = True,
        startups: str = "10:30:100",
    ) -> None:
        self.folder = folder
        self.addresses = addresses
        self._variables = {"HOME": str(folder)}
        folder.mkdir(parents=True)
        folder.chmod(0o700)
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        shutil.copy(folder / "user.pub", folder / "authorized")
        # sshd listens on at most 16 addresses. With more, listen on all, and allow only logins from loopback.
        every = len(addresses) > 16
        with socket.socket() as probe:
            probe.bind(("0.0.0.0" if every else addresses[0], 0))
            self.port = probe.getsockname()[1]
        listen = ["0.0.0.0"] if every else addresses
        self.config = folder / "config"
        self.known_hosts = folder / "known_hosts"
        key = " ".join((folder / "host.pub").read_text().split()[:2])
        known = [f"[{address}]:{self.port} {key}\n" for address in addresses]
        self.known_hosts.write_text("".join(known) if trusted else "")
        hosts = [
            f"Host h{index}\n  HostName {address}\n  Port {self.port}\n"
            for index, address in enumerate(addresses)
        ]
        self.config.write_text(
            "".join(hosts) + f"Host h*\n  User {getpass.getuser()}\n  IdentityFile {folder / 'user'}\n"
            f"  IdentitiesOnly yes\n  UserKnownHostsFile {self.known_hosts}\n"
        )
        (folder / "sshd_config").write_text(
            "".join(f"ListenAddress {address}:{self.port}\n" for address in listen)
            + f"HostKey {folder / 'host'}\nAuthorizedKeysFile {folder / 'authorized'}\nPidFile {folder / 'pid'}\n"
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nAllowUsers *@127.0.0.0/8\n"
            # the post-quantum algorithms take 50 ms on each side
            "KexAlgorithms -sntrup761*,mlkem*\n"
            f"MaxStartups {startups}\nSetEnv HOME={folder}\n"
        )
        self.start()

    def start(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        server = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin")
        assert server, "these tests need an sshd: apt-get install openssh-server"
        subprocess.run([server, "-f", self.folder / "sshd_config", "-E", self.folder / "log"], check=True)
        pid = self.folder / "pid"
        listens = wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"))
        assert listens, (self.folder / "log").read_text()

    def stop(self) -> None:
        """Stop the server and its sessions."""
        pid = int((self.folder / "pid").read_text())
        self.drop_sessions()
        os.kill(pid, signal.SIGTERM)
        wait_until(
            lambda: not (self.folder / "pid").exists()
        )  # sshd removes the file after it closed its ports

    def node(self, number: int, name: str = "", **keys: str) -> Machine:
        """Return an address of the server as a node."""
        host = f"h{number}"
        return Machine(name or host, self.addresses[number], login=host, ssh_config=str(self.config), **keys)

    def prefer(self, *lines: str) -> None:
        """Put lines before all others of the ssh_config; ssh takes the first value of a keyword."""
        text = "".join(f"  {line}\n" for line in lines)
        self.config.write_text(f"Host *\n{text}{self.config.read_text()}")

    def serve(self, *lines: str) -> None:
        """Put lines before all others of the sshd_config, and restart the server."""
        config = self.folder / "sshd_config"
        config.write_text("".join(f"{line}\n" for line in lines) + config.read_text())
        self.stop()
        self.start()

    def bin(self) -> Path:
        """Return a folder that is first on the PATH of every later login."""
        folder = self.folder / "bin"
        if not folder.exists():
            folder.mkdir()
            self.set_env(PATH=f"{folder}:{os.environ['PATH']}")
        return folder

    def set_env(self, **variables: str) -> None:
        """Set variables of every later login."""
        self._variables |= variables
        config = self.folder / "sshd_config"
        others = [line for line in config.read_text().splitlines(True) if not line.startswith("SetEnv ")]
        pairs = " ".join(f"{name}={value}" for name, value in self._variables.items())
        config.write_text(f"SetEnv {pairs}\n{''.join(others)}")
        self.stop()
        self.start()

    def before_each_command(self, number: int, text: str) -> None:
        """Run bash code on one address before each command; `kill -9 $PPID` in it breaks the connection."""
        wrapper = self.folder / "wrapper"
        wrapper.write_text(f'#!/bin/bash\n{text}\nexec bash -c "$SSH_ORIGINAL_COMMAND"\n')
        wrapper.chmod(0o755)
        with (self.folder / "sshd_config").open("a") as file:
            file.write(f"Match LocalAddress {self.addresses[number]}\n  ForceCommand {wrapper}\n")
        self.stop()
        self.start()

    def drop_sessions(self) -> None:
        """Break every connection; the server keeps running."""
        pid = (self.folder / "pid").read_text().strip()
        subprocess.run(["pkill", "-KILL", "-P", pid], check=False)


def addresses(worker: int, count: int) -> list[str]:
    """Loopback addresses that no other worker of `pytest -n` uses."""
    return [f"127.0.{10 * worker + 1}.{last}" for last in range(1, count + 1)]


def inventory(folder: Path, server: Sshd, run_dir: Path, **keys: object) -> Path:
    """Write a cluster.yaml with the server's addresses as node-0, node-1, ..., without containers."""
    nodes = {
        f"node-{index}": {"login": f"h{index}", "address": address, "run_dir": str(run_dir), **keys}
        for index, address in enumerate(server.addresses)
    }
    nodes = {
        name: {"runtime": "none", "gpus": 0, "data_dir": f"{run_dir}/data", **node}
        for name, node in nodes.items()
    }
    (folder / ".clusterignore").write_text("/remote\n/records\n/sshd\n")
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump({"ssh_config": str(server.config), "device": "cpu", "nodes": nodes}))
    return file


#: A setting that paramiko does not know, and that changes nothing: the ssh program has to log in.
THROUGH_SSH = "IdentityAgent none"


@pytest.fixture
def sshd(tmp_path, worker):
    """A server on three addresses, each a node of the launcher: h0, h1 and h2, known to its own known_hosts file.

    Each worker of `pytest -n` has its own addresses.
    """
    server = Sshd(tmp_path / "sshd", addresses(worker, 3))
    yield server
    server.stop()
