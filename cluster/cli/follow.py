"""Terminal output of a followed job: its header, live display, interruption and final report."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

import typer

from cluster.cli import streams
from cluster.cli.console import console, print_line
from cluster.cli.signals import exit_now, hung_up, interrupted, on_interrupt, on_signals
from cluster.errors import ClusterError
from cluster.spec.counts import counted

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.spec.model import JobRecord
    from cluster.store import JobStore
    from cluster.supervisor.attempt_monitor import AttemptMonitor

_ERROR = "bold red"
_STOPS_AT_ONCE = 16


def follow(
    record: JobRecord,
    records: JobStore,
    out: Console,
    logs: str,
    *,
    stop_on_interrupt: bool,
    notes: Sequence[str] = (),
    secrets: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Print the job's header, follow it over its restarts to its end, and return the exit code.

    `logs` selects the `master` or `all` nodes. Ctrl-C exits; with `stop_on_interrupt` it stops the job. If the terminal
    or the pipe that reads the output is closed, the job keeps running, and so does a supervisor in the background.
    """
    from cluster.cli.display import LiveDisplay, header
    from cluster.supervisor import supervisor

    job_id = record.plan.job_id
    try:
        message = f"exited before the job stopped; to stop it: clusterctl stop {job_id}"
        on_interrupt(out, message if stop_on_interrupt else "")
        screen = LiveDisplay(out, record.plan, all_nodes=logs == "all", is_attached=not stop_on_interrupt)
        print_line(out, header(record.plan), *notes)
        with screen:
            attempt, refusal = supervisor.Supervisor(record, records, screen, secrets).run()
    except KeyboardInterrupt as interrupt:
        # An interrupted print can leave the first console buffering for ever.
        out = console(stderr=streams.is_closed())
        out.show_cursor()
        if hung_up() or not stop_on_interrupt:
            problems = leave_behind(record, records, secrets)
            between = isinstance(interrupt, supervisor.BetweenAttempts) and not records.supervisor_of(job_id)
            state = (
                f"is not restarted until you type: clusterctl attach {job_id}" if between else "keeps running"
            )
            print_line(out, *problems, f"detached; {job_id} {state}. To stop it: clusterctl stop {job_id}")
            raise typer.Exit(interrupted()) from None
        stop_interrupted(record, records, out)
    except ClusterError as error:
        raise type(error)(
            error.message, f"the job may still be running: clusterctl attach {job_id}"
        ) from error
    streams.outlive()
    return finish(attempt, refusal, records, out)


def leave_behind(record: JobRecord, records: JobStore, secrets: Mapping[str, str]) -> list[str]:
    """Leave a supervisor behind, which restarts the job after failures. Return a sentence if there is none."""
    from cluster.supervisor import background

    if why := background.leave_behind(record, records, secrets):
        job_id = record.plan.job_id
        what = f"{job_id} is not restarted after a failure, until you type: clusterctl attach {job_id}"
        return [f"no supervisor runs in the background: {why}; {what}"]
    return []


def stop_interrupted(record: JobRecord, records: JobStore, out: Console) -> NoReturn:
    """Stop a job after Ctrl-C, and exit. A finished job keeps its outcome; only the copy of its results ends."""
    from cluster.supervisor import job_end

    job_id = record.plan.job_id
    record = records.load(job_id)
    if record.outcome in ("done", "failed"):
        problems = job_end.clean_up(record, grace_s=0)
        how = f"interrupted; {job_id}: {record.outcome}. To copy the rest of its results: clusterctl stop {job_id}"
        print_line(out, *problems, how)
        raise typer.Exit(interrupted())
    for error in stop_jobs([record], records, out):
        raise error
    raise typer.Exit(interrupted())


def stop_jobs(
    stopping: Sequence[JobRecord], records: JobStore, out: Console, grace_s: float | None = None
) -> list[ClusterError]:
    """Stop jobs at the same time, wait for their ends and collect their results, as `job_end.stop` does.

    The next Ctrl-C kills their ranks. Print what could not be collected, and return the errors of those that may still
    be running.
    """
    from cluster.supervisor import job_end

    streams.outlive()
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # a closed terminal does not end a stop half-way
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    killing: list[threading.Thread] = []
    errors: list[ClusterError] = []

    def kill() -> None:
        for record in stopping:
            print_line(out, f"stopping {record.plan.job_id} now (Ctrl-C again exits at once)")
            # in a thread: the stop before it waits for the same processes
            killing.append(threading.Thread(target=job_end.clean_up, args=(record, 0.0), daemon=True))
            killing[-1].start()

    def stop(record: JobRecord) -> None:
        job_id = record.plan.job_id
        try:
            ended, problems = job_end.stop(job_id, records, grace_s)
        except ClusterError as error:
            where = f"{job_id}: " if len(stopping) > 1 else ""
            errors.append(type(error)(where + error.message, error.hint))
        else:
            how = "It had already ended" if record.is_cleared else "No processes remain"
            print_line(out, *problems, f"{job_id}: {ended.outcome}. {how}.")

    names = " ".join(record.plan.job_id for record in stopping)
    what, them = ("the job", "it") if len(stopping) == 1 else ("all jobs", "them")
    on_signals(kill, exit_now(out, f"exited before {what} stopped; to stop {them}: clusterctl stop {names}"))
    for record in stopping:
        if not record.outcome:
            nodes = len(record.plan.nodes)
            grace = record.job.grace_s if grace_s is None else grace_s
            how = f"up to {grace:g} s for a checkpoint (Ctrl-C stops it now)" if grace else "now"
            where = f"on {counted(nodes, 'node')}"
            print_line(out, f"stopping {record.plan.job_id} {where}: {how}")
    with ThreadPoolExecutor(_STOPS_AT_ONCE) as pool:
        list(pool.map(stop, stopping))
    for thread in killing:
        thread.join()
    return errors


def finish(attempt: AttemptMonitor, refusal: str, records: JobStore, out: Console) -> int:
    """Clean up after a job, print its final report and return the exit code."""
    from cluster.supervisor import job_end, report, restarts

    plan = attempt.plan
    view = attempt.view
    verdict = attempt.verdict
    ended_at = time.time()
    outcome, problems = job_end.finish(attempt, records)
    print_line(out, *problems)
    if outcome == "stopped":
        print_line(out, f"{plan.job_id} was stopped")
        return report.EXIT_FAILED
    if outcome == "done":
        print_line(out, report.done(view, plan, str(Path.cwd()), records.load(plan.job_id).launched_at))
        if lost := report.lost_lines(view):
            print_line(out, f"done, {lost}", style=_ERROR)
        return report.EXIT_DONE
    if verdict not in ("failed", "late", "stalled"):  # another process could not start it
        return print_outcome(records.load(plan.job_id), out)
    cause = report.cause(view, verdict)
    if verdict == "late":
        joined = f"{view.ready_count} of {len(view.nodes)} nodes joined"
        print_line(out, f"{plan.job_id}: {joined} in {plan.job.rendezvous_timeout_s:g} s", style=_ERROR)
        cause = f"missing: {cause}"
    print_line(out, cause, style=_ERROR)
    if refusal and not (plan.attempt == 1 and refusal == restarts.NO_RESTARTS):
        print_line(out, f"not restarted: {refusal}")
    print_line(out, *report.last_lines(view, verdict, attempt.tails))
    stopped = f"all nodes stopped {time.time() - ended_at:.1f} s later"
    print_line(out, "; ".join([stopped, *report.logs_of(plan, every_rank=True)]))
    return records.load(plan.job_id).exit_code


def print_outcome(record: JobRecord, out: Console) -> int:
    """Print the outcome of a finished job, and return its exit code."""
    from cluster.supervisor import report

    text = f"{record.plan.job_id}: {record.outcome}" + (f" ({record.detail})" if record.detail else "")
    print_line(
        out, text + (f"; see: clusterctl logs {record.plan.job_id}" if report.logs_of(record.plan) else "")
    )
    return report.EXIT_DONE if record.outcome == "done" else record.exit_code
