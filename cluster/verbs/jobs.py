"""The verbs for jobs that there are: attach, wait, stop, ps, status, logs."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from cluster.errors import UsageError
from cluster.verbs import options
from cluster.verbs.follow import EXIT_INTERRUPTED, console, end, ended, follow, header, say


def attach(job: options.JobName, logs: options.Logs = "master") -> None:
    """Follow a job again: after --detach, a closed terminal, or a launcher that was killed.

    Ctrl-C leaves the job running. The exit code is the job's, as for launch.
    """
    from cluster.records import Records

    all_nodes = options.every_log(logs)
    records, out = Records(), console()
    record = records.load(job)
    if record.outcome:
        raise typer.Exit(ended(record, out))
    watched, refused = follow(record, records, out, all_nodes=all_nodes, stops=False)
    raise typer.Exit(end(watched, refused, records, out))


def wait(job: options.JobName) -> None:
    """Wait until a job ends, silently; the exit code is the job's."""
    from cluster import commands, supervise
    from cluster.records import Records

    records, out = Records(), console()
    record = records.load(job)
    if record.outcome:
        raise typer.Exit(ended(record, out))
    try:
        watched, refused = supervise.run(record, records, commands.Quiet())
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    raise typer.Exit(end(watched, refused, records, out))


def stop(job: options.JobName) -> None:
    """Stop a job on every node and wait until nothing of it is left; safe to repeat."""
    from cluster import commands
    from cluster.records import Records

    out = console()
    record, undone = commands.stop(job, Records())
    for text in undone:
        say(out, text)
    say(out, f"{job}: {record.outcome}; nothing of it is running")


def ps(
    as_json: options.AsJson = False,
    every: Annotated[bool, typer.Option("--all", "-a", help="Also jobs that have ended.")] = False,
) -> None:
    """List jobs; one whose engine or machines do not answer is `unreachable`."""
    from rich.table import Table

    from cluster import commands
    from cluster.errors import UnreachableError
    from cluster.records import Records
    from cluster.report import seconds

    rows: list[dict[str, Any]] = []
    for record in Records():
        if record.outcome and not every:
            continue
        try:
            state, view = commands.look(record)
            ready = view.ready_count
        except UnreachableError:  # which is no reason to say nothing of the others
            state, ready = record.outcome or "unreachable", 0
        made = record.plan
        age_s = time.time() - record.created_at
        rows.append(
            {
                "job": made.job_id,
                "state": state,
                "backend": made.backend,
                "nodes": f"{ready}/{len(made.nodes)}" if state in ("joining", "running") else len(made.nodes),
                "age_s": round(age_s),
                "run_dir": made.run_dir,
            }
        )
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    if not rows:
        say(console(), "no jobs" if every else "no job is running (ended ones: clusterctl ps --all)")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for column in ("job", "state", "backend", "nodes", "age", "run directory"):
        table.add_column(column, no_wrap=column != "run directory", overflow="fold")
    for row in rows:
        table.add_row(
            row["job"], row["state"], row["backend"], str(row["nodes"]), seconds(row["age_s"]), row["run_dir"]
        )
    console().print(table)


def status(job: options.JobName, as_json: options.AsJson = False) -> None:
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
    out = console()
    say(out, f"{header(record.plan)}   {state}")
    if record.detail:
        say(out, record.detail)
    if not record.outcome:
        out.print(node_table(view, record.plan, time.time()))
    if view.metric is not None:
        say(out, report.scores(view.metric, f"epoch {view.metric.get('epoch')}"))
    say(out, f"logs: {record.plan.attempt_dir}")


def logs(
    job: options.JobName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    node: Annotated[str, options.option("--node", help="Only this node: node-1, or 1.")] = "",
    everything: Annotated[bool, typer.Option("--everything", help="Also the lines of the agent.")] = False,
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
