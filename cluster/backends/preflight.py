"""Preflight check: decides from the output of agent/check.sh whether the nodes can run a plan. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from cluster.agent import scripts
from cluster.errors import (
    ClusterError,
    GpusHeldError,
    LaunchError,
    NameTakenError,
    PortTakenError,
    UsageError,
)
from cluster.runtimes import ARCHITECTURES, DOCKER, NEWER_DRIVER, RUNTIMES, driver_problem, short_id
from cluster.spec.image import DEFAULT_IMAGE, how_to_get
from cluster.spec.model import Gpu, Machine, Plan
from cluster.transport.nvidia_smi import listed_gpus

#: The exit code of agent/start.sh and agent/compose_up.sh if another job holds a GPU.
GPUS_HELD = 74


def ids(gpus: Sequence[Gpu]) -> str:
    """Return the ids of GPUs, which a job locks: "0,1"."""
    return ",".join(map(str, gpus))


def command(plan: Plan, machine: Machine, **more: scripts.Value) -> list[str]:
    """Return the command that runs agent/check.sh on a machine; `more` are its other variables."""
    kind = RUNTIMES[machine.runtime]
    versions = kind.check(plan.job.image, plan.job.python, "-c", scripts.text("checks/versions.py"))
    where: dict[str, scripts.Value] = {
        "engine": kind.engine,
        "image": plan.job.image,
        "run_dir": machine.run_dir,
    }
    what = {"device": plan.job.device, "gpus": ids(plan.gpus_on(machine)), "python": plan.job.python}
    unless_given = {**dict.fromkeys(("new", "master", "port", "name"), ""), "needs": ()}
    values = {
        **where,
        **what,
        "versions": versions if plan.job.device == "cuda" else (),
        **unless_given,
        **more,
    }
    bash, option, text, name = scripts.command("check", **values)
    if lines := scripts.prologue(plan.job.prologue, 'echo "prologue $1"; exit 0'):
        text = f"{scripts.exports(plan.job.env)}\n{lines}{text}"
    return [bash, option, text, name]


def problems(plan: Plan, machine: Machine, report: Sequence[str]) -> list[UsageError]:
    """Return an error for each thing that a machine lacks."""
    where = machine.name
    python = plan.job.python
    errors = []
    for line in report:
        word, _, text = line.partition(" ")
        if word == "no_rsync" and plan.is_elsewhere(machine):
            why = "rsync is not installed, so the results cannot be fetched"
            hint = f"on {where}: apt-get install rsync"
        elif word == "run_dir":
            why = f"cannot write to the run directory {text}" + (
                "" if ": " in text else " (no space, or read-only)"
            )
            hint = f"in cluster.yaml, set run_dir of {where} to a folder that you can write to"
        elif word == "prologue":
            why = text
            hint = "correct --prologue, or prologue in the job file or cluster.yaml"
        elif word == "no_python":
            why = f"there is no program {python} to run the node with"
            hint = f"name a Python interpreter of {where}: --python PATH"
        elif word == "torch" and plan.job.says_ready:
            why = f"{python} has no torch, so it cannot run a node"
            hint = "in a clone of the repository: pip install '.[trainer]'"
        elif word == "no_runtime":
            why = f"{text} is not installed"
            hint = f"install it on {where}, or detect the runtime: clusterctl init"
        elif word == "engine":
            why = f"{machine.runtime} does not answer: {text}"
            hint = f"clusterctl doctor --only {where}"
            if "permission denied" in text:
                hint = f"on {where}: sudo usermod -aG {machine.runtime} $USER, then log in again"
        elif word == "image" and ARCHITECTURES.get(text.split()[2], text.split()[1]) != text.split()[1]:
            _, platform, own = text.split()
            why = f"{plan.job.image} is an image for {platform}, but the machine is {own}"
            hint = f"build it on such a machine, or name an image for {own}: --image NAME"
        elif word == "no_way":
            why = f"cannot reach the master at {text}"
            hint = "to see which addresses and ports work: clusterctl doctor"
        elif word == "no_image":
            why = f"no image {plan.job.image}"
            hint = "to copy it from this machine, add --push to the command"
            hint += f"; if this machine does not have it either: {how_to_get(plan.job.image, DOCKER.name)}"
            if plan.job.image != DEFAULT_IMAGE:
                hint += f"; or on {where}: {machine.runtime} pull {plan.job.image}"
        elif word == "missing":
            why = f"{text} does not exist"
            hint = machine.hint_for_missing(text)
        else:
            continue
        errors.append(UsageError(f"{where}: {why}", hint))
    return errors + (
        _gpu_problems(machine.name, plan.gpus_on(machine), report) if plan.job.device == "cuda" else []
    )


def _gpu_problems(where: str, gpus: Sequence[Gpu], report: Sequence[str]) -> list[UsageError]:
    """Return an error for each of these GPUs that nvidia-smi does not list, and for a driver that is too old."""
    text = "\n".join(line[7:] for line in report if line.startswith("listed "))
    listed = listed_gpus(text)
    here = ", ".join(map(str, listed)) or text.partition("\n")[0] or "none"
    hint = f"in cluster.yaml, correct gpus of {where}; or use --device cpu"
    absent = [gpu for gpu in gpus if gpu not in listed]
    errors = [UsageError(f"{where}: no GPU {gpu}: nvidia-smi lists {here}", hint) for gpu in absent]
    # In reverse, because Python imports the first of two packages.
    facts = dict(line.partition("=")[::2] for line in reversed(report))
    if "compat" not in facts and (why := driver_problem(facts.get("driver", ""), facts.get("cuda", ""))):
        errors.append(UsageError(f"{where}: {why}", f"on {where}: {NEWER_DRIVER}"))
    return errors


def different(plan: Plan, reports: Mapping[str, Sequence[str]]) -> dict[str, UsageError]:
    """Return an error for each node with another image than the first in `reports`."""
    images = {
        name: line.split()[1].removeprefix("sha256:")  # podman omits it
        for name, lines in reports.items()
        for line in lines
        if line.startswith("image ")
    }
    first, wanted = next(iter(images.items()), ("", ""))
    hint = "copy this machine's image to all of them: add --push to the command"
    errors = {}
    for name, image in images.items():
        if image != wanted:
            why = f"its image {plan.job.image} is {short_id(image)}, but on {first} it is {short_id(wanted)}"
            errors[name] = UsageError(f"{name}: {why}", hint)
    return errors


def conflicts(plan: Plan, machine: Machine, report: Sequence[str]) -> list[UsageError]:
    """Return an error for each thing there that another job or program has: the name, GPUs, the master's port."""
    where = machine.name
    errors: list[UsageError] = []
    for line in report:
        word, _, text = line.partition(" ")
        if word == "exists":
            hint = "choose another name: --name NAME"
            errors.append(NameTakenError(f"{where}: {text} already exists", hint))
        elif word == "runs":
            errors.append(name_taken(plan.job_id, where, text))
        elif word == "held" and (holder := text.split()[0]) != plan.job_id:
            errors.append(gpus_held(where, holder))
        elif word == "port":
            hint = "choose another port, or let clusterctl choose: --master-port auto"
            text = re.sub(r' users:\(\("([^"]*)",(pid=\d+).*', r" by \1 (\2)", text)  # as `ss` prints it
            errors.append(PortTakenError(f"{where}: port {plan.master_port} is {text}", hint))
    return errors


def name_taken(job_id: str, where: str, what: str) -> NameTakenError:
    """Return the error for a name in use: an engine has each only once, and people know jobs by them."""
    return NameTakenError(
        f"{where}: a job {job_id} already exists: {what}",
        "choose another name (--name NAME), stop that job where it was launched, or remove an orphan: clusterctl gc",
    )


def gpus_held(where: str, job: str) -> GpusHeldError:
    """Return the error for a node whose GPUs another job holds."""
    return GpusHeldError(
        f"{where}: job {job} is using its GPUs",
        "wait for them by adding --wait 2h, or choose other machines: --only a,b",
    )


def lost_race(plan: Plan, where: str, job: str) -> ClusterError:
    """Return the error for a node whose GPUs another job has taken since the preflight check."""
    if job == plan.job_id:  # of another launcher: its folders on the node are not this launcher's
        return LaunchError(
            f"{where}: another job named {job} is using its GPUs", "choose another name: --name NAME"
        )
    return gpus_held(where, job)


def refuse(errors: Sequence[UsageError]) -> None:
    """Raise the errors of all nodes as one: the problems, else the conflicts of one kind. A taken port comes last."""
    for kind in (UsageError, NameTakenError, GpusHeldError, PortTakenError):
        if of_kind := [error for error in errors if type(error) is kind]:
            messages = dict.fromkeys(error.message for error in of_kind)
            hints = dict.fromkeys(error.hint for error in of_kind if error.hint)
            raise kind("\n       ".join(messages), "\n      ".join(hints))
