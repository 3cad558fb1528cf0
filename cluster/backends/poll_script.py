"""The polling script of a backend: what it is given, how it runs on a machine, and what its lines say of the nodes."""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.agent import scripts
from cluster.backends import log_files
from cluster.backends.script import attempt_dir
from cluster.errors import UnreachableError
from cluster.spec import node_status
from cluster.spec.model import Machine, Plan
from cluster.spec.node_status import NodeStatus, NodeStatuses
from cluster.spec.status import parse
from cluster.transport import reach

#: Timeout of a poll: a machine that answers pings may still be slow.
TIMEOUT_S = 30.0
#: Characters of the arguments of one polling command: Linux takes 128 KB in the one argument that SSH makes of them.
_MOST_WORDS = 1 << 16


@dataclass(frozen=True)
class Script:
    """A polling script: its name in agent/, its variables, and the lines that it prints of a job before its nodes.

    `words` returns the arguments that come before a job's nodes.
    """

    name: str
    head: int = 0
    words: Callable[[Plan, Machine], Sequence[str]] = lambda plan, machine: ()
    values: Mapping[str, str | int] = field(default_factory=dict)


#: The lines that a script prints of a job, and the statuses of its nodes.
Answer = tuple[list[str], NodeStatuses]


def poll(plan: Plan, machine: Machine, script: Script) -> Answer:
    """Run a polling script for a plan's nodes on a machine, and append to the local copies of logs that are elsewhere.

    Raises UnreachableError.
    """
    nodes = plan.nodes_on(machine)
    copies = {
        node.name: Path(plan.attempt_dir, f"{node.name}.log") for node in nodes if plan.is_elsewhere(machine)
    }
    sizes = {name: copy.stat().st_size if copy.exists() else 0 for name, copy in copies.items()}
    ((lines, logs),) = _run([(plan, _words(plan, machine, script, sizes))], machine, script)
    head, found = _parsed(plan, machine, script, lines)
    for node in nodes:
        chunk = base64.b64decode(logs[node.name])
        if node.name in copies:
            log_files.append(plan, copies[node.name], sizes[node.name], chunk)
        if len(chunk) >= log_files.CHUNK:  # a node counts as exited once its whole log has been fetched
            found[node.name] = NodeStatus(node.name, "starting", events=found[node.name].events)
    return head, found


def poll_all(plans: Sequence[Plan], machine: Machine, script: Script) -> list[Answer]:
    """Run a polling script once for the nodes that all plans have on a machine, without their logs.

    The arguments of very many jobs take several commands. Raises UnreachableError.
    """
    return [
        _parsed(plan, machine, script, lines)
        for part in _parts([(plan, _words(plan, machine, script, {})) for plan in plans])
        for (plan, _), (lines, _) in zip(part, _run(part, machine, script), strict=True)
    ]


def _words(plan: Plan, machine: Machine, script: Script, sizes: Mapping[str, int]) -> list[str]:
    """Return the arguments for a plan's nodes on a machine; `sizes` has the size of each log's copy."""
    folder = attempt_dir(plan, machine)
    each = [
        word for node in plan.nodes_on(machine) for word in (folder, node.name, str(sizes.get(node.name, "")))
    ]
    return [*script.words(plan, machine), *each]


def _parts(pairs: Sequence[tuple[Plan, list[str]]]) -> Iterator[list[tuple[Plan, list[str]]]]:
    """Divide the plans, so that the arguments of each part are no longer than _MOST_WORDS."""
    part: list[tuple[Plan, list[str]]] = []
    size = 0
    for plan, words in pairs:
        own = sum(len(word) + 3 for word in words)
        if part and size + own > _MOST_WORDS:
            yield part
            part = []
            size = 0
        part.append((plan, words))
        size += own
    if part:
        yield part


def _run(
    pairs: Sequence[tuple[Plan, list[str]]], machine: Machine, script: Script
) -> list[tuple[list[str], dict[str, str]]]:
    """Run a polling script, and return for each plan its lines, and the logs of its nodes. Raises UnreachableError."""
    words = [word for _, own in pairs for word in own]
    command = scripts.command(script.name, *words, most=log_files.CHUNK, **script.values)
    done = reach(machine).run(command, timeout_s=TIMEOUT_S)
    lines = done.out.removesuffix("\n").split("\n")  # not splitlines: a status may have other ends of lines
    sizes = [script.head + 4 * len(plan.nodes_on(machine)) for plan, _ in pairs]
    if len(lines) != sum(sizes):
        raise UnreachableError(f"{machine.name}: {done.last_line}")
    made = []
    for (plan, _), size in zip(pairs, sizes, strict=True):
        own = lines[:size]
        lines = lines[size:]
        names = [node.name for node in plan.nodes_on(machine)]
        made.append((own, dict(zip(names, own[script.head + 3 :: 4], strict=True))))
    return made


def _parsed(plan: Plan, machine: Machine, script: Script, lines: Sequence[str]) -> Answer:
    answers = {}
    for index, node in enumerate(plan.nodes_on(machine)):
        state, why, agent = lines[script.head + 4 * index :][:3]
        answers[node.name] = node_status.from_agent(node.name, parse(agent), state, why)
    return list(lines[: script.head]), answers
