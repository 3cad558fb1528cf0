"""The options of the verbs, each declared once: a dataclass per group, a type for one that stands alone."""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from cluster.config import DEFAULT_IMAGE, Request
from cluster.errors import UsageError
from cluster.model import Inventory, Job

#: As typer's, for a default that means "not given": help does not show it.
option = functools.partial(typer.Option, show_default=False)
argument = functools.partial(typer.Argument, show_default=False)


def _job_names(incomplete: str) -> list[str]:
    """Completion: the jobs that are remembered."""
    from cluster.records import Records

    return [name for record in Records() if (name := record.plan.job_id).startswith(incomplete)]


JobName = Annotated[str, typer.Argument(metavar="JOB", help="As `clusterctl ps` shows it.", autocompletion=_job_names)]
InventoryFile = Annotated[
    str,
    option(
        "--inventory",
        "-i",
        metavar="FILE",
        help="The machines; by default cluster.yaml where there is one in this folder.",
    ),
]
Hostfile = Annotated[
    str,
    option(
        "--hostfile",
        metavar="FILE",
        help="The machines instead: a hostfile as DeepSpeed and MPI have it (worker-1 slots=4).",
    ),
]
SshConfig = Annotated[str, option("--ssh-config", metavar="FILE", help="Read this instead of ~/.ssh/config.")]
Logs = Annotated[str, typer.Option("--logs", help="Show the log of: master, all.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@dataclass
class InventoryOptions:
    """Options that choose an inventory."""

    inventory: InventoryFile = ""
    hosts: Annotated[
        str,
        option("--hosts", metavar="A,B", help="The machines instead: [USER@]HOST[:PORT] or names from ~/.ssh/config."),
    ] = ""
    hostfile: Hostfile = ""
    ssh_config: SshConfig = ""
    only = ""  # no option: `NodeOptions` adds it

    def load(self, *, complete: bool = True, backend: str = "auto") -> Inventory | None:
        """Return the chosen inventory, or None if the options name none and there is no cluster.yaml.

        With `complete`, ask the nodes for what the file leaves open. Raise ClusterError if a node does not answer.
        """
        from cluster import discovery

        found = discovery.load(self.inventory, self.hosts, self.hostfile, self.ssh_config, self.only, backend=backend)
        return discovery.complete(found) if found and complete else found

    def need(self, *, complete: bool = True) -> Inventory:
        """Return the chosen inventory; raise UsageError if there is none."""
        found = self.load(complete=complete)
        if found is None:
            raise UsageError("no machines: there is no cluster.yaml in this folder", "clusterctl init gpu-a gpu-b")
        return found


@dataclass
class NodeOptions(InventoryOptions):
    """Options that choose nodes of an inventory."""

    only: Annotated[
        str, option("--only", metavar="A,B", help="Only these nodes of the inventory, by name or label.")
    ] = ""


@dataclass
class SlurmOptions:
    """Options that are passed to Slurm."""

    partition: Annotated[str, option("--partition", "-p", metavar="NAME", help="Slurm: the partition.")] = ""
    account: Annotated[str, option("--account", metavar="NAME", help="Slurm: who pays.")] = ""
    qos: Annotated[str, option("--qos", metavar="NAME", help="Slurm: the quality of service.")] = ""
    time_limit: Annotated[
        str, option("--time", metavar="H:MM:SS", help="Slurm: the time limit; a checkpoint comes 90 s before.")
    ] = ""
    slurm: Annotated[
        list[str],
        typer.Option(
            "--slurm", metavar="KEY=VALUE", help="Slurm: another option of sbatch, as in mem=32G. Repeatable."
        ),
    ] = field(default_factory=list)

    def for_sbatch(self) -> tuple[str, ...]:
        """Return the given options, each as `name=value`."""
        named = {"partition": self.partition, "account": self.account, "qos": self.qos, "time": self.time_limit}
        return (*(f"{name}={value}" for name, value in named.items() if value), *self.slurm)


@dataclass
class RunOptions:
    """Options of a job that `bench` also takes. Except for `nodes` and `backend`, they are fields of `Request`."""

    arguments: Annotated[
        list[str],
        argument(metavar="[-- TRAINER ARGUMENTS]", help="For the trainer: -- train --data coco.yaml --epochs 30"),
    ] = field(default_factory=list)
    nodes: Annotated[
        str,
        option(
            "--nodes",
            "-n",
            help="How many nodes; 2:4 takes four and goes on with as few as two (machines of an inventory). By default "
            "one, or the whole inventory.",
        ),
    ] = ""
    gpus: Annotated[int, typer.Option("--gpus", "-g", help="Processes per node, one per GPU.")] = 1
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            "-b",
            help="[b]ssh[/b]: the machines of the inventory; [b]slurm[/b]: a cluster with a queue; [b]compose[/b]: "
            "containers on this machine; [b]local[/b]: process groups on it; [b]here[/b]: compose where an engine "
            "answers, else local; [b]auto[/b]: what the inventory says, else here.",
        ),
    ] = "auto"
    name: Annotated[str, option("--name", help="The job's name; by default derived from the job.")] = ""
    device: Annotated[
        str,
        typer.Option(
            "--device",
            help="[b]auto[/b]: what cluster.yaml says (cuda unless it says another); on this machine GPUs if there are "
            "enough, else CPU processes, and says so; [b]cuda[/b]: GPUs or an error; [b]cpu[/b]; [b]any[/b]: leave it "
            "to the program.",
        ),
    ] = "auto"
    image: Annotated[
        str, option("--image", help=f"The container image; by default the inventory's, else {DEFAULT_IMAGE}.")
    ] = ""
    run_root: Annotated[str, option("--run-dir", help="One folder per job is made here; by default ./runs.")] = ""
    env: Annotated[
        list[str],
        typer.Option(
            "--env",
            "-e",
            help="NAME=VALUE for the program; NAME alone is a secret: its value comes from your environment and stands "
            "on no command line, in no plan, record or log. Repeatable.",
        ),
    ] = field(default_factory=list)
    mounts: Annotated[
        list[str],
        typer.Option(
            "--mount",
            "-v",
            help="SOURCE[:TARGET[:rw]] for the containers; repeatable. Paths in the arguments are mounted by "
            "themselves.",
        ),
    ] = field(default_factory=list)
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds until all nodes must have met.")] = 300.0
    python: Annotated[
        str,
        option(
            "--python", help="The interpreter that has torch: the machines' own, or in containers on them the image's."
        ),
    ] = ""

    def request(self, slurm: SlurmOptions, **others: Any) -> Request:
        """Return the request that the options make, with `others` as further fields of it."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in vars(self).items()
            if name not in ("nodes", "backend", "env_file")
        }
        return Request(**given, slurm=slurm.for_sbatch(), **others)


@dataclass
class JobOptions(RunOptions):
    """Options of a job. Except for `env_file`, the added ones are fields of `Request`, too."""

    user: Annotated[str, option("--user", help="UID:GID in the containers; by default yours.")] = ""
    command: Annotated[
        str, option("--command", help="Run this torchrun program instead of our trainer: 'train.py --lr 0.1'.")
    ] = ""
    master_port: Annotated[str, typer.Option("--master-port", help="A port, or auto.")] = "auto"
    env_file: Annotated[str, option("--env-file", help="A file of NAME=VALUE lines, all of them secrets.")] = ""
    spares: Annotated[int, typer.Option("--spares", help="Nodes of the inventory to keep for those that are lost.")] = 0
    max_restarts: Annotated[
        int | None,
        option(
            "--max-restarts",
            help="Starts after a failure, each from the newest checkpoint; by default 3, with --command 0.",
        ),
    ] = None
    stall_timeout_s: Annotated[
        float, typer.Option("--stall-timeout", help="Seconds without a step that count as a failure; 0: never.")
    ] = 300.0


@dataclass
class ArrayOptions:
    """Options of a Slurm job array."""

    array: Annotated[
        str,
        option(
            "--array",
            metavar="FILE",
            help="Slurm: a job for each line of the file, whose arguments follow those of the command line.",
        ),
    ] = ""
    array_limit: Annotated[
        int, typer.Option("--array-limit", metavar="N", min=1, help="Slurm: run at most N jobs of the array at a time.")
    ] = 256

    def jobs(self, request: Request, options: JobOptions, machines: Inventory | None) -> tuple[list[Job], list[str]]:
        """The jobs NAME-0, NAME-1 and so on, and what to note. Raises UsageError naming the line that is wrong."""
        from cluster import commands

        base, chosen, notes = commands.resolve(request, options.nodes, options.backend, machines)
        if chosen != "slurm":
            raise UsageError("--array: only Slurm has job arrays", "use a cluster.yaml with backend: slurm")
        jobs: list[Job] = []
        try:
            lines = Path(self.array).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not a UTF-8 text"
            raise UsageError(f"--array {self.array}: {why}", "one line of arguments for each job") from error
        for nth, line in enumerate(lines, 1):
            try:
                words = shlex.split(line, comments=True)
            except ValueError as error:
                raise UsageError(f"{self.array}:{nth}: {error}", "quote it for a shell") from error
            if not words:
                continue
            one = replace(request, name=f"{base.name}-{len(jobs)}")
            if request.command:
                one = replace(one, command=f"{request.command} {shlex.join(words)}")
            else:
                one = replace(one, arguments=(*request.arguments, *words))
            jobs.append(commands.resolve(one, options.nodes, options.backend, machines)[0])
        if not jobs:
            raise UsageError(f"--array {self.array}: no arguments in it", "one line of arguments for each job")
        return jobs, notes


def takes_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a dataclass of options by its fields, as typer needs them."""
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        group: type[Any] = parameter.annotation
        if not is_dataclass(group):
            parameters.append(parameter)
            continue
        groups[parameter.name] = group
        hints = get_type_hints(group, include_extras=True)
        for each in fields(group):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            parameters.append(parameter.replace(name=each.name, default=default, annotation=hints[each.name]))

    @functools.wraps(verb)
    def called(**values: Any) -> None:
        made = {}
        for name, group in groups.items():
            made[name] = group(**{each.name: values.pop(each.name) for each in fields(group)})
        verb(**made, **values)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def every_log(logs: str) -> bool:
    """Whether `--logs` asks for every node's log and not the master's alone; raises UsageError for another word."""
    if logs not in ("master", "all"):
        raise UsageError(f"--logs {logs!r}", "one of: master, all")
    return logs == "all"
