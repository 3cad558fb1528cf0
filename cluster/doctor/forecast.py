"""What a link between nodes makes of a training's speed: pure arithmetic on what was measured.

A ring's all-reduce sends `bytes x 2 (n - 1) / n` over every node's link in `2 (n - 1)` hops; DDP does one per bucket.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from cluster import contract

#: Parameters of the models (`trainer info`), 80 classes: each is one gradient of 4 bytes.
PARAMETERS = {
    "yolov5n": 1_872_157,
    "yolov5s": 7_235_389,
    "yolov5m": 21_190_557,
    "yolov5l": 46_563_709,
    "yolov5x": 86_749_405,
}
BUCKET_BYTES = 25 << 20
#: Of a step, the part that is the backward pass: the sums of finished buckets travel during the rest of it.
BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True)
class Link:
    """What was measured between `nodes` nodes: the time of a tiny all-reduce, and the bytes per second of a large one.

    `bytes_per_s` is the bus bandwidth: what passes over one node's link, whatever the number of nodes.
    """

    nodes: int
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Forecast:
    """The time of a step's sums on `nodes` nodes, and the efficiency: `worst` without overlap, `best` with the most."""

    nodes: int
    compressed: bool
    all_reduce_s: float
    worst: float | None = None
    best: float | None = None


def bus_bytes_per_s(size: int, nodes: int, taken_s: float) -> float:
    """The bandwidth of one node's link when an all-reduce of `size` bytes takes `taken_s`."""
    return size * 2 * (nodes - 1) / nodes / taken_s


def all_reduce_s(gradient_bytes: int, nodes: int, link: Link) -> float:
    """How long all gradients' sums take on `nodes` nodes, nothing else going on."""
    hop_s = link.latency_s / (2 * (link.nodes - 1))
    buckets = max(1, math.ceil(gradient_bytes / BUCKET_BYTES))
    steps = 2 * (nodes - 1)
    return gradient_bytes * steps / nodes / link.bytes_per_s + buckets * steps * hop_s


def efficiency(step_s: float, reduce_s: float) -> tuple[float, float]:
    """The share of N times one node's speed that is left: with no overlap, and with the backward pass as cover."""
    worst = step_s / (step_s + reduce_s)
    best = step_s / (step_s + max(0.0, reduce_s - BACKWARD_SHARE * step_s))
    return worst, best


def step_s(events: Sequence[Mapping[str, Any]]) -> float | None:
    """A step's time without the sums, from the events that one node of a job wrote; None where they tell nothing.

    The median of what lies between two reports of an epoch, less the share that the epochs' sums took.
    """
    progress = [event for event in events if event.get("event") == contract.PROGRESS]
    steps = [
        (after["time"] - before["time"]) / (after["step"] - before["step"])
        for before, after in pairwise(progress)
        if before.get("epoch") == after.get("epoch") and after.get("step", 0) > before.get("step", 0)
    ]
    waits = [event["shares"].get("sync", 0.0) for event in events if isinstance(event.get("shares"), Mapping)]
    if not steps:
        return None
    return float(statistics.median(steps)) * (1 - float(waits[-1] if waits else 0.0))


def forecasts(gradient_bytes: int, link: Link, step_s: float | None) -> list[Forecast]:
    """For 2, 4 and 8 nodes: plain, then with gradients as bf16: half the bytes. No efficiency without `step_s`."""
    found = []
    for compressed in (False, True):
        for nodes in (2, 4, 8):
            reduce_s = all_reduce_s(gradient_bytes // 2 if compressed else gradient_bytes, nodes, link)
            worst, best = efficiency(step_s, reduce_s) if step_s else (None, None)
            found.append(Forecast(nodes, compressed, reduce_s, worst, best))
    return found
