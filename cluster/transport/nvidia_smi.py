"""The output of `nvidia-smi -L`: the GPUs and MIG slices of a machine. Pure."""

import re
from typing import NamedTuple

from cluster.spec.model import Gpu


class ListedGpu(NamedTuple):
    """A GPU, or a MIG slice with the index of its GPU and the UUIDs of both."""

    model: str
    gpu_index: str
    uuids: tuple[str, ...]


def listed_gpus(text: str) -> dict[Gpu, ListedGpu]:
    """Return the GPUs in the output of `nvidia-smi -L`. MIG slices replace their GPU, which no program can use."""
    gpus: dict[Gpu, ListedGpu] = {}
    whole = ListedGpu("", "", ())
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+): (.*) \(UUID: ([^)]+)\)", line):
            whole = ListedGpu(match[2], match[1], (match[3],))
            gpus[int(match[1])] = whole
        elif match := re.match(r"\s*MIG (\S+) .*\(UUID: (MIG-[\w-]+)\)", line):
            gpus.pop(int(whole.gpu_index), None)
            gpus[match[2]] = ListedGpu(
                f"{whole.model} MIG {match[1]}", whole.gpu_index, (match[2], *whole.uuids)
            )
    return gpus


def visible_gpus(listed: str, visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPU ids in `nvidia-smi -L` output that CUDA_VISIBLE_DEVICES (None: not set) selects, in its order.

    As in CUDA, entries are numbers or prefixes of UUIDs, and the first invalid entry ends the list. The entry of a GPU
    with MIG slices is the first of them.
    """
    gpus = listed_gpus(listed)
    if visible is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for word in visible.split(","):
        word = word.strip()
        matches = [
            gpu
            for gpu, (_, index, uuids) in gpus.items()
            if word == index or (word and any(uuid.startswith(word) for uuid in uuids))
        ]
        if not matches:
            break
        chosen.append(matches[0])
    return tuple(dict.fromkeys(chosen))
