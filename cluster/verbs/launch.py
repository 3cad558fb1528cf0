"""`clusterctl launch` and `plan`: from the options to a job."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cluster.errors import UsageError
from cluster.verbs.follow import console, end, follow, header, on_interrupt, say
from cluster.verbs.options import (
    ArrayOptions,
    AsJson,
    JobOptions,
    Logs,
    NodeOptions,
    SlurmOptions,
    every_log,
    option,
    takes_options,
)


@takes_options
def launch(
    *,
    options: JobOptions,
    inventory: NodeOptions,
    slurm: SlurmOptions,
    array: ArrayOptions,
    logs: Logs = "master",
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the nodes are started.")] = False,
    push: Annotated[bool, typer.Option("--push", help="First send the image to the nodes that have not ours.")] = False,
) -> None:
    """Start a job, wait until all nodes have met, stream its log until it ends.

    Ctrl-C stops the job on every node.

    Exit codes: 0 done, 1 failed, 2 wrong request, 3 could not be started, 4 nodes did not come, 5 a machine or engine
    does not answer (the job may go on: attach), 130 interrupted.
    """
    from cluster import commands, secrets
    from cluster.records import Records

    all_nodes = every_log(logs)
    file_secrets = secrets.read(options.env_file)
    request = options.request(slurm, env_names=tuple(file_secrets))
    machines = inventory.load(backend=options.backend)
    if array.array:
        jobs, notes = array.jobs(request, options, machines)
        values = secrets.values(jobs[0].secrets, file_secrets)
        made = commands.launch_array(jobs, Records(), array.array_limit, values)
        first, last = made[0].plan.job_id, made[-1].plan.job_id
        for text in (*notes, f"submitted {len(made)} jobs: {first} to {last}; see them with: clusterctl ps"):
            say(console(), text)
        return
    job, chosen, notes = commands.resolve(request, options.nodes, options.backend, machines)
    if push and job.queue:
        raise UsageError("--push: the nodes of a Slurm cluster take the image from its disk", "clusterctl image sif")
    values = secrets.values(job.secrets, file_secrets)
    records = Records()
    out = console()
    in_containers = [node for node in (*job.hosts, *job.spares) if node.runtime != "none"]
    if push and not in_containers:
        raise UsageError("--push: no other machine of this job runs containers", "leave it out")
    if push:
        from cluster.verbs.image import bring

        bring(in_containers, job.image, out)
    # before there is anything to stop
    on_interrupt(out, "left while stopping; finish it with: clusterctl stop JOB (clusterctl ps --all names it)")
    notes += commands.unfit_spares(job, chosen)
    record = commands.launch(job, chosen, records, numbered=not options.name, secrets=values)
    if detach:
        for text in (header(record.plan), *notes, f"running; see it with: clusterctl attach {record.plan.job_id}"):
            say(out, text)
        return
    watched, refused = follow(record, records, out, all_nodes=all_nodes, stops=True, notes=[*notes, ""], values=values)
    raise typer.Exit(end(watched, refused, records, out))


@takes_options
def plan(
    *,
    options: JobOptions,
    inventory: NodeOptions,
    slurm: SlurmOptions,
    array: ArrayOptions,
    build: Annotated[str, option("--build", help="A folder that `docker compose` builds the image from.")] = "",
    output: Annotated[str, typer.Option("--output", "-o", help="Write it to this file (a folder for several).")] = "",
    agent: Annotated[
        bool, typer.Option("--agent", help="Print the agent, the program that starts a node's ranks.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print what launch would do, node by node, and do nothing."""
    from cluster import commands, resources, secrets

    if agent:
        print(resources.text("agent/agent.py"), end="")
        return
    if output and as_json:
        raise UsageError("--json and -o exclude each other", f"clusterctl plan --json ... > {output}")
    request = options.request(slurm, build=build, env_names=tuple(secrets.read(options.env_file)))
    machines = inventory.load(backend=options.backend)
    if array.array:
        jobs, notes = array.jobs(request, options, machines)
        plans, step = commands.array_plan(jobs, array.array_limit)
        steps = (step, *(each for made in plans for each in made.steps))
    else:
        job, chosen, notes = commands.resolve(request, options.nodes, options.backend, machines)
        plans = [commands.plan(job, chosen)]
        steps = plans[0].steps
    for note in notes:
        print(note, file=sys.stderr)
    if as_json:
        found = [asdict(made) for made in plans]
        print(json.dumps({"array": asdict(steps[0]), "plans": found} if array.array else found[0], indent=1))
        return
    for path in dict.fromkeys(step.agent for step in steps if step.agent):
        digest = resources.digest("agent/agent.py")
        print(f"the agent: {path} (sha256 {digest}; clusterctl plan --agent prints it)", file=sys.stderr)
    files = [(step, path, text) for step in steps for path, text in step.files.items()]
    if output:
        named = [
            (f"{Path(path).parts[-3]}.sbatch" if array.array and step.agent else path, text)
            for step, path, text in files
        ]
        _write_plan(Path(output), [(Path(path).name, text) for path, text in named])
        if not any(node.login for node in plans[0].nodes):
            for agent_path in dict.fromkeys(step.agent for step in steps if step.agent):
                _write_agent(agent_path)
        return
    for step, path, text in files:
        if len(files) > 1:
            print(f"# ---- {step.place}: {path}")
        print(text, end="" if text.endswith("\n") else "\n")


def _write_agent(path: str) -> None:
    """Put the agent where the plan expects it, so that what was written can be run by hand."""
    from cluster import resources

    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(resources.text("agent/agent.py"), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "write it there: clusterctl plan --agent > FILE") from error
    print(f"wrote {path}", file=sys.stderr)


def _write_plan(output: Path, files: list[tuple[str, str]]) -> None:
    targets = [output] if len(files) == 1 else [output / name for name, _ in files]
    try:
        if len(files) > 1:
            output.mkdir(parents=True, exist_ok=True)
        for target, (_, text) in zip(targets, files, strict=True):
            target.write_text(text)
    except OSError as error:
        raise UsageError(f"-o {output}: {error.strerror}", "name a file in a folder that is there") from error
    print(f"wrote {', '.join(str(target) for target in targets)}", file=sys.stderr)
