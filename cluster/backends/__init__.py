"""Backends: where jobs run. A backend is one file or folder, and one line of the table below."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the help texts list the backends, and need none of them
    from cluster.backends.base import Backend

#: The class of each backend by its name, and where it runs jobs. `--backend here` is the first one on this machine that
#: works, and hints prefer the earlier ones.
_TABLE = {
    "compose": ("cluster.backends.compose:ComposeBackend", "containers on this machine"),
    "local": ("cluster.backends.hosts:LocalBackend", "processes on this machine"),
    "ssh": ("cluster.backends.hosts:SshBackend", "the machines of the inventory"),
    "slurm": ("cluster.backends.slurm:SlurmBackend", "a Slurm cluster"),
    "kubernetes": (
        "cluster.backends.kubernetes:KubernetesBackend",
        "the Kubernetes cluster of your kubeconfig",
    ),
}


class _Backends(Mapping[str, "Backend"]):
    """The backends by their names. Each is imported when it is needed: most commands need one."""

    def __init__(self) -> None:
        self._made: dict[str, Backend] = {}

    def __getitem__(self, name: str) -> Backend:
        if name not in self._made:
            module, _, of_class = _TABLE[name][0].partition(":")
            self._made[name] = getattr(importlib.import_module(module), of_class)()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_TABLE)

    def __len__(self) -> int:
        return len(_TABLE)

    def __contains__(self, name: object) -> bool:
        return name in _TABLE


BACKENDS: Mapping[str, Backend] = _Backends()
#: Where each backend runs jobs, by its name, for help texts.
SUMMARIES = {name: summary for name, (_, summary) in _TABLE.items()}
