"""Backends: where jobs run. A backend is one file, and one line of `BACKENDS`."""

from __future__ import annotations

from cluster.backends.base import Backend
from cluster.backends.compose import ComposeBackend
from cluster.backends.hosts import HostsBackend
from cluster.backends.slurm import SlurmBackend
from cluster.transport import reach
from cluster.transport.local import LocalShell

__all__ = ["BACKENDS", "SLURM", "Backend"]

#: The only backend with job arrays.
SLURM = SlurmBackend(reach)
BACKENDS: dict[str, Backend] = {
    "local": HostsBackend("local", reach),
    "ssh": HostsBackend("ssh", reach),
    "compose": ComposeBackend(LocalShell()),
    "slurm": SLURM,
}
