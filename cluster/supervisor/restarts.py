"""Restart policy: whether a failed job is restarted, and on which nodes. Pure.

On Slurm, agent/batch.sh requeues the job after a checkpoint or a dead node, and Slurm chooses the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster import contract
from cluster.errors import ClusterError
from cluster.spec import slurm
from cluster.spec.model import Job, Node
from cluster.supervisor.job_state import JobView, NodeView, Verdict, failing, is_secondary
from cluster.supervisor.report import cause, exit_code

NO_RESTARTS = "--max-restarts 0"
#: Exit codes after SIGKILL and SIGTERM.
_KILLED = (137, 143)


@dataclass(frozen=True)
class Failure:
    """The end of an attempt: the cause in one line, and the (epoch, step); (0, 0) is before the first step.

    `is_program_error`: the program exited with an error of its own, so a restart may fail at the same step.
    """

    why: str
    step: tuple[int, int] = (0, 0)
    is_program_error: bool = False


def failure(view: JobView, verdict: Verdict) -> Failure:
    """Return the failure of an attempt with this view and verdict."""
    progress = view.progress or {}
    step = (int(progress.get("epoch") or 0), int(progress.get("step") or 0))
    return Failure(cause(view, verdict), step, verdict == "failed" and _is_program_error(failing(view)[0]))


def _is_program_error(node: NodeView) -> bool:
    is_own = node.phase == "exited" and not is_secondary(node)
    return is_own and node.exit_code not in (*_KILLED, contract.EXIT_RUN_ME_AGAIN)


def refusal(job: Job, view: JobView, verdict: Verdict, past: Sequence[Failure]) -> str:
    """Return why the job is not restarted after the last failure of `past`, or "" if it is."""
    last = past[-1]
    if verdict == "failed" and failing(view)[0].note == slurm.CANCELLED:
        return "it was cancelled with scancel"
    if exit_code(view, verdict) == contract.EXIT_BAD_INPUT:
        return "the program refused its input"
    if verdict == "late":
        return "its nodes never joined"
    if len(past) > 1 and last.is_program_error and past[-2].is_program_error and last.step == past[-2].step:
        if not last.step[0]:
            return "it failed before its first step twice"
        if last.why == past[-2].why:
            return f"it failed with the same error at epoch {last.step[0]}, step {last.step[1]} twice"
    if len(past) > job.max_restarts:
        return f"it was restarted {job.max_restarts} times (--max-restarts)" if job.max_restarts else NO_RESTARTS
    return ""


def choose(job: Job, nodes: Sequence[Node], state: Mapping[str, ClusterError | None]) -> tuple[Node, ...]:
    """Return the nodes of the next attempt: the last ones in order, with spares in place of those with an error.

    `state` has the error of each node, or None. Return () if fewer than `job.least_nodes` are left.
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
