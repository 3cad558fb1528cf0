"""Facts, which `probe.sh` prints on a node, and findings, which the checks derive from facts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cluster.spec.model import Machine

TIMEOUT_S = 60.0
Level = Literal["ok", "warning", "failure"]
#: Receives one line of progress.
Say = Callable[[str], None]


@dataclass(frozen=True)
class Facts:
    """The output of a probe: every key with its values, in the order of the output."""

    values: Mapping[str, tuple[str, ...]]

    def text(self, key: str) -> str:
        """Return the first value, or "" if the key is absent."""
        return self.values.get(key, ("",))[0]

    def every(self, key: str) -> tuple[str, ...]:
        """Return all values."""
        return self.values.get(key, ())

    def number(self, key: str, nth: int = 0) -> int:
        """Return the nth word of the first value as a number, 0 if it is not one."""
        words = self.text(key).split()
        return int(words[nth]) if len(words) > nth and words[nth].isdigit() else 0

    def pairs(self, key: str) -> list[tuple[str, str]]:
        """Return every value, split at its first blank."""
        return [(first, rest) for first, _, rest in (value.partition(" ") for value in self.every(key))]

    def has(self, tool: str) -> bool:
        """Return whether the node has this program."""
        return tool in self.every("has")


def parse(text: str) -> Facts:
    """Return the facts in a probe's output."""
    values: dict[str, tuple[str, ...]] = {}
    for key, _, value in (line.partition("=") for line in text.splitlines()):
        if value.strip():
            values[key] = (*values.get(key, ()), value.strip())
    return Facts(values)


#: What a probe runs if a line of the inventory's prologue fails.
PROLOGUE_FAILED = 'echo "prologue=$1"; exit'


@dataclass(frozen=True)
class NodeFacts:
    """Input of the checks: the nodes that could be reached, and the facts of each by its name.

    `image_id` is the id of `image` on this machine, "" if it is absent. `clock_s` has each node's clock minus this
    machine's, in seconds. `backend` and `prologue` are the inventory's.
    """

    nodes: tuple[Machine, ...]
    facts: Mapping[str, Facts]
    image: str = ""
    image_id: str = ""
    device: str = "cuda"
    clock_s: Mapping[str, float] = field(default_factory=dict)
    backend: str = ""
    prologue: str = ""


class Verdict(NamedTuple):
    """The result of a check on one node; a warning and a failure have a `fix`."""

    level: Level
    detail: str
    fix: str = ""


#: A check of one node, which may compare it with the others. None: it does not apply to this node.
Check = Callable[[Machine, Facts, NodeFacts], Verdict | None]


@dataclass(frozen=True)
class Finding:
    """One line of the report: a verdict with its check and its node."""

    check: str
    node: str
    level: Level
    detail: str
    fix: str = ""

    @property
    def is_silent(self) -> bool:
        """Whether it says that the node does not answer."""
        return self.check == "login" and self.level == "failure"


def judge(checks: Mapping[str, Check], seen: NodeFacts) -> list[Finding]:
    """Return the findings of all checks on all nodes."""
    pairs = [(name, check, node) for name, check in checks.items() for node in seen.nodes]
    verdicts = [(name, node, check(node, seen.facts[node.name], seen)) for name, check, node in pairs]
    return [Finding(name, node.name, *verdict) for name, node, verdict in verdicts if verdict is not None]


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 0 without failures, 5 if a node could not be reached, else 3."""
    failed = {finding.check for finding in findings if finding.level == "failure"}
    return 5 if "login" in failed else 3 if failed else 0


def usual(values: Iterable[str]) -> str:
    """Return the most frequent value, the first one of several; "" without values."""
    listed = list(values)
    return max(listed, key=listed.count, default="")


def with_note(detail: str, note: str) -> str:
    """Return a detail about the login, and the note of the shell if there is one."""
    return f"{detail}, {note}" if note else detail


def typed_on(node: Machine, facts: Facts | None, command: str, *, root: bool = False) -> str:
    """Return the line to type on this machine that runs `command` on the node, with sudo if needed."""
    if root and (facts is None or facts.text("uid") != "0"):
        command = f"sudo {command}"
    if not node.login:
        return command
    config = f"-F {node.ssh_config} " if node.ssh_config else ""
    terminal = "-t " if command.startswith("sudo ") else ""
    return f'ssh {terminal}{config}{node.login} "{command}"'
