"""A job without torch: every rank prints `tick N: rank R of W`, `--ticks` times, `--every` so many seconds."""

import argparse
import json
import os
import time

parser = argparse.ArgumentParser()
parser.add_argument("--ticks", type=int, default=1000)
parser.add_argument("--ticks-later", type=int, help="the same, from the second attempt on")
parser.add_argument("--every", type=float, default=0.2)
parser.add_argument("--fail-at", type=int, default=-1, help="the last rank raises at this tick")
arguments = parser.parse_args()

later = arguments.ticks_later is not None and os.environ["CLUSTER_ATTEMPT"] != "1"
rank = int(os.environ["RANK"])
world = int(os.environ["WORLD_SIZE"])
if os.environ["LOCAL_RANK"] == "0":
    ready = {"event": "ready", "node": int(os.environ["GROUP_RANK"]), "time": time.time(), "rank": rank}
    print(
        "::cluster", json.dumps(ready | {"world_size": world, "backend": "gloo", "device": "cpu"}), flush=True
    )
for tick in range(arguments.ticks_later if later else arguments.ticks):
    print(f"tick {tick}: rank {rank} of {world}", flush=True)
    if tick == arguments.fail_at and rank == world - 1:
        raise ValueError("this rank fails on purpose")
    time.sleep(arguments.every)
