"""Whether a job that failed is started again, and on which nodes: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster import contract
from cluster.errors import ClusterError
from cluster.model import Job, Node
from cluster.rendezvous import JobView, Verdict, failing, missing
from cluster.report import cause, exit_code

NOT_ASKED = "--max-restarts 0"


@dataclass(frozen=True)
class Failure:
    """One attempt's end: which node, why in one line, and at which step of the whole run (0: before the first)."""

    node: str
    why: str
    step: tuple[int, int] = (0, 0)
    own_error: bool = False
    checkpointed: bool = False


def failure(view: JobView, verdict: Verdict) -> Failure:
    """What the view of an attempt that failed, came too late or stalled says about its end."""
    node = (missing(view) if verdict == "late" else failing(view) or list(view.nodes))[0]
    said = node.failed or {}
    progress = view.progress or {}
    return Failure(
        node.name,
        cause(view, verdict),
        (int(progress.get("epoch") or 0), int(progress.get("step") or 0)),
        # A rank that wrote its own end raised an error: with the same state it raises it again.
        own_error=bool(said) and said.get("exit_code") != contract.EXIT_RUN_ME_AGAIN,
        checkpointed=said.get("exit_code") == contract.EXIT_RUN_ME_AGAIN,
    )


def refusal(job: Job, view: JobView, verdict: Verdict, past: Sequence[Failure]) -> str:
    """Why the job is not started again after the last of `past`; "" when it is."""
    last = past[-1]
    if exit_code(view, verdict) == contract.EXIT_BAD_INPUT:
        return "the input was refused, and it would be again"
    if verdict == "late":
        return "its nodes never met, and they would not now"
    again = len(past) > 1 and (last.step, last.why) == (past[-2].step, past[-2].why)
    if again and (last.own_error or not last.step[0]):
        where = f"epoch {last.step[0]}, step {last.step[1]}" if last.step[0] else "the start"
        return f"it failed in the same way at the same place ({where}) twice"
    if len(past) > job.max_restarts:
        return f"it was restarted {job.max_restarts} times (--max-restarts)" if job.max_restarts else NOT_ASKED
    return ""


def choose(job: Job, nodes: Sequence[Node], state: Mapping[str, ClusterError | None]) -> tuple[Node, ...]:
    """The nodes of the next attempt: those of the last one in their order, spares in the places of those that fail.

    `state` says for each node what keeps it from running the job. Empty when fewer than `job.min_nodes` are left.
    """
    spares = [node for node in job.spares if node not in nodes and state.get(node.name) is None]
    chosen = []
    for node in nodes:
        if state.get(node.name) is None:
            chosen.append(node)
        elif spares:
            chosen.append(spares.pop(0))
    chosen += spares[: job.nodes - len(chosen)]
    return tuple(chosen) if len(chosen) >= job.least_nodes else ()
