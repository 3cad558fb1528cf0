"""Backends: where jobs run. A backend is one file, and one line of `BACKENDS`."""

from cluster.backends.base import Backend
from cluster.backends.compose import ComposeBackend
from cluster.backends.hosts import HostsBackend
from cluster.backends.slurm import SlurmBackend

__all__ = ["BACKENDS", "SLURM", "Backend"]

#: The only backend with job arrays.
SLURM = SlurmBackend()
BACKENDS: dict[str, Backend] = {
    "local": HostsBackend("local"),
    "ssh": HostsBackend("ssh"),
    "compose": ComposeBackend(),
    "slurm": SLURM,
}
