"""A job as the queue of a batch system shows it, and what that says of the job's nodes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster import contract
from cluster.spec.model import Plan
from cluster.spec.node_status import NodeStatus, Phase

#: Exit code of job.sh if the run directory is not the same folder on all nodes.
EXIT_NOT_SHARED = 78

#: The ends of a node after which job.sh requeues the job (see RULES in supervisor/restarts.py): its exit code, or no
#: exit code, as after the failure of its host.
ENDED_WITH_CHECKPOINT = str(contract.EXIT_RUN_ME_AGAIN)
ENDED_WITHOUT_CODE = "nothing"
REQUEUED_AFTER = (ENDED_WITH_CHECKPOINT, ENDED_WITHOUT_CODE)


@dataclass(frozen=True)
class QueuedJob:
    """A job in the queue, or one that has left it.

    `state` is the queue's word. `phase` is the nodes' phase: `pending` in the queue, `starting` once it runs, `exited`
    with `exit_code` if its script has ended, and `lost` if the batch system ended it. `detail` says why it waits or has
    ended. `requeues` counts how often the batch system has put it back into the queue. `is_shared`: its nodes share the
    run directory, as far as its end tells.
    """

    number: str
    state: str
    phase: Phase
    detail: str = ""
    exit_code: int | None = None
    requeues: int = 0
    is_shared: bool = True
    is_cancelled: bool = False

    @property
    def is_active(self) -> bool:
        """Whether the job is in the queue or runs."""
        return self.phase in ("pending", "starting")


def is_requeued(plan: Plan, job: QueuedJob | None, attempt: int) -> bool:
    """Return whether the job has been requeued after the plan's attempt. `attempt` is the running one."""
    if attempt > plan.attempt:
        return True
    return job is not None and job.phase == "pending" and job.requeues >= plan.attempt


def statuses(
    plan: Plan,
    job: QueuedJob | None,
    attempt: int,
    hosts: Sequence[str],
    own: Sequence[NodeStatus],
    error: str = "",
    *,
    scheduler: str,
    lister: str,
) -> list[NodeStatus]:
    """Return the status of each node of the plan's attempt: its own exit status, else what its job's state says.

    `own` has the statuses from the nodes' status files, `attempt` is the running attempt (0: none yet), `hosts` has the
    host of each of its nodes, and `error` is an error of the batch script. `scheduler` is the batch system's name, and
    `lister` the program that shows its queue.
    """
    requeued = is_requeued(plan, job, attempt)
    made = []
    for rank, status in enumerate(own):
        where = f"on {hosts[rank]}" if attempt == plan.attempt and rank < len(hosts) else ""
        if status.phase == "exited":
            made.append(_exited(status, job, where))
        elif requeued:
            made.append(
                NodeStatus(status.node, "lost", detail=f"{scheduler} requeued the job {where}".strip())
            )
        elif job is None:
            made.append(NodeStatus(status.node, "lost", detail=f"{lister} does not list the job"))
        elif job.is_active:
            detail = job.detail or "; ".join(filter(None, [where, error]))
            made.append(replace(status, phase=job.phase, detail=detail))
        else:
            made.append(_ended(status.node, job, error or where))
    return made


def _exited(status: NodeStatus, job: QueuedJob | None, where: str) -> NodeStatus:
    """Return the status of a node that has written its exit code."""
    if not status.exit_code:
        return replace(status, detail="")
    if job is not None and job.is_cancelled:
        return replace(status, detail=job.detail, is_cancelled=True)
    return replace(status, where=where)


def _ended(node: str, job: QueuedJob, why: str) -> NodeStatus:
    """Return the status of a node that has written no exit code, although its job has ended."""
    if not job.is_shared:
        detail = f"the run directory is not shared by all nodes: {why or 'missing on the first'}"
    elif job.phase == "exited" and job.exit_code and not job.is_cancelled:
        detail = why or job.detail
    else:
        detail = job.detail
    return NodeStatus(node, job.phase, job.exit_code, detail, is_cancelled=job.is_cancelled)
