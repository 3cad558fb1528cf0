"""Backends: where jobs run. A backend is one file or folder, and one line of `BACKENDS`."""

from cluster.backends.base import Backend
from cluster.backends.compose import ComposeBackend
from cluster.backends.hosts import LocalBackend, SshBackend
from cluster.backends.kubernetes import KubernetesBackend
from cluster.backends.slurm import SlurmBackend

__all__ = ["BACKENDS", "Backend"]

#: By name. `--backend here` is the first one on this machine that works, and hints prefer the earlier ones.
BACKENDS: dict[str, Backend] = {
    each.name: each for each in (ComposeBackend(), LocalBackend(), SshBackend(), SlurmBackend(), KubernetesBackend())
}
