"""Following a job on the screen to its end, and telling how it ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from cluster.errors import ClusterError

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.commands import Watched
    from cluster.model import Plan, Record
    from cluster.records import Records
    from cluster.view import Screen

EXIT_INTERRUPTED = 130


def follow(
    record: Record,
    records: Records,
    out: Console,
    *,
    all_nodes: bool,
    stops: bool,
    notes: Sequence[str] = (),
    values: Mapping[str, str] | None = None,
) -> tuple[Watched, str]:
    """Say what the job is, follow it on the screen, over restarts; Ctrl-C stops it (launch) or leaves it (attach)."""
    from cluster import commands, supervise
    from cluster.view import Screen

    job_id = record.plan.job_id
    try:
        on_interrupt(out, f"left while stopping; finish it with: clusterctl stop {job_id}" if stops else "")
        screen: Screen = Screen(out, record.plan, all_nodes=all_nodes, skips_past=not stops)
        for text in (header(record.plan), *notes):
            say(out, text)
        with screen:
            return supervise.run(record, records, screen, secrets=values)
    except KeyboardInterrupt as interrupted:
        if not stops:
            between = isinstance(interrupted, supervise.BetweenAttempts)
            state = f"is being started again, by: clusterctl attach {job_id}" if between else "goes on"
            say(out, f"left; {job_id} {state}. Stop it with: clusterctl stop {job_id}")
            raise typer.Exit(EXIT_INTERRUPTED) from None
    except ClusterError as error:
        raise type(error)(error.message, f"the job may still be running: clusterctl attach {job_id}") from error
    nodes = len(record.plan.nodes)
    say(out, f"stopping {job_id} on {nodes} node{'s' if nodes > 1 else ''} (Ctrl-C again leaves at once)")
    _, undone = commands.stop(job_id, records)
    for text in undone:
        say(out, text)
    say(out, "stopped; nothing of it is running")
    raise typer.Exit(EXIT_INTERRUPTED)


def on_interrupt(out: Console, left: str) -> None:
    """Have Ctrl-C and SIGTERM raise KeyboardInterrupt; the next one says `left` and ends this process at once.

    Raised a second time it would not: Python waits for threads, and those for machines that do not answer.
    """
    handled = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]

    def first(*_: object) -> NoReturn:
        for number in handled:
            signal.signal(number, again)
        raise KeyboardInterrupt

    def again(*_: object) -> NoReturn:
        if left:
            say(out, left)
        out.file.flush()
        os._exit(EXIT_INTERRUPTED)

    for number in handled:
        signal.signal(number, first)


def end(watched: Watched, refused: str, records: Records, out: Console) -> int:
    """Clean up after a job, tell how it ended, return the exit code."""
    from cluster import commands, report, restarts

    plan, view, verdict = watched.plan, watched.view, watched.verdict
    began = time.time()
    outcome, undone = commands.finish(watched, records)
    for text in undone:
        say(out, text)
    if outcome == "stopped":
        say(out, f"{plan.job_id} was stopped")
        return report.EXIT_FAILED
    if outcome == "done":
        say(out, report.done(view, plan, str(Path.cwd())))
        return report.EXIT_DONE
    cause = report.cause(view, verdict)
    if verdict == "late":
        error(out, f"{plan.job_id}: {view.ready_count} of {len(view.nodes)} nodes met in {plan.timeout_s:g} s")
        cause = f"missing: {cause}"
    error(out, cause)
    if refused and not (plan.attempt == 1 and refused == restarts.NOT_ASKED):
        say(out, f"not started again: {refused}")
    for line in report.last_words(view, verdict, watched.tails):
        say(out, line)
    say(out, f"all nodes stopped {time.time() - began:.1f} s later; every rank's log: {plan.attempt_dir}")
    return records.load(plan.job_id).exit_code


def ended(record: Record, out: Console) -> int:
    """Tell how a job ended that nobody needs to wait for any more, return its exit code."""
    from cluster import report

    text = f"{record.plan.job_id} has ended: {record.outcome}" + (f" ({record.detail})" if record.detail else "")
    say(out, f"{text}; see: clusterctl logs {record.plan.job_id}")
    return report.EXIT_DONE if record.outcome == "done" else record.exit_code


def header(made: Plan) -> str:
    """What a job is, in one line, with its image's id."""
    from cluster import commands
    from cluster.view import header

    return header(made, commands.image_id(made))


def console() -> Console:
    """Where a verb prints: colours only on a terminal."""
    from rich.console import Console

    return Console(highlight=False)


def say(out: Console, text: str) -> None:
    """One line, as it is."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def error(out: Console, text: str) -> None:
    """One line that says what went wrong."""
    out.print(text, markup=False, highlight=False, soft_wrap=True, style="bold red")
