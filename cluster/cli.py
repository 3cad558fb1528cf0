"""The command line: reads options, calls a verb, prints. Everything a user sees of `clusterctl` is printed here."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from cluster.config import DEFAULT_IMAGE, Request
from cluster.errors import ClusterError, UsageError
from cluster.verbs import image as image_verbs
from cluster.verbs import options
from cluster.verbs.doctor import doctor
from cluster.verbs.gc import gc
from cluster.verbs.init import init
from cluster.verbs.sync import sync

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.commands import Watched
    from cluster.model import Inventory, Job, Plan, Record
    from cluster.records import Records
    from cluster.view import Screen

EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="clusterctl",
    help="Start one training job on several nodes, watch it meet and run, and stop it.",
    epilog="A first run on this machine: clusterctl launch --nodes 2 --gpus 2",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command(epilog="Example: clusterctl gc --only gpu-b")(gc)
app.command(epilog="Example: clusterctl init gpu-a gpu-b gpu-c")(init)
app.command(epilog="Example: clusterctl sync ./data/coco ./my.yaml")(sync)
app.command(epilog="Example: clusterctl doctor --skip link")(doctor)
app.add_typer(image_verbs.app, name="image")

# Imports of the verbs stand in the functions: `clusterctl --help` and completion must answer at once.


def _job_names(incomplete: str) -> list[str]:
    """Completion: the jobs that are remembered."""
    from cluster.records import Records

    return [name for record in Records() if (name := record.plan.job_id).startswith(incomplete)]


JobName = Annotated[str, typer.Argument(metavar="JOB", help="As `clusterctl ps` shows it.", autocompletion=_job_names)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Nodes = Annotated[
    str,
    typer.Option(
        "--nodes",
        "-n",
        help="How many nodes; 2:4 takes four and goes on with as few as two. By default one, or the whole inventory.",
        show_default=False,
    ),
]
Gpus = Annotated[int, typer.Option("--gpus", "-g", help="Processes per node, one per GPU.", show_default=True)]
BackendName = Annotated[
    str,
    typer.Option(
        "--backend",
        "-b",
        help="[b]ssh[/b]: the machines of the inventory; [b]slurm[/b]: a cluster with a queue; [b]compose[/b]: "
        "containers on this machine; [b]local[/b]: process groups on it; [b]auto[/b]: what the inventory says, else "
        "compose where an engine answers, else local.",
    ),
]
Name = Annotated[
    str, typer.Option("--name", help="The job's name; by default derived from the job.", show_default=False)
]
DeviceName = Annotated[
    str,
    typer.Option(
        "--device",
        help="[b]auto[/b]: GPUs if there are enough, else CPU processes, and says so; [b]cuda[/b]: GPUs or an error; "
        "[b]cpu[/b]; [b]any[/b]: leave it to the program.",
    ),
]
Image = Annotated[
    str, typer.Option("--image", help=f"The container image; by default {DEFAULT_IMAGE}.", show_default=False)
]
Build = Annotated[
    str, typer.Option("--build", help="A folder that `docker compose` builds the image from.", show_default=False)
]
User = Annotated[str, typer.Option("--user", help="UID:GID in the containers; by default yours.", show_default=False)]
RunRoot = Annotated[
    str, typer.Option("--run-dir", help="One folder per job is made here; by default ./runs.", show_default=False)
]
Command = Annotated[
    str,
    typer.Option(
        "--command", help="Run this torchrun program instead of our trainer: 'train.py --lr 0.1'.", show_default=False
    ),
]
Env = Annotated[
    list[str],
    typer.Option(
        "--env",
        "-e",
        help="NAME=VALUE for the program; NAME alone is a secret: its value comes from your environment and stands on "
        "no command line, in no plan, record or log. Repeatable.",
    ),
]
EnvFile = Annotated[
    str, typer.Option("--env-file", help="A file of NAME=VALUE lines, all of them secrets.", show_default=False)
]
Python = Annotated[
    str,
    typer.Option("--python", help="The interpreter that has torch, where no container is used.", show_default=False),
]
Spares = Annotated[int, typer.Option("--spares", help="Nodes of the inventory to keep for those that are lost.")]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        "--max-restarts",
        help="Starts after a failure, each from the newest checkpoint; by default 3, with --command 0.",
        show_default=False,
    ),
]
StallTimeout = Annotated[
    float, typer.Option("--stall-timeout", help="Seconds without a step that count as a failure; 0: never.")
]
Mounts = Annotated[
    list[str],
    typer.Option(
        "--mount",
        "-v",
        help="SOURCE[:TARGET[:rw]] for the containers; repeatable. Paths in the arguments are mounted by themselves.",
    ),
]
Port = Annotated[str, typer.Option("--master-port", help="A port, or auto.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds until all nodes must have met.")]
Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="[-- TRAINER ARGUMENTS]",
        help="For the trainer: -- train --data coco.yaml --epochs 30",
        show_default=False,
    ),
]


@app.command(epilog="Example: clusterctl launch --nodes 2 --gpus 2 -- train --epochs 3")
def launch(
    arguments: Arguments = [],  # noqa: B006 (typer reads the default and never changes it)
    nodes: Nodes = "",
    gpus: Gpus = 1,
    backend: BackendName = "auto",
    inventory: options.InventoryFile = "",
    hosts: options.Hosts = "",
    hostfile: options.Hostfile = "",
    ssh_config: options.SshConfig = "",
    only: options.Only = "",
    name: Name = "",
    device: DeviceName = "auto",
    image: Image = "",
    user: User = "",
    run_root: RunRoot = "",
    command: Command = "",
    env: Env = [],  # noqa: B006
    mounts: Mounts = [],  # noqa: B006
    master_port: Port = "auto",
    timeout_s: Timeout = 300.0,
    env_file: EnvFile = "",
    python: Python = "",
    spares: Spares = 0,
    max_restarts: MaxRestarts = None,
    stall_timeout_s: StallTimeout = 300.0,
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

    Exit codes: 0 done, 1 failed, 2 wrong request, 3 could not be started, 4 nodes did not come.
    """
    from cluster import commands, secrets
    from cluster.records import Records

    if logs not in ("master", "all"):
        raise UsageError(f"--logs {logs!r}", "one of: master, all")
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
    machines = options.chosen_inventory(inventory, hosts, hostfile, ssh_config, only)
    job, chosen, notes = _resolve(request, nodes, backend, machines)
    values = secrets.values(job.secrets, file_secrets)
    records = Records()
    out = _console()
    in_containers = [node for node in (*job.hosts, *job.spares) if node.runtime != "none"]
    if push and in_containers:
        from cluster.verbs.image import bring

        bring(in_containers, job.image, out)
    record = commands.launch(job, chosen, records, numbered=not name, secrets=values)
    _say(out, _header(record.plan))
    for note in notes:
        _say(out, note)
    if detach:
        _say(out, f"running; see it with: clusterctl attach {record.plan.job_id}")
        return
    _say(out, "")
    watched, refused = _follow(record, records, out, all_nodes=logs == "all", stops=True, values=values)
    raise typer.Exit(_end(watched, refused, records, out))


@app.command(
    epilog="Example: clusterctl plan --nodes 2 --gpus 2 --backend compose -o job.yml && docker compose -f job.yml up"
)
def plan(
    arguments: Arguments = [],  # noqa: B006
    nodes: Nodes = "",
    gpus: Gpus = 1,
    backend: BackendName = "auto",
    inventory: options.InventoryFile = "",
    hosts: options.Hosts = "",
    hostfile: options.Hostfile = "",
    ssh_config: options.SshConfig = "",
    only: options.Only = "",
    name: Name = "",
    device: DeviceName = "auto",
    image: Image = "",
    build: Build = "",
    user: User = "",
    run_root: RunRoot = "",
    command: Command = "",
    env: Env = [],  # noqa: B006
    mounts: Mounts = [],  # noqa: B006
    master_port: Port = "auto",
    timeout_s: Timeout = 300.0,
    env_file: EnvFile = "",
    python: Python = "",
    spares: Spares = 0,
    max_restarts: MaxRestarts = None,
    stall_timeout_s: StallTimeout = 300.0,
    partition: options.Partition = "",
    account: options.Account = "",
    qos: options.Qos = "",
    time_limit: options.Time = "",
    slurm: options.Slurm = [],  # noqa: B006
    output: Annotated[str, typer.Option("--output", "-o", help="Write it to this file (a folder for several).")] = "",
    as_json: AsJson = False,
) -> None:
    """Print what launch would do, node by node, and do nothing."""
    from cluster import commands, secrets

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
    machines = options.chosen_inventory(inventory, hosts, hostfile, ssh_config, only)
    job, chosen, notes = _resolve(request, nodes, backend, machines)
    made = commands.plan(job, chosen)
    for note in notes:
        print(note, file=sys.stderr)
    if as_json:
        print(json.dumps(asdict(made), indent=1))
        return
    files = [(step, path, text) for step in made.steps for path, text in step.files.items()]
    if output:
        _write_plan(Path(output), [(Path(path).name, text) for _, path, text in files])
        return
    for step, path, text in files:
        if len(files) > 1:
            print(f"# ---- {step.place}: {path}")
        print(text, end="" if text.endswith("\n") else "\n")


@app.command()
def attach(
    job: JobName,
    logs: Annotated[str, typer.Option("--logs", help="Show the log of: master, all.")] = "master",
) -> None:
    """Follow a job again: after --detach, a closed terminal, or a launcher that was killed.

    Ctrl-C leaves the job running. The exit code is the job's, as for launch.
    """
    from cluster.records import Records

    records, out = Records(), _console()
    record = records.load(job)
    if record.outcome:
        raise typer.Exit(_ended(record, out))
    _say(out, _header(record.plan))
    watched, refused = _follow(record, records, out, all_nodes=logs == "all", stops=False)
    raise typer.Exit(_end(watched, refused, records, out))


@app.command()
def wait(job: JobName) -> None:
    """Wait until a job ends, silently; the exit code is the job's."""
    from cluster import commands, supervise
    from cluster.records import Records

    records, out = Records(), _console()
    record = records.load(job)
    if record.outcome:
        raise typer.Exit(_ended(record, out))
    try:
        watched, refused = supervise.run(record, records, commands.Quiet())
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    raise typer.Exit(_end(watched, refused, records, out))


@app.command()
def stop(job: JobName) -> None:
    """Stop a job on every node and wait until nothing of it is left; safe to repeat."""
    from cluster import commands
    from cluster.records import Records

    record = commands.stop(job, Records())
    _say(_console(), f"{job}: {record.outcome}; nothing of it is running")


@app.command()
def ps(
    as_json: AsJson = False,
    every: Annotated[bool, typer.Option("--all", "-a", help="Also jobs that have ended.")] = False,
) -> None:
    """List jobs."""
    from rich.table import Table

    from cluster import commands
    from cluster.records import Records
    from cluster.report import seconds

    rows: list[dict[str, Any]] = []
    for record in Records():
        if record.outcome and not every:
            continue
        state, view = commands.look(record)
        made = record.plan
        age_s = time.time() - record.created_at
        rows.append(
            {
                "job": made.job_id,
                "state": state,
                "backend": made.backend,
                "nodes": f"{view.ready_count}/{len(made.nodes)}"
                if state in ("joining", "running")
                else len(made.nodes),
                "age_s": round(age_s),
                "run_dir": made.run_dir,
            }
        )
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    if not rows:
        _say(_console(), "no jobs" if every else "no job is running (ended ones: clusterctl ps --all)")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for column in ("job", "state", "backend", "nodes", "age", "run directory"):
        table.add_column(column, no_wrap=column != "run directory", overflow="fold")
    for row in rows:
        table.add_row(
            row["job"], row["state"], row["backend"], str(row["nodes"]), seconds(row["age_s"]), row["run_dir"]
        )
    _console().print(table)


@app.command()
def status(job: JobName, as_json: AsJson = False) -> None:
    """Show a job's nodes: phase, since when, and why."""
    from cluster import commands, report
    from cluster.records import Records
    from cluster.view import node_table

    record = Records().load(job)
    state, view = commands.look(record)
    if as_json:
        nodes = [
            {"node": node.name, "phase": node.phase, "note": node.note, "exit_code": node.exit_code}
            for node in view.nodes
        ]
        print(json.dumps({"job": job, "state": state, "detail": record.detail, "nodes": nodes, "metric": view.metric}))
        return
    out = _console()
    _say(out, f"{_header(record.plan)}   {state}")
    if record.detail:
        _say(out, record.detail)
    if not record.outcome:
        out.print(node_table(view, record.plan, time.time()))
    if view.metric is not None:
        _say(out, report.scores(view.metric, f"epoch {view.metric.get('epoch')}"))
    _say(out, f"logs: {record.plan.attempt_dir}")


@app.command()
def logs(
    job: JobName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    node: Annotated[str, typer.Option("--node", help="Only this node: node-1, or 1.", show_default=False)] = "",
    everything: Annotated[bool, typer.Option("--everything", help="Also the lines of torchrun itself.")] = False,
) -> None:
    """Print what a job's program wrote, every node's lines with its name in front."""
    from cluster import commands
    from cluster.backends import BACKENDS
    from cluster.records import Records

    record = Records().load(job)
    names = [each.name for each in record.plan.nodes]
    wanted = f"node-{node}" if node.isdigit() else node
    if wanted and wanted not in names:
        raise UsageError(f"--node {node!r}: {job} has {', '.join(names)}")
    follower = commands.Follower(record.plan, BACKENDS[record.plan.backend], record.created_at)
    width = max(len(name) for name in names)
    try:
        while True:
            for name, text in follower.step(time.time(), everything=everything):
                if not wanted:
                    print(f"{name:<{width}} | {text}", flush=True)
                elif name == wanted:
                    print(text, flush=True)
            ended = all(each.phase in ("exited", "lost") for each in follower.view.nodes)
            if not follow or ended:
                return
            time.sleep(commands.TICK_S)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _resolve(request: Request, nodes: str, backend: str, inventory: Inventory | None) -> tuple[Job, str, list[str]]:
    from cluster import commands, config

    chosen, why = commands.choose_backend(backend, inventory)
    fewest, most = config.node_range(nodes, len(inventory.nodes) - request.spares if inventory else 1)
    request = replace(request, nodes=most, min_nodes=fewest, inventory=inventory)
    job, notes = config.job(request, commands.here(request), chosen)
    return job, chosen, [*([why] if why else []), *notes]


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


def _follow(
    record: Record,
    records: Records,
    out: Console,
    *,
    all_nodes: bool,
    stops: bool,
    values: Mapping[str, str] | None = None,
) -> tuple[Watched, str]:
    """Follow on the screen, over restarts; Ctrl-C stops the job (launch) or leaves it (attach)."""
    from cluster import commands, supervise
    from cluster.view import Screen

    screen: Screen = Screen(out, record.plan, all_nodes=all_nodes, skips_past=not stops)
    job_id = record.plan.job_id
    try:
        signal.signal(signal.SIGTERM, _interrupt)
        with screen:
            return supervise.run(record, records, screen, secrets=values)
    except KeyboardInterrupt:
        if not stops:
            _say(out, f"left; {job_id} goes on. Stop it with: clusterctl stop {job_id}")
            raise typer.Exit(EXIT_INTERRUPTED) from None
    except ClusterError as error:
        raise type(error)(error.message, f"the job may still be running: clusterctl attach {job_id}") from error
    try:
        _say(out, f"stopping {job_id} on {len(record.plan.nodes)} nodes (Ctrl-C again leaves at once)")
        commands.stop(job_id, records)
        _say(out, "stopped; nothing of it is running")
    except KeyboardInterrupt:
        _say(out, f"left while stopping; finish it with: clusterctl stop {job_id}")
    raise typer.Exit(EXIT_INTERRUPTED)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _end(watched: Watched, refused: str, records: Records, out: Console) -> int:
    """Clean up after a job, tell how it ended, return the exit code."""
    from cluster import commands, report, restarts

    plan, view, verdict = watched.plan, watched.view, watched.verdict
    began = time.time()
    outcome, undone = commands.finish(watched, records)
    for text in undone:
        _say(out, text)
    if outcome == "stopped":
        _say(out, f"{plan.job_id} was stopped")
        return report.EXIT_FAILED
    if outcome == "done":
        _say(out, report.done(view, plan, str(Path.cwd())))
        return report.EXIT_DONE
    cause = report.cause(view, verdict)
    if verdict == "late":
        _error(out, f"{plan.job_id}: {view.ready_count} of {len(view.nodes)} nodes met in {plan.timeout_s:g} s")
        cause = f"missing: {cause}"
    _error(out, cause)
    if refused and not (plan.attempt == 1 and refused == restarts.NOT_ASKED):
        _say(out, f"not started again: {refused}")
    for line in report.last_words(view, verdict, watched.tails):
        _say(out, line)
    _say(out, f"all nodes stopped {time.time() - began:.1f} s later; every rank's log: {plan.attempt_dir}")
    return report.exit_code(view, verdict)


def _ended(record: Record, out: Console) -> int:
    """Tell how a job ended that nobody needs to wait for any more."""
    text = f"{record.plan.job_id} has ended: {record.outcome}" + (f" ({record.detail})" if record.detail else "")
    _say(out, f"{text}; see: clusterctl logs {record.plan.job_id}")
    return 0 if record.outcome == "done" else 1


def _header(made: Plan) -> str:
    from cluster import commands
    from cluster.view import header

    return header(made, commands.image_id(made))


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _say(out: Console, text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def _error(out: Console, text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True, style="bold red")


def main() -> None:
    """Run the command line; a ClusterError becomes one `error:` line, one `hint:` line and its exit code."""
    try:
        app()
    except ClusterError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
