"""How many training pictures a second the loader makes from JPEG, against the loader of `ultralytics`.

    python benchmarks/loader.py --data bccd/data.yaml --peer-python ul/bin/python

`--peer-python` is the interpreter of a virtual environment that has `ultralytics` (pip install ultralytics); without
it only this project's loader is timed. Both make mosaics of the same pictures with YOLOv5's standard augmentation,
one thread in each process, and take turns, so that a change of the machine's speed hits both; what is printed are
medians over the rounds. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH = 16
ROOT = Path(__file__).resolve().parents[1]


def ours(data: str, imgsz: int, workers: int) -> Callable[[], int]:
    """One pass over the training pictures: how many there were."""
    from trainer.config import Hyp
    from trainer.data import TrainLoader, open_dataset

    dataset = open_dataset(data, "train", imgsz=imgsz)
    loader = TrainLoader(dataset, imgsz=imgsz, batch=BATCH, rank=0, world=1, seed=0, workers=workers, hyp=Hyp())
    epochs = iter(range(1000000))
    return lambda: sum(len(batch.ids) for batch in loader.epoch(next(epochs)))


def peer(data: str, imgsz: int, workers: int) -> Callable[[], int]:
    """The same with `ultralytics`, by its documented functions."""
    from ultralytics.cfg import get_cfg
    from ultralytics.data import build_dataloader, build_yolo_dataset
    from ultralytics.data.utils import check_det_dataset

    found = check_det_dataset(data)
    settings = get_cfg(overrides={"task": "detect", "imgsz": imgsz, "batch": BATCH})
    dataset = build_yolo_dataset(settings, found["train"], BATCH, found, mode="train")
    loader = build_dataloader(dataset, batch=BATCH, workers=workers, shuffle=True, rank=-1)
    return lambda: sum(len(batch["img"]) for batch in loader)


def serve(arguments: argparse.Namespace) -> None:
    """Time a pass for every line on standard input, and say it on standard output."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is not an answer
    make = {"ours": ours, "peer": peer}[arguments.role]
    run = make(arguments.data, arguments.imgsz[0], arguments.workers[0])
    for _ in sys.stdin:
        run()  # workers have made batches ahead since the last round
        begin, cpu = time.perf_counter(), time.process_time()
        images = sum(run() for _ in range(arguments.passes))
        timed = {"images": images, "seconds": time.perf_counter() - begin, "cpu_s": time.process_time() - cpu}
        print(json.dumps(timed), file=answer, flush=True)


class Side:
    """One loader in a process of its own."""

    def __init__(self, python: str, role: str, data: str, options: list[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "YOLO_OFFLINE": "true"}
        self.rates: list[float] = []
        self.cpu_ms: list[float] = []  # of the main process
        self._process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), "--role", role, "--data", data, *options],
            env=environment,
            cwd=Path(data).parent,  # the peer takes a relative `path:` from here
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def round(self, counts: bool) -> None:
        """Make one pass; the first ones, that warm up, do not count."""
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            assert self._process.stderr
            sys.exit(f"a loader ended early:\n{self._process.stderr.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        if counts:
            self.rates.append(answer["images"] / answer["seconds"])
            self.cpu_ms.append(1000 * answer["cpu_s"] / answer["images"])

    def stop(self) -> None:
        """End the process and its workers."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def compare(arguments: argparse.Namespace, data: str, imgsz: int, workers: int) -> None:
    """Print the line of one setting."""
    options = ["--imgsz", str(imgsz), "--workers", str(workers), "--passes", str(arguments.passes)]
    sides = {"ours": Side(sys.executable, "ours", data, options)}
    if arguments.peer_python:
        sides["peer"] = Side(arguments.peer_python, "peer", data, options)
    try:
        for k in range(-1, arguments.rounds):
            for side in sides.values():
                side.round(counts=k >= 0)
    finally:
        for side in sides.values():
            side.stop()
    median = {name: statistics.median(side.rates) for name, side in sides.items()}
    rates = "  ".join(
        f"{name} {median[name]:6.0f} images/s"
        + ("" if workers else f" ({statistics.median(side.cpu_ms):.1f} CPU-ms each)")
        for name, side in sides.items()
    )
    ratio = ""
    if "peer" in sides:
        pairs = [a / b for a, b in zip(sides["ours"].rates, sides["peer"].rates, strict=True)]
        ratio = f"  ratio {statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"
    print(f"{imgsz:4} px  {workers} workers  {rates}{ratio}", flush=True)


def main() -> None:
    """Compare the loaders at every size and number of workers that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="data.yaml of a set in YOLO format")
    parser.add_argument("--peer-python", default="", help="interpreter that can import ultralytics")
    parser.add_argument("--imgsz", type=int, nargs="+", default=[320, 640])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passes", type=int, default=2, help="over the training pictures, in each round")
    parser.add_argument("--role", choices=["ours", "peer"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        serve(arguments)
        return
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {cores} cores, Python {platform.python_version()}, batch {BATCH}", flush=True)
    with tempfile.TemporaryDirectory() as folder:  # the peer writes beside the labels
        copy = Path(folder) / "data"
        shutil.copytree(Path(arguments.data).resolve().parent, copy)
        for imgsz in arguments.imgsz:
            for workers in arguments.workers:
                compare(arguments, str(copy / Path(arguments.data).name), imgsz, workers)


if __name__ == "__main__":
    main()
