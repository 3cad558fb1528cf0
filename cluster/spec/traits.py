"""Traits: what a backend declares about itself, so that no code outside of it has to ask for its name. Pure."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from cluster.errors import UsageError
from cluster.runtimes.base import Runtime
from cluster.spec.model import Device, Machine

#: The refusal of `--prologue` where the engine or the cluster starts the containers.
NO_NODE_SHELL = (
    "its lines run outside the containers, where this backend starts no shell; inside, use --setup and --env"
)


class Traits:
    """The declarations of a backend; each has a default, which most backends keep."""

    name: str
    #: Which machines run the nodes: this one, those that cluster.yaml lists, or those that a scheduler assigns.
    machines: Literal["here", "listed", "assigned"]
    #: With a scheduler: whether the jobs are submitted on a login node, the only node in cluster.yaml.
    has_login_node = False
    #: Whether the nodes run in containers; None: the runtime of their machine decides.
    in_containers: bool | None = None
    #: The options of `launch` that only some backends support, of those here that it supports.
    supports: frozenset[str] = frozenset()
    #: The settings that need no value: `--set exclusive`.
    flags: frozenset[str] = frozenset()
    #: Why it does not support an option, where that is not obvious.
    refusals: ClassVar[Mapping[str, str]] = {}
    #: The type of its section in cluster.yaml, as `module:name`, or "". It is imported when it is needed.
    section = ""
    #: The runtime of a machine in cluster.yaml that names none; "": the machine is asked.
    default_runtime = ""
    #: Whether `clusterctl init` can describe its cluster, of which cluster.yaml lists no machines: method `discover`.
    is_discoverable = False
    #: The module with its own checks for `clusterctl doctor`, or "" for the checks of machines that cluster.yaml lists.
    doctor = ""

    def fits(self, runtime: Runtime) -> bool:
        """Return whether its machines can use a runtime."""
        return True

    def login_node(self, image: str) -> Machine:
        """Return the node that reaches the scheduler if there is no cluster.yaml; `image` is the requested one."""
        raise NotImplementedError

    def settings(self, listed: Mapping[str, Any], given: Mapping[str, str]) -> Mapping[str, Any]:
        """Return its section of cluster.yaml with the settings of the command line. Raise UsageError for a bad one."""
        return {**listed, **given}

    def words_of(self, key: str) -> list[str]:
        """Return the path in its section that a key of --set names: `limits.cpu` is `cpu` in `limits`."""
        return key.split(".", 1)

    def folders(self, settings: Mapping[str, Any]) -> Sequence[str]:
        """Return the folders that its nodes have without the launcher: paths below them are left as they are."""
        return ()

    def advice(self, device: Device, procs_per_node: int, settings: Mapping[str, Any]) -> list[str]:
        """Return sentences on settings that a job of this kind usually needs and does not have."""
        return []

    def section_type(self) -> Any:
        """Return the type of its section in cluster.yaml, for pydantic."""
        module, _, name = self.section.partition(":")
        return getattr(importlib.import_module(module), name)

    def refuse(
        self, option: str, table: Mapping[str, "Traits"], given: str = "", instead: str = "omit it"
    ) -> None:
        """Raise UsageError if it does not support an option.

        `given` is what the user typed, such as `--nodes 2:4`, and `instead` is what to do about it.
        """
        if option in self.supports:
            return
        if why := self.refusals.get(option):
            raise UsageError(
                f"{given or option}: {why}", instead if (given or option).startswith("--") else ""
            )
        others = [f"--backend {other.name}" for other in table.values() if option in other.supports]
        hint = f"{instead}, or use a backend that supports it: {', '.join(others)}" if others else instead
        raise UsageError(f"{given or option} is not supported by the backend {self.name}", hint)


#: All backends by name, in the order in which `--backend here` and the hints prefer them.
Table = Mapping[str, Traits]


def on_this_machine(backend: str, table: Table) -> bool:
    """Return whether a value of --backend means this machine, with or without a cluster.yaml."""
    return backend == "here" or (backend in table and table[backend].machines == "here")
