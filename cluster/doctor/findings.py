"""What a check says of a node: fine, worth knowing, or in the way of a launch - and then what to type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster.doctor.probe import Facts
from cluster.model import Node

Level = Literal["ok", "warning", "failure"]

EXIT_FINE = 0
EXIT_WOULD_STOP = 3
EXIT_UNREACHABLE = 5


@dataclass(frozen=True)
class Finding:
    """One line of the report; every warning and failure has a `fix`."""

    check: str
    node: str
    level: Level
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Seen:
    """Everything that is known when the checks judge: `nodes` are those that answered, with their facts.

    `image_id` is the launching machine's ("": it has none), `clock_s` each node's clock minus this machine's, `jobs`
    the jobs that are known to run, `versions` what the image holds (None: nobody could look).
    """

    nodes: tuple[Node, ...]
    facts: Mapping[str, Facts]
    image: str = ""
    image_id: str = ""
    device: str = "cuda"
    clock_s: Mapping[str, float] = field(default_factory=dict)
    jobs: frozenset[str] = frozenset()
    versions: Facts | None = None


def exit_code(findings: Sequence[Finding]) -> int:
    """0 when nothing would stop a launch, 5 when a machine could not be reached, else 3."""
    failed = {finding.check for finding in findings if finding.level == "failure"}
    if "login" in failed:
        return EXIT_UNREACHABLE
    return EXIT_WOULD_STOP if failed else EXIT_FINE


def typed_on(node: Node, facts: Facts | None, command: str, *, root: bool = False) -> str:
    """The line a user types here to run `command` there, with sudo where it needs root and the login has not."""
    if root and (facts is None or facts.text("uid") != "0"):
        command = f"sudo {command}"
    if not node.login:
        return command
    config = f"-F {node.ssh_config} " if node.ssh_config else ""
    terminal = "-t " if command.startswith("sudo ") else ""
    return f'ssh {terminal}{config}{node.login} "{command}"'
