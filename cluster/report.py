"""How a job ended, in words and as an exit code: pure, from what was seen of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from cluster import contract
from cluster.logs import AGENT_PREFIX, Event
from cluster.model import Plan
from cluster.rendezvous import JobView, NodeView, Verdict, failing, is_secondary, missing

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_LATE = 4

#: How many lines of a failed rank are shown.
LAST_LINES = 25
# The agent puts "[1] " in front of what local rank 1 prints, and nothing in front of what local rank 0 prints.
_OTHER_RANK = re.compile(r"\[(\d+)\] ")

# What a trainer's events may tell of, with its title.
SCORES = {"map50": "mAP50", "map": "mAP50-95", "top1": "top-1", "top5": "top-5", "miou": "mIoU"}
_SIGNALS = {137: " (killed)", 143: " (terminated)", 139: " (crashed: segmentation fault)", 134: " (aborted)"}


def seconds(value: float) -> str:
    """`9.8 s`, `42 s`, `2 min 31 s`, `3 h 05 min`."""
    if value < 10:
        return f"{value:.1f} s"
    if value < 60:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def scores(event: Event, first: str) -> str:
    """`epoch 6   mAP50 0.912   mAP50-95 0.684`, with the scores that the event has."""
    words = [first]
    for key, title in SCORES.items():
        if isinstance(event.get(key), int | float):
            words.append(f"{title} {event[key]:.3f}")
    return "   ".join(words)


def done(view: JobView, plan: Plan, cwd: str) -> str:
    """`done in 2 min 31 s   mAP50 0.950   mAP50-95 0.740   runs/digits-7f3a/best.pt`."""
    took = max((node.ended_at or 0.0) for node in view.nodes) - view.started
    first = f"done in {seconds(max(0.0, took))}"
    run_dir = PurePath(plan.run_dir)
    shown = run_dir.relative_to(cwd) if run_dir.is_relative_to(cwd) else run_dir
    if view.done is None:
        return f"{first}   {shown}"
    # The event has the path as the node sees it; the run directory is the same folder.
    best = str(view.done.get("best", "")).rpartition(f"/{plan.job_id}/")[2]
    return f"{scores(view.done, first)}   {shown / best}"


def cause(view: JobView, verdict: Verdict) -> str:
    """Why a job ended badly, in one line: the first failing node, or those that did not come or move; else ""."""
    if verdict == "failed":
        first = failing(view)[0]
        silent = [node for node in view.nodes if node.silent]
        if is_secondary(first) and silent:  # not long enough to be lost, but who else should it have been
            return f"{silent[0].name}: {silent[0].silent}"
        return _failure(first)
    if verdict == "stalled":
        quiet = [node for node in view.nodes if node.phase == "ready"]
        where = (
            f"epoch {view.progress.get('epoch')}, step {view.progress.get('step')}" if view.progress else "the start"
        )
        return f"{', '.join(node.name for node in quiet)}: no step since {where}"
    if verdict == "late":
        late = missing(view)
        return "; ".join(f"{node.name}: {node.phase}" + (f": {node.note}" if node.note else "") for node in late)
    return ""


def hint(view: JobView, verdict: Verdict) -> str:
    """What to do about it, where the node that failed first knew; else ""."""
    said = failing(view)[0].failure if verdict == "failed" else None
    return str((said or {}).get("hint") or "")


def last_words(view: JobView, verdict: Verdict, tails: Mapping[str, Sequence[str]]) -> list[str]:
    """The last lines of the nodes to blame, each with its node's name, and what to do where a node knew."""
    nodes = missing(view) if verdict == "late" else failing(view)[:1] or list(view.nodes)[:1]
    refused = exit_code(view, verdict) == contract.EXIT_BAD_INPUT
    lines = []
    for node in nodes:
        if not refused:  # a refusal says it all in its one line
            lines += [f"  {node.name} | {line}" for line in _own_lines(node, tails[node.name]) or [_last_heard(node)]]
            lines += [f"  then rank {other['rank']}: {_shortened(other['error'])}" for other in _others(node)]
        if node.failure is not None and node.failure.get("hint"):
            lines.append(f"hint: {node.failure['hint']}")
    return lines


def exit_code(view: JobView, verdict: Verdict) -> int:
    """What the launcher ends with: the trainer's own 2 for a refused input, which torchrun turns into a 1."""
    if verdict == "late":
        return EXIT_LATE
    if verdict == "stalled":
        return EXIT_FAILED
    if verdict != "failed":
        return EXIT_DONE
    code = failing(view)[0].exit_code
    return contract.EXIT_BAD_INPUT if view.says_ready and code == contract.EXIT_BAD_INPUT else EXIT_FAILED


def _failure(node: NodeView) -> str:
    if node.failure is not None:
        rank = node.failure.get("rank")
        where = f" {node.where}" if node.where else ""
        return f"{node.name}{where}: " + (f"rank {rank}: " if rank is not None else "") + str(node.failure.get("error"))
    if node.phase == "lost":
        return f"{node.name}: lost: {node.note}"
    why = f": {node.note}" if node.note and not node.note.startswith("exit ") else ""
    return f"{node.name}: exit {node.exit_code}{_SIGNALS.get(node.exit_code or 0, '')}{why}"


def _own_lines(node: NodeView, tail: Sequence[str]) -> list[str]:
    """The last lines of the rank that failed; of a node without one, the node's."""
    local_rank = (node.failure or {}).get("local_rank")
    if local_rank is None:
        return list(tail[-LAST_LINES:])
    found = []
    for line in tail:
        match = _OTHER_RANK.match(line)
        if (int(match[1]) if match else 0) == local_rank and not line.startswith(AGENT_PREFIX):
            found.append(line[match.end() :] if match else line)
    return found[-LAST_LINES:]


def _others(node: NodeView) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = (node.failure or {}).get("others", ())
    return found


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


def _last_heard(node: NodeView) -> str:
    if node.progress is None:
        return "(printed nothing)"
    epoch, step, steps = (node.progress.get(name) for name in ("epoch", "step", "steps"))
    return f"(printed nothing; last heard of in epoch {epoch}, step {step} of {steps})"
