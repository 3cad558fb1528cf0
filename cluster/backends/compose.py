"""Backend compose: one container per node on this machine, started by docker compose.

The plan is a compose file that works without the launcher (`docker compose -f FILE up`). Every node is a service that
runs the agent. Containers, network and project have the job's name for people, and its launch ID as a label, by which
they are found. Another project of that name is left alone.
"""

import contextlib
import json
import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from cluster import contract
from cluster.agent import scripts
from cluster.backends import preflight, processes, script
from cluster.backends.base import Backend, FoundJob
from cluster.errors import ClusterError, LaunchError, UnreachableError, UsageError
from cluster.runtimes import DOCKER, engine_options
from cluster.spec import node_status
from cluster.spec.image import how_to_get
from cluster.spec.model import (
    CACHE,
    SETUP,
    Inventory,
    Job,
    JobRecord,
    Node,
    Plan,
    Step,
    nodes_of,
    this_machine,
)
from cluster.spec.mount import Mount
from cluster.spec.node_status import NodeStatus
from cluster.spec.status import MOST_STATUS, parse
from cluster.spec.traits import NO_NODE_SHELL
from cluster.transport import Completed, LocalShell, inside
from cluster.transport.waits import waiting

#: The mount target of the job's run root.
RUNS = "/runs"
#: Time for the engine to remove a container.
_REMOVAL_S = 10.0
#: The path of the agent in the container: an archive, or in a checkout the folder of its source.
AGENT = "/agent"


class ComposeBackend(Backend):
    """One container per node on the engine of this machine."""

    name = "compose"
    machines = "here"
    in_containers = True
    supports = frozenset({"--image", "--mount", "--build", "--wait", "--run-option", "unequal nodes"})
    refusals: ClassVar[Mapping[str, str]] = {"--prologue": NO_NODE_SHELL}
    engines = (DOCKER.name,)

    def plan(self, job: Job, *, attempt: int, port: int) -> Plan:
        """One step: the compose file, and the command that brings it up."""
        nodes = nodes_of(job, this_machine(runtime=DOCKER.name))
        made = Plan(job, attempt, self.name, nodes, nodes[0].name, port)
        file = f"{made.attempt_dir}/compose.yaml"
        agent = f"{job.build}/cluster/agent/app" if job.build else f"{made.attempt_dir}/agent.pyz"
        up = (
            "docker",
            "compose",
            "-p",
            job.name,
            "-f",
            file,
            "--project-directory",
            ".",
            "up",
            "-d",
            "--no-build",
        )
        text = render(job, nodes, attempt=attempt, port=port, agent=agent)
        return replace(made, steps=(Step("this machine", {file: text}, up, agent=agent),))

    def check(self, job: Job, plan: Plan) -> None:
        """Raise UsageError without an engine, compose or the image, and NameTakenError for a job of this name."""
        if problem := self.problem():
            raise UsageError(*problem)
        if self._docker("image", "inspect", "--format", "{{.Id}}", plan.job.image).code:
            image = plan.job.image
            raise UsageError(f"this machine has no image {image}", how_to_get(image, DOCKER.name))
        for source in (mount.source for mount in plan.job.mounts if not Path(mount.source).exists()):
            raise UsageError(f"--mount {source}: no such file or folder on this machine", "check the path")
        # compose would replace the other project's containers
        if others := self._others(plan):
            raise preflight.name_taken(plan.job_id, "this machine", others[0])
        if job.gpus:
            (here,) = plan.machines
            report = LocalShell().run(preflight.command(plan, here)).out.splitlines()
            preflight.refuse(
                [*preflight.problems(plan, here, report), *preflight.conflicts(plan, here, report)]
            )

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> None:
        """Lock the GPUs and start the project; stop it again if a container does not start.

        Raises GpusHeldError if another job has a GPU, or LaunchError.
        """
        (step,) = plan.steps
        (text,) = step.files.values()
        if plan.job.secrets or contract.IMAGE in text:
            import yaml

            image_id = self._docker("image", "inspect", "--format", "{{.Id}}", plan.job.image).out.strip()
            more = {name: _escaped(secrets[name]) for name in plan.job.secrets}
            more |= {contract.IMAGE: f"{plan.job.image} {image_id}"}  # a name may get another image
            document = yaml.safe_load(text)
            for service in document["services"].values():
                service["environment"] |= more
            text = yaml.safe_dump(document, sort_keys=False)
        if not Path(step.agent).exists():
            Path(step.agent).write_bytes(scripts.archive())
        # compose reads the plan from stdin, because the file may have changed.
        argv = [argument if argument not in step.files else "-" for argument in step.argv]
        beside = [f"{plan.job.run_root}/{name}" for name in ((CACHE, SETUP) if plan.job.setup else (CACHE,))]
        launched = {"job": plan.job_id, "launch": plan.job.launch_id}
        values = {"gpus": preflight.ids(plan.job.gpus), "user": _uid(plan.job), "beside": beside}
        command = scripts.command("compose_up", *argv, **launched, **values)
        up = LocalShell().run(command, stdin=text, timeout_s=300)
        if up.code == preflight.GPUS_HELD:
            raise preflight.lost_race(plan, "this machine", up.out.strip())
        if up.code:
            self.cancel(plan, grace_s=0)
            hint = "to see the compose file, run the same command with plan instead of launch"
            raise LaunchError(f"this machine: docker compose up: {up.last_line}", hint)

    def observe(self, plan: Plan) -> Sequence[NodeStatus]:
        """Return statuses from the agents' status files and `docker inspect`; without a container a node is lost."""
        (statuses,) = self.observe_all([plan])
        if isinstance(statuses, ClusterError):
            raise statuses
        return statuses

    def observe_all(self, plans: Sequence[Plan]) -> list[Sequence[NodeStatus] | ClusterError]:
        """Run one `docker inspect`."""
        names = [f"{plan.job_id}-{node.name}" for plan in plans for node in plan.nodes]
        inspected = self._docker("inspect", "--type", "container", *names)
        if inspected.code and "no such container" not in inspected.err.lower():
            return [
                UnreachableError(f"this machine: docker inspect: {inspected.last_line}", "docker info")
                for _ in plans
            ]
        states = {
            (
                container["Name"].lstrip("/"),
                (container["Config"]["Labels"] or {}).get(contract.LAUNCH_ID),
            ): container
            for container in json.loads(inspected.out or "[]")
        }

        def state(plan: Plan, node: Node) -> Mapping[str, Any] | None:
            container = states.get((f"{plan.job_id}-{node.name}", plan.job.launch_id))
            return container and container["State"]

        return [[_status(plan, node.name, state(plan, node)) for node in plan.nodes] for plan in plans]

    def cancel(self, plan: Plan, *, grace_s: float, only_attempt: bool = False) -> None:
        """Stop and remove the containers, then the network."""
        grace = Path(plan.attempt_dir, contract.GRACE_FILE)
        # Without the file, the agents wait as long as the job's own grace.
        with contextlib.suppress(OSError), inside.open_file(plan.run_dir, grace, "wb") as file:
            file.write(f"{math.ceil(grace_s)}\n".encode())
        with waiting(f"the containers of {plan.job_id} to exit", grace_s + 60):
            self._down(plan.job.launch_id, grace_s)
        if plan.job.gpus:  # the process that has their locks ends soon; the next job may start at once
            processes.stop(plan.nodes[0].machine, plan.job.launch_id, 0, [], timeout_s=30)

    def remove(self, inventory: Inventory, found: FoundJob) -> None:
        """Remove the containers and the network of a launch, and then its processes. Raises ClusterError."""
        self._down(found.launch_id, 0)
        super().remove(inventory, found)

    def exec(self, record: JobRecord, node: Node, argv: Sequence[str], *, tty: bool) -> list[str]:
        """Return `docker exec`."""
        status = next(candidate for candidate in self.observe(record.plan) if candidate.node == node.name)
        if status.phase in ("exited", "lost"):
            raise UsageError(f"{node.name}: its ranks have exited")
        words = [
            "docker",
            "exec",
            "--interactive",
            *(["--tty"] if tty else []),
            f"{record.plan.job_id}-{node.name}",
        ]
        return [*words, *script.in_setup(record.job, argv)]

    def problem(self) -> tuple[str, str] | None:
        """Return why there is no engine with compose on this machine, as (message, hint), or None."""
        hint = "make engine, in a clone of the repository (on Debian as root); or --backend local"
        try:
            engine = self._docker("version", "--format", "{{.Server.Version}}")
        except UnreachableError as error:
            return error.message, hint
        if engine.code:
            return f"this machine: the Docker Engine does not answer: {engine.last_line}", hint
        if self._docker("compose", "version").code:
            return (
                "this machine: docker has no compose plugin",
                "install docker-compose-plugin, or --backend local",
            )
        return None

    def user(self) -> str:
        """Return root for a rootless engine: root in its containers is the caller on the host."""
        try:
            options = self._docker("info", "--format", "{{.SecurityOptions}}")
        except UnreachableError:
            return super().user()
        return "0:0" if options.code == 0 and "rootless" in options.out else super().user()

    def _down(self, launch_id: str, grace_s: float) -> None:
        """Do what `docker compose down` does, by the launch ID: that would take all that has the project's name.

        Raises ClusterError if a container remains.
        """
        label = f"{contract.LAUNCH_ID}={launch_id}"
        if listed := self._labelled(label):
            seconds = str(math.ceil(grace_s))
            LocalShell().run(["docker", "stop", "-t", seconds, *listed], timeout_s=grace_s + 60)
            LocalShell().run(["docker", "rm", "--force", *listed], timeout_s=60)
        until = time.monotonic() + _REMOVAL_S
        while (
            left := self._labelled(label)
        ) and time.monotonic() < until:  # another `stop` may be removing them
            time.sleep(0.5)
        if left:
            hint = f"docker rm -f {' '.join(left)}"
            raise ClusterError(f"this machine: cannot remove the containers {' '.join(left)}", hint)
        if networks := self._labelled(label, networks=True):
            self._docker("network", "rm", *networks)

    def _others(self, plan: Plan) -> list[str]:
        """Return the containers and networks of a project with the job's name that are not the job's own."""
        project = f"com.docker.compose.project={plan.job_id}"
        own = f"{contract.LAUNCH_ID}={plan.job.launch_id}"
        others = []
        for what, networks in (("container", False), ("network", True)):
            ours = self._labelled(own, networks=networks)
            all_of_it = self._labelled(project, networks=networks)
            others += [f"{what} {name}" for name in all_of_it if name not in ours]
        return others

    def _labelled(self, label: str, *, networks: bool = False) -> list[str]:
        """Return the containers, or networks, with a label. Raises UnreachableError if the engine does not answer."""
        command = ("network", "ls", "--quiet") if networks else ("ps", "--all", "--quiet")
        listed = self._docker(*command, "--filter", f"label={label}")
        if listed.code:
            raise UnreachableError(f"this machine: docker {command[0]}: {listed.last_line}", "docker info")
        return listed.out.split()

    def _docker(self, *arguments: str) -> Completed:
        return LocalShell().run(["docker", *arguments], timeout_s=30)


def render(job: Job, nodes: Sequence[Node], *, attempt: int, port: int, agent: str) -> str:
    """Return the compose file: what all nodes share, then one service per node; `agent` is a path of this machine."""
    command = [_escaped(word) for word in (job.python, AGENT, *job.command)]
    services = ""
    added = engine_options.service_keys(job.run_options)
    for rank, node in enumerate(nodes):
        own = {"container_name": f"{job.name}-{node.name}", "hostname": node.name}
        reserved = gpu_reservation(node) if job.device != "cpu" and node.gpus else {}
        if "ulimits" in reserved and "ulimits" in added:
            reserved["ulimits"] |= added["ulimits"]
        own |= reserved
        services += f"  {node.name}:\n    <<: *node\n{_yaml(own, 4)}"
        services += (
            f"    environment:\n      <<: *environment\n{_yaml(_own_environment(job, nodes, rank), 6)}"
        )
    return (
        f"# {script.size(job)} on this machine. Written by `clusterctl plan`.\n"
        f"{_yaml({'name': job.name}, 0)}"
        f"x-node: &node\n{_yaml(_node(job, agent), 2)}"
        f"  command: {_yaml(command, 4, flow=True).lstrip()}"
        f"  environment: &environment\n{_yaml(_environment(job, nodes, attempt=attempt, port=port), 4)}"
        f"services:\n{services}"
        f"{_yaml({'networks': {'default': {'labels': _labels(job)}}}, 0)}"
    )


def _yaml(values: object, indent: int, *, flow: bool = False) -> str:
    import yaml  # importing it takes longer than importing all backends, and only a compose file needs it

    text = yaml.safe_dump(values, sort_keys=False, width=120, allow_unicode=True, default_flow_style=flow)
    return textwrap.indent(text, indent * " ")


def gpu_reservation(node: Node) -> dict[str, Any]:
    """Return the keys of a service that reserve exactly this node's GPUs, with the limits that NVIDIA recommends."""
    devices = {"driver": "nvidia", "device_ids": [str(gpu) for gpu in node.gpus], "capabilities": ["gpu"]}
    return {
        "ulimits": {"memlock": -1, "stack": 67108864},
        "deploy": {"resources": {"reservations": {"devices": [devices]}}},
    }


def _node(job: Job, agent: str) -> dict[str, Any]:
    """Return the keys that all services share."""
    service: dict[str, Any] = {"image": job.image}
    build = {"context": job.build, "args": {"BASE_IMAGE": "${BASE_IMAGE:-python:3.12-slim}"}}
    service |= {"build": build} if job.build else {"pull_policy": "never"}
    service |= {"user": job.user} if job.user else {}
    service |= {"working_dir": _escaped(job.workdir)} if job.workdir else {}
    mounts = (Mount(job.run_root, RUNS, read_only=False), Mount(agent, AGENT), *job.mounts)
    return service | {
        "volumes": [_volume(mount) for mount in mounts],
        "init": True,
        "ipc": "host",  # dataloader workers need more than the 64 MB of /dev/shm that a container has
        "stop_grace_period": f"{math.ceil(job.grace_s)}s",
        "labels": _labels(job),
        **engine_options.service_keys(job.run_options),
    }


def _labels(job: Job) -> dict[str, str]:
    """Return the labels of containers and network. agent/compose_up.sh sets the variable: who plans may not launch."""
    return {**script.identity(job, ComposeBackend.name), contract.USER_ID: f"${{{contract.USER_ID}:-}}"}


def _environment(job: Job, nodes: Sequence[Node], *, attempt: int, port: int) -> dict[str, Any]:
    """Return the variables that all services share; compose takes the values of those without one from its own."""
    gpus = range(len(nodes[0].gpus))  # a container numbers its GPUs from 0
    master = (nodes[0].name, port)
    values = {
        **job.env,
        **script.shared_environment(
            job, ComposeBackend.name, attempt, f"{RUNS}/{job.name}", master, _uid(job)
        ),
        contract.NODES_ON_HOST: str(job.nodes),
        **script.gpu_environment(job, gpus),
    }
    plain = _values(values)
    passed = [name for name in job.pass_env if "*" not in name]
    # agent/compose_up.sh sets the umask: with `docker compose up` it is the container's.
    return {**dict.fromkeys(passed), **plain, **dict.fromkeys([*job.secrets, contract.UMASK])}


def _own_environment(job: Job, nodes: Sequence[Node], rank: int) -> dict[str, Any]:
    """Return the variables of one service, which replace the shared ones of _environment."""
    own = {"PET_NODE_RANK": str(rank), **script.rank_environment(job, rank)}
    if len(nodes[rank].gpus) != len(nodes[0].gpus):
        own |= script.gpu_environment(job, range(len(nodes[rank].gpus)))
    return _values(own)


def _values(values: Mapping[str, str]) -> dict[str, Any]:
    return {
        name: int(text) if text.isdigit() and str(int(text)) == text else _escaped(text)
        for name, text in values.items()
    }


def _uid(job: Job) -> str:
    return job.user.partition(":")[0]


def _volume(mount: Mount) -> dict[str, Any]:
    # The long form: a path may contain ':', and a missing source is an error, not a new folder of root.
    made = {"type": "bind", "source": _escaped(mount.source), "target": _escaped(mount.target)}
    return made | ({"read_only": True} if mount.read_only else {}) | {"bind": {"create_host_path": False}}


def _escaped(text: str) -> str:
    return text.replace("$", "$$")


def _status(plan: Plan, name: str, state: Mapping[str, Any] | None) -> NodeStatus:
    text = ""
    with (
        contextlib.suppress(OSError),
        inside.open_file(plan.run_dir, Path(plan.attempt_dir, f"{name}.json")) as file,
    ):
        text = file.read(MOST_STATUS + 1).decode(errors="replace")
    agent = parse(text)
    if agent.has_exited:
        return node_status.from_agent(name, agent)
    if state is None:
        return NodeStatus(name, "lost", detail="its container is gone")
    if state["Status"] == "created":
        return NodeStatus(name, "pending")
    if state["Status"] in ("running", "restarting", "paused"):
        detail = "its container is paused" if state["Status"] == "paused" else ""
        return replace(node_status.from_agent(name, agent), detail=detail)
    detail = "its container ran out of memory" if state.get("OOMKilled") else state.get("Error", "")
    ended_at = datetime.fromisoformat(f"{state['FinishedAt'][:19]}+00:00").timestamp()
    return NodeStatus(name, "exited", state["ExitCode"], detail, ended_at)
