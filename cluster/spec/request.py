"""The request for a job: what `launch` and `plan` take as options, and the Python interface as keywords. Pure."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

import typer

#: typer's, for a default that means "not given". The help text does not show it.
option = functools.partial(typer.Option, show_default=False)
argument = functools.partial(typer.Argument, show_default=False)


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Options that are passed to the backend."""

    partition: Annotated[str, option("--partition", "-p", metavar="NAME", help="Slurm: the partition.")] = ""
    account: Annotated[str, option(metavar="NAME", help="Slurm: the account.")] = ""
    qos: Annotated[str, option(metavar="NAME", help="Slurm: the quality of service.")] = ""
    time_limit: Annotated[
        str, option("--time", metavar="H:MM:SS", help="Slurm: the time limit; a checkpoint is written --grace before.")
    ] = ""
    settings: Annotated[
        list[str],
        option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of the backend, as in its section of cluster.yaml: mem=32G or any other option of sbatch "
            "(Slurm), namespace=vision (Kubernetes). Repeatable.",
        ),
    ] = field(default_factory=list)

    def given_settings(self, backend: str, table: Iterable[str], *, unnamed: bool = True) -> dict[str, str]:
        """Return the settings of a backend by their keys, as typed. `table` has the names of all backends.

        A setting of another backend, such as `slurm.mem=32G`, is left out: a job file may have a section for each.
        Without `unnamed`, so is one that names no backend.
        """
        named = {"partition": self.partition, "account": self.account, "qos": self.qos, "time": self.time_limit}
        found = {key: value for key, value in named.items() if value and unnamed}
        for text in self.settings:
            key, _, value = text.removeprefix("--").partition("=")
            name, dot, rest = key.partition(".")
            is_named = bool(dot) and name in table
            if name == backend if is_named else unnamed:
                found[rest if is_named else key] = value
        return found


@dataclass(frozen=True, kw_only=True)
class Request(BackendOptions):
    """The options of `launch` and `plan` that describe a job, as typed."""

    arguments: Annotated[
        list[str],
        argument(
            metavar="[JOB.yaml] [-- TRAINER ARGUMENTS]",
            help="A job file, whose keys are these options. For the trainer: -- train --data coco.yaml --epochs 30",
        ),
    ] = field(default_factory=list)
    nodes: Annotated[
        str,
        option(
            "--nodes",
            "-n",
            help="The number of nodes; with 2:4 the job starts on four machines and continues with as few "
            "as two. By default one, or the whole inventory.",
        ),
    ] = ""
    gpus: Annotated[int, typer.Option("--gpus", "-g", help="Processes per node, one per GPU.")] = 1
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            "-b",
            help="ssh: the machines of the inventory; slurm: a Slurm cluster; compose: containers on this machine; "
            "local: process groups on this machine; here: compose if a Docker Engine answers, else local; "
            "auto: the inventory's backend, else here.",
        ),
    ] = "auto"
    name: Annotated[str, option(help="The job's name; by default derived from the command.")] = ""
    device: Annotated[
        str,
        typer.Option(
            help="auto: the device of cluster.yaml (default cuda); on this machine cuda if it has enough GPUs, else "
            "cpu with a note; cuda: GPUs or an error; cpu; any: the program decides."
        ),
    ] = "auto"
    image: Annotated[
        str, option(help="The container image; by default the inventory's, else that of `make image`.")
    ] = ""
    build: Annotated[
        str, option(metavar="DIR", help="First build the container image from DIR/Dockerfile, and push it.")
    ] = ""
    setup: Annotated[
        str,
        option(
            metavar="COMMANDS",
            help="Shell commands that run once per node before the program: 'pip install -r requirements.txt'. They "
            "install into a virtual environment, which later jobs with the same commands and files use again.",
        ),
    ] = ""
    run_root: Annotated[
        str, option("--run-dir", help="The parent of the jobs' run directories; by default ./runs.")
    ] = ""
    env: Annotated[
        list[str],
        option(
            "--env",
            "-e",
            help="NAME=VALUE for the program; NAME alone is a secret: its value comes from your environment, is on no "
            "command line and in no plan or record, and is masked in logs. Repeatable.",
        ),
    ] = field(default_factory=list)
    mounts: Annotated[
        list[str],
        option(
            "--mount",
            "-v",
            help="SOURCE[:TARGET[:rw]] for the containers; repeatable. Paths in arguments are mounted automatically.",
        ),
    ] = field(default_factory=list)
    timeout_s: Annotated[float, typer.Option("--rendezvous-timeout", help="Seconds in which all nodes must join.")] = (
        300.0
    )
    python: Annotated[
        str, option(help="The Python interpreter with torch, on the machines or in the container image.")
    ] = ""
    command: Annotated[str, option(help="A program for torchrun instead of the trainer: 'train.py --lr 0.1'.")] = ""
    workdir: Annotated[
        str,
        option(
            metavar="DIR",
            help="With --command: the program's working directory, by default the current folder. Other machines and "
            "Slurm get a copy, without what .gitignore and .clusterignore list.",
        ),
    ] = ""
    master_port: Annotated[str, typer.Option(help="A port number, or auto.")] = "auto"
    spares: Annotated[
        int, typer.Option(help="How many nodes of the inventory to reserve as replacements for lost nodes.")
    ] = 0
    max_restarts: Annotated[
        int | None,
        option(help="Restarts after failures, each from the newest checkpoint; by default 3, with --command 0."),
    ] = None
    stall_timeout_s: Annotated[
        float | None,
        option(
            "--stall-timeout",
            help="Seconds without progress after which the job fails, by default 300; 0: never. With --command the "
            "default is 0, and progress is output or the use of a CPU or GPU.",
        ),
    ] = None
    grace: Annotated[
        str,
        option(
            metavar="TIME",
            help="How long the ranks may take to write a checkpoint when the job is stopped, before they are killed: "
            "90s, 10m. By default 2m.",
        ),
    ] = ""
