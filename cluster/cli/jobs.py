"""Commands for launched jobs: attach, wait, stop, ps, status, logs, top, serve."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.backends import BACKENDS
from cluster.cli import options, streams
from cluster.cli.console import console, print_line
from cluster.cli.follow import finish, follow, leave_behind, print_outcome, stop_jobs
from cluster.cli.signals import EXIT_INTERRUPTED, interrupted, on_interrupt
from cluster.errors import UsageError, with_hint
from cluster.spec.model import JobRecord
from cluster.spec.request import option
from cluster.store import JobStore

if TYPE_CHECKING:
    from cluster.supervisor.job_state import NodeView
    from cluster.supervisor.job_status import JobStatus

_NO_SUPERVISOR = "none"
#: The columns of `ps`.
_COLUMNS = ("job", "state", "backend", "nodes", "age_s", "supervisor", "run_dir")
#: How many of the supervisor's notes `status` prints.
_MOST_NOTES = 10
#: How many jobs `ps` names that have the same reason.
_MOST_NAMES = 8


def _supervisor_of(record: JobRecord, records: JobStore) -> str:
    """Return what restarts a job: `pid 123 on HOST`, `the queue` or `none`; "" for an ended job."""
    if record.outcome:
        return ""
    if supervisor := records.supervisor_of(record.plan.job_id):
        return str(supervisor)
    return "the queue" if BACKENDS[record.plan.backend].requeues else _NO_SUPERVISOR


def _about(job_status: "JobStatus") -> dict[str, Any]:
    """Return what `ps` and `status` say in JSON about a job's state: times are Unix times, null if unknown."""
    return {
        "last_state": job_status.last_state or None,
        "since": job_status.since,
        "reason": job_status.why or None,
    }


def _node_json(node: "NodeView", job_status: "JobStatus") -> dict[str, Any]:
    """Return what `status` says in JSON about a node; of one that does not answer, also its last phase."""
    ended = {"exit_code": node.status.exit_code, "quiet_s": node.status.quiet_s}
    if not node.status.silent:
        return {"node": node.name, "phase": node.phase, "note": node.note, **ended}
    phases = job_status.last.phases if job_status.last_state and job_status.last else {}
    about = {"node": node.name, "phase": job_status.state, "note": node.shown_note, **ended}
    return {**about, "last_phase": phases.get(node.name)}


def _named(names: Sequence[str]) -> str:
    """Format the names of jobs: `a, b, c and 97 more`."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def attach(job: options.JobName, logs: options.Logs = "master") -> None:
    """Follow a running job and restart it after failures.

    Use it after `launch --detach`, or when the launcher is gone. Ctrl-C detaches: the job keeps running, and a
    background process restarts it after failures. The exit code is the job's, as for launch.
    """
    from cluster.supervisor import job_end

    records = JobStore()
    out = console()
    record = records.load(job)
    if record.outcome:
        job_end.await_results(job, records)
        raise typer.Exit(print_outcome(record, out))
    raise typer.Exit(follow(record, records, out, logs, stop_on_interrupt=False))


def wait(job: options.JobName) -> None:
    """Wait silently for a job to end. The exit code is the job's."""
    from cluster.supervisor import display, job_end, supervisor

    records = JobStore()
    out = console()
    record = records.load(job)
    if record.outcome:
        job_end.await_results(job, records)
        raise typer.Exit(print_outcome(record, out))
    on_interrupt(out, "")
    try:
        attempt, refusal = supervisor.Supervisor(record, records, display.Display()).run()
    except KeyboardInterrupt:
        print_line(out, *leave_behind(record, records, {}))
        raise typer.Exit(interrupted()) from None
    raise typer.Exit(finish(attempt, refusal, records, out))


def supervise(job: options.JobName) -> None:
    """Supervise a job in the background. clusterctl itself starts this, with the values of secrets as JSON on stdin."""
    from cluster.supervisor import background

    streams.outlive()
    try:
        secrets = json.loads((not sys.stdin.isatty() and sys.stdin.read()) or "{}")
    except ValueError as error:
        raise UsageError(f"stdin: expected the values of secrets as JSON: {error}") from None
    background.run(job, JobStore(), secrets)


def stop(
    names: options.JobNames = None,
    every: Annotated[
        bool, options.flag("Stop all running jobs that this machine has launched.", "--all", "-a")
    ] = False,
    grace: Annotated[
        str,
        option(
            metavar="TIME",
            help="How long the ranks may take to write a checkpoint: 90s, 10m.  [default: as at launch]",
        ),
    ] = "",
) -> None:
    """Stop jobs on all their nodes, and wait until all processes have exited.

    You can run it again at any time. Ctrl-C kills what is still running.
    """
    from cluster.spec.duration import seconds

    records = JobStore()
    out = console()
    if every == bool(names):
        raise UsageError("give the names of jobs, or --all", "clusterctl ps lists the running jobs")
    chosen = records if every else map(records.load, dict.fromkeys(names or []))
    stopping = [record for record in chosen if not (every and record.outcome)]
    for damaged in records.unreadable() if every else []:
        print_line(out, with_hint(f"not stopped: {damaged.error.message}", damaged.error.hint))
    if not stopping:
        print_line(out, "no running jobs")
    errors = stop_jobs(stopping, records, out, seconds(grace, "--grace") if grace else None)
    for error in errors[1:]:
        print_line(out, with_hint(error.message, error.hint))
    if errors:
        raise errors[0]


def ps(
    as_json: options.AsJson = False,
    every: Annotated[
        bool, options.flag("Include jobs that are done, failed or stopped.", "--all", "-a")
    ] = False,
) -> None:
    """List jobs and their states.

    A job is queued while it waits for machines, and unreachable if its nodes, their Docker Engine, the cluster or the
    queue do not answer: the table says since when, and what the job was doing before. It is unreadable if its record is
    damaged or was written by another version. The supervisor is the process that restarts the job after a failure.
    """
    from rich.table import Column, Table

    from cluster.cli.display import PLAIN
    from cluster.supervisor import job_monitor
    from cluster.supervisor.report import from_here, seconds

    rows: list[dict[str, Any]] = []
    shown_states: dict[str, str] = {}
    reasons: dict[str, list[str]] = {}
    records = JobStore()
    now = time.time()
    for job_status in job_monitor.poll_all(
        [record for record in records if every or not record.outcome], records
    ):
        plan = job_status.record.plan
        state = job_status.state
        shown_states[plan.job_id] = job_status.words(now)
        if problem := job_status.problem:
            reason = f"{state}: {problem}" if job_status.is_readable else problem
            reasons.setdefault(reason, []).append(plan.job_id)
        row: dict[str, Any] = {
            "job": plan.job_id,
            "state": state,
            "backend": plan.backend,
            "nodes": job_status.nodes,
            "age_s": round(now - job_status.record.launched_at),
            "supervisor": _supervisor_of(job_status.record, records) if job_status.is_readable else "",
            "run_dir": plan.run_dir,
        }
        rows.append(row | _about(job_status))
    problems = [f"{_named(names)}: {reason}" for reason, names in reasons.items()]
    damaged = records.unreadable()
    for unreadable in damaged:
        row = {
            "job": unreadable.job_id,
            "state": "unreadable",
            "backend": "",
            "nodes": "",
            "age_s": "",
            "supervisor": "",
        }
        rows.append(row | {"run_dir": "", "record": str(unreadable.path), "error": unreadable.error.message})
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    if not rows:
        print_line(console(), "no jobs" if every else "no running jobs (to list all: clusterctl ps --all)")
        return
    columns = [
        Column(title, no_wrap=True) for title in ("job", "state", "backend", "nodes", "age", "supervisor")
    ]
    table = Table(*columns, Column("run directory", overflow="fold"), **PLAIN)
    here = ""
    with contextlib.suppress(FileNotFoundError):  # the current folder has been removed
        here = str(Path.cwd())
    for row in rows:
        age = seconds(row["age_s"]) if row["age_s"] != "" else ""
        shown = row | {"state": shown_states.get(row["job"], row["state"]), "age_s": age}
        shown |= {"run_dir": from_here(row["run_dir"], here) if row["run_dir"] else row["record"]}
        table.add_row(*(str(shown[key]) for key in _COLUMNS))
    console().print(table)
    print_line(
        console(),
        *problems,
        *(with_hint(unreadable.error.message, unreadable.error.hint) for unreadable in damaged),
    )


def status(job: options.JobName, as_json: options.AsJson = False) -> None:
    """Show the phase of each node of a job."""
    from cluster.cli.display import header, node_table
    from cluster.supervisor import job_monitor, notes, report
    from cluster.supervisor.progress import out_of

    records = JobStore()
    now = time.time()
    (job_status,) = job_monitor.poll_all([records.load(job)], records)
    record = job_status.record
    state = job_status.state
    view = job_status.view
    supervisor = _supervisor_of(record, records) if job_status.is_readable else ""
    kept = notes.Reader(record.plan).lines()
    if as_json:
        nodes = [_node_json(node, job_status) for node in view.nodes]
        metric = view.metric and view.metric.as_json()
        about = {
            "job": job,
            "state": state,
            **_about(job_status),
            "detail": record.detail,
            "commit": record.commit,
        }
        print(
            json.dumps({**about, "supervisor": supervisor, "notes": kept, "nodes": nodes, "metric": metric})
        )
        return
    out = console()
    commit = record.commit and f"commit: {record.commit}"
    reason = job_status.problem
    print_line(
        out,
        *filter(None, (f"{header(record.plan)}   {job_status.words(now)}", reason, record.detail, commit)),
    )
    if not record.outcome:
        is_alone = supervisor == _NO_SUPERVISOR
        hint = (
            f" (not restarted after a failure; to change that: clusterctl attach {job})" if is_alone else ""
        )
        print_line(out, f"supervisor: {supervisor}{hint}")
        out.print(node_table(view, record.plan, now, last=job_status.last))
    if view.metric is not None:
        epoch = view.metric.epoch
        title = "newest epoch" if epoch is None else f"epoch {out_of(epoch, view.metric.epochs)}"
        print_line(out, report.scores(view.metric, title))
    print_line(out, *kept[-_MOST_NOTES:])
    print_line(out, *report.logs_of(record.plan))


def logs(
    job: options.JobName,
    follow: Annotated[bool, options.flag("Follow the logs until the job ends.", "--follow", "-f")] = False,
    node: Annotated[str, option("--node", help="Only this node: node-1, or 1.")] = "",
    everything: Annotated[bool, options.flag("Include the agent's output.", "--everything")] = False,
) -> None:
    """Print a job's logs, each line prefixed with its node."""
    from cluster.supervisor import attempt_monitor, job_monitor, notes, session

    monitor = job_monitor.JobMonitor(job, JobStore())
    plan = monitor.record.plan
    kept = notes.Reader(monitor.record.plan)
    wanted = session.node_named(monitor.record, node).name if node else ""
    width = max(len(member.name) for member in plan.nodes)
    try:
        while True:
            lines = monitor.step(everything=everything)
            for text in kept.lines() if not wanted else ():
                print(f"supervisor | {text}", flush=True)
            for name, text in lines:
                if not wanted:
                    print(f"{name:<{width}} | {text}", flush=True)
                elif name == wanted:
                    print(text, flush=True)
            if not follow or monitor.has_ended:
                return
            time.sleep(attempt_monitor.POLL_S)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def top(
    job: options.JobName,
    as_json: options.AsJson = False,
    once: Annotated[bool, options.flag("Print one sample and exit.", "--once")] = False,
) -> None:
    """Show the CPU, memory and GPU use of a running job's ranks until Ctrl-C.

    The columns are cores, memory of the rank and its workers, memory in use on the host, GPU use and GPU memory, and
    a graph of recent GPU use (or CPU use, without a GPU). The agent on each node samples every 2 s.
    Without a terminal, the table is printed once.
    """
    from rich.console import Group
    from rich.live import Live

    from cluster.cli.display import UsageTable, header
    from cluster.supervisor import job_monitor, progress

    monitor = job_monitor.JobMonitor(job, JobStore())
    usage = UsageTable()
    out = console()
    if outcome := monitor.record.outcome:
        raise UsageError(f"{job} is not running: {outcome}", f"to see how it ended: clusterctl status {job}")

    def sample() -> None:
        monitor.step()
        usage.add(monitor.view)

    def drawn() -> Group:
        view = monitor.view
        speed = progress.describe(view.progress).speed if view.progress else ""
        words = filter(None, (header(monitor.record.plan), speed))
        return Group("   ".join([*words, usage.spark("images_per_s")]), usage.table(view))

    sample()
    if as_json:
        view = monitor.view
        nodes = [
            {
                "node": node.name,
                "phase": node.phase,
                "usage": node.status.usage and node.status.usage.as_json(),
            }
            for node in view.nodes
        ]
        print(json.dumps({"job": job, "nodes": nodes, "progress": view.progress and view.progress.as_json()}))
    elif once or not out.is_terminal:
        out.print(drawn())
    else:
        try:
            with Live(console=out, get_renderable=drawn, auto_refresh=False, screen=True) as live:
                while not monitor.has_ended:
                    live.refresh()
                    time.sleep(2)
                    sample()
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        print_line(out, f"{job}: all nodes have ended")


def serve(
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 means all.")
    ] = "localhost",
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="Port to listen on; 0 picks a free port.")
    ] = 8265,
    metrics: Annotated[bool, options.flag("Serve /metrics for Prometheus too.", "--metrics")] = False,
) -> None:
    """Show all jobs in a browser, live and read-only.

    The printed URL contains a token, because every user of this machine can reach localhost. A browser sends it once,
    and Prometheus as its bearer token. Each start makes a new token, unless CLUSTERCTL_TOKEN is set.
    Ctrl-C stops the server. To open the page on another machine: ssh -L 8265:localhost:8265 THIS-MACHINE. With another
    --host, the connection is not encrypted.
    """
    import re
    import secrets
    import socket

    from cluster.web.server import Server

    if metrics:
        try:
            import prometheus_client  # noqa: F401
        except ImportError:
            raise UsageError("--metrics needs prometheus-client", "pip install prometheus-client") from None
    token = os.environ.get("CLUSTERCTL_TOKEN") or secrets.token_urlsafe(24)
    # The error does not show the token, because this one may be a secret, too.
    if not re.fullmatch(r"[\w.~-]{16,}", token, re.ASCII):
        hint = "python3 -c 'import secrets; print(secrets.token_urlsafe())' prints one"
        raise UsageError("CLUSTERCTL_TOKEN: expected at least 16 letters, digits and -._~", hint)
    try:
        server = Server((host, port), JobStore(), token, has_metrics=metrics)
    # The last two are of text that is no host name: not UTF-8, or a label that is too long.
    except (OSError, UnicodeError, TypeError) as error:
        why = getattr(error, "strerror", None) or "this is not a host name"
        raise UsageError(
            f"cannot listen on {host}:{port}: {why}", "choose another port; --port 0 picks a free port"
        ) from error
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    shown = f"[{name}]" if ":" in name else name
    with server:
        print_line(console(), f"http://{shown}:{server.server_address[1]}/?token={token}  (Ctrl-C to end)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
