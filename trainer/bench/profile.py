"""Profile of a few training steps: a trace for Perfetto, and torch's table of the most expensive operators."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from trainer.bench.measure import start_trainer, steps_of, warm_up
from trainer.bench.processes import request_of, run_here
from trainer.config import Settings
from trainer.data.loading.dataloader import PREFETCH
from trainer.distributed import comm
from trainer.errors import TrainerError

SHOWN = 10  # operators


def profile(settings: Settings, ranks: int, threads: int, steps: int, warmup: int, trace: Path) -> str:
    """Profile `steps` training steps after `warmup` steps; write rank 0's `trace`, and return its operators' table."""
    if trace.exists() and not trace.is_file():  # for example /dev/null, which the file would replace
        raise TrainerError(f"--out {trace}: not a regular file", "use another path")
    partial = trace.absolute().with_name(f".{trace.name}")  # keeps the suffix: torch compresses .gz
    try:
        partial.touch()
    except OSError as error:
        raise TrainerError(f"--out {trace}: {error.strerror}", "use a path in an existing folder") from None
    request = request_of("profile", settings, threads, steps=steps, warmup=warmup, trace=str(partial))
    try:
        table: str = run_here(request, ranks)
        partial.replace(trace)
    finally:
        partial.unlink(missing_ok=True)
    return table


def record(settings: Settings, threads: int, steps: int, warmup: int, trace: str) -> str:
    """Run one rank of `profile`, and return the table of its operators. Rank 0 writes the trace."""
    run = start_trainer(settings, threads)
    batches = steps_of(run)

    def updates_after(later: int) -> bool:
        """Whether the step `later` steps after the next one updates the weights."""
        ends_epoch = (run.state.step + later + 1) % run.train_loader.steps == 0
        accumulated = run.global_step + later - run.state.last_move
        return ends_epoch or accumulated % run.schedule.accumulate == 0

    # Use up the prefetched batches too. Then continue until the last profiled step updates the weights: steps of
    # gradient accumulation have no optimizer step and no all-reduce.
    warm_up(run, batches, warmup)
    for _ in range(PREFETCH * run.workers):
        run.step(next(batches))
    while not updates_after(steps - 1):
        run.step(next(batches))
    on_gpu = run.device.type == "cuda"
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    comm.barrier()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            with record_function("step"):
                with record_function("loading"):
                    batch = next(batches)
                with record_function("training"):
                    run.step(batch)
        if on_gpu:
            torch.cuda.synchronize(run.device)
    if run.world.rank == 0:
        profiler.export_chrome_trace(trace)
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=order, row_limit=SHOWN)
    comm.barrier()
    return str(table)
