"""The status of a node as a backend observed it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from cluster.agent.app.node_agent.events import Event
from cluster.spec.status import AgentStatus, Failure, StalledRank, Usage, from_exit_file

Phase = Literal["pending", "starting", "setup", "joining", "ready", "exited", "lost"]


@dataclass(frozen=True)
class NodeStatus:
    """The state of a node as a backend observed it; `ended_at` is a Unix time, None while it runs or if unknown.

    `silent` says why and since when the machine does not answer, `where` on which host a batch job's node ran.
    `failure` is the first failure among its ranks, from the agent.
    `stall` says where its ranks wait, if they make no progress.
    `leaving` are the ranks that have not exited although the programs of all ranks of the node have ended well.
    `usage` has the CPU, memory and GPU use of its ranks, and the memory of its host.
    `events` are the last event of each kind that makes up the phase and progress of the node.
    `heartbeat` is the last one of its agent, by the clock of its machine (0: none yet). Compare it only with another
    heartbeat of that agent: clocks differ, and are set.
    `lost` says how many lines its log lacks, and why. `quiet_s` is the time since a rank wrote its last line.
    `is_final`: the node could not start, and another attempt could not, either. `starts_over`: what was seen of it
    before no longer holds, because the attempt has given its machines back and starts again later. `is_cancelled`: its
    queue was asked to end the job, so it is not restarted.
    """

    node: str
    phase: Phase
    exit_code: int | None = None
    detail: str = ""
    ended_at: float | None = None
    silent: str = ""
    where: str = ""
    failure: Failure | None = None
    stall: tuple[StalledRank, ...] = ()
    leaving: tuple[int, ...] = ()
    usage: Usage | None = None
    events: tuple[Event, ...] = ()
    heartbeat: float = 0.0
    lost: str = ""
    quiet_s: float = 0.0
    is_final: bool = False
    starts_over: bool = False
    is_cancelled: bool = False


#: The statuses of a plan's nodes on one machine, by the node's name.
NodeStatuses = dict[str, NodeStatus]


def from_agent(name: str, agent: AgentStatus, state: str = "", why: str = "") -> NodeStatus:
    """Return a node's status from the agent's status file, the state of the node's script, and why that exited.

    `state` is `exit CODE TIME`, `alive`, `gone`, `starting` or `no folder`.
    """
    word, _, rest = state.partition(" ")
    events = agent.events or ()
    if agent.has_exited:
        detail = (agent.reason or "") if agent.exit_code else ""
        if failure := agent.failure:
            detail = "" if failure.rank is not None else failure.error
        ended = NodeStatus(
            name, "exited", agent.exit_code, detail, agent.ended_at, failure=failure, events=events
        )
        return replace(ended, lost=agent.lost)
    if word == "exit":  # the runtime failed before the agent started
        code, at = from_exit_file(rest)
        return NodeStatus(name, "exited", code, why, at)
    if word == "no":
        return NodeStatus(name, "lost", detail="its folder does not exist")
    if word == "gone":
        detail = "its script exited without an exit code" + (f": {why}" if why else "")
        return NodeStatus(name, "lost", detail=detail)
    return NodeStatus(
        name,
        "setup" if agent.phase == "setup" else "starting",
        stall=agent.stall or (),
        leaving=agent.leaving or (),
        usage=agent.usage,
        events=events,
        heartbeat=agent.heartbeat or 0.0,
        lost=agent.lost,
        quiet_s=agent.quiet_s,
    )
