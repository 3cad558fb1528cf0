"""The nouns: what a job is, where it runs, what will be done, what was seen. All frozen, none does anything."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.errors import UsageError

Phase = Literal["pending", "starting", "joining", "ready", "exited", "lost"]
Device = Literal["cpu", "cuda", "any"]

#: A job's name becomes part of container, network and folder names, so it has their narrowest alphabet.
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,47}")


@dataclass(frozen=True)
class Mount:
    """A folder of the machine as the job sees it; `synced`: one of this machine, of which nodes have copies."""

    source: str
    target: str
    read_only: bool = True
    synced: bool = False


@dataclass(frozen=True)
class Node:
    """A machine, or a part of one: `address` is what its peers dial, `login` how we reach it ("": this machine).

    `run_dir` holds one folder per job on that machine, `data_dir` the folders that were synced to it, `gpus` the ids
    that jobs may use. `ssh_config` is a file to read instead of `~/.ssh/config`.
    """

    name: str
    address: str
    gpus: tuple[int, ...] = ()
    login: str = ""
    run_dir: str = ""
    data_dir: str = ""
    runtime: str = "none"
    ssh_config: str = ""
    labels: tuple[str, ...] = ()

    @property
    def is_machine(self) -> bool:
        """Whether it is a machine of an inventory, which may be this one, and not a part of one that nodes share."""
        return bool(self.login or self.run_dir)


@dataclass(frozen=True)
class Queue:
    """A Slurm cluster: its login node, whose run_dir and data_dir all nodes have in common, and options for sbatch."""

    login: Node
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Inventory:
    """The machines that jobs may run on, and what is true of every job there unless a launch says otherwise.

    With the backend slurm the one node is the login node, and `options` are for sbatch.
    """

    nodes: tuple[Node, ...]
    backend: Literal["ssh", "slurm"] = "ssh"
    options: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    device: Device = "cuda"
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    path: str = ""


@dataclass(frozen=True)
class Job:
    """What shall run: `command` is what torchrun is given, on `nodes` nodes, as `procs_per_node` processes each.

    `run_root` holds one folder per job. `says_ready` tells whether the program writes the contract's events.
    `secrets` are names of variables whose values are in no plan. `hosts` are the machines, none for the one at hand,
    or `queue` is what gives them out. `gpus` are those of the machine at hand, for all of its nodes together.
    After a failure it is started again `max_restarts` times, on `spares` where hosts are lost, on fewer nodes down to
    `min_nodes` (0: never fewer); `stall_timeout_s` without progress is a failure (0: never).
    Raises UsageError when a field makes no sense.
    """

    name: str
    command: tuple[str, ...]
    nodes: int
    procs_per_node: int
    run_root: str
    device: Device = "any"
    image: str = ""
    build: str = ""
    user: str = ""
    python: str = "python3"
    workdir: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    port: int = 0
    timeout_s: float = 300.0
    says_ready: bool = True
    gpus: tuple[int, ...] = ()
    hosts: tuple[Node, ...] = ()
    spares: tuple[Node, ...] = ()
    queue: Queue | None = None
    min_nodes: int = 0
    max_restarts: int = 0
    stall_timeout_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no backend could run."""
        if not NAME.fullmatch(self.name):
            raise UsageError(
                f"--name {self.name!r}: a job's name has small letters, digits and '-', 48 at most",
                "for example: --name digits-2",
            )
        for option, value in (("--nodes", self.nodes), ("--gpus", self.procs_per_node)):
            if value < 1:
                raise UsageError(f"{option} {value}: a job needs at least one", f"for example: {option} 1")
        if self.port and not 1024 <= self.port <= 65535:
            raise UsageError(f"--master-port {self.port}: not between 1024 and 65535", "or: --master-port auto")
        if not self.command:
            raise UsageError("nothing to run: the command is empty", "for example: --command 'train.py --lr 0.1'")
        for option, seconds in (("--timeout", self.timeout_s), ("--stall-timeout", self.stall_timeout_s or 1)):
            if seconds <= 0:
                raise UsageError(f"{option} {seconds:g}: must be more than 0 seconds")
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts {self.max_restarts}: must be 0 or more")

    @property
    def least_nodes(self) -> int:
        """The fewest nodes that the job runs on."""
        return self.min_nodes or self.nodes

    @property
    def world_size(self) -> int:
        """How many processes take part, over all nodes."""
        return self.nodes * self.procs_per_node


@dataclass(frozen=True)
class Step:
    """One thing done in one place: files to write there (path to text), then a command to run.

    `needs` are the paths that must be there before; `agent` is the path of the agent (agent/agent.py).
    """

    place: str
    files: Mapping[str, str]
    argv: tuple[str, ...]
    needs: tuple[str, ...] = ()
    agent: str = ""


@dataclass(frozen=True)
class Plan:
    """Everything a launch will do, complete and printable; equal jobs give equal plans."""

    job_id: str
    attempt: int
    backend: str
    nodes: tuple[Node, ...]
    steps: tuple[Step, ...]
    run_dir: str
    master_addr: str
    master_port: int
    world_size: int
    timeout_s: float
    says_ready: bool
    image: str = ""
    command: tuple[str, ...] = ()
    device: Device = "any"
    secrets: tuple[str, ...] = ()

    @property
    def attempt_dir(self) -> str:
        """The folder of this attempt's scripts, logs and exit codes, on the launching machine."""
        return f"{self.run_dir}/attempt-{self.attempt}"

    def dir_on(self, node: Node) -> str:
        """The job's folder on a node's own disk."""
        return f"{node.run_dir}/{self.job_id}" if node.run_dir else self.run_dir

    def is_elsewhere(self, node: Node) -> bool:
        """Whether a node writes into another folder than the job's here, so that what it writes has to be brought."""
        return bool(node.login) or self.dir_on(node) != self.run_dir


@dataclass(frozen=True)
class NodeStatus:
    """What a backend saw of one node: `ended_at` is in seconds since 1970, None while it runs or unknown.

    `silent` says why and for how long its machine has not answered, `where` on which host a node ran that has no name
    of its own. `failure` is the first failure among its ranks, as the agent found it: rank, time, error, hint,
    exit_code, secondary.
    """

    node: str
    phase: Phase
    exit_code: int | None = None
    detail: str = ""
    ended_at: float | None = None
    silent: str = ""
    where: str = ""
    failure: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Record:
    """What is remembered of a job: the plan of its newest attempt, and how it ended ("" while nobody has seen the end).

    `exit_code` is what a launcher that sees a bad end exits with.

    `retired` are the nodes of earlier attempts that the plan has no more, `past` how each earlier attempt failed.
    """

    plan: Plan
    created_at: float
    job: Job
    retired: tuple[Node, ...] = ()
    past: tuple[str, ...] = ()
    outcome: Literal["", "done", "failed", "stopped"] = ""
    detail: str = ""
    exit_code: int = 1


def plan_of(
    job: Job, backend: str, nodes: tuple[Node, ...], *, attempt: int, master: tuple[str, int], in_containers: bool
) -> Plan:
    """An attempt of the job on these nodes, without its steps."""
    return Plan(
        job_id=job.name,
        attempt=attempt,
        backend=backend,
        nodes=nodes,
        steps=(),
        run_dir=f"{job.run_root}/{job.name}",
        master_addr=master[0],
        master_port=master[1],
        world_size=job.world_size,
        timeout_s=job.timeout_s,
        says_ready=job.says_ready,
        image=job.image if in_containers else "",
        command=(job.python, *job.command),
        device=job.device,
        secrets=job.secrets,
    )


def one_box(job: Job, addresses: Sequence[str]) -> tuple[Node, ...]:
    """The nodes of a job that share one machine: `node-0`, `node-1`, ..., each with its part of the GPUs."""
    per_node = job.procs_per_node
    return tuple(
        Node(f"node-{rank}", address, job.gpus[rank * per_node : (rank + 1) * per_node])
        for rank, address in enumerate(addresses)
    )
