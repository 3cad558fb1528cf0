"""Data classes of the launcher: inventory, job, plan, node status, job record. Pure."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cluster import contract
from cluster.errors import UsageError
from cluster.runtimes import RUNTIMES
from cluster.spec.counts import Procs
from cluster.spec.environment import PASS_ENV
from cluster.spec.mount import Mount
from cluster.spec.request import UnchangedOptions

Device = Literal["cpu", "cuda", "any"]
#: The index of a GPU in the order of nvidia-smi, or the UUID of a MIG slice, which jobs use and lock like a GPU.
Gpu = int | str

#: The launch ID of a plan that has not been launched: `clusterctl plan` prints it, so that equal jobs have equal plans.
NOT_LAUNCHED = "0" * 16
#: The pattern of a job's name, which container, network and folder names contain.
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,47}")
#: The folder of the working directory's copy in a job's run directory.
WORKDIR = "workdir"
#: The folder of the virtual environments of `--setup`, next to the jobs' run directories.
SETUP = ".setup"
#: The folder of the programs' caches, also next to the run directories: it outlives the jobs and their containers.
CACHE = ".cache"


@dataclass(frozen=True)
class Machine:
    """A machine on which nodes of jobs run, or that submits them.

    The other machines connect to `address`; the launcher connects to `login` over SSH ("": this machine). On the
    machine, `run_dir` has one folder per job ("": the job's folder on this machine), `data_dir` the synced
    folders, and `gpus` are the ids that jobs may use. `ssh_config` is a file to read instead of `~/.ssh/config`.
    """

    name: str
    address: str
    gpus: tuple[Gpu, ...] = ()
    login: str = ""
    run_dir: str = ""
    data_dir: str = ""
    runtime: str = "none"
    ssh_config: str = ""
    labels: tuple[str, ...] = ()

    @property
    def is_listed(self) -> bool:
        """Whether it is a machine of an inventory, not the one that launches without an inventory."""
        return bool(self.login or self.run_dir)

    @property
    def in_container(self) -> bool:
        """Whether programs run in a container there; also while the runtime is not known ("")."""
        return not (self.runtime and RUNTIMES[self.runtime].inside)

    def mirror(self, path: str) -> str:
        """Return the path there of the copy of an absolute path of this machine; the same on this machine."""
        return f"{self.data_dir}{path}" if self.login else path

    def hint_for_missing(self, path: str) -> str:
        """Return a hint on how to copy a missing path there; "" if the launcher cannot."""
        if self.login and not self.in_container:
            return "without a container nothing is mounted: provide the same path there, on a shared disk or with rsync"
        return f"clusterctl sync {path.removeprefix(self.data_dir)}" if self.login and self.data_dir else ""


def this_machine(gpus: tuple[Gpu, ...] = (), runtime: str = "none") -> Machine:
    """Return this machine, for jobs without an inventory."""
    return Machine("this machine", "127.0.0.1", gpus, runtime=runtime)


@dataclass(frozen=True)
class Node:
    """A node of a job: one agent, which starts the ranks on `machine` with the node's share of its GPUs."""

    name: str
    machine: Machine
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Queue:
    """A cluster whose scheduler assigns the machines of a job.

    With Slurm, all nodes share `run_dir` and `data_dir` of the `login` node. `settings` are the backend's.
    """

    login: Machine
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Inventory:
    """The machines that jobs may run on, and defaults for their jobs.

    `is_assigned`: a scheduler assigns the machines, and the only one here is that which reaches it. `settings` are the
    section of the backend in cluster.yaml.
    """

    machines: tuple[Machine, ...]
    backend: str = "ssh"
    is_assigned: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    image: str = ""
    device: Device = "cuda"
    env: Mapping[str, str] = field(default_factory=dict)
    pass_env: tuple[str, ...] = PASS_ENV
    prologue: str = ""
    mounts: tuple[Mount, ...] = ()
    path: str = ""


@dataclass(frozen=True)
class Job(UnchangedOptions):
    """A job: torchrun runs `command` on `nodes` nodes. `procs` are the processes of each, from `procs_per_node`.

    `run_root` has one folder per job; `image` is "" if no node runs in a container. `says_ready`: the program writes
    the contract's events. `secrets` are names of variables whose values no plan contains. The program runs in
    `workdir`; with `copies_workdir` each node has a copy
    of this machine's folder there. `prologue` are shell lines that a node runs first, outside of its container, and
    that set its environment. `setup` are shell commands that run before it on each node, in a virtual
    environment that all jobs with the same `setup_key` share ("": the job's own). Containers get the variables of the
    node that match a pattern of `pass_env`, and `run_options` are for the engine that starts them. `hosts` are the
    machines (none: this machine), or `queue` provides them.
    `gpus` are this machine's, for all of its nodes together. After a failure the job restarts `max_restarts` times,
    with `spares` for lost hosts, and with fewer nodes down to `min_nodes` (0: never fewer). `stall_timeout_s` without
    progress is a failure (0: never). Ranks that still run `grace_s` after a request to stop are killed. `launch_id` is
    on everything that the job starts, in all of its attempts: two jobs may have the same name, and no two launches have
    the same ID. Raises UsageError if a field is invalid.
    """

    name: str
    command: tuple[str, ...]
    nodes: int
    procs_per_node: Procs
    run_root: str
    device: Device = "any"
    image: str = ""
    build: str = ""
    user: str = ""
    python: str = "python3"
    workdir: str = ""
    copies_workdir: bool = False
    prologue: str = ""
    setup_key: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    pass_env: tuple[str, ...] = PASS_ENV
    secrets: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    run_options: tuple[str, ...] = ()
    port: int = 0
    says_ready: bool = True
    gpus: tuple[Gpu, ...] = ()
    hosts: tuple[Machine, ...] = ()
    spares: tuple[Machine, ...] = ()
    queue: Queue | None = None
    min_nodes: int = 0
    max_restarts: int = 0
    stall_timeout_s: float = 0.0
    grace_s: float = contract.STOP_GRACE_S
    launch_id: str = NOT_LAUNCHED

    def __post_init__(self) -> None:
        """Raise UsageError if a field is invalid for every backend."""
        if not NAME.fullmatch(self.name):
            hint = "for example: --name digits-2"
            raise UsageError(f"--name {self.name!r}: use at most 48 lower-case letters, digits and '-'", hint)
        if not self.command:
            raise UsageError("--command is empty", "for example: --command 'train.py --lr 0.1'")
        for option, value, least in (
            ("--nodes", self.nodes, 1),
            ("--gpus", min(self.procs, default=1), 1),
            ("--rendezvous-timeout", self.rendezvous_timeout_s, 0.1),
            ("--stall-timeout", self.stall_timeout_s, 0),
            ("--max-restarts", self.max_restarts, 0),
            ("--grace", self.grace_s, 0),
        ):
            if value < least:
                raise UsageError(f"{option} {value:g}: must be at least {least}")
        if self.grace_s > contract.MAX_GRACE_S:
            raise UsageError(
                f"--grace {self.grace_s:g}s: must be at most {contract.MAX_GRACE_S:g}s (18 hours)"
            )
        shares = zip(self.gpus_of_nodes, self.procs, strict=True)
        if any(procs > 1 and any(isinstance(gpu, str) for gpu in gpus) for gpus, procs in shares):
            each = self.procs_per_node
            given = ",".join(map(str, each)) if isinstance(each, tuple) else str(each)
            why = f"--gpus {given}: CUDA shows a process only one MIG slice"
            raise UsageError(why, "--gpus 1, with one slice for each node")

    @property
    def least_nodes(self) -> int:
        """The minimum number of nodes."""
        return self.min_nodes or self.nodes

    @property
    def procs(self) -> tuple[int, ...]:
        """The number of processes of each node."""
        if self.procs_per_node == "all":
            return tuple(len(host.gpus) for host in self.hosts)
        return (
            self.procs_per_node
            if isinstance(self.procs_per_node, tuple)
            else (self.procs_per_node,) * self.nodes
        )

    def on(self, hosts: Sequence[Machine]) -> "Job":
        """Return the job on other machines, of which those that it does not have get as many processes as any node."""
        each = self.procs_per_node
        if isinstance(each, tuple):
            known = dict(zip(self.hosts, self.procs, strict=True))
            each = tuple(known.get(host, self.most_procs) for host in hosts)
        return replace(self, hosts=tuple(hosts), nodes=len(hosts), procs_per_node=each)

    @property
    def most_procs(self) -> int:
        """The number of processes of the largest node; of every node if a scheduler assigns the machines."""
        return max(self.procs, default=0)

    @property
    def is_unequal(self) -> bool:
        """Whether some nodes have more processes than others."""
        return len(set(self.procs)) > 1

    @property
    def world_size(self) -> int:
        """The number of processes on all nodes."""
        return sum(self.procs)

    @property
    def gpus_of_nodes(self) -> tuple[tuple[Gpu, ...], ...]:
        """The GPUs of each node: the first ones of its machine, or its part of `gpus`."""
        if self.hosts:
            return tuple(host.gpus[:procs] for host, procs in zip(self.hosts, self.procs, strict=False))
        ends = itertools.accumulate(self.procs)
        return tuple(self.gpus[end - procs : end] for procs, end in zip(self.procs, ends, strict=True))


@dataclass(frozen=True)
class Step:
    """A step of a plan on one machine: files to write (path to text), then a command to run.

    `needs` are paths that must exist before; agent.pyz (agent/app) is copied to the path `agent`.
    """

    place: str
    files: Mapping[str, str]
    argv: tuple[str, ...]
    needs: tuple[str, ...] = ()
    agent: str = ""


@dataclass(frozen=True)
class Plan:
    """All files and commands of an attempt of `job`; equal jobs have equal plans.

    The job is that of the attempt: after the loss of machines it may have fewer nodes than the job that was launched.
    """

    job: Job
    attempt: int
    backend: str
    nodes: tuple[Node, ...]
    master_addr: str
    master_port: int
    steps: tuple[Step, ...] = ()

    @property
    def job_id(self) -> str:
        """The name of the job."""
        return self.job.name

    @property
    def run_dir(self) -> str:
        """The job's run directory on this machine."""
        return f"{self.job.run_root}/{self.job.name}"

    @property
    def workdir(self) -> str:
        """The folder of this machine of which each node has a copy, or ""."""
        return self.job.workdir if self.job.copies_workdir else ""

    @property
    def attempt_dir(self) -> str:
        """The folder of this attempt's scripts, logs and node statuses on this machine."""
        return f"{self.run_dir}/attempt-{self.attempt}"

    @property
    def machines(self) -> list[Machine]:
        """The machines of its nodes. Those with the same login are one."""
        first: dict[tuple[str, str], Machine] = {}
        for node in self.nodes:
            first.setdefault((node.machine.login, node.machine.ssh_config), node.machine)
        return list(first.values())

    def nodes_on(self, machine: Machine) -> list[Node]:
        """Return the nodes on a machine."""
        there = (machine.login, machine.ssh_config)
        return [node for node in self.nodes if (node.machine.login, node.machine.ssh_config) == there]

    def gpus_on(self, machine: Machine) -> tuple[Gpu, ...]:
        """Return the GPUs of all nodes on a machine."""
        return tuple(gpu for node in self.nodes_on(machine) for gpu in node.gpus)

    def dir_on(self, machine: Machine) -> str:
        """Return the job's run directory on a machine."""
        return f"{machine.run_dir}/{self.job_id}" if machine.run_dir else self.run_dir

    def is_elsewhere(self, machine: Machine) -> bool:
        """Whether a machine has another run directory than `run_dir` here, so that results must be fetched."""
        return bool(machine.login) or self.dir_on(machine) != self.run_dir


@dataclass(frozen=True)
class PastAttempt:
    """An attempt that has failed: its number, the names of its nodes, Unix times, and why it ended.

    A restart that does not start is one, too. `step` is the last (epoch, step) that was seen; (0, 0) is before the
    first one. `is_program_error`: the program itself failed, so a restart may fail at the same step.
    """

    attempt: int
    nodes: tuple[str, ...]
    started_at: float
    ended_at: float
    cause: str
    step: tuple[int, int] = (0, 0)
    is_program_error: bool = False


@dataclass(frozen=True)
class JobRecord:
    """The stored state of a job: the plan of its latest attempt, and its outcome ("": not known yet).

    `exit_code` is the launcher's exit code if the outcome is not `done`. `retired` are nodes of earlier attempts that
    the plan no longer has, and `history` lists all failures, so that every process counts the same restarts. `commit`
    is that of the working directory, "" outside of git; `withheld` are its files with secrets, which are not copied to
    nodes, and `sent_secrets` are those that the user sends. `ended_at` is a Unix time, 0 before. A job that was stopped
    has in `stop_grace_s` the grace of that stop. An attempt is recorded before its nodes are started; until all of them
    are, `start_lock` names the job whose lock the process that starts them holds: for a job of an array, the first one.
    `is_cleared`: it has ended, and all of its machines have confirmed that nothing of it is left there.
    """

    plan: Plan
    created_at: float  # of the latest attempt
    job: Job
    retired: tuple[Node, ...] = ()
    outcome: Literal["", "done", "failed", "stopped"] = ""
    detail: str = ""
    exit_code: int = 1
    commit: str = ""
    withheld: tuple[str, ...] = ()
    sent_secrets: tuple[str, ...] = ()
    history: tuple[PastAttempt, ...] = ()
    ended_at: float = 0.0
    stop_grace_s: float = 0.0
    start_lock: str = ""
    is_cleared: bool = False

    @property
    def launched_at(self) -> float:
        """The Unix time at which the first attempt began."""
        return self.history[0].started_at if self.history else self.created_at


def nodes_of(job: Job, machine: Machine) -> tuple[Node, ...]:
    """Return the nodes of a job on one machine: `node-0`, `node-1`, ..., each with its part of the job's GPUs."""
    return tuple(Node(f"node-{rank}", machine, gpus) for rank, gpus in enumerate(job.gpus_of_nodes))
