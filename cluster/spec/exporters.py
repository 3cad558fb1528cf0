"""Exporters: a job as a task file of SkyPilot or dstack, which rent machines in clouds. Pure.

The task starts the job's program with torchrun on each node. What only clusterctl does has no place in such a file; its
first lines say so.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar

from cluster.errors import UsageError
from cluster.spec import resolver
from cluster.spec.counts import node_range
from cluster.spec.here import Here
from cluster.spec.image import DEFAULT_IMAGE
from cluster.spec.job_text import yaml_text
from cluster.spec.model import Job
from cluster.spec.request import BackendOptions, Request, declared
from cluster.spec.traits import Traits


class _Rented(Traits):
    """A rented machine: a container with the files of this machine."""

    name = "rented"
    machines = "here"
    in_containers = True
    supports = frozenset({"--image", "--mount", "--prologue"})
    refusals: ClassVar[Mapping[str, str]] = {"unequal nodes": "a task file has one number for all nodes"}


#: torchrun's options for a node, from the variables that describe the nodes of a task.
_SKYPILOT = {
    "nnodes": "$SKYPILOT_NUM_NODES",
    "node-rank": "$SKYPILOT_NODE_RANK",
    "master-addr": '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
}
_DSTACK = {
    "nnodes": "$DSTACK_NODES_NUM",
    "node-rank": "$DSTACK_NODE_RANK",
    "master-addr": "$DSTACK_MASTER_NODE_IP",
}
_PORT = 29500
#: SkyPilot wants the name of a GPU, which a job of clusterctl does not have: the cheapest of these is taken.
_GPUS = ("L4", "A100", "H100")
#: The options that a task has, too. It has no others: a note names those that are given.
_TAKEN_OVER = frozenset({"arguments", "command", "device", "env", "gpus", "image", "mounts", "name", "nodes"})
_TAKEN_OVER |= {"prologue", "setup", "workdir"}
#: Options of which nothing needs to be said: the task is for another launcher, and restarts have their own note.
_TAKEN_OVER |= {"backend", "send_secrets", "max_restarts"}
_IN_SECTIONS = frozenset(option.name for option in fields(BackendOptions))
#: The working directory in a container of dstack.
_WORKDIR = "/workdir"


def _skypilot(job: Job) -> dict[str, Any]:
    """Return the keys of a SkyPilot task."""
    gpus = {} if job.device == "cpu" else {"accelerators": dict.fromkeys(_GPUS, job.most_procs)}
    return {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": {**gpus, "image_id": f"docker:{job.image}"},
        "workdir": job.workdir,
        "file_mounts": {mount.target: mount.source for mount in job.mounts if mount.source != job.workdir},
        "envs": dict(job.env),
        "secrets": dict.fromkeys(job.secrets),
        "setup": job.setup and "\n".join(filter(None, [job.prologue, job.setup])),
        "run": "\n".join(filter(None, [job.prologue, _torchrun(job, _SKYPILOT)])),
    }


def _dstack(job: Job) -> dict[str, Any]:
    """Return the keys of a dstack task."""
    folders = [(job.workdir, _WORKDIR)] if job.workdir else []
    folders += [(mount.source, mount.target) for mount in job.mounts if mount.source != job.workdir]
    return {
        "type": "task",
        "name": job.name,
        "nodes": job.nodes,
        "image": job.image,
        "files": [f"{source}:{target}" for source, target in folders],
        "working_dir": job.workdir and _WORKDIR,
        "env": [*(f"{name}={value}" for name, value in job.env.items()), *job.secrets],
        "commands": [*filter(None, [job.prologue, job.setup]), _torchrun(job, _DSTACK)],
        "resources": {} if job.device == "cpu" else {"gpu": job.most_procs},
    }


#: The keys of a task, by the name of the launcher that reads it.
FORMATS: Mapping[str, Callable[[Job], dict[str, Any]]] = {"skypilot": _skypilot, "dstack": _dstack}
_COMMANDS = {"skypilot": "sky launch FILE", "dstack": "dstack apply -f FILE"}


def export(request: Request, here: Here, to: str) -> str:
    """Return the task file of a request; the first lines are comments on what the task lacks.

    Raises UsageError for an invalid request, an unknown launcher, or a container image that no registry has.
    """
    if to not in FORMATS:
        raise UsageError(f"--export {to}: unknown", f"use one of: {', '.join(FORMATS)}")
    job, notes = _job(request, here)
    if job.image == DEFAULT_IMAGE:
        hint = f"push it to a registry with docker push, and name it there: --image REGISTRY/{job.image}"
        raise UsageError(f"{job.image}: a rented machine cannot pull this container image", hint)
    if job.secrets:
        given = " ".join(f"--secret {name}" for name in job.secrets)
        notes.append(f"{', '.join(job.secrets)}: secrets, whose values come from your environment")
        notes += [f"  sky launch {given} FILE"] if to == "skypilot" else []
    if to == "skypilot" and job.device != "cpu":
        notes.append("accelerators: any of these GPUs will do; keep those that you want")
    if to == "dstack" and job.nodes > 1:
        notes.append("a task of several nodes needs a fleet with `placement: cluster`")
    keys = {key: value for key, value in FORMATS[to](job).items() if value not in ("", {}, [])}
    head = [f"Written by clusterctl. To run it: {_COMMANDS[to]}", *notes]
    return "".join(f"# {line}\n" for line in head) + yaml_text(keys)


def _job(request: Request, here: Here) -> tuple[Job, list[str]]:
    """Return the job without what a rented machine has no use for, and a sentence for each option left out."""
    fewest, most = node_range(request.nodes, 1)
    left_out = [option for option in declared(Request) if option.field not in _TAKEN_OVER | _IN_SECTIONS]
    given = [
        option for option in left_out if getattr(request, option.field) not in (option.default, "", None)
    ]
    notes = [f"not taken over: {option.flag}" for option in given]
    notes += [f"not taken over: --set {name}" for name in request.given_settings("", ())]
    if fewest < most:
        notes.append(f"not taken over: --nodes {request.nodes}, because the task always has {most} nodes")
    if request.max_restarts != 0 and not request.command:
        notes.append(
            "not taken over: restarts from the last checkpoint; keep ./runs on a volume or in a bucket for them"
        )
    defaults: dict[str, Any] = {name: getattr(Request(), name) for name in _IN_SECTIONS}
    defaults |= {option.field: option.default for option in left_out}
    device = "cpu" if request.device == "cpu" else "any"
    reduced = replace(request, **{**defaults, "nodes": str(most), "device": device})
    job, _ = resolver.job(reduced, here, _Rented(), {})
    return job, notes


def _torchrun(job: Job, variables: Mapping[str, str]) -> str:
    """Return the command that starts the ranks of a node."""
    options = [f'--{name} "{value}"' for name, value in variables.items()]
    options += [f"--nproc-per-node {job.most_procs}", f"--master-port {_PORT}"]
    return f"torchrun {' '.join(options)} {shlex.join(job.command)}"
