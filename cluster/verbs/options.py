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
Partition = Annotated[
    str, typer.Option("--partition", "-p", metavar="NAME", help="Slurm: the partition.", show_default=False)
]
Account = Annotated[str, typer.Option("--account", metavar="NAME", help="Slurm: who pays.", show_default=False)]
Qos = Annotated[str, typer.Option("--qos", metavar="NAME", help="Slurm: the quality of service.", show_default=False)]
Time = Annotated[
    str,
    typer.Option(
        "--time", metavar="H:MM:SS", help="Slurm: the time limit; a checkpoint comes 90 s before.", show_default=False
    ),
]
Slurm = Annotated[
    list[str],
    typer.Option("--slurm", metavar="KEY=VALUE", help="Slurm: any other option of sbatch, as in mem=32G. Repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def for_sbatch(partition: str, account: str, qos: str, time: str, others: list[str]) -> tuple[str, ...]:
    """What is given of the options for Slurm, each as `name=value`."""
    named = {"partition": partition, "account": account, "qos": qos, "time": time}
    return (*(f"{name}={value}" for name, value in named.items() if value), *others)


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
