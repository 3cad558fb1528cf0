"""CPU time per training image of a detector's dataloader: painted in the workers, and on the device.

    python benchmarks/painting.py --data bccd/data.yaml

Counts this process's CPU time for batches of decoded images (--cache ram) at 640 px. `packed` sends the visible parts
of the sources to the device, `resident` only the recipes. Painting on the device is not part of it.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import time

import torch

from trainer.config import Hyp
from trainer.data.detection_loader import TrainLoader
from trainer.data.device_painter import DevicePainter
from trainer.data.registry import open_dataset
from trainer.distributed.comm import World


def main() -> None:
    """Print a line per way of painting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--batches", type=int, default=8, help="of 16 images, per round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    data = open_dataset(arguments.data, "train", imgsz=arguments.imgsz)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times: dict[str, list[float]] = {"workers": [], "packed": [], "resident": []}
    specs, collates = [], []
    for name in times:
        painter = None if name == "workers" else DevicePainter(device)
        shared = {"batch": 16, "rank": 0, "world": 1, "workers": 0, "painter": painter}
        loader = TrainLoader(data, imgsz=arguments.imgsz, seed=0, hyp=Hyp(), **shared)
        loader.cache("ram", [], World(), lambda value: [value], 2)
        if name == "packed":
            loader._collate.is_resident = False
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


if __name__ == "__main__":
    main()
