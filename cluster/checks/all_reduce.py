"""All-reduce benchmark of a process group: median times of a small tensor and of a large one.

Each node runs this file in the container image, as `python3 - RANK WORLD_SIZE MASTER:PORT BACKEND`. It prints `joined`,
then a line `sum BYTES SECONDS` for each tensor.
"""

import os
import sys

_SIZES = ((1 << 10, 20), (1 << 25, 3))  # bytes and number of runs


def main(rank: str, world_size: str, master: str, backend: str) -> None:
    """Join the process group and print the timings."""
    import datetime
    import statistics
    import time

    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(
        backend,
        init_method=f"tcp://{master}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=datetime.timedelta(seconds=30),
    )

    def timed(tensor: torch.Tensor) -> float:
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    timed(torch.ones(1, device=device))
    print("joined", flush=True)
    for size, rounds in _SIZES:
        tensor = torch.ones(size // 4, device=device)
        timed(tensor)
        print("sum", size, statistics.median(timed(tensor) for _ in range(rounds)), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
