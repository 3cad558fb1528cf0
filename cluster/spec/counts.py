"""How many nodes a job has, and how many processes each of them: --nodes and --gpus. Pure."""

import re
from collections.abc import Sequence
from typing import Literal

from cluster.errors import UsageError

#: The number of processes of every node, or of each node in order; "all": as many as the node's machine has GPUs.
Procs = int | tuple[int, ...] | Literal["all"]
#: Of more nodes than this, not every number of processes is shown.
_MOST_LISTED = 8
#: The largest number of nodes. A typing error would otherwise take hours to plan.
_MOST_NODES = 10_000


def node_range(text: str, all_nodes: int) -> tuple[int, int]:
    """Parse `--nodes`: `2:4` is (2, 4), `4` is (4, 4), "" is all nodes. Raise UsageError for anything else."""
    if not text:
        return all_nodes, all_nodes
    match = re.fullmatch(r"(?:(-?\d{1,18}):)?(-?\d{1,18})", text.strip())
    fewest, most = (int(match[1] or match[2]), int(match[2])) if match else (0, 0)
    why = ""
    if match is None:
        why = "expected a number, or MIN:MAX"
    elif min(fewest, most) < 1:
        why = "must be at least 1"
    elif fewest > most:
        why = f"MIN ({fewest}) must not exceed MAX ({most})"
    elif most > _MOST_NODES:
        why = f"must be at most {_MOST_NODES}"
    if why:
        raise UsageError(f"--nodes {text}: {why}", "for example: --nodes 2, or --nodes 2:4")
    return fewest, most


def gpus_per_node(text: str) -> Procs:
    """Parse `--gpus`: `2`, `2,1` or `all`. Equal numbers are one. Raise UsageError for anything else."""
    if text == "all":
        return "all"
    if not re.fullmatch(r"-?[0-9]{1,18}(, *-?[0-9]{1,18})*", text):
        example = "for example: --gpus 2; for two nodes with two GPUs and one: --gpus 2,1; or --gpus all"
        raise UsageError(f"--gpus {text}: expected a number, one number per node, or all", example)
    numbers = tuple(map(int, text.split(",")))
    if min(numbers) < 1:
        each_node = " for each node" if numbers[1:] else ""
        raise UsageError(f"--gpus {text}: must be at least 1{each_node}", "to run without GPUs: --device cpu")
    return numbers[0] if len(numbers) == 1 else numbers


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 node`, `2 nodes`, `2 processes`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def and_list(numbers: Sequence[int]) -> str:
    """Format numbers: `2 and 1`, `4, 4 and 2`. Of many, only the sum and the range."""
    *first, last = map(str, numbers)
    if len(first) >= _MOST_LISTED:
        return f"{min(numbers)} to {max(numbers)} (together {sum(numbers)})"
    return f"{', '.join(first)} and {last}" if first else last
