"""The request for a job: what `launch` and `plan` take as options, and the Python interface as keywords. Pure."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

import typer

#: typer's, for a default that means "not given". The help text does not show it.
option = functools.partial(typer.Option, show_default=False)
argument = functools.partial(typer.Argument, show_default=False)
#: What `--backend` means without naming a backend. The command line lists the backends too (cli/options.py).
HERE_AND_AUTO = (
    "here: compose if Docker is running, otherwise local. auto: the inventory's backend, or here without an inventory."
)
# Headings of `launch --help-all`. Options without one are the common ones, which `launch --help` shows too.
_SLURM = "Slurm"
_PROGRAM = "The program and its container"
_NETWORK = "Network"
_FAILURES = "Failures and stopping"


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Options that are passed to the backend."""

    partition: Annotated[
        str, option("--partition", "-p", metavar="NAME", help="Partition to submit to.", rich_help_panel=_SLURM)
    ] = ""
    account: Annotated[str, option(metavar="NAME", help="Account to charge.", rich_help_panel=_SLURM)] = ""
    qos: Annotated[str, option(metavar="NAME", help="Quality of service.", rich_help_panel=_SLURM)] = ""
    time_limit: Annotated[
        str,
        option(
            "--time",
            metavar="H:MM:SS",
            help="Time limit. A checkpoint is written --grace before it.",
            rich_help_panel=_SLURM,
        ),
    ] = ""
    settings: Annotated[
        list[str],
        option(
            "--set",
            metavar="KEY=VALUE",
            help="Backend setting, as in its section of cluster.yaml: mem=32G. Repeatable.\n\n"
            "Slurm takes any option of sbatch.",
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
            help="A job file, whose keys are these options, and arguments for the trainer after --.",
        ),
    ] = field(default_factory=list)
    nodes: Annotated[
        str,
        option(
            "--nodes",
            "-n",
            metavar="N",
            help="Number of nodes.\n\n2:4 starts on four nodes and continues with as few as two if nodes are lost.  "
            "[default: 1, or all machines of the inventory]",
        ),
    ] = ""
    gpus: Annotated[
        str,
        typer.Option(
            "--gpus",
            "-g",
            metavar="N",
            help="GPUs per node; each gets one process.\n\n"
            "2,1 gives the first node two and the second one. all uses every GPU of each machine.",
        ),
    ] = "1"
    backend: Annotated[
        str, typer.Option("--backend", "-b", metavar="NAME", help=f"Where to run.\n\n{HERE_AND_AUTO}")
    ] = "auto"
    name: Annotated[str, option(metavar="NAME", help="Name of the job.  [default: derived from the command]")] = ""
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="cuda, cpu, any or auto.\n\n"
            "cuda fails if GPUs are missing; any leaves the choice to the program. auto is the device of cluster.yaml "
            "(cuda unless it says otherwise); on this machine it is cuda if there are enough GPUs, otherwise cpu.",
        ),
    ] = "auto"
    image: Annotated[
        str,
        option(
            metavar="IMAGE",
            help="Container image.  [default: the inventory's, or the one that `make image` builds]",
        ),
    ] = ""
    build: Annotated[
        str,
        option(
            metavar="DIR",
            help="Build the container image from DIR/Dockerfile and copy it to the nodes first.",
            rich_help_panel=_PROGRAM,
        ),
    ] = ""
    prologue: Annotated[
        str,
        option(
            metavar="LINES",
            help="Shell lines to run first on each node, such as 'module load cuda; conda activate ml'.\n\n"
            "What they export reaches the program without a container, and the command that starts one. Only the "
            "backends local, ssh and slurm have a shell on the node: elsewhere use --setup or --env.",
            rich_help_panel=_PROGRAM,
        ),
    ] = ""
    setup: Annotated[
        str,
        option(
            metavar="COMMANDS",
            help="Shell commands to run once per node before the program, such as "
            "'pip install -r requirements.txt'. They install into a virtual environment, which later jobs with the "
            "same commands and files reuse.",
            rich_help_panel=_PROGRAM,
        ),
    ] = ""
    run_root: Annotated[
        str, option("--run-dir", metavar="DIR", help="Where to create the job's run directory.  [default: ./runs]")
    ] = ""
    env: Annotated[
        list[str],
        option(
            "--env",
            "-e",
            metavar="NAME[=VALUE]",
            help="Environment variable; NAME alone passes yours as a secret. Repeatable.\n\n"
            "A secret appears on no command line, in no plan and in no record, and is masked in logs.",
        ),
    ] = field(default_factory=list)
    mounts: Annotated[
        list[str],
        option(
            "--mount",
            "-v",
            metavar="SOURCE[:TARGET[:rw]]",
            help="File or folder to mount into the containers. Repeatable. Paths in the program's arguments are "
            "mounted automatically.",
            rich_help_panel=_PROGRAM,
        ),
    ] = field(default_factory=list)
    run_options: Annotated[
        list[str],
        option(
            "--run-option",
            metavar="OPTION",
            help="Option of docker run or podman run for the containers: '--memory 32g', --device=/dev/fuse. "
            "Repeatable. Compose has an equivalent for most of them.",
            rich_help_panel=_PROGRAM,
        ),
    ] = field(default_factory=list)
    timeout_s: Annotated[
        float,
        typer.Option(
            "--rendezvous-timeout",
            metavar="SECONDS",
            help="How long to wait for all nodes to join.",
            rich_help_panel=_NETWORK,
        ),
    ] = 300
    python: Annotated[
        str,
        option(
            metavar="PATH",
            help="Python interpreter that has torch, on the machines or in the container image.",
            rich_help_panel=_PROGRAM,
        ),
    ] = ""
    command: Annotated[
        str, option(metavar="COMMAND", help="Program to run instead of the trainer: 'train.py --lr 0.1'.")
    ] = ""
    workdir: Annotated[
        str,
        option(
            metavar="DIR",
            help="Working directory of --command. Remote machines and Slurm get a copy without the files that "
            ".gitignore and .clusterignore list.  [default: the current folder]",
            rich_help_panel=_PROGRAM,
        ),
    ] = ""
    send_secrets: Annotated[
        bool,
        typer.Option(
            "--send-secrets",
            "--yes",
            help="Also copy those files of the working directory that usually hold secrets, such as .env and *.pem.\n\n"
            "Without it, they stop the launch, unless .clusterignore lists them: NAME leaves a file out, !NAME sends "
            "it.",
            rich_help_panel=_PROGRAM,
        ),
    ] = False
    master_port: Annotated[
        str, typer.Option(metavar="PORT", help="Port of rank 0, or auto.", rich_help_panel=_NETWORK)
    ] = "auto"
    spares: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Machines of the inventory to keep in reserve for lost nodes.",
            rich_help_panel=_FAILURES,
        ),
    ] = 0
    max_restarts: Annotated[
        int | None,
        option(
            metavar="N",
            help="Restarts after failures, from the newest checkpoint.  [default: 3; with --command: 0]",
        ),
    ] = None
    stall_timeout_s: Annotated[
        float | None,
        option(
            "--stall-timeout",
            metavar="SECONDS",
            help="Fail the job after this long without progress; 0 disables it. A --command makes progress if it "
            "prints something, or if its ranks move on in their Python code.  [default: 300; with --command: 0]",
            rich_help_panel=_FAILURES,
        ),
    ] = None
    grace: Annotated[
        str,
        option(
            metavar="TIME",
            help="How long the ranks may take to write a checkpoint, or to exit once the job is done, before they are "
            "killed: 90s, 10m.  [default: 2m]",
            rich_help_panel=_FAILURES,
        ),
    ] = ""
