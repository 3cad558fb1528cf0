"""A program in which one rank fails in a given way, and the first line that the launcher must print.

As a program: `first_failure.py RANK HOW` sums over gloo, and `first_failure.py RANK HOW trainer ARGUMENTS...` runs the
trainer, whose rank fails at its second step. HOW is a key of FAILURES.
"""

import gc
import os
import signal
import sys
import time
from pathlib import Path

FAILURES = {
    "exception": r"OSError: \[Errno 30\] Read-only file system: '/data/x'",
    "exit": r"exit code 3",
    "kill": r"killed by SIGKILL",
    "segv": r"killed by SIGSEGV",
    "oom": r"out of memory: the kernel killed it",
}
MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

#: The trainer formats an OSError itself.
TRAINER_FAILURES = FAILURES | {"exception": r"/data/x: Read-only file system"}


def expected(node, rank, how, program="torch"):
    """Return a regular expression for the first line."""
    error = (TRAINER_FAILURES if program == "trainer" else FAILURES)[how]
    return rf"^{node}( on \w+)?: rank {rank}: {error}$"


def has_memory_limit():
    """Return whether the container's cgroup, version 2 or 1, has a limit."""
    texts = [Path(path).read_text() for path in MEMORY_LIMITS if Path(path).exists()]
    return any(text.strip().isdigit() and int(text) < 2 << 30 for text in texts)


def fail(how):
    """Fail in the given way."""
    if how == "exception":
        raise OSError(30, "Read-only file system", "/data/x")
    if how == "exit":
        os._exit(3)
    if how == "oom":
        print("waits for its limit", flush=True)
        while not has_memory_limit():
            time.sleep(0.1)
        held = []
        while True:
            held.append(bytearray(os.urandom(1 << 20)) * 64)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "segv": signal.SIGSEGV}[how])


def all_reduce_until(failing, how):
    """Sum over all ranks in a loop; rank `failing` fails after the third sum."""
    gc.disable()  # collections take a fifth of torch's import, and ten tests start four ranks each
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(10_000):
        dist.all_reduce(torch.ones(1))
        print(f"step {step}", flush=True)
        if step == 2 and dist.get_rank() == failing:
            fail(how)


def train(failing, how, arguments):
    """Run the trainer; rank `failing` fails after its second step of the optimizer."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from trainer.__main__ import main

    steps = 0

    def count(*_):
        nonlocal steps
        steps += 1
        if steps == 2 and int(os.environ["RANK"]) == failing:
            fail(how)

    register_optimizer_step_post_hook(count)
    sys.argv = ["trainer", *arguments]
    main()


if __name__ == "__main__":
    if sys.argv[3:]:
        train(int(sys.argv[1]), sys.argv[2], sys.argv[4:])
    else:
        all_reduce_until(int(sys.argv[1]), sys.argv[2])
