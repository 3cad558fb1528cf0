"""The facts of a node, which `probe.sh` prints as `key=value` lines; nothing is judged here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster import resources
from cluster.errors import UnreachableError
from cluster.model import Node
from cluster.shells import reach

TIMEOUT_S = 45.0


@dataclass(frozen=True)
class Facts:
    """What a node said of itself: every key with its values, in the order they came."""

    values: Mapping[str, tuple[str, ...]]

    def text(self, key: str) -> str:
        """The first value, "" where there is none."""
        return self.values.get(key, ("",))[0]

    def every(self, key: str) -> tuple[str, ...]:
        """All values."""
        return self.values.get(key, ())

    def number(self, key: str, nth: int = 0) -> int | None:
        """The nth word of the first value as a number; None where there is none, also for "unlimited"."""
        words = self.text(key).split()
        return int(words[nth]) if len(words) > nth and words[nth].isdigit() else None

    def pairs(self, key: str) -> list[tuple[str, str]]:
        """Every value cut at its first blank."""
        cut = (value.partition(" ") for value in self.every(key))
        return [(first, rest) for first, _, rest in cut]

    def has(self, tool: str) -> bool:
        """Whether the node has this program."""
        return tool in self.every("has")


def parse(text: str) -> Facts:
    """The facts of a probe's output."""
    values: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        key, is_fact, value = line.partition("=")
        if is_fact and value.strip():
            values[key] = (*values.get(key, ()), value.strip())
    return Facts(values)


def look(node: Node, image: str, addresses: Sequence[str]) -> Facts:
    """What is on a node; raises UnreachableError when it cannot be reached or has no bash."""
    words = [node.run_dir, node.runtime, image, resources.text("doctor/versions.py"), *addresses]
    text = resources.text("doctor/common.sh", "doctor/probe.sh")
    done = reach(node).run(["bash", "-c", text, "probe", *words], timeout_s=TIMEOUT_S)
    facts = parse(done.out)
    if "end" not in facts.every("probe"):
        raise UnreachableError(
            f"{node.name}: commands do not run there: {done.last_line}",
            f'try by hand: ssh {node.login} "bash --version"',
        )
    return facts
