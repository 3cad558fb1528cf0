"""The options of the verbs, and the machines that they choose together."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.config import DEFAULT_IMAGE
from cluster.errors import UsageError
from cluster.model import Inventory


def _job_names(incomplete: str) -> list[str]:
    """Completion: the jobs that are remembered."""
    from cluster.records import Records

    return [name for record in Records() if (name := record.plan.job_id).startswith(incomplete)]


JobName = Annotated[str, typer.Argument(metavar="JOB", help="As `clusterctl ps` shows it.", autocompletion=_job_names)]
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
    typer.Option("--slurm", metavar="KEY=VALUE", help="Slurm: another option of sbatch, as in mem=32G. Repeatable."),
]
Nodes = Annotated[
    str,
    typer.Option(
        "--nodes",
        "-n",
        help="How many nodes; 2:4 takes four and goes on with as few as two (machines of an inventory). By default "
        "one, or the whole inventory.",
        show_default=False,
    ),
]
Gpus = Annotated[int, typer.Option("--gpus", "-g", help="Processes per node, one per GPU.", show_default=True)]
BackendName = Annotated[
    str,
    typer.Option(
        "--backend",
        "-b",
        help="[b]ssh[/b]: the machines of the inventory; [b]slurm[/b]: a cluster with a queue; [b]compose[/b]: "
        "containers on this machine; [b]local[/b]: process groups on it; [b]here[/b]: compose where an engine answers, "
        "else local; [b]auto[/b]: what the inventory says, else here.",
    ),
]
Name = Annotated[
    str, typer.Option("--name", help="The job's name; by default derived from the job.", show_default=False)
]
DeviceName = Annotated[
    str,
    typer.Option(
        "--device",
        help="[b]auto[/b]: what cluster.yaml says (cuda unless it says another); on this machine GPUs if there are "
        "enough, else CPU processes, and says so; [b]cuda[/b]: GPUs or an error; [b]cpu[/b]; [b]any[/b]: leave it to "
        "the program.",
    ),
]
Image = Annotated[
    str,
    typer.Option(
        "--image", help=f"The container image; by default the inventory's, else {DEFAULT_IMAGE}.", show_default=False
    ),
]
Build = Annotated[
    str, typer.Option("--build", help="A folder that `docker compose` builds the image from.", show_default=False)
]
User = Annotated[str, typer.Option("--user", help="UID:GID in the containers; by default yours.", show_default=False)]
RunRoot = Annotated[
    str, typer.Option("--run-dir", help="One folder per job is made here; by default ./runs.", show_default=False)
]
Command = Annotated[
    str,
    typer.Option(
        "--command", help="Run this torchrun program instead of our trainer: 'train.py --lr 0.1'.", show_default=False
    ),
]
Env = Annotated[
    list[str],
    typer.Option(
        "--env",
        "-e",
        help="NAME=VALUE for the program; NAME alone is a secret: its value comes from your environment and stands on "
        "no command line, in no plan, record or log. Repeatable.",
    ),
]
EnvFile = Annotated[
    str, typer.Option("--env-file", help="A file of NAME=VALUE lines, all of them secrets.", show_default=False)
]
Python = Annotated[
    str,
    typer.Option(
        "--python",
        help="The interpreter that has torch: the machines' own, or in containers on them the image's.",
        show_default=False,
    ),
]
Spares = Annotated[int, typer.Option("--spares", help="Nodes of the inventory to keep for those that are lost.")]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        "--max-restarts",
        help="Starts after a failure, each from the newest checkpoint; by default 3, with --command 0.",
        show_default=False,
    ),
]
StallTimeout = Annotated[
    float, typer.Option("--stall-timeout", help="Seconds without a step that count as a failure; 0: never.")
]
Mounts = Annotated[
    list[str],
    typer.Option(
        "--mount",
        "-v",
        help="SOURCE[:TARGET[:rw]] for the containers; repeatable. Paths in the arguments are mounted by themselves.",
    ),
]
Port = Annotated[str, typer.Option("--master-port", help="A port, or auto.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds until all nodes must have met.")]
Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="[-- TRAINER ARGUMENTS]",
        help="For the trainer: -- train --data coco.yaml --epochs 30",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def for_sbatch(partition: str, account: str, qos: str, time: str, others: list[str]) -> tuple[str, ...]:
    """What is given of the options for Slurm, each as `name=value`."""
    named = {"partition": partition, "account": account, "qos": qos, "time": time}
    return (*(f"{name}={value}" for name, value in named.items() if value), *others)


def every_log(logs: str) -> bool:
    """Whether `--logs` asks for every node's log and not the master's alone; raises UsageError for another word."""
    if logs not in ("master", "all"):
        raise UsageError(f"--logs {logs!r}", "one of: master, all")
    return logs == "all"


def chosen_inventory(
    inventory: str = "",
    hosts: str = "",
    hostfile: str = "",
    ssh_config: str = "",
    only: str = "",
    *,
    complete: bool = True,
    backend: str = "auto",
) -> Inventory | None:
    """The machines that the options choose; None where there are none and no cluster.yaml: this machine is meant.

    With `complete` the machines are asked for what the texts leave open (as `init` does; nothing is written), and
    one that does not answer is an error.
    """
    from cluster import discovery

    found = discovery.load(inventory, hosts, hostfile, ssh_config, only, backend=backend)
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
