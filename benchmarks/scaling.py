"""Scaling efficiency of the trainer, compared with a plain loop under DistributedDataParallel.

    python benchmarks/scaling.py --batch 16 --ranks 2 -- --data bccd/data.yaml --imgsz 320

Options after `--` are those of `trainer train`. The plain loop has the same network, batch, precision, memory format
and threads. It uses DDP's defaults, images in memory, the mean square of the outputs as its loss, and SGD. The
efficiency is the images per second on N ranks over N times those on one, at a constant batch per rank (weak scaling).
Both update the weights in every step, and take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from trainer.bench.measure import Effort, cpu_name, measure, start_trainer
from trainer.bench.tables import markdown
from trainer.cli.bench import settings_of
from trainer.config import Settings
from trainer.distributed.comm import World, devices_of, pick_device, usable_cores
from trainer.engine.memory import keep_freed_memory


def plain_rank(request: Path) -> None:
    """Run one rank of the plain loop; rank 0 prints the images per second of all ranks."""
    content = json.loads(request.read_text())
    settings = Settings(**content["settings"])
    effort = Effort(**content["effort"])
    # The trainer builds the network in a single process; the rest of the loop is plain torch.
    variables = {
        name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    }
    size = int(variables["WORLD_SIZE"])
    local = int(variables["LOCAL_RANK"])
    world = World(rank=int(variables["RANK"]), local_rank=local, size=size, local_size=size, launched=True)
    device = pick_device(settings.device, world)
    run = start_trainer(
        replace(settings, device="cpu" if device.type == "cpu" else str(device.index)), effort.threads
    )
    os.environ.update(variables)
    model = run.model.train()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    net: nn.Module = model
    if size > 1:
        net = nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True
        )
    if device.type == "cpu":
        keep_freed_memory()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9, momentum=0.9, fused=True)
    images = torch.rand(settings.batch // size, 3, settings.imgsz, settings.imgsz, device=device)
    images = images.to(memory_format=torch.channels_last)
    begun = 0.0
    for step in range(effort.warmup + effort.steps):
        if step == effort.warmup:
            dist.barrier()
            begun = now(device)
        with torch.autocast(device.type, run.dtype, enabled=run.dtype != torch.float32):
            outputs = tree_leaves(net(images))
        torch.stack([t.float().square().mean() for t in outputs]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    if world.rank == 0:
        print("RATE", effort.steps * settings.batch / (now(device) - begun), flush=True)
    dist.destroy_process_group()


def now(device: torch.device) -> float:
    """Return the time after all work of the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def plain(settings: Settings, ranks: int, effort: Effort) -> float:
    """Return the images per second of the plain loop on `ranks` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder) / "request.json"
        request.write_text(json.dumps({"settings": asdict(settings), "effort": asdict(effort)}))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        done = subprocess.run(
            [*command, __file__, "--plain", str(request)],
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(effort.threads),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return next(float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("RATE "))


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=16, help="images of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of each rank (default: its share of the cores)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("train", nargs="*", help="options of `trainer train`, after --")
    arguments = parser.parse_args()
    if arguments.plain:
        plain_rank(arguments.plain)
        return

    settings = replace(settings_of(arguments.train, arguments.device), noval=True)
    threads = arguments.threads or max(1, usable_cores() // arguments.ranks)
    effort = Effort(arguments.warmup, arguments.steps, threads)
    rates: dict[tuple[str, int], list[float]] = {}
    for number in range(arguments.rounds):
        for ranks in (1, arguments.ranks):
            batch = arguments.batch * ranks
            hyp = replace(settings.hyp, nbs=float(batch))  # every step updates the weights
            point = replace(settings, batch=batch, hyp=hyp, device=devices_of(settings.device, ranks))
            for name in ("trainer", "plain DDP"):
                rate = (
                    measure(point, ranks, effort).train_images_per_s
                    if name == "trainer"
                    else plain(point, ranks, effort)
                )
                rates.setdefault((name, ranks), []).append(rate)
                print(
                    f"round {number + 1}: {name}, ranks: {ranks}: {rate:.1f} images/s",
                    file=sys.stderr,
                    flush=True,
                )

    efficiency = {
        name: [
            n / one / arguments.ranks
            for one, n in zip(rates[name, 1], rates[name, arguments.ranks], strict=True)
        ]
        for name in ("trainer", "plain DDP")
    }
    device = pick_device(arguments.device.split(",")[0], World())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    where = f"{name}, {usable_cores()} cores, torch {torch.__version__}"
    print(f"{where}, {time.strftime('%Y-%m-%d')}: ", end="")
    print(f"{settings.data}, {settings.imgsz} px, batch {arguments.batch} and {threads} threads per rank\n")
    rows = [
        [
            *(
                name,
                f"{statistics.median(rates[name, 1]):.1f}",
                f"{statistics.median(rates[name, arguments.ranks]):.1f}",
            ),
            *(f"{statistics.median(values):.1%}", "  ".join(f"{value:.2f}" for value in values)),
        ]
        for name, values in efficiency.items()
    ]
    header = ["", "1 rank, images/s", f"{arguments.ranks} ranks, images/s", "efficiency", "by round"]
    print(markdown(header, rows, left=1))
    ratios = [a / b for a, b in zip(efficiency["trainer"], efficiency["plain DDP"], strict=True)]
    print(f"\nefficiency over that of plain DDP: {statistics.median(ratios):.3f}", end="")
    print(f" (by round {'  '.join(f'{r:.2f}' for r in ratios)}; the goal is 0.95 or more)")


if __name__ == "__main__":
    main()
