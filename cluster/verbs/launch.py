"""`clusterctl launch` and `plan`: from the options to a job."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from cluster.config import Request
from cluster.errors import UsageError
from cluster.verbs import options
from cluster.verbs.follow import console, end, follow, header, on_interrupt, say


def launch(
    arguments: options.Arguments = [],  # noqa: B006 (typer reads the default and never changes it)
    nodes: options.Nodes = "",
    gpus: options.Gpus = 1,
    backend: options.BackendName = "auto",
    inventory: options.InventoryFile = "",
    hosts: options.Hosts = "",
    hostfile: options.Hostfile = "",
    ssh_config: options.SshConfig = "",
    only: options.Only = "",
    name: options.Name = "",
    device: options.DeviceName = "auto",
    image: options.Image = "",
    user: options.User = "",
    run_root: options.RunRoot = "",
    command: options.Command = "",
    env: options.Env = [],  # noqa: B006
    mounts: options.Mounts = [],  # noqa: B006
    master_port: options.Port = "auto",
    timeout_s: options.Timeout = 300.0,
    env_file: options.EnvFile = "",
    python: options.Python = "",
    spares: options.Spares = 0,
    max_restarts: options.MaxRestarts = None,
    stall_timeout_s: options.StallTimeout = 300.0,
    partition: options.Partition = "",
    account: options.Account = "",
    qos: options.Qos = "",
    time_limit: options.Time = "",
    slurm: options.Slurm = [],  # noqa: B006
    logs: Annotated[str, typer.Option("--logs", help="Show the log of: master, all.")] = "master",
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

    all_nodes = options.every_log(logs)
    request = Request(
        gpus=gpus,
        name=name,
        device=device,
        image=image,
        user=user,
        run_root=run_root,
        command=command,
        arguments=tuple(arguments),
        env=tuple(env),
        mounts=tuple(mounts),
        master_port=master_port,
        timeout_s=timeout_s,
        python=python,
        spares=spares,
        max_restarts=max_restarts,
        stall_timeout_s=stall_timeout_s,
        slurm=options.for_sbatch(partition, account, qos, time_limit, slurm),
    )
    file_secrets = secrets.read(env_file)
    request = replace(request, env_names=tuple(file_secrets))
    machines = options.chosen_inventory(inventory, hosts, hostfile, ssh_config, only, backend=backend)
    job, chosen, notes = commands.resolve(request, nodes, backend, machines)
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
    record = commands.launch(job, chosen, records, numbered=not name, secrets=values)
    if detach:
        for text in (header(record.plan), *notes, f"running; see it with: clusterctl attach {record.plan.job_id}"):
            say(out, text)
        return
    watched, refused = follow(record, records, out, all_nodes=all_nodes, stops=True, notes=[*notes, ""], values=values)
    raise typer.Exit(end(watched, refused, records, out))


def plan(
    arguments: options.Arguments = [],  # noqa: B006
    nodes: options.Nodes = "",
    gpus: options.Gpus = 1,
    backend: options.BackendName = "auto",
    inventory: options.InventoryFile = "",
    hosts: options.Hosts = "",
    hostfile: options.Hostfile = "",
    ssh_config: options.SshConfig = "",
    only: options.Only = "",
    name: options.Name = "",
    device: options.DeviceName = "auto",
    image: options.Image = "",
    build: options.Build = "",
    user: options.User = "",
    run_root: options.RunRoot = "",
    command: options.Command = "",
    env: options.Env = [],  # noqa: B006
    mounts: options.Mounts = [],  # noqa: B006
    master_port: options.Port = "auto",
    timeout_s: options.Timeout = 300.0,
    env_file: options.EnvFile = "",
    python: options.Python = "",
    spares: options.Spares = 0,
    max_restarts: options.MaxRestarts = None,
    stall_timeout_s: options.StallTimeout = 300.0,
    partition: options.Partition = "",
    account: options.Account = "",
    qos: options.Qos = "",
    time_limit: options.Time = "",
    slurm: options.Slurm = [],  # noqa: B006
    output: Annotated[str, typer.Option("--output", "-o", help="Write it to this file (a folder for several).")] = "",
    agent: Annotated[
        bool, typer.Option("--agent", help="Print the agent, the program that starts a node's ranks.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Print what launch would do, node by node, and do nothing."""
    from cluster import commands, resources, secrets

    if agent:
        print(resources.text("agent/agent.py"), end="")
        return
    if output and as_json:
        raise UsageError("--json and -o exclude each other", f"clusterctl plan --json ... > {output}")
    request = Request(
        gpus=gpus,
        name=name,
        device=device,
        image=image,
        build=build,
        user=user,
        run_root=run_root,
        command=command,
        arguments=tuple(arguments),
        env=tuple(env),
        mounts=tuple(mounts),
        master_port=master_port,
        timeout_s=timeout_s,
        python=python,
        spares=spares,
        max_restarts=max_restarts,
        stall_timeout_s=stall_timeout_s,
        slurm=options.for_sbatch(partition, account, qos, time_limit, slurm),
        env_names=tuple(secrets.read(env_file)),
    )
    machines = options.chosen_inventory(inventory, hosts, hostfile, ssh_config, only, backend=backend)
    job, chosen, notes = commands.resolve(request, nodes, backend, machines)
    made = commands.plan(job, chosen)
    for note in notes:
        print(note, file=sys.stderr)
    if as_json:
        print(json.dumps(asdict(made), indent=1))
        return
    for path in dict.fromkeys(step.agent for step in made.steps):
        digest = resources.digest("agent/agent.py")
        print(f"the agent: {path} (sha256 {digest}; clusterctl plan --agent prints it)", file=sys.stderr)
    files = [(step, path, text) for step in made.steps for path, text in step.files.items()]
    if output:
        _write_plan(Path(output), [(Path(path).name, text) for _, path, text in files])
        if not any(node.login for node in made.nodes):
            _write_agent(made.steps[0].agent)
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
