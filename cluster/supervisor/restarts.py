"""Restart policy: the rules that decide whether a failed job is restarted, and the nodes of its next attempt. Pure.

In a batch system, backends/batch/job.sh applies two of the rules without a launcher (exit code 75, and nodes that ended
without an exit code), and the system chooses the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster import contract
from cluster.errors import ClusterError
from cluster.spec.model import Job, JobRecord, Machine
from cluster.supervisor.job_state import JobView, NodeView, Verdict, failing, is_secondary
from cluster.supervisor.progress import last_step
from cluster.supervisor.report import cause, exit_code

NO_RESTARTS = "--max-restarts 0"
#: Exit codes after SIGKILL and SIGTERM.
_KILLED = (137, 143)


@dataclass(frozen=True)
class Failure:
    """The end of an attempt, or a restart that did not start. The fields are those of PastAttempt."""

    why: str
    step: tuple[int, int] = (0, 0)
    is_program_error: bool = False


@dataclass(frozen=True)
class Ended:
    """What the rules see: the job, the last view and verdict of the attempt, and all failures of the job."""

    job: Job
    view: JobView
    verdict: Verdict
    past: Sequence[Failure]

    @property
    def first(self) -> NodeView | None:
        """The node that failed first."""
        return failing(self.view)[0] if self.verdict == "failed" else None

    @property
    def is_repeated(self) -> bool:
        """Whether the program failed by itself at the same step as the time before."""
        if len(self.past) < 2:
            return False
        before, last = self.past[-2:]
        return last.is_program_error and before.is_program_error and last.step == before.step


@dataclass(frozen=True)
class Rule:
    """A rule of the list in docs/how-to/failures.md. The first one that applies decides.

    `when` is the list's text. `why_not` is the reason against a restart, formatted with the job, its last failure
    and the node that failed first; "" restarts the job.
    """

    when: str
    applies: Callable[[Ended], bool]
    why_not: str = ""


#: Who decides that a job is restarted, and when: only these rules.
RULES = (
    Rule(
        "`scancel` ended the job",
        lambda ended: ended.first is not None and ended.first.status.is_cancelled,
        "it was {first.note}",
    ),
    Rule(
        "a pod can never start, for example because of a wrong image name or a missing Secret",
        lambda ended: ended.first is not None and ended.first.status.is_final,
        "it could not start, nor could another attempt",
    ),
    Rule(
        "the trainer exits with 2 (fix something first)",
        lambda ended: exit_code(ended.view, ended.verdict) == contract.EXIT_BAD_INPUT,
        "the program refused its input",
    ),
    Rule(
        "the nodes did not join within `--rendezvous-timeout`",
        lambda ended: ended.verdict == "late",
        "its nodes never joined",
    ),
    Rule(
        "the program fails before its first step, twice in a row",
        lambda ended: ended.is_repeated and not ended.past[-1].step[0],
        "it failed before its first step twice",
    ),
    Rule(
        "the program fails at the same step with the same error, twice in a row",
        lambda ended: ended.is_repeated and ended.past[-1].why == ended.past[-2].why,
        "it failed with the same error at epoch {last.step[0]}, step {last.step[1]} twice",
    ),
    Rule(
        "`--max-restarts` is 0",
        lambda ended: ended.job.max_restarts == 0,
        NO_RESTARTS,
    ),
    Rule(
        "the job was restarted `--max-restarts` times, counting attempts that failed to start",
        lambda ended: len(ended.past) > ended.job.max_restarts,
        "it was restarted {job.max_restarts} times (--max-restarts)",
    ),
    Rule(
        "the trainer wrote a checkpoint after a signal (exit code 75)",
        lambda ended: ended.first is not None and ended.first.status.exit_code == contract.EXIT_RUN_ME_AGAIN,
    ),
    Rule(
        "a machine, its engine or the agent on it is gone",
        lambda ended: ended.first is not None and ended.first.phase == "lost",
    ),
    Rule(
        "anything else: a program error, a killed rank or container, a stall",
        lambda ended: True,
    ),
)


def failure(view: JobView, verdict: Verdict) -> Failure:
    """Return the failure of an attempt with this view and verdict."""
    is_program_error = verdict == "failed" and _is_program_error(failing(view)[0])
    return Failure(cause(view, verdict), last_step(view.progress), is_program_error)


def failures(record: JobRecord) -> list[Failure]:
    """Return all recorded failures of a job, also those that other processes have seen."""
    return [Failure(past.cause, past.step, past.is_program_error) for past in record.history]


def _is_program_error(node: NodeView) -> bool:
    is_own = node.phase == "exited" and not is_secondary(node)
    return is_own and node.status.exit_code not in (*_KILLED, contract.EXIT_RUN_ME_AGAIN)


def refusal(job: Job, view: JobView, verdict: Verdict, past: Sequence[Failure]) -> str:
    """Return why the job is not restarted after the last failure of `past`, or "" if it is."""
    ended = Ended(job, view, verdict, past)
    rule = next(rule for rule in RULES if rule.applies(ended))
    return rule.why_not.format(job=job, last=past[-1], first=ended.first)


def choose(job: Job, state: Mapping[str, ClusterError | None]) -> Job | None:
    """Return the job of the next attempt: on its hosts in order, with spares for those with an error.

    A spare gets the number of processes of the host that it replaces; with `--gpus all`, it has its own number. `state`
    has the error of each host, or None. Return None if fewer than `job.least_nodes` are left.
    """
    spares = [host for host in job.spares if state.get(host.name) is None]
    hosts: list[Machine] = []
    procs: list[int] = []
    for host, number in zip(job.hosts, job.procs, strict=True):
        if state.get(host.name) is not None:
            if not spares:
                continue
            host = spares.pop(0)
        hosts.append(host)
        procs.append(number)
    if len(hosts) < job.least_nodes:
        return None
    each = tuple(procs) if isinstance(job.procs_per_node, tuple) else job.procs_per_node
    return replace(job, hosts=tuple(hosts), nodes=len(hosts), procs_per_node=each)
