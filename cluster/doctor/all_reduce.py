"""Times the all-reduce of a process group for growing tensors.

This file is a program of its own: each node runs it in the container image, as
`python3 - RANK WORLD_SIZE MASTER:PORT BACKEND TIMEOUT_S`. It prints `joined`, then `sum BYTES SECONDS` (the median of
several) for each size, while there is time for the next. After the timeout it exits with 70.
"""

import os
import sys
import threading

_SIZES = ((1 << 10, 20), (1 << 22, 5), (1 << 24, 3), (1 << 26, 3))  # in bytes, and how often each is timed


def main(rank: str, world_size: str, master: str, backend: str) -> None:
    """Join the others and time."""
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

    def timed(numbers: torch.Tensor) -> float:
        began = time.perf_counter()
        dist.all_reduce(numbers)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    timed(torch.ones(1, device=device))
    print("joined", flush=True)
    taken = 0.0
    for size, rounds in _SIZES:
        has_time = torch.tensor([1.0 if taken * 4 * rounds < 4 else 0.0], device=device)
        dist.broadcast(has_time, 0)
        if not has_time.item():
            break
        numbers = torch.ones(size // 4, device=device)
        timed(numbers)
        taken = statistics.median(timed(numbers) for _ in range(rounds))
        print("sum", size, taken, flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    threading.Timer(float(sys.argv[5]), os._exit, (70,)).start()
    main(*sys.argv[1:5])
