"""`clusterctl launch` and `clusterctl plan`."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.backends import BACKENDS
from cluster.cli import options, streams
from cluster.cli.console import console, print_line
from cluster.cli.follow import follow, leave_behind, stop_interrupted
from cluster.cli.options import LaunchOptions
from cluster.cli.signals import hung_up, interrupted, on_interrupt
from cluster.errors import UsageError, printable
from cluster.spec.request import Request, option

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.spec.model import Job, JobRecord, Plan, Step
    from cluster.store import JobStore
    from cluster.supervisor.launcher import Launcher, Target

_VARIABLE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


@dataclass(frozen=True)
class _Prepared:
    """What `launch` and `plan` make of their options before they differ.

    `options` are merged from the job file and the command line. `jobs` are one, or those of an array. `in_file`
    are the secrets of --env-file, and `notes` are for the user.
    """

    options: LaunchOptions
    target: Target
    jobs: list[Job]
    in_file: Mapping[str, str]
    notes: list[str]

    @property
    def request(self) -> Request:
        """The request, with the names of the secrets in --env-file."""
        return _with_secrets(self.options, self.in_file)


def _prepare(given: LaunchOptions) -> _Prepared:
    """Return where a launch runs its jobs, and the jobs. Raise UsageError for invalid options."""
    from cluster.supervisor import launcher

    in_file = read_secrets(given.env_file)
    request = _with_secrets(given, in_file)
    target = launcher.choose_target(request, given.load(backend=given.backend))
    if given.array:
        jobs, notes = _array_jobs(given.array, request, target)
    else:
        job, notes = target.job(request)
        jobs = [job]
    return _Prepared(given, target, jobs, in_file, notes)


def _with_secrets(given: LaunchOptions, in_file: Mapping[str, str]) -> LaunchOptions:
    return replace(given, env=[*given.env, *in_file])


def _array_jobs(path: str, request: Request, target: Target) -> tuple[list[Job], list[str]]:
    """Return the jobs NAME-0, NAME-1, ... of an array, one for each line of a file, and notes.

    Raises UsageError with the number of a bad line, or for a backend without job arrays.
    """
    from cluster.spec.shell_words import split

    base, notes = target.job(request)
    BACKENDS[target.backend].refuse("--array", BACKENDS)
    jobs: list[Job] = []
    hint = "write one line of arguments per job"
    for number, line in enumerate(options.read_text(path, "--array ", hint).splitlines(), 1):
        words = split(line, f"{path}:{number}", comments=True)
        if not words:
            continue
        one = replace(request, name=f"{base.name}-{len(jobs)}")
        if request.command:
            one = replace(one, command=f"{request.command} {shlex.join(words)}")
        else:
            one = replace(one, arguments=[*request.arguments, *words])
        job, _ = target.job(one)
        jobs.append(job)
    if not jobs:
        raise UsageError(f"--array {path}: the file has no arguments", hint)
    return jobs, notes


@options.takes_options
def launch(
    *,
    context: typer.Context,
    given: LaunchOptions,
    logs: options.Logs = "master",
    detach: Annotated[
        bool,
        options.flag(
            "Return once all nodes have started; a background process restarts the job after failures.",
            "--detach",
            "-d",
        ),
    ] = False,
    wait: Annotated[
        str,
        option(
            metavar="TIME", help="Wait up to TIME (90s, 30m, 2h) for free GPUs, first come, first served."
        ),
    ] = "",
    push: Annotated[
        bool, options.flag("First copy the container image to the nodes that lack it.", "--push")
    ] = False,
) -> None:
    """Start a job on all nodes and follow its log until it ends. Ctrl-C stops the job on every node.

    Describe the job by options, by a job file, or by both; an option overrides the key of the job file.

    Exit codes: 0 done, 1 failed, 2 invalid request, 3 a node could not be started, 4 nodes did not join in time, 5 a
    machine or its Docker Engine does not answer (the job may still be running: clusterctl attach), 129 the terminal or
    the pipe was closed (the job continues), 130 interrupted.
    """
    from cluster.spec.duration import seconds
    from cluster.store import JobStore
    from cluster.supervisor import launcher

    wait_s = seconds(wait, "--wait") if wait else None
    prepared = _prepare(options.with_job_file(context, given))
    backend = BACKENDS[prepared.target.backend]
    first, *_ = prepared.jobs
    records = JobStore()
    out = console()
    if wait:
        backend.refuse("--wait", BACKENDS)
    secrets = secret_values(first.secrets, prepared.in_file)
    env_file = prepared.options.env_file
    withheld = (os.path.abspath(env_file),) if env_file else ()  # noqa: PTH100 (resolve() would follow links)
    starter = launcher.Launcher(records, secrets, withheld, prepared.options.send_secrets)
    if prepared.options.array:
        _submit_array(prepared, starter, out)
        return
    _provide_image(prepared, push, out)
    how = "clusterctl stop JOB (to list jobs: clusterctl ps --all)"
    on_interrupt(out, f"exited before the job stopped; to stop it: {how}")
    notes = [
        *prepared.notes,
        *launcher.visible_secrets(secrets),
        *launcher.unusable_spares(first, backend.name),
    ]
    try:
        record, more = _start(prepared, starter, wait_s, out)
        notes += [*more, *_save(prepared, record)]
        if detach:
            _leave(record, records, secrets, notes, out)
            return
        notes.append("")
        code = follow(record, records, out, logs, stop_on_interrupt=True, notes=notes, secrets=secrets)
    except KeyboardInterrupt:
        _interrupt(starter)
        raise typer.Exit(interrupted()) from None
    raise typer.Exit(code)


def _submit_array(prepared: _Prepared, starter: Launcher, out: Console) -> None:
    """Submit the jobs of an array, and print how to list them."""
    from cluster.supervisor import launcher

    submitted = starter.launch_array(prepared.jobs, prepared.target.backend, prepared.options.array_limit)
    notes = [*prepared.notes, *launcher.visible_secrets(starter.secrets)]
    notes += BACKENDS[prepared.target.backend].notes(prepared.jobs[0])
    first = submitted[0].plan.job_id
    last = submitted[-1].plan.job_id
    print_line(
        out, *notes, f"submitted {len(submitted)} jobs: {first} to {last}; to list them: clusterctl ps"
    )


def _provide_image(prepared: _Prepared, push: bool, out: Console) -> None:
    """Build the container image, and copy it to the nodes, if the options say so."""
    (job,) = prepared.jobs
    build = prepared.options.build
    in_containers = [node for node in (*job.hosts, *job.spares) if node.in_container]
    if build:
        from cluster.images import engine

        engine.build(build, job.image)
    if push:
        BACKENDS[prepared.target.backend].refuse("--push", BACKENDS)
        if not in_containers:
            raise UsageError("--push: no remote node of this job needs the image", "omit it")
    if in_containers and (push or build):
        from cluster.cli.image import push_to
        from cluster.transport import parallel

        parallel.together(push_to(in_containers, job.image, out))


def _start(
    prepared: _Prepared, starter: Launcher, wait_s: float | None, out: Console
) -> tuple[JobRecord, list[str]]:
    """Start the job, with `wait_s` once its turn for GPUs has come. Return its record, and notes."""
    from cluster.cli.sync import progress
    from cluster.supervisor import gpu_queue

    (job,) = prepared.jobs
    with progress(console(stderr=True)) as starter.report:
        if wait_s is not None:
            say = functools.partial(print_line, out)
            return gpu_queue.launch_in_turn(starter, prepared.request, prepared.target, wait_s, say)
        return starter.launch(job, prepared.target.backend, numbered=not prepared.options.name)


def _save(prepared: _Prepared, record: JobRecord) -> list[str]:
    """Write job.yaml into the run directory. Return the problem if that is not possible: the job runs."""
    # Without the name, because a job that repeats it needs another.
    text = job_yaml(replace(prepared.options, name=""), prepared.target)
    try:
        _write({Path(record.plan.run_dir, "job.yaml"): text}, quiet=True)
    except UsageError as error:
        return [error.message]
    return []


def _leave(
    record: JobRecord, records: JobStore, secrets: Mapping[str, str], notes: list[str], out: Console
) -> None:
    """Leave a job to a background process, and print how to follow it."""
    from cluster.cli.display import header

    problems = leave_behind(record, records, secrets)
    attach = f"clusterctl attach {record.plan.job_id}"
    print_line(out, header(record.plan), *notes, *problems, f"running; to follow it: {attach}")


def _interrupt(starter: Launcher) -> None:
    """Stop a job after Ctrl-C; leave it to a background process if the terminal was closed."""
    started = starter.started
    records = starter.records
    out = console(stderr=streams.is_closed())
    if started and hung_up() and not records.load(started.plan.job_id).outcome:
        job_id = started.plan.job_id
        problems = leave_behind(started, records, starter.secrets)
        print_line(out, *problems, f"detached; {job_id} keeps running. To stop it: clusterctl stop {job_id}")
        return
    if started:
        stop_interrupted(started, records, out)
    print_line(out, "Stopped. No processes remain.")


@options.takes_options
def plan(
    *,
    context: typer.Context,
    given: LaunchOptions,
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", help="Write the plan to this file, or into this folder if it has several files."
        ),
    ] = "",
    agent: Annotated[
        bool,
        options.flag(
            "Write agent.pyz, the program that starts the ranks on a node, to -o or a pipe.", "--agent"
        ),
    ] = False,
    save: Annotated[
        str, option(metavar="FILE", help="Write the options to a job file instead of printing a plan.")
    ] = "",
    export: Annotated[
        str,
        option(metavar="skypilot|dstack", help="Print a task file for SkyPilot or dstack instead of a plan."),
    ] = "",
    schema: Annotated[
        bool, options.flag("Print the JSON Schema of job files, for editors.", "--schema")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Print the files and commands of a launch without launching anything."""
    if agent:
        _write_agent(output)
        return
    if schema:
        from cluster.spec import job_file

        print(json.dumps(job_file.json_schema(BACKENDS), indent=1))
        return
    complete = options.with_job_file(context, given)
    if export:
        _print(_exported(complete, export), output)
        return
    if output and as_json and not save:
        raise UsageError("--json and -o cannot be used together", f"clusterctl plan --json ... > {output}")
    prepared = _prepare(complete)
    if save:
        _write({Path(save): job_yaml(prepared.options, prepared.target)})
        return
    plans, steps = _plans(prepared)
    for note in prepared.notes:
        print(printable(note), file=sys.stderr)
    if as_json:
        values = [asdict(job_plan) for job_plan in plans]
        print(
            json.dumps(
                {"array": asdict(steps[0]), "plans": values} if complete.array else values[0], indent=1
            )
        )
        return
    agents = list(dict.fromkeys(step.agent for step in steps if step.agent))
    _describe_agents(agents)
    if output:
        # With nodes on this machine alone, the plan's files can then be run by hand.
        is_here = not any(machine.login for machine in plans[0].machines)
        _write_plan(steps, agents if is_here else [], output, is_array=bool(complete.array))
    else:
        _print_plan(steps)


def _write_agent(output: str) -> None:
    """Write the agent's archive to a file, or to a pipe."""
    from cluster.agent import scripts

    if output:
        _write({Path(output): scripts.archive()})
    elif sys.stdout.isatty():
        hint = "clusterctl plan --agent -o agent.pyz; python3 -m zipfile -e agent.pyz FOLDER shows its source"
        raise UsageError("--agent: an archive cannot be printed on a terminal", hint)
    else:
        sys.stdout.buffer.write(scripts.archive())


def _exported(given: LaunchOptions, to: str) -> str:
    """Return the task file of another launcher."""
    from cluster.spec import exporters
    from cluster.supervisor import launcher

    request = _with_secrets(given, read_secrets(given.env_file))
    return exporters.export(request, launcher.local_machine(replace(request, device="cpu")), to)


def _print(text: str, output: str) -> None:
    """Print a text, or write it to a file if one is named."""
    if output:
        _write({Path(output): text})
    else:
        print(text, end="")


def _plans(prepared: _Prepared) -> tuple[list[Plan], list[Step]]:
    """Return the plans of the jobs, and all steps. The first step of an array submits it."""
    from cluster.supervisor import launcher

    if not prepared.options.array:
        (job,) = prepared.jobs
        made = launcher.plan(job, prepared.target.backend)
        return [made], [*made.steps]
    plans, submission = launcher.array_plan(
        prepared.jobs, prepared.target.backend, prepared.options.array_limit
    )
    return plans, [submission, *(step for made in plans for step in made.steps)]


def _describe_agents(paths: Sequence[str]) -> None:
    """Print where the agent will be, and how to see it."""
    from cluster.agent import scripts

    digest = hashlib.sha256(scripts.archive()).hexdigest()[:12] if paths else ""
    for path in paths:
        print(
            f"the agent: {path} (sha256 {digest}; clusterctl plan --agent -o FILE writes it)", file=sys.stderr
        )


def _write_plan(steps: Sequence[Step], agents: Sequence[str], output: str, *, is_array: bool) -> None:
    """Write the files of a plan into the folder `output`, or a single one to that path, and the agents to theirs."""
    from cluster.agent import scripts

    files = [(step, path, text) for step in steps for path, text in step.files.items()]
    texts: dict[Path, str | bytes] = {}
    for step, path, text in files:
        # The scripts of an array's jobs have one name, in folders of their own.
        name = f"{Path(path).parts[-3]}.sbatch" if is_array and step.agent else Path(path).name
        texts[Path(output) if len(files) == 1 else Path(output, name)] = text
    _write(texts | {Path(path): scripts.archive() for path in agents})


def _print_plan(steps: Sequence[Step]) -> None:
    """Print the files of a plan, each below its path if there are several."""
    files = [(step, path, text) for step in steps for path, text in step.files.items()]
    for step, path, text in files:
        if len(files) > 1:
            print(f"# ---- {step.place}: {path}")
        print(text, end="" if text.endswith("\n") else "\n")


def job_yaml(given: LaunchOptions, target: Target) -> str:
    """Return the job file of these options, with absolute paths, so that it works from every folder."""
    from cluster.spec.job_text import write
    from cluster.spec.resolver import absolute_paths
    from cluster.spec.traits import on_this_machine
    from cluster.transport.discovery import DEFAULT_FILE

    inventory = ""
    if not (on_this_machine(given.backend, BACKENDS) or given.hosts or given.hostfile):
        inventory = given.inventory or (DEFAULT_FILE if Path(DEFAULT_FILE).exists() else "")
    with_paths = replace(
        absolute_paths(given, target.here),
        inventory=_absolute(inventory),
        hostfile=_absolute(given.hostfile),
        ssh_config=_absolute(given.ssh_config),
        env_file=_absolute(given.env_file),
    )
    return write(with_paths, target.backend, BACKENDS)


def _absolute(path: str) -> str:
    """Return the absolute path of a file, "" for none. A link is not followed: it may later lead elsewhere."""
    return path and os.path.abspath(Path(path).expanduser())  # noqa: PTH100


def _write(texts: Mapping[Path, str | bytes], *, quiet: bool = False) -> None:
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode() if isinstance(text, str) else text)
        except OSError as error:
            raise UsageError(
                f"{path}: cannot be written: {error.strerror}", "name another file: -o FILE"
            ) from error
    if not quiet:
        print(f"wrote {', '.join(map(str, texts))}", file=sys.stderr)


def read_secrets(path: str) -> dict[str, str]:
    """Return the NAME=VALUE lines of a file ("": none). Quotes around a whole value are removed.

    Raise UsageError if a line is malformed. The message has its number, not its text.
    """
    values = {}
    for number, line in enumerate(options.read_text(path, "--env-file ").splitlines() if path else (), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _VARIABLE.fullmatch(line.strip())
        if match is None:
            hint = "write one NAME=VALUE per line; lines that begin with # are comments"
            raise UsageError(f"--env-file {path}, line {number}: not NAME=VALUE", hint)
        value = match[2]
        values[match[1]] = (
            value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
        )
    return values


def secret_values(names: Sequence[str], in_file: Mapping[str, str]) -> dict[str, str]:
    """Return the value of each name from the file, or else from the environment. Raise UsageError if one is not set."""
    values = {**os.environ, **in_file}
    for name in names:
        if name not in values:
            hint = f"set it (export {name}=...), or put it in a file of secrets: --env-file FILE"
            raise UsageError(f"{name}: this variable is not set in your environment", hint)
        if not values[name].isascii() and os.fsencode(values[name]).decode(errors="ignore") != values[name]:
            raise UsageError(
                f"--env {name}: the value of {name} is not UTF-8", "encode it, for example in base64"
            )
    return {name: values[name] for name in names}
