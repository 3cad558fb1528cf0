"""Whether a job that failed is started again, and on which nodes: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster import contract, slurm
from cluster.errors import ClusterError
from cluster.model import Job, Node
from cluster.rendezvous import JobView, NodeView, Verdict, failing, is_secondary
from cluster.report import cause, exit_code

NOT_ASKED = "--max-restarts 0"


#: How a node exits that something else has ended: by SIGKILL or SIGTERM.
_KILLED = (137, 143)


@dataclass(frozen=True)
class Failure:
    """One attempt's end: why, in one line, and at which (epoch, step) of the run; (0, 0) is before the first step.

    `by_itself`: the program ended with an error of its own, so from the same state it would again.
    """

    why: str
    step: tuple[int, int] = (0, 0)
    by_itself: bool = False


def failure(view: JobView, verdict: Verdict) -> Failure:
    """What the view of an attempt that failed, came too late or stalled says about its end."""
    progress = view.progress or {}
    step = (int(progress.get("epoch") or 0), int(progress.get("step") or 0))
    return Failure(cause(view, verdict), step, verdict == "failed" and _ended_itself(failing(view)[0]))


def _ended_itself(node: NodeView) -> bool:
    ended = node.phase == "exited" and not is_secondary(node)
    return ended and node.exit_code not in (*_KILLED, contract.EXIT_RUN_ME_AGAIN)


def refusal(job: Job, view: JobView, verdict: Verdict, past: Sequence[Failure]) -> str:
    """Why the job is not started again after the last of `past`; "" when it is."""
    last = past[-1]
    if verdict == "failed" and failing(view)[0].note == slurm.CANCELLED:
        return "it was cancelled with scancel"
    if exit_code(view, verdict) == contract.EXIT_BAD_INPUT:
        return "the input was refused, and it would be again"
    if verdict == "late":
        return "its nodes never met, and they would not now"
    if len(past) > 1 and last.by_itself and past[-2].by_itself and last.step == past[-2].step:
        if not last.step[0]:
            return "it failed before its first step twice"
        if last.why == past[-2].why:
            return f"it failed in the same way at epoch {last.step[0]}, step {last.step[1]} twice"
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
