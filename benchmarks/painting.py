"""CPU time per training image of a detector's dataloader, painted in the workers and on the device; a GPU's time.

    python benchmarks/painting.py --data bccd/data.yaml

Counts this process's CPU time for batches of decoded images (--cache ram) at 640 px. `packed` sends the visible parts
of the sources to the device, `resident` only the recipes. Painting on the device is not part of it. On a GPU, further
lines are the time that painting a batch takes there, for the kernel and the copies, and on the host.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import time
from typing import NamedTuple

import torch

from trainer.config import Hyp
from trainer.data.detection_loader import TrainLoader
from trainer.data.device_painter import DevicePainter, Painting
from trainer.data.registry import open_dataset
from trainer.distributed.comm import World


class PaintTimes(NamedTuple):
    """Milliseconds of painting a batch: on the GPU those of the kernel and of the copies, and those of the host."""

    kernel_ms: float
    copies_ms: float
    host_ms: float


def paint_times(painter: DevicePainter, painting: Painting, count: int = 50) -> PaintTimes:
    """Return the times of painting a batch; without a GPU, those of the host are the interpreter's."""
    on_gpu = torch.cuda.is_available()
    painting = painting.pin_memory() if on_gpu else painting
    painter(painting)
    if on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        painter(painting)
    host_ms = (time.perf_counter() - begin) * 1e3 / count
    if not on_gpu:
        return PaintTimes(0.0, 0.0, host_ms)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            painter(painting)
        torch.cuda.synchronize()
    spent_ms = {event.key: event.self_device_time_total / 1e3 / count for event in profiler.key_averages()}
    kernel_ms = sum(ms for name, ms in spent_ms.items() if "paint_batch" in name)
    return PaintTimes(kernel_ms, sum(spent_ms.values()) - kernel_ms, host_ms)


def main() -> None:
    """Print a line per way of painting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--batches", type=int, default=8, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    data = open_dataset(arguments.data, "train", imgsz=arguments.imgsz)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # the loaders need a painter, although it paints nothing here
    times: dict[str, list[float]] = {"workers": [], "packed": [], "resident": []}
    specs, collates, painters = [], [], dict[str, DevicePainter | None]()
    for name in times:
        painter = painters[name] = None if name == "workers" else DevicePainter(device)
        shared = {"batch": arguments.batch, "rank": 0, "world": 1, "workers": 0, "painter": painter}
        loader = TrainLoader(data, imgsz=arguments.imgsz, seed=0, hyp=Hyp(), **shared)
        loader.cache("ram", [], World(), lambda value: [value], 2)
        if name == "packed":
            loader._collate.is_resident = False
            painters[name] = DevicePainter(device)  # which holds no sources
        specs = list(itertools.islice(loader.sampler.specs_from(0, 0), arguments.batches))
        collates.append((name, loader._collate))
    images = sum(len(spec.ids) for spec in specs)
    for turn in range(arguments.rounds + 1):
        for name, collate in collates:
            begin = time.process_time()
            for spec in specs:
                collate.collate(spec)
            if turn:  # the first round is a warm-up
                times[name].append((time.process_time() - begin) * 1e3 / images)
    print(f"{len(data)} images, {arguments.imgsz} px, {platform.processor() or platform.machine()}")
    for name, values in times.items():
        print(f"{name:9} {statistics.median(values):.2f} ms of CPU per image")
    for name, collate in collates:
        painter = painters[name]
        if painter and device.type == "cuda":
            batch = collate.collate(specs[0])
            kernel_ms, copies_ms, host_ms = paint_times(painter, batch.images)
            figures = f"kernel {kernel_ms:.3f} ms, copies {copies_ms:.3f} ms, host {host_ms:.3f} ms"
            print(f"{name:9} a batch of {len(batch.ids)} on the GPU: {figures}")


if __name__ == "__main__":
    main()
