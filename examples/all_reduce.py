"""Any torchrun program runs under clusterctl: this one sums a number over all ranks, `--ticks` times a second apart.

clusterctl launch --nodes 2 --gpus 2 --command "examples/all_reduce.py --ticks 5"
"""

import argparse
import os
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--ticks", type=int, default=3)
parser.add_argument("--fail-at", type=int, default=-1, help="the last rank raises at this tick")
arguments = parser.parse_args()

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank = dist.get_rank()
world = dist.get_world_size()
try:
    for tick in range(arguments.ticks):
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        print(f"tick {tick}: rank {rank} of {world} sees the sum {total.item():g}", flush=True)
        if tick == arguments.fail_at and rank == world - 1:
            raise ValueError("this rank fails on purpose")
        time.sleep(1)
finally:  # also after an error: Python's end, while a thread of the group still works, is a crash now and then
    dist.destroy_process_group()
