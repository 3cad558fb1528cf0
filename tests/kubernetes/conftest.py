"""Fixtures of the Kubernetes cluster on the testbed's hosts: its users, kubectl, and its faults."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.spec.image import DEFAULT_IMAGE
from tests.conftest import wait_until
from tests.real.conftest import TESTBED, script

NAME = os.environ.get("TESTBED_NAME", "clusterctl-testbed")  # as in testbed/settings.sh
OURS = "app.kubernetes.io/managed-by=clusterctl"
KINDS = "pods,services,configmaps,secrets,persistentvolumeclaims,jobs"


@dataclass(frozen=True)
class Kubectl:
    """kubectl on the testbed's cluster. `folder` has the program, and a kubeconfig per user."""

    folder: Path

    def kubeconfig(self, user="admin"):
        return self.folder / f"{user}.kubeconfig"

    def argv(self, *arguments, user="admin"):
        config = f"--kubeconfig={self.kubeconfig(user)}"
        return [self.folder / "kubectl", config, f"--cache-dir={self.folder / 'cache'}", *arguments]

    def attempt(self, *arguments, user="admin", text="", timeout_s=60):
        """Return the exit code and the output. `text` is the standard input."""
        argv = self.argv(*arguments, user=user)
        done = subprocess.run(
            argv, input=text, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def __call__(self, *arguments, user="admin", text="", timeout_s=60):
        """Return the output. A failure fails the test."""
        code, output = self.attempt(*arguments, user=user, text=text, timeout_s=timeout_s)
        assert code == 0, f"kubectl {arguments} as {user}: exit {code}\n{output}"
        return output.strip()


@pytest.fixture(scope="session")
def kubectl():
    """kubectl on a cluster that was started and healed first; the container image is on its nodes."""
    script("up.sh")
    script("image.sh", DEFAULT_IMAGE)
    script("kubernetes/up.sh")
    script("kubernetes/fault.sh", "heal")
    # The variable of testbed/settings.sh, for a second testbed.
    return Kubectl(Path(os.environ.get("TESTBED_STATE", TESTBED / ".state")) / "kubernetes")


@pytest.fixture(scope="session")
def kubeconfig(kubectl):
    """The admin's kubeconfig."""
    return kubectl.kubeconfig()


@pytest.fixture(scope="session")
def ada(kubectl):
    """The kubeconfig of ada, who may start runs in the namespace ada, and nothing else."""
    return kubectl.kubeconfig("ada")


@pytest.fixture(scope="session")
def bob(kubectl):
    """The kubeconfig of bob, who may start runs in the namespace bob, and nothing else."""
    return kubectl.kubeconfig("bob")


@pytest.fixture
def fault(kubectl):
    """Run a command of testbed/kubernetes/fault.sh: `fault("kubelet-kill", "n1")`. Undone after the test."""
    yield lambda *arguments: script("kubernetes/fault.sh", *arguments)
    script("kubernetes/fault.sh", "heal")


@pytest.fixture(autouse=True)
def nothing_left(kubectl):
    """After each test, no object of the launcher may be left in any namespace."""
    yield
    find = ("get", KINDS, "--all-namespaces", "--selector", OURS, "--output", "name")
    wait_until(lambda: not kubectl(*find), timeout_s=30)
    if left := kubectl(*find):
        force = ("--grace-period=0", "--force")
        for namespace in kubectl(
            "get", "namespaces", "--output", "jsonpath={.items[*].metadata.name}"
        ).split():
            kubectl("delete", KINDS, "--namespace", namespace, "--selector", OURS, *force)
    assert not left
