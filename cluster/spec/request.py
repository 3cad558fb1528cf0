"""The options of a job, which `launch` and `plan`, job.yaml, and the Python interface take.

An option is declared here and nowhere else. Its field has typer's option with the help, a `Key` if job.yaml has it in
another form, and SOME_BACKENDS if some refuse it. From these declarations come the command line (cli/options.py), job
files (job_file.py, job_text.py), their schema and the docs. A new option that a backend reads as `job.NAME` is one
field of `UnchangedOptions`. Pure.
"""

import functools
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import ParameterInfo

from cluster.spec import job_key, mount
from cluster.spec.job_key import Key

#: typer's, for a default that means "not given". The help text does not show it.
option = functools.partial(typer.Option, show_default=False)
argument = functools.partial(typer.Argument, show_default=False)
#: What `--backend` means without naming a backend. The command line lists the backends too (cli/options.py).
HERE_AND_AUTO = (
    "here: compose if Docker is running, otherwise local. "
    "auto: the inventory's backend, or here without an inventory."
)
#: Marks an option that not all backends support: those that do name it in `Traits.supports`, any other refuses it.
SOME_BACKENDS = "some backends"
#: Restarts, and seconds without progress, of the trainer's jobs: another program may not resume, or wait for input.
DEFAULT_RESTARTS = 3
DEFAULT_STALL_TIMEOUT_S = 300.0
#: The values of --device.
DEVICES = ("auto", "cpu", "cuda", "any")
# Headings of `launch --help-all`. Options without one are the common ones, which `launch --help` shows too.
_SLURM = "Slurm"
_PROGRAM = "The program and its container"
_NETWORK = "Network"
_FAILURES = "Failures and stopping"
_MACHINES = "Machines"


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Options that are passed to the backend."""

    partition: Annotated[
        str,
        option("--partition", "-p", metavar="NAME", help="Partition to submit to.", rich_help_panel=_SLURM),
        SOME_BACKENDS,
    ] = ""
    account: Annotated[
        str, option(metavar="NAME", help="Account to charge.", rich_help_panel=_SLURM), SOME_BACKENDS
    ] = ""
    qos: Annotated[
        str, option(metavar="NAME", help="Quality of service.", rich_help_panel=_SLURM), SOME_BACKENDS
    ] = ""
    time_limit: Annotated[
        str,
        option(
            "--time",
            metavar="H:MM:SS",
            help="Time limit. With launch, the job writes a checkpoint --grace before it.",
            rich_help_panel=_SLURM,
        ),
        SOME_BACKENDS,
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
        named = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "time": self.time_limit,
        }
        settings = {key: value for key, value in named.items() if value and unnamed}
        for text in self.settings:
            key, _, value = text.removeprefix("--").partition("=")
            name, dot, rest = key.partition(".")
            is_named = bool(dot) and name in table
            if name == backend if is_named else unnamed:
                settings[rest if is_named else key] = value
        return settings


@dataclass(frozen=True, kw_only=True)
class UnchangedOptions:
    """Options whose value a Job has as it was typed: backends read it as `job.NAME`."""

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
    rendezvous_timeout_s: Annotated[
        float,
        typer.Option(
            "--rendezvous-timeout",
            metavar="SECONDS",
            help="How long to wait for all nodes to join.",
            rich_help_panel=_NETWORK,
        ),
        Key("rendezvous_timeout", least=0),
    ] = 300


@dataclass(frozen=True, kw_only=True)
class _JobOptions:
    """Options from which resolver.py computes a Job, in the order of the keys of job.yaml."""

    name: Annotated[
        str, option(metavar="NAME", help="Name of the job.  [default: derived from the command]")
    ] = ""
    nodes: Annotated[
        str,
        option(
            "--nodes",
            "-n",
            metavar="N",
            help="Number of nodes.\n\n2:4 starts on four nodes and continues with as few as two if nodes are lost.  "
            "[default: 1, or all machines of the inventory]",
        ),
        job_key.nodes(),
    ] = ""
    gpus: Annotated[
        str,
        typer.Option(
            "--gpus",
            "-g",
            metavar="N",
            help="GPUs per node; each gets one process. With --device cpu, the number of processes per node.\n\n"
            "2,1 gives the first node two and the second one. all uses every GPU of each machine.",
        ),
        job_key.gpus(),
    ] = "1"
    command: Annotated[
        str,
        option(metavar="COMMAND", help="Program to run instead of the trainer: 'train.py --lr 0.1'."),
        job_key.command(),
    ] = ""
    arguments: Annotated[
        list[str],
        argument(
            metavar="[JOB.yaml] [-- TRAINER ARGUMENTS]",
            help="A job file, whose keys are these options, and arguments for the trainer after --.",
        ),
        job_key.words(
            name="args",
            help="Arguments of the trainer, as after `--`: `train --data coco.yaml`. Not together with `command`.",
        ),
    ] = field(default_factory=list)
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
    prologue: Annotated[
        str,
        option(
            metavar="LINES",
            help="Shell lines to run first on each node, such as 'module load cuda; conda activate ml'.\n\n"
            "What they export reaches the program without a container, and the command that starts one. Only the "
            "backends local, ssh and slurm have a shell on the node: elsewhere use --setup or --env.",
            rich_help_panel=_PROGRAM,
        ),
        SOME_BACKENDS,
    ] = ""
    image: Annotated[
        str,
        option(
            metavar="IMAGE",
            help="Container image.  [default: the inventory's, or the one that `make image` builds]",
        ),
        SOME_BACKENDS,
    ] = ""
    build: Annotated[
        str,
        option(
            metavar="DIR",
            help="Build the container image from DIR/Dockerfile and copy it to the nodes first.",
            rich_help_panel=_PROGRAM,
        ),
        SOME_BACKENDS,
    ] = ""
    backend: Annotated[
        str, typer.Option("--backend", "-b", metavar="NAME", help=f"Where to run.\n\n{HERE_AND_AUTO}")
    ] = "auto"
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="cuda, cpu, any or auto.\n\n"
            "cuda fails if GPUs are missing; any leaves the choice to the program. auto is the device of cluster.yaml "
            "(cuda unless it says otherwise); on this machine it is cuda if there are enough GPUs, otherwise cpu.",
        ),
        Key(choices=DEVICES),
    ] = "auto"
    env: Annotated[
        list[str],
        option(
            "--env",
            "-e",
            metavar="NAME[=VALUE]",
            help="Environment variable; NAME alone passes yours as a secret. Repeatable.\n\n"
            "A secret appears on no command line, in no plan and in no record, and is masked in logs.",
        ),
        Key(help="Environment variables of the program, by name."),
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
        Key(
            help="`SOURCE[:TARGET[:rw]]`: folders for the containers. Paths in `args` are mounted automatically.",
            item=lambda text: mount.parse(text, "/"),
        ),
        SOME_BACKENDS,
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
        Key(
            help="Options of docker run or podman run for the containers: `[--memory=32g, --ulimit nofile=65536]`."
        ),
        SOME_BACKENDS,
    ] = field(default_factory=list)
    spares: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Machines of the inventory to keep in reserve for lost nodes.",
            rich_help_panel=_FAILURES,
        ),
        Key(least=0),
        SOME_BACKENDS,
    ] = 0
    max_restarts: Annotated[
        int | None,
        option(
            metavar="N",
            help="Restarts after failures, from the newest checkpoint.  "
            f"[default: {DEFAULT_RESTARTS}; with --command: 0]",
        ),
        Key(least=0),
    ] = None
    stall_timeout_s: Annotated[
        float | None,
        option(
            "--stall-timeout",
            metavar="SECONDS",
            help="Fail the job after this long without progress; 0 disables it. A --command makes progress if it "
            "prints something, or if its ranks move on in their Python code.  "
            f"[default: {DEFAULT_STALL_TIMEOUT_S:g}; with --command: 0]",
            rich_help_panel=_FAILURES,
        ),
        Key("stall_timeout", least=0),
    ] = None
    grace: Annotated[
        str,
        option(
            metavar="TIME",
            help="How long the ranks may take to write a checkpoint, or to exit once the job is done, before they are "
            "killed: 90s, 10m.  [default: 2m]",
            rich_help_panel=_FAILURES,
        ),
        job_key.time("--grace"),
    ] = ""
    master_port: Annotated[
        str,
        typer.Option(metavar="PORT", help="Port of rank 0, or auto.", rich_help_panel=_NETWORK),
        job_key.scalar(),
    ] = "auto"
    run_root: Annotated[
        str,
        option(
            "--run-dir", metavar="DIR", help="Where to create the job's run directory.  [default: ./runs]"
        ),
        Key("run_dir"),
    ] = ""
    python: Annotated[
        str,
        option(
            metavar="PATH",
            help="Python interpreter that has torch, on the machines or in the container image.",
            rich_help_panel=_PROGRAM,
        ),
    ] = ""


# Of a dataclass's bases, the last one's fields come first.
@dataclass(frozen=True, kw_only=True)
class Request(BackendOptions, UnchangedOptions, _JobOptions):
    """The options of a job, as typed."""


@dataclass(frozen=True)
class SecretOptions:
    """The options of secrets."""

    env_file: Annotated[
        str,
        option(metavar="FILE", help="File of secrets, one NAME=VALUE per line.", rich_help_panel=_PROGRAM),
    ] = ""


@dataclass(frozen=True)
class ArrayOptions:
    """Options of a job array."""

    array: Annotated[
        str,
        option(
            metavar="FILE",
            help="Submit one job per line of FILE. Each line is appended to the arguments or the command.",
            rich_help_panel=_SLURM,
        ),
    ] = ""
    array_limit: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="How many jobs of the array may run at once.", rich_help_panel=_SLURM
        ),
        Key(least=1),
    ] = 256


@dataclass(frozen=True)
class MachineOptions:
    """Options that choose machines."""

    inventory: Annotated[
        str,
        option(
            "--inventory",
            "-i",
            metavar="FILE",
            help="Inventory of machines.  [default: cluster.yaml, if it exists]",
        ),
    ] = ""
    hosts: Annotated[
        str,
        option(
            metavar="A,B",
            help="Machines to use instead of an inventory.\n\n[USER@]HOST[:PORT], or names from ~/.ssh/config.",
        ),
        job_key.names(),
    ] = ""
    hostfile: Annotated[
        str,
        option(
            metavar="FILE",
            help="Hostfile of DeepSpeed or MPI (worker-1 slots=4) that names the machines.",
            rich_help_panel=_MACHINES,
        ),
    ] = ""
    ssh_config: Annotated[
        str,
        option(
            metavar="FILE",
            help="SSH configuration to use instead of ~/.ssh/config.",
            rich_help_panel=_MACHINES,
        ),
    ] = ""
    only: Annotated[
        str,
        option(
            metavar="A,B",
            help="Use only these machines of the inventory, by name or label.",
            rich_help_panel=_MACHINES,
        ),
        job_key.names(),
    ] = ""


@dataclass(frozen=True)
class LaunchOptions(MachineOptions, ArrayOptions, SecretOptions, Request):
    """All options that a job file may have."""


@dataclass(frozen=True)
class Declared:
    """An option as it is declared: the name, type and default of its field, its flag, its help and its key.

    `is_everywhere`: all backends support it.
    """

    field: str
    type: Any
    default: Any
    flag: str
    help: str
    key: Key
    is_everywhere: bool

    @property
    def key_name(self) -> str:
        """The name of its key in job.yaml."""
        return self.key.name or self.field


@functools.cache
def declared(group: type[Any]) -> tuple[Declared, ...]:
    """Return the options of a group, in their order."""
    hints = get_type_hints(group, include_extras=True)
    return tuple(_declared(option, hints[option.name]) for option in fields(group))


def _declared(each: Field[Any], annotated: Any) -> Declared:
    kind, *metadata = get_args(annotated)
    shown = next(value for value in metadata if isinstance(value, ParameterInfo))
    key = next((value for value in metadata if isinstance(value, Key)), Key())
    default = each.default if each.default_factory is MISSING else each.default_factory()
    # Of the names of an option in an annotation, typer takes the first one for its default.
    flag = shown.default if isinstance(shown.default, str) else f"--{each.name.replace('_', '-')}"
    return Declared(each.name, kind, default, flag, shown.help or "", key, SOME_BACKENDS not in metadata)


def keyed() -> tuple[Declared, ...]:
    """Return the options with a key in job.yaml, in the order of the keys. The others are in backends' sections."""
    in_sections = {option.name for option in fields(BackendOptions)}
    return tuple(option for option in declared(LaunchOptions) if option.field not in in_sections)
