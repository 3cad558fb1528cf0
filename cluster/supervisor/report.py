"""The final report of a job on the terminal: its cause of failure, the last log lines, and the exit code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath

from cluster import contract
from cluster.agent.app.node_agent.events import Scored
from cluster.backends.logs import AGENT_PREFIX
from cluster.spec.model import Plan
from cluster.spec.status import StalledRank
from cluster.supervisor import hints, progress
from cluster.supervisor.job_state import JobView, NodeView, Verdict, failing, is_secondary, missing

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_LATE = 4

#: How many lines of a failed rank are shown.
LAST_LINES = 25
# The agent prefixes the lines of local rank 1 with "[1] ", and those of local rank 0 with nothing.
_OTHER_RANK = re.compile(r"\[(\d+)\] ")

_SIGNALS = {137: " (killed)", 143: " (terminated)", 139: " (crashed: segmentation fault)", 134: " (aborted)"}


def seconds(value: float) -> str:
    """Format a duration: `9.8 s`, `42 s`, `2 min 31 s`, `3 h 05 min`."""
    if value < 10:
        return f"{value:.1f} s"
    if value < 60:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def scores(event: Scored, first: str) -> str:
    """Format the scores of an event: `epoch 6/7   mAP50 0.912   mAP50-95 0.684`."""
    named = progress.named_scores(event.scores)
    return "   ".join([first, *(f"{name} {score}" for name, score in named.items())])


def done(view: JobView, plan: Plan, cwd: str, launched_at: float) -> str:
    """Format the success: `done in 2 min 31 s   mAP50 0.950   mAP50-95 0.740   runs/digits-7f3a/best.pt`.

    The time counts from the launch, with all earlier attempts.
    """
    ended_at = max(node.status.ended_at or node.left_at or view.done_at or 0.0 for node in view.nodes)
    first = f"done in {seconds(max(0.0, ended_at - launched_at))}"
    if plan.attempt > 1:
        first += f" (attempt {plan.attempt}: {seconds(max(0.0, ended_at - view.started))})"
    shown = from_here(plan.run_dir, cwd)
    if view.done is None:
        return f"{first}   {shown}"
    # The event has the node's path of the same run directory.
    best = (view.done.best or "").rpartition(f"/{plan.job_id}/")[2]
    return f"{scores(view.done, first)}   {shown / best}"


def lost_lines(view: JobView) -> str:
    """Return what the logs of a job lack, `but the log of node-0 lost 3 lines: No space left on device`, or ""."""
    lost = [f"the log of {node.name} lost {node.status.lost}" for node in view.nodes if node.status.lost]
    return f"but {'; '.join(lost)}" if lost else ""


def logs_of(plan: Plan, *, every_rank: bool = False) -> list[str]:
    """Return a line with the folder of the attempt's logs, or nothing if there are none here.

    `every_rank`: say so if each rank has a file there.
    """
    folder = Path(plan.attempt_dir)
    if every_rank and any(folder.glob("ranks/*/*")):
        return [f"every rank's log: {folder}"]
    return [f"logs: {folder}"] if any(folder.glob("*.log")) else []


def overdue(node: NodeView) -> str:
    """Return a sentence about a node that is stopped because it did not exit when the job was done."""
    if not node.status.leaving:
        return f"{node.name}: its ranks did not exit after the job was done: stopping them"
    is_one = len(node.status.leaving) == 1
    who = f"rank {node.status.leaving[0]}" if is_one else f"ranks {', '.join(map(str, node.status.leaving))}"
    return f"{node.name}: {who} did not exit after the program's end: stopping {'it' if is_one else 'them'}"


def from_here(path: str, cwd: str) -> PurePath:
    """Return a path in the folder `cwd` relative to it, and any other path as it is."""
    full = PurePath(path)
    return full.relative_to(cwd) if full.is_relative_to(cwd) else full


def cause(view: JobView, verdict: Verdict) -> str:
    """Return the cause of a failure in one line: the first failure, or the late or stalled nodes ("": none).

    Of a job that is done, return what its logs lack.
    """
    if verdict == "failed":
        first = failing(view)[0]
        silent = [node for node in view.nodes if node.status.silent]
        if is_secondary(first) and silent:  # not lost yet, but the only explanation
            return f"{silent[0].name}: {silent[0].status.silent}"
        return _failure(first)
    if verdict == "stalled" and (ranks := [rank for node in view.nodes for rank in node.status.stall]):
        return _stall(ranks)
    if verdict == "stalled":
        where = progress.describe(view.progress).position if view.progress else "the start"
        running = ", ".join(node.name for node in view.nodes if node.phase == "ready")
        return f"{running}: no step since {where}"
    if verdict == "late":
        late = missing(view)
        return "; ".join(
            f"{node.name}: {node.phase}" + (f": {node.note}" if node.note else "") for node in late
        )
    return lost_lines(view) if verdict == "done" else ""


def last_lines(view: JobView, verdict: Verdict, tails: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the last log lines of the failed or late nodes, other ranks' failures, and the hint of the failure."""
    if verdict == "stalled" and any(node.status.stall for node in view.nodes):
        return []  # `cause` says where, and the log has the stacks
    nodes = missing(view) if verdict == "late" else failing(view)[:1] or view.nodes[:1]
    is_bad_input = exit_code(view, verdict) == contract.EXIT_BAD_INPUT
    lines = []
    for node in nodes:
        failure = node.status.failure
        rank_lines = _rank_lines(node, tails[node.name])
        if not is_bad_input:  # its error is one line, and `cause` has it
            lines += [f"  {node.name} | {line}" for line in rank_lines or [_last_progress(node)]]
            others = (failure.others if failure else None) or ()
            lines += [f"  then rank {other.rank}: {other.error[:100]}" for other in others]
        advice = failure.hint if failure else None
        advice = advice or hints.hint(failure.error if failure else "", rank_lines)
        if advice:
            lines.append(f"hint: {advice}")
    return lines


def exit_code(view: JobView, verdict: Verdict) -> int:
    """Return the launcher's exit code. It is 2 for bad input of the trainer, as in the trainer itself."""
    if verdict == "late":
        return EXIT_LATE
    if verdict == "stalled":
        return EXIT_FAILED
    if verdict != "failed":
        return EXIT_DONE
    code = failing(view)[0].status.exit_code
    return contract.EXIT_BAD_INPUT if view.says_ready and code == contract.EXIT_BAD_INPUT else EXIT_FAILED


def _stall(ranks: Sequence[StalledRank]) -> str:
    """Return `rank 3 has not entered all_reduce: sleep (train.py:45); ranks 0-2 wait in all_reduce (train.py:40)`.

    The ranks outside of a collective come first, and of those the place with the fewest ranks.
    """
    places: dict[tuple[str, str, str], list[int]] = {}
    for stalled in ranks:
        key = (stalled.collective or "", stalled.call or "", stalled.place or "")
        places.setdefault(key, []).append(stalled.rank)
    collectives = list(dict.fromkeys(collective for collective, _, _ in places if collective))
    parts = []
    for (collective, call, place), numbers in sorted(
        places.items(), key=lambda item: (bool(item[0][0]), len(item[1]))
    ):
        is_one = len(numbers) == 1
        who = f"rank {numbers[0]}" if is_one else f"ranks {', '.join(map(str, sorted(numbers)))}"
        what = f"{who}: {call or 'unknown'}"
        if collective:
            what = f"{who} {'waits' if is_one else 'wait'} in {collective}"
        elif collectives:
            what = f"{who} {'has' if is_one else 'have'} not entered {collectives[0]}: {call or 'unknown'}"
        parts.append(what + (f" ({place})" if place else ""))
    is_busy = any(stalled.busy for stalled in ranks)
    what = "no output, and busy at the same place" if is_busy else "no output and no activity"
    return f"{what}: " + "; ".join(parts)


def _failure(node: NodeView) -> str:
    if node.status.failure is not None:
        rank = node.status.failure.rank
        where = f" {node.status.where}" if node.status.where else ""
        return (
            f"{node.name}{where}: "
            + (f"rank {rank}: " if rank is not None else "")
            + node.status.failure.error
        )
    if node.phase == "lost":
        return f"{node.name}: lost: {node.note}"
    why = f": {node.note}" if node.note and not node.note.startswith("exit ") else ""
    if why and node.status.is_final:  # it has not started, so that nothing of it has exited
        return f"{node.name}{why}"
    return f"{node.name}: exit {node.status.exit_code}{_SIGNALS.get(node.status.exit_code or 0, '')}{why}"


def _rank_lines(node: NodeView, tail: Iterable[str]) -> list[str]:
    """Return the last lines of the failed rank, or of the whole node if no rank is known."""
    local_rank = node.status.failure.local_rank if node.status.failure else None
    if local_rank is None:
        return list(tail)[-LAST_LINES:]
    lines = []
    for line in tail:
        match = _OTHER_RANK.match(line)
        line_rank = int(match[1]) if match else 0
        if line_rank == local_rank and not line.startswith(AGENT_PREFIX):
            lines.append(line[match.end() :] if match else line)
    return lines[-LAST_LINES:]


def _last_progress(node: NodeView) -> str:
    if node.progress is None:
        return "(printed nothing)"
    return f"(printed nothing; last progress: {progress.describe(node.progress).position})"
