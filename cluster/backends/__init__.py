"""Backends: where jobs run. A backend is one file or folder, and one line of the table below."""

import importlib
from collections.abc import Iterator, Mapping

from cluster.backends.base import Backend

__all__ = ["BACKENDS", "Backend"]

#: The class of each backend by its name. `--backend here` is the first one on this machine that works, and hints prefer
#: the earlier ones.
_CLASSES = {
    "compose": "cluster.backends.compose:ComposeBackend",
    "local": "cluster.backends.hosts:LocalBackend",
    "ssh": "cluster.backends.hosts:SshBackend",
    "slurm": "cluster.backends.slurm:SlurmBackend",
    "kubernetes": "cluster.backends.kubernetes:KubernetesBackend",
}


class _Backends(Mapping[str, Backend]):
    """The backends by their names. Each is imported when it is needed: most commands need one."""

    def __init__(self) -> None:
        self._made: dict[str, Backend] = {}

    def __getitem__(self, name: str) -> Backend:
        if name not in self._made:
            module, _, of_class = _CLASSES[name].partition(":")
            self._made[name] = getattr(importlib.import_module(module), of_class)()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)

    def __contains__(self, name: object) -> bool:
        return name in _CLASSES


BACKENDS: Mapping[str, Backend] = _Backends()
