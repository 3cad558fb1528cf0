"""CPU time per training image of a detector's dataloader, by painter (--augment-on) and by cache (--cache).

    python benchmarks/painting.py --data bccd/data.yaml

Counts the CPU time of the training process and its dataloader workers, for the batches of whole epochs: recipes,
pixels, and their transport. Painting on the device is not part of it. The first epoch decodes the images, later ones
find them in the cache. `device, resident` keeps them on the device. On a GPU, further lines are the time that painting
a batch takes there, for the kernel and the copies, and on the host.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.config import Hyp
from trainer.data.augment.device_painter import DevicePainter, Painting
from trainer.data.dataset import Dataset
from trainer.data.loading.dataloader import start_forkserver
from trainer.data.loading.detection_loader import TrainLoader
from trainer.data.registry import open_dataset
from trainer.distributed.comm import World

PAINTERS = ("workers", "device")
ENDLESS = 1_000_000  # epochs after which nothing changes


class NoPainter(DevicePainter):
    """Takes the images of a batch to the device, and paints nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.resident = None

    def __call__(self, painting: Painting) -> Tensor:
        """Return images without values."""
        if painting.uploads and self.resident:
            self.resident.receive(painting.uploads)
        return torch.empty((painting.images, *painting.shape, 3), dtype=torch.uint8)


def cpu_seconds() -> float:
    """Return the CPU time of this process and its dataloader workers until now."""
    total = time.process_time()
    for worker in multiprocessing.active_children():
        for thread in Path(f"/proc/{worker.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # has ended
                total += int((thread / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9
    return total


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a loader."""
    share = {"batch": arguments.batch, "rank": 0, "world": 1, "workers": arguments.workers, "seed": 0}
    return {**share, "imgsz": arguments.imgsz, "hyp": Hyp()}


def measure(data: Dataset, painter: str, cache: str, arguments: argparse.Namespace) -> Iterator[float]:
    """Yield the milliseconds of CPU time per image of each epoch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = {**options_of(arguments), "painter": NoPainter(device) if painter == "device" else None}
    # One pass an epoch: the workers must not prefetch the next one.
    loader = TrainLoader(data, epochs=1, close_mosaic=-ENDLESS, **options)
    kind = cache if cache in ("none", "ram") else "auto"
    loader.cache(kind, [], World(), lambda value: [value], 1, lambda _: None)
    if loader._painter and loader._painter.resident:
        if cache == "resident":
            loader._painter.resident.open()
        else:
            loader._painter.resident = loader._collate.resident = None
    loader.start([])
    time.sleep(2)  # the workers' start is not counted
    for epoch in range(arguments.epochs):
        loader._next = None
        begin = cpu_seconds()
        for _ in loader.epoch(epoch):
            pass
        yield (cpu_seconds() - begin) * 1e3 / len(data)
    loader.close()


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
    """Print a line per painter and cache."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start_forkserver(arguments.workers > 0)
    data = open_dataset(arguments.data, "train", imgsz=arguments.imgsz)
    print(
        f"{len(data)} images, {arguments.imgsz} px, batch {arguments.batch}, {arguments.workers} workers, ",
        end="",
    )
    print(f"{os.cpu_count()} cores of {platform.processor() or platform.machine()}")
    print("milliseconds of CPU time per image:  first epoch, median of the later ones")
    for painter in PAINTERS:
        for cache in ("none", "ram", "resident")[: 3 if painter == "device" else 2]:
            first, *later = measure(data, painter, cache, arguments)
            print(f"{painter + ', ' + cache:18} {first:8.2f} {statistics.median(later):8.2f}", flush=True)
    if torch.cuda.is_available():
        painter = DevicePainter(torch.device("cuda"))
        loader = TrainLoader(data, painter=painter, **options_of(arguments))
        batch = loader._collate.collate(next(iter(loader.sampler.specs_from(0, 0))))
        print(f"a batch of {len(batch.ids)} on the GPU, ms: {paint_times(painter, batch.images)}")


if __name__ == "__main__":
    main()
