"""Profiles a few steps of a real training: a trace for Perfetto, and the operators that cost most."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, record_function

from trainer import dist
from trainer.bench.measure import begin, run_recorded, short_memory_said, steps_of
from trainer.bench.tables import markdown
from trainer.config import Settings
from trainer.data.shared_memory import PREFETCH
from trainer.errors import TrainerError
from trainer.training.run import Run
from trainer.verify import settings_from
from trainer.weights import checkpoint

SPANS = ("step", "loading", "training")  # ours, in the trace


@dataclass(frozen=True)
class Operator:
    """What an operator cost on rank 0, per step, without what it called; shares are of all operators' time."""

    name: str
    calls: float
    cpu_ms: float
    device_ms: float | None  # None on a CPU
    share: float  # of the device's time where there is one, else of the CPU's


def profile(settings: Settings, ranks: int, threads: int, steps: int, warmup: int, trace: Path) -> list[Operator]:
    """Train for `warmup` and then for `steps` profiled steps; writes rank 0's `trace`, whole or not at all.

    Returns all operators, the costliest first. Raises TrainerError as a rank does.
    """
    partial = trace.absolute().with_name(f".{trace.name}")  # the same ending: torch packs a .gz
    try:
        partial.touch()
    except OSError as error:
        raise TrainerError(f"--out {trace}: {error.strerror}", "name a file in a folder that exists") from None
    try:
        with tempfile.TemporaryDirectory(prefix="profile-") as folder:
            asked, answer = Path(folder) / "asked.json", Path(folder) / "answer.json"
            content = {"threads": threads, "steps": steps, "warmup": warmup, "trace": str(partial)}
            asked.write_text(json.dumps({**content, "settings": dataclasses.asdict(settings)}), encoding="utf-8")
            run_recorded(["profile", "--record", f"{asked},{answer}"], ranks, threads)
            found = [Operator(**row) for row in json.loads(answer.read_text(encoding="utf-8"))]
        partial.replace(trace)
    finally:
        partial.unlink(missing_ok=True)
    return found


def record(asked: Path, answer: Path) -> None:
    """What one rank does; rank 0 writes the trace, and what its operators cost."""
    content: dict[str, Any] = json.loads(asked.read_text(encoding="utf-8"))
    with short_memory_said():
        run = begin(settings_from(content["settings"]), content["threads"])
        coming = steps_of(run)
        # With workers also those steps that use up what they made ahead, and so many that the last profiled step is one
        # that moves the weights: in between there is no optimizer and no exchange to be seen.
        for _ in range(content["warmup"] + PREFETCH * run.workers):
            run.step(next(coming))
        while not _moves(run, content["steps"] - 1):
            run.step(next(coming))
        on_device = run.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
        dist.barrier()
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(content["steps"]):
                with record_function("step"):
                    with record_function("loading"):
                        batch = next(coming)
                    with record_function("training"):
                        run.step(batch)
            if on_device:
                torch.cuda.synchronize(run.device)
        if run.world.rank == 0:
            profiler.export_chrome_trace(content["trace"])
            rows = operators(profiler.key_averages(), content["steps"], on_device=on_device)
            checkpoint.write_bytes(answer, json.dumps([dataclasses.asdict(row) for row in rows]).encode())
        dist.barrier()
    dist.leave()


def _moves(run: Run, later: int) -> bool:
    """Whether the weights are moved so many steps after the next one, as they are at an epoch's end in any case."""
    ends = (run.at.step + later + 1) % run.train.steps == 0
    return ends or (run.number + later - run.at.last_move) % run.schedule.accumulate == 0


def operators(events: Any, steps: int, *, on_device: bool) -> list[Operator]:
    """torch's averages of `steps` steps as Operators, the costliest first; our own spans are none."""
    # A kernel's time counts for the operator that launched it; its own row would count it twice.
    found = [e for e in events if e.key not in SPANS and e.device_type == DeviceType.CPU]
    costs = [e.self_device_time_total if on_device else e.self_cpu_time_total for e in found]
    whole = sum(costs) or 1
    rows = [
        Operator(
            name=e.key,
            calls=e.count / steps,
            cpu_ms=e.self_cpu_time_total / 1000 / steps,
            device_ms=e.self_device_time_total / 1000 / steps if on_device else None,
            share=cost / whole,
        )
        for e, cost in zip(found, costs, strict=True)
    ]
    return sorted(rows, key=lambda row: -row.share)


def table_of(rows: Sequence[Operator]) -> str:
    """A row for each operator."""
    on_device = any(row.device_ms is not None for row in rows)
    header = ["operator", "calls a step", *(["GPU ms a step"] if on_device else []), "CPU ms a step", "share"]
    lines = []
    for row in rows:
        device = [] if row.device_ms is None else [f"{row.device_ms:.2f}"]
        name = row.name if len(row.name) <= 60 else row.name[:57] + "..."
        lines.append([name, f"{row.calls:.4g}", *device, f"{row.cpu_ms:.2f}", f"{row.share:.1%}"])
    return markdown(header, lines, left=1)
