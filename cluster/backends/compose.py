"""Jobs as containers of one image on this machine, made by docker compose.

The plan is a compose file that works without the launcher (`docker compose -f FILE up`). Every node is a service that
runs the agent. Containers, network and project are named after the job, so all of them are found without a record.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import contract, logs, looks, readiness, resources, torchrun
from cluster.errors import ClusterError, LaunchError, UnreachableError, UsageError
from cluster.model import Job, Mount, Node, NodeStatus, Phase, Plan, Step, one_box, plan_of
from cluster.runtimes.containers import short_id
from cluster.shells import Completed, Shell

# yaml takes longer to import than all of the backends, and only a compose file needs it.
if TYPE_CHECKING:
    import yaml

#: Where the job's run root is inside a container.
RUNS = "/runs"
#: Where the agent is inside a container.
AGENT = "/agent.py"
#: The oldest compose that is known to take configs from files.
_MIN_COMPOSE = (2, 23, 1)

#: Docker's words for a container's state, in ours.
_PHASES: dict[str, Phase] = {
    "created": "pending",
    "running": "starting",
    "restarting": "starting",
    "paused": "starting",
    "removing": "exited",
    "exited": "exited",
    "dead": "exited",
}


class ComposeBackend:
    """One container per node on the engine of this machine."""

    name = "compose"

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def plan(self, job: Job, *, attempt: int, port: int) -> Plan:
        """One step: the compose file, and the command that brings it up."""
        nodes = one_box(job, [f"node-{rank}" for rank in range(job.nodes)])
        made = plan_of(job, self.name, nodes, attempt=attempt, master=(nodes[0].address, port), in_containers=True)
        file = f"{made.attempt_dir}/compose.yaml"
        agent = f"{job.build}/cluster/agent/agent.py" if job.build else f"{made.attempt_dir}/agent.py"
        up = ("docker", "compose", "-p", job.name, "-f", file, "--project-directory", ".", "up", "-d", "--no-build")
        text = render(job, nodes, attempt=attempt, port=port, agent=agent)
        return replace(made, steps=(Step("this machine", {file: text}, up, agent=agent),))

    def check(self, job: Job, plan: Plan) -> None:
        """Raise UsageError without an engine, compose or the image; NameTakenError for a job of this name."""
        problem = engine_problem(self._shell)
        if problem:
            raise UsageError(*problem)
        found = self._docker("image", "inspect", "--format", "{{.Id}}", plan.image)
        if found.code:
            raise UsageError(
                f"this machine: no image {plan.image}",
                "make image   (or name one that is there: --image NAME)",
            )
        # compose would take the other job's containers for older ones of this
        if plan.attempt == 1 and (left := self._left(plan.job_id)):
            raise readiness.name_taken(plan.job_id, "this machine", f"container {left[0]}")

    def image_id(self, image: str) -> str:
        """The image's id as people are shown it, or "" when it is not there."""
        found = self._docker("image", "inspect", "--format", "{{.Id}}", image)
        return short_id(found.out.strip()) if found.code == 0 else ""

    def submit(self, plan: Plan, secrets: Mapping[str, str] | None = None) -> None:
        """Bring the project up; take it down again when any container does not start."""
        (step,) = plan.steps
        (text,) = step.files.values()
        if plan.secrets:
            text = _with_secrets(text, {name: (secrets or {})[name] for name in plan.secrets})
        if not Path(step.agent).exists():
            Path(step.agent).write_text(resources.text("agent/agent.py"), encoding="utf-8")
        # The file is the command's input, so that what runs is what the plan says and not a file that changed since.
        argv = [argument if argument not in step.files else "-" for argument in step.argv]
        up = self._shell.run(argv, stdin=text, timeout_s=300)
        if up.code:
            self.cancel(plan, grace_s=0)
            raise LaunchError(
                f"this machine: docker compose up: {up.last_line}",
                "see what compose was given: the same command with plan instead of launch",
            )

    def requeued(self, plan: Plan, wait: Callable[[float], None]) -> Plan | None:
        """None: the launcher starts the next attempt."""
        return None

    def observe(self, plan: Plan) -> Sequence[NodeStatus]:
        """From the agents' status files and `docker inspect`; a container that does not exist is lost."""
        names = [_container(plan.job_id, node.name) for node in plan.nodes]
        found = self._docker("inspect", "--type", "container", *names)
        try:
            listed = json.loads(found.out or "[]")
        except json.JSONDecodeError as error:
            raise UnreachableError(f"this machine: docker inspect: {found.last_line}") from error
        if not listed and "no such container" not in found.err.lower():
            raise UnreachableError(f"this machine: docker inspect: {found.last_line}", "docker info")
        states = {container["Name"].lstrip("/"): container["State"] for container in listed}
        return [_status(plan, node.name, states.get(name)) for node, name in zip(plan.nodes, names, strict=True)]

    def logs(self, plan: Plan, offsets: Mapping[str, int]) -> Mapping[str, bytes]:
        """Read from the run directory, which is a folder of this machine."""
        return logs.read(plan, offsets)

    def cancel(self, plan: Plan, *, grace_s: float) -> None:
        """`docker compose down`, then whatever still carries the job's label."""
        self._shell.run(
            ["docker", "compose", "-p", plan.job_id, "down", "-t", str(int(grace_s)), "--remove-orphans"],
            timeout_s=grace_s + 60,
        )
        left = self._left(plan.job_id)
        if left:
            self._docker("rm", "-f", *left)
            left = self._left(plan.job_id)
        if left:
            raise ClusterError(
                f"this machine: containers {' '.join(left)} of {plan.job_id} do not go away",
                f"docker rm -f {' '.join(left)}",
            )

    def _left(self, job_id: str) -> list[str]:
        return self._docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={job_id}").out.split()

    def _docker(self, *arguments: str) -> Completed:
        return self._shell.run(["docker", *arguments], timeout_s=30)


def engine_problem(shell: Shell) -> tuple[str, str] | None:
    """Why compose cannot be used on this machine, as (message, hint), or None when engine and compose answer."""
    try:
        engine = shell.run(["docker", "version", "--format", "{{.Server.Version}}"], timeout_s=15)
    except UnreachableError as error:
        return error.message, "make engine   (installs one on Debian as root), or --backend local"
    if engine.code:
        return (
            f"this machine: the Docker Engine does not answer: {engine.last_line}",
            "make engine   (installs and starts one on Debian as root), or --backend local",
        )
    compose = shell.run(["docker", "compose", "version", "--short"], timeout_s=15)
    if compose.code:
        return (
            "this machine: docker has no compose plugin",
            "install docker-compose-plugin, or --backend local",
        )
    numbers = tuple(int(number) for number in re.findall(r"\d+", compose.out)[:3])
    if numbers < _MIN_COMPOSE:
        wanted = ".".join(str(number) for number in _MIN_COMPOSE)
        return (
            f"this machine: docker compose {compose.out.strip()} is too old: {wanted} or newer is needed",
            "update docker-compose-plugin, or --backend local",
        )
    return None


def is_rootless(shell: Shell) -> bool:
    """Whether this machine's engine is a rootless one, in whose containers root is the caller outside."""
    try:
        found = shell.run(["docker", "info", "--format", "{{.SecurityOptions}}"], timeout_s=15)
    except UnreachableError:
        return False
    return found.code == 0 and "rootless" in found.out


def render(job: Job, nodes: Sequence[Node], *, attempt: int, port: int, agent: str) -> str:
    """The compose file: what the nodes have in common once, then one service per node.

    `agent` is the agent's file on this machine.
    """
    import yaml

    shared = _Shared("node", _node(job))
    shared["environment"] = _Shared("environment", _environment(job, nodes, attempt=attempt, port=port))
    services = {}
    for rank, node in enumerate(nodes):
        environment: dict[str, Any] = {_MERGE: shared["environment"], "PET_NODE_RANK": rank}
        service = {_MERGE: shared, "container_name": _container(job.name, node.name), "hostname": node.name}
        if job.device != "cpu" and node.gpus:
            service |= gpu_reservation(node)
        services[node.name] = service | {"environment": environment}
    head = f"# {job.nodes} nodes x {job.procs_per_node} processes on this machine. Written by `clusterctl plan`.\n"
    document = {
        "name": job.name,
        "x-node": shared,
        "services": services,
        "configs": {"agent": {"file": _escaped(agent)}},
    }
    return head + yaml.dump(document, Dumper=_dumper(), sort_keys=False, width=120, allow_unicode=True)


def _with_secrets(text: str, secrets: Mapping[str, str]) -> str:
    import yaml

    document = yaml.safe_load(text)
    for service in document["services"].values():
        service["environment"] |= {name: _escaped(value) for name, value in secrets.items()}
    return yaml.safe_dump(document, sort_keys=False)


def gpu_reservation(node: Node) -> dict[str, Any]:
    """What a service needs to see this node's GPUs and no others."""
    devices = {"driver": "nvidia", "device_ids": [str(gpu) for gpu in node.gpus], "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [devices]}}}}


def _node(job: Job) -> dict[str, Any]:
    """What all services have in common."""
    service: dict[str, Any] = {"image": job.image}
    if job.build:
        service["build"] = {"context": job.build, "args": {"BASE_IMAGE": "${BASE_IMAGE:-python:3.12-slim}"}}
    else:
        service["pull_policy"] = "never"
    if job.user:
        service["user"] = job.user
    if job.workdir:
        service["working_dir"] = _escaped(job.workdir)
    return service | {
        "command": _Flow(_escaped(word) for word in torchrun.command(job, AGENT)),
        "configs": [{"source": "agent", "target": AGENT}],
        "volumes": [_volume(mount) for mount in (Mount(job.run_root, RUNS, read_only=False), *job.mounts)],
        "init": True,
        "shm_size": "2gb",
        "stop_grace_period": "30s",
        "labels": {contract.JOB_ID: job.name},
    }


def _environment(job: Job, nodes: Sequence[Node], *, attempt: int, port: int) -> dict[str, Any]:
    """The variables that all services have in common; a secret's value is that of the shell that runs compose."""
    gpus = range(len(nodes[0].gpus))  # a container counts those that it was given from 0
    values = {
        **job.env,
        **torchrun.shared_environment(
            job, attempt=attempt, run_dir=f"{RUNS}/{job.name}", master=(nodes[0].address, port)
        ),
        contract.NODES_ON_HOST: str(job.nodes),
        **torchrun.gpu_environment(job, gpus),
    }
    plain: dict[str, Any] = {
        name: int(text) if text.isdigit() and str(int(text)) == text else _escaped(text)
        for name, text in values.items()
    }
    return plain | dict.fromkeys(job.secrets)


def _volume(mount: Mount) -> dict[str, Any]:
    # The long form: a path may hold ':', and a source that is not there is an error instead of a new root-owned folder.
    volume: dict[str, Any] = {
        "type": "bind",
        "source": _escaped(mount.source),
        "target": _escaped(mount.target),
    }
    if mount.read_only:
        volume["read_only"] = True
    return volume | {"bind": {"create_host_path": False}}


def _escaped(text: str) -> str:
    return text.replace("$", "$$")


def _container(job_id: str, node: str) -> str:
    return f"{job_id}-{node}"


def _status(plan: Plan, name: str, state: Mapping[str, Any] | None) -> NodeStatus:
    answer = looks.read_agent(Path(plan.attempt_dir, f"{name}.json"))
    if answer.agent.get("phase") == "exited":
        return looks.status(name, answer)
    if state is None:
        return NodeStatus(name, "lost", detail="its container is gone")
    phase = _PHASES.get(state["Status"], "lost")
    if phase != "exited":
        return NodeStatus(name, phase, detail="its container is paused" if state["Status"] == "paused" else "")
    detail = state.get("Error", "")
    if state.get("OOMKilled"):
        detail = "its container ran out of memory"
    return NodeStatus(name, phase, state["ExitCode"], detail, _seconds(state.get("FinishedAt", "")))


def _seconds(stamp: str) -> float | None:
    """Seconds since 1970 of Docker's `2026-11-21T07:20:11.123456789Z`."""
    match = re.match(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d{1,6})?", stamp)
    if match is None or stamp.startswith("0001"):
        return None
    return datetime.fromisoformat(match[1] + "+00:00").timestamp() + float(match[2] or 0)


class _Shared(dict[str, Any]):
    """A mapping that YAML shows once, with the anchor `name`, and refers to everywhere else."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.name = name


class _Flow(list[str]):
    """A list that YAML shows on one line."""


class _MergeKey(str):
    """YAML's `<<`, which takes over the keys of another mapping."""


_MERGE = _MergeKey("<<")


@functools.cache
def _dumper() -> type[yaml.SafeDumper]:
    import yaml

    class Dumper(yaml.SafeDumper):
        """With named anchors, merge keys and short lists on one line."""

        def ignore_aliases(self, data: object) -> bool:
            return not isinstance(data, _Shared)

        def generate_anchor(self, node: yaml.Node) -> str:
            return str(node.anchor_name)  # type: ignore[attr-defined]

        def shared(self, data: _Shared) -> yaml.Node:
            node = self.represent_dict(data)
            node.anchor_name = data.name  # type: ignore[attr-defined]
            return node

    Dumper.add_representer(_Shared, Dumper.shared)
    Dumper.add_representer(
        _Flow, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)
    )
    Dumper.add_representer(
        _MergeKey, lambda dumper, data: dumper.represent_scalar("tag:yaml.org,2002:merge", str(data))
    )
    return Dumper
