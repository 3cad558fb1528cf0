"""`clusterctl launch` and `clusterctl plan`."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from cluster.backends import BACKENDS
from cluster.cli import options, streams
from cluster.cli.console import console, print_line
from cluster.cli.follow import follow, leave_behind, stop_interrupted
from cluster.cli.signals import hung_up, interrupted, on_interrupt
from cluster.errors import UsageError, printable
from cluster.spec.request import Request, option

_VARIABLE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


@options.takes_options
def launch(
    *,
    context: typer.Context,
    request: Request,
    inventory: options.NodeOptions,
    array: options.ArrayOptions,
    env_file: options.EnvFile = "",
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
        str, option(metavar="TIME", help="Wait up to TIME (90s, 30m, 2h) for free GPUs, first come, first served.")
    ] = "",
    push: Annotated[bool, options.flag("First copy the container image to the nodes that lack it.", "--push")] = False,
) -> None:
    """Start a job on all nodes and follow its log until it ends. Ctrl-C stops the job on every node.

    Describe the job by options, by a job file, or by both; an option overrides the key of the job file.

    Exit codes: 0 done, 1 failed, 2 invalid request, 3 a node could not be started, 4 nodes did not join in time, 5 a
    machine or its Docker Engine does not answer (the job may still be running: clusterctl attach), 129 the terminal or
    the pipe was closed (the job continues), 130 interrupted.
    """
    from cluster.cli.sync import progress
    from cluster.spec.duration import seconds
    from cluster.store import JobStore
    from cluster.supervisor import gpu_queue, launcher

    wait_s = seconds(wait, "--wait") if wait else 0.0
    request, inventory, array, env_file = options.with_job_file(context, request, inventory, array, env_file)
    machines = inventory.load(backend=request.backend)
    backend, _ = launcher.choose_backend(request.backend, machines)
    # without the name, because a job that repeats it needs another
    saved = job_text(replace(request, name=""), backend, inventory, env_file)
    in_file = read_secrets(env_file)
    request = replace(request, env=[*request.env, *in_file])
    records, out = JobStore(), console()
    without = (os.path.abspath(env_file),) if env_file else ()  # noqa: PTH100 (resolve() would follow links)
    if array.array:
        jobs, chosen, notes = array.jobs(request, machines)
        if wait:
            BACKENDS[chosen].refuse("--wait", BACKENDS)
        starter = launcher.Launcher(records, secret_values(jobs[0].secrets, in_file), without, request.send_secrets)
        notes += launcher.visible_secrets(starter.secrets)
        submitted = starter.launch_array(jobs, chosen, array.array_limit)
        notes += BACKENDS[chosen].notes(jobs[0])
        first, last = submitted[0].plan.job_id, submitted[-1].plan.job_id
        print_line(out, *notes, f"submitted {len(submitted)} jobs: {first} to {last}; to list them: clusterctl ps")
        return
    job, chosen, notes = launcher.resolve(request, machines)
    starter = launcher.Launcher(records, secret_values(job.secrets, in_file), without, request.send_secrets)
    in_containers = [node for node in (*job.hosts, *job.spares) if node.in_container]
    if request.build:
        from cluster.images import engine

        engine.build(request.build, job.image)
    if push:
        BACKENDS[chosen].refuse("--push", BACKENDS)
    if push and not in_containers:
        raise UsageError("--push: no remote node of this job needs the image", "omit it")
    if in_containers and (push or request.build):
        from cluster.cli.image import push_to
        from cluster.transport import parallel

        parallel.together(push_to(in_containers, job.image, out))
    how = "clusterctl stop JOB (to list jobs: clusterctl ps --all)"
    on_interrupt(out, f"exited before the job stopped; to stop it: {how}")
    notes += launcher.visible_secrets(starter.secrets)
    notes += launcher.unusable_spares(job, chosen)
    try:
        with progress(console(stderr=True)) as starter.report:
            if wait:
                say = functools.partial(print_line, out)
                record, more = gpu_queue.launch_in_turn(starter, request, machines, wait_s, say)
            else:
                record, more = starter.launch(job, chosen, numbered=not request.name)
        notes += more
        try:
            _write({Path(record.plan.run_dir, "job.yaml"): saved}, quiet=True)
        except UsageError as error:  # the job runs
            notes.append(error.message)
        if detach:
            from cluster.cli.display import header

            notes += leave_behind(record, records, starter.secrets)
            attach = f"clusterctl attach {record.plan.job_id}"
            print_line(out, header(record.plan), *notes, f"running; to follow it: {attach}")
            return
        notes.append("")
        code = follow(record, records, out, logs, stop_on_interrupt=True, notes=notes, secrets=starter.secrets)
    except KeyboardInterrupt:
        started, out = starter.started, console(stderr=streams.is_closed())
        if started and hung_up() and not records.load(started.plan.job_id).outcome:
            problems, job_id = leave_behind(started, records, starter.secrets), started.plan.job_id
            print_line(out, *problems, f"detached; {job_id} keeps running. To stop it: clusterctl stop {job_id}")
            raise typer.Exit(interrupted()) from None
        if started:
            stop_interrupted(started, records, out)
        print_line(out, "Stopped. No processes remain.")
        raise typer.Exit(interrupted()) from None
    raise typer.Exit(code)


@options.takes_options
def plan(
    *,
    context: typer.Context,
    request: Request,
    inventory: options.NodeOptions,
    array: options.ArrayOptions,
    env_file: options.EnvFile = "",
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", help="Write the plan to this file, or into this folder if it has several files."
        ),
    ] = "",
    agent: Annotated[
        bool, options.flag("Write agent.pyz, the program that starts the ranks on a node, to -o or a pipe.", "--agent")
    ] = False,
    save: Annotated[
        str, option(metavar="FILE", help="Write the options to a job file instead of printing a plan.")
    ] = "",
    export: Annotated[
        str,
        option(metavar="skypilot|dstack", help="Print a task file for SkyPilot or dstack instead of a plan."),
    ] = "",
    schema: Annotated[bool, options.flag("Print the JSON Schema of job files, for editors.", "--schema")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Print the files and commands of a launch, node by node, without launching anything."""
    from cluster.agent import scripts
    from cluster.supervisor import launcher

    if agent:
        if output:
            _write({Path(output): scripts.archive()})
        elif sys.stdout.isatty():
            hint = "clusterctl plan --agent -o agent.pyz; python3 -m zipfile -e agent.pyz FOLDER shows its source"
            raise UsageError("--agent: an archive cannot be printed on a terminal", hint)
        else:
            sys.stdout.buffer.write(scripts.archive())
        return
    if schema:
        from cluster.spec import job_file

        print(json.dumps(job_file.json_schema(BACKENDS), indent=1))
        return
    request, inventory, array, env_file = options.with_job_file(context, request, inventory, array, env_file)
    if save:
        _, chosen, _ = launcher.resolve(request, inventory.load(backend=request.backend))  # refuses a wrong option
        _write({Path(save): job_text(request, chosen, inventory, env_file)})
        return
    if export:
        from cluster.spec import exporters

        secrets = list(read_secrets(env_file))
        request = replace(request, env=[*request.env, *secrets])
        text = exporters.export(request, launcher.local_machine(replace(request, device="cpu")), export)
        if output:
            _write({Path(output): text})
        else:
            print(text, end="")
        return
    if output and as_json:
        raise UsageError("--json and -o cannot be used together", f"clusterctl plan --json ... > {output}")
    request = replace(request, env=[*request.env, *read_secrets(env_file)])
    machines = inventory.load(backend=request.backend)
    if array.array:
        jobs, chosen, notes = array.jobs(request, machines)
        plans, submission = launcher.array_plan(jobs, chosen, array.array_limit)
        steps = (submission, *(step for job_plan in plans for step in job_plan.steps))
    else:
        job, chosen, notes = launcher.resolve(request, machines)
        plans = [launcher.plan(job, chosen)]
        steps = plans[0].steps
    for note in notes:
        print(printable(note), file=sys.stderr)
    if as_json:
        values = [asdict(job_plan) for job_plan in plans]
        print(json.dumps({"array": asdict(steps[0]), "plans": values} if array.array else values[0], indent=1))
        return
    agents = list(dict.fromkeys(step.agent for step in steps if step.agent))
    digest = hashlib.sha256(scripts.archive()).hexdigest()[:12]
    for path in agents:
        print(f"the agent: {path} (sha256 {digest}; clusterctl plan --agent -o FILE writes it)", file=sys.stderr)
    files = [(step, path, text) for step in steps for path, text in step.files.items()]
    if output:
        texts: dict[Path, str | bytes] = {}
        for step, path, text in files:
            # The scripts of an array's jobs have one name, in folders of their own.
            name = f"{Path(path).parts[-3]}.sbatch" if array.array and step.agent else Path(path).name
            texts[Path(output) if len(files) == 1 else Path(output, name)] = text
        if not any(each.login for each in plans[0].machines):  # the plan's files can then be run by hand
            texts |= {Path(path): scripts.archive() for path in agents}
        _write(texts)
        return
    for step, path, text in files:
        if len(files) > 1:
            print(f"# ---- {step.place}: {path}")
        print(text, end="" if text.endswith("\n") else "\n")


def job_text(request: Request, backend: str, inventory: options.NodeOptions, env_file: str) -> str:
    """Return the job file of these options, with absolute paths, so that it works from every folder."""
    from cluster.spec.job_text import write
    from cluster.spec.resolver import absolute_paths
    from cluster.spec.traits import on_this_machine
    from cluster.supervisor import launcher

    more = {key: str(getattr(inventory, key)) for key in ("hosts", "hostfile", "ssh_config", "only")}
    more |= {"inventory": "", "env_file": env_file}
    if not (on_this_machine(request.backend, BACKENDS) or more["hosts"] or more["hostfile"]):
        more["inventory"] = inventory.inventory or ("cluster.yaml" if Path("cluster.yaml").exists() else "")
    for key in ("inventory", "hostfile", "ssh_config", "env_file"):
        more[key] = more[key] and os.path.abspath(Path(more[key]).expanduser())  # noqa: PTH100
    here = launcher.local_machine(replace(request, device="cpu"))
    return write(absolute_paths(request, here), backend, more, BACKENDS)


def _write(texts: Mapping[Path, str | bytes], *, quiet: bool = False) -> None:
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode() if isinstance(text, str) else text)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror}", "name another file: -o FILE") from error
    if not quiet:
        print(f"wrote {', '.join(map(str, texts))}", file=sys.stderr)


def read_secrets(path: str) -> dict[str, str]:
    """Return the NAME=VALUE lines of a file ("": none). Quotes around a whole value are removed.

    Raise UsageError if a line is malformed. The message has its number, not its text.
    """
    found = {}
    for number, line in enumerate(options.read_text(path, "--env-file ").splitlines() if path else (), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _VARIABLE.fullmatch(line.strip())
        if match is None:
            hint = "write one NAME=VALUE per line; lines that begin with # are comments"
            raise UsageError(f"--env-file {path}, line {number}: not NAME=VALUE", hint)
        value = match[2]
        found[match[1]] = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    return found


def secret_values(names: Sequence[str], in_file: Mapping[str, str]) -> dict[str, str]:
    """Return the value of each name from the file, or else from the environment. Raise UsageError if one is not set."""
    found = {**os.environ, **in_file}
    for name in names:
        if name not in found:
            hint = f"set it (export {name}=...), or put it in a file of secrets: --env-file FILE"
            raise UsageError(f"--env {name}: {name} is not set in your environment", hint)
        if not found[name].isascii() and os.fsencode(found[name]).decode(errors="ignore") != found[name]:
            raise UsageError(f"--env {name}: the value of {name} is not UTF-8", "encode it, for example in base64")
    return {name: found[name] for name in names}
