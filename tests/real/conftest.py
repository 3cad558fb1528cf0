"""Fixtures of the testbed: three hosts on this machine with sshd, Docker Engine and Slurm, and their faults."""

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.spec.image import DEFAULT_IMAGE
from tests.conftest import ROOT

TESTBED = ROOT / "testbed"


def script(name, *arguments, env=None, timeout_s=280):
    """Run a script of the testbed and return its output; a failure fails the test."""
    done = subprocess.run(
        [TESTBED / name, *arguments], env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{name} {arguments}\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Host:
    """A host of the testbed, over SSH."""

    name: str
    address: str
    ssh_config: Path

    def ssh(self, command, user="root"):
        """Return the argv that runs a shell command on the host."""
        return ["ssh", "-F", str(self.ssh_config), "-o", "ConnectTimeout=10", f"{user}@{self.name}", command]

    def try_run(self, command, user="root", timeout_s=60):
        """Return the exit code and the output; 255 if the host does not answer."""
        done = subprocess.run(
            self.ssh(command, user), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def run(self, command, user="root", timeout_s=60):
        """Return the output; a failure fails the test."""
        code, text = self.try_run(command, user, timeout_s)
        assert code == 0, f"{self.name}: exit {code}: {command}\n{text}"
        return text.strip()

    def start(self, command, user="root"):
        """Start a command and return its process, whose output can be read."""
        return subprocess.Popen(
            self.ssh(command, user),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )


@dataclass(frozen=True)
class Testbed:
    """The three hosts, their ssh_config and their faults."""

    hosts: dict[str, Host]
    ssh_config: Path

    def __getitem__(self, name):
        return self.hosts[name]

    def fault(self, *arguments):
        """Run a command of testbed/fault.sh: `fault("freeze", "n1")`."""
        script("fault.sh", *arguments)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Add the logs of Slurm to the report of a failed test."""
    report = yield
    hosts = getattr(item, "funcargs", {}).get("testbed")
    if report.failed and hosts is not None:
        logs = "tail -n 40 /var/log/slurmctld.log; cd /shared/ada/clusterctl/runs && tail -n 5 */slurm.log */*/*.err"
        with contextlib.suppress(subprocess.TimeoutExpired):
            report.sections.append(("Slurm on n0", hosts["n0"].try_run(logs)[1][-6000:]))
    return report


@pytest.fixture(scope="session")
def testbed():
    """The three hosts, which are started and healed first, without the container image."""
    script("up.sh")
    script("fault.sh", "heal")
    # The variables of testbed/settings.sh, for a second testbed.
    config = Path(os.environ.get("TESTBED_STATE", TESTBED / ".state")) / "ssh_config"
    net = os.environ.get("TESTBED_NET", "172.30.0")
    return Testbed({f"n{i}": Host(f"n{i}", f"{net}.{10 + i}", config) for i in range(3)}, config)


@pytest.fixture(scope="session")
def image_on_hosts(testbed):
    """The name of the container image, which is copied to every host's engine first."""
    script("image.sh", DEFAULT_IMAGE)
    return DEFAULT_IMAGE


@pytest.fixture(autouse=True)
def healed(testbed):
    """Undo all faults after each test."""
    yield
    testbed.fault("heal")
