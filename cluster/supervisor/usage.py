"""What ranks use of a machine in words, the same in `launch`, in `top` and on the page of `serve`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.filesize import decimal

from cluster.spec.status import HostMemory, RankUsage


@dataclass(frozen=True)
class UsageText:
    """The use of one rank, or of several on a node together; "" for what is not known.

    `cpu` is in cores, `memory` what the ranks and their workers have resident, `host_memory` what all programs on the
    machine use of its total.
    """

    cpu: str
    memory: str
    host_memory: str
    gpu: str
    gpu_memory: str


def describe(ranks: Sequence[RankUsage], host: HostMemory | None) -> UsageText:
    """Return the words for the newest samples of ranks on one node."""
    gpu_uses = [rank.use for rank in ranks if rank.use is not None]
    gpu_memories = [
        (rank.memory, rank.memory_total)
        for rank in ranks
        if rank.memory is not None and rank.memory_total is not None
    ]
    return UsageText(
        cpu=f"{sum(rank.cpu for rank in ranks):.1f}",
        memory=decimal(round(sum(rank.rss for rank in ranks))),
        host_memory=_share(host.total - host.free, host.total) if host else "",
        gpu=f"{sum(gpu_uses) / len(gpu_uses):.0f} %" if gpu_uses else "",
        gpu_memory=_share(*map(sum, zip(*gpu_memories, strict=True))) if gpu_memories else "",
    )


def _share(used: float, total: float) -> str:
    """Format bytes of a total: `12.1/80.0 GB`."""
    return f"{used / 1e9:.1f}/{total / 1e9:.1f} GB"
