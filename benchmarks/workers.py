"""How far the number of workers that `--workers auto` takes is below the best fixed one.

    python benchmarks/workers.py -- --data bccd/data.yaml --cfg yolov5n.yaml --imgsz 320 --batch 16

What stands after `--` are options of `trainer train`. Some trainings begin with `--workers auto` until each has taken a
number. Then those, and the fixed ones that are asked for, train for two seconds each, in many turns of one and the
same training: trainings of their own, minutes apart, differ by more than what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trainer.__main__ import main as trainer
from trainer.bench.tables import markdown
from trainer.training import workers

EVERY = "--every"  # first argument of the process that tries every number


def main() -> None:
    """Run the trainings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", default="0,1,2", help="the fixed numbers, with commas")
    parser.add_argument("--turns", type=int, default=16, help="of each fixed number")
    parser.add_argument("--runs", type=int, default=4, help="trainings with --workers auto")
    parser.add_argument("train", nargs="*", help="options of `trainer train`, after --")
    arguments = parser.parse_args()

    taken = [found(arguments.train) for _ in range(arguments.runs)]
    numbers = {int(k) for k in arguments.numbers.split(",")} | {run["workers"] for run in taken}
    rates = found(arguments.train, sorted(numbers), arguments.turns)["images_per_s"]

    best = max(rates.values())
    rows = [[k, f"{rate:.1f}", f"{rate / best:.2f}"] for k, rate in rates.items()]
    print(markdown(["fixed workers", "images/s", "of the best"], rows), end="\n\n")
    for run in taken:
        tried = ", ".join(f"{rate:.1f} with {k}" for k, rate in run["images_per_s"].items())
        print(f"auto: {tried}: {run['workers']} is taken, {rates[str(run['workers'])] / best:.2f} of the best")
    worst = min(rates[str(run["workers"])] for run in taken) / best
    print(f"\nthe worst choice of {len(taken)}: {worst:.2f} of the best; the goal is 0.90 or more")


def found(train: list[str], numbers: list[int] | None = None, turns: int = 0) -> dict[str, Any]:
    """What `--workers auto` remembers of a training: rates by number of workers, and the number it took.

    With `numbers` it tries all of these, and so many turns of each.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = [__file__, EVERY, json.dumps([numbers, turns])] if numbers else ["-m", "trainer"]
        own = ["--project", folder, "--epochs", "100000", "--noval", "--workers", "auto"]  # it is stopped long before
        answer = Path(folder) / "clusterctl" / "workers.json"
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(
                [sys.executable, *program, "train", *train, *own],
                # GOMP_SPINCOUNT: as `trainer` sets it before torch is loaded, which this file does at its top.
                env={"GOMP_SPINCOUNT": "3000", **os.environ, "XDG_CACHE_HOME": folder},
                stdout=log,
                stderr=log,
            )
            while process.poll() is None and not answer.exists():
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            process.wait()
            if not answer.exists():
                log.seek(0)
                raise SystemExit(log.read()[-4000:])
        (content,) = json.loads(answer.read_text()).values()
    print("tried", content, file=sys.stderr, flush=True)
    return dict(content)


def try_every(numbers: list[int], turns: int) -> None:
    """Be a `trainer` whose search leaves out none of the numbers, however bad it seems."""
    workers.next_to_try = lambda rates, *_: next((k for k in numbers if k not in rates), None)
    workers.NEAR, workers.TURNS = 1.0, turns
    trainer()


if __name__ == "__main__":
    if sys.argv[1:2] == [EVERY]:
        asked = json.loads(sys.argv[2])
        del sys.argv[1:3]
        try_every(*asked)
    else:
        main()
