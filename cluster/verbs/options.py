"""The options that verbs share, and the machines that they choose together."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.errors import UsageError
from cluster.model import Inventory

InventoryFile = Annotated[
    str,
    typer.Option(
        "--inventory",
        "-i",
        metavar="FILE",
        help="The machines; by default cluster.yaml where there is one in this folder.",
        show_default=False,
    ),
]
Hosts = Annotated[
    str,
    typer.Option(
        "--hosts",
        metavar="A,B",
        help="The machines instead: [USER@]HOST[:PORT] or names from ~/.ssh/config.",
        show_default=False,
    ),
]
Hostfile = Annotated[
    str,
    typer.Option(
        "--hostfile",
        metavar="FILE",
        help="The machines instead: a hostfile as DeepSpeed and MPI have it (worker-1 slots=4).",
        show_default=False,
    ),
]
SshConfig = Annotated[
    str,
    typer.Option("--ssh-config", metavar="FILE", help="Read this instead of ~/.ssh/config.", show_default=False),
]
Only = Annotated[
    str,
    typer.Option(
        "--only", metavar="A,B", help="Only these nodes of the inventory, by name or label.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def chosen_inventory(
    inventory: str = "",
    hosts: str = "",
    hostfile: str = "",
    ssh_config: str = "",
    only: str = "",
    *,
    complete: bool = True,
) -> Inventory | None:
    """The machines that the options choose; None where there are none and no cluster.yaml: this machine is meant.

    With `complete` the machines are asked for what the texts leave open (as `init` does; nothing is written), and
    one that does not answer is an error.
    """
    from cluster import discovery

    found = discovery.load(inventory, hosts, hostfile, ssh_config, only)
    return discovery.complete(found) if found and complete else found


def needed_inventory(
    inventory: str = "",
    hosts: str = "",
    hostfile: str = "",
    ssh_config: str = "",
    only: str = "",
    *,
    complete: bool = True,
) -> Inventory:
    """As `chosen_inventory`, for verbs that make no sense without machines: raises UsageError where there are none."""
    found = chosen_inventory(inventory, hosts, hostfile, ssh_config, only, complete=complete)
    if found is None:
        raise UsageError("no machines: there is no cluster.yaml in this folder", "clusterctl init gpu-a gpu-b")
    return found
