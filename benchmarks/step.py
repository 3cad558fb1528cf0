"""What a training step costs the host, without a GPU: counts that do not depend on the machine, and times.

    python benchmarks/step.py --data bccd/data.yaml

For yolov5n and yolov5nu, 640 px, batch 16; without `--data` on generated images.

- operations: of a step with an update, on the device "meta", without views; most are one kernel on a GPU. The gradient
  norm is not among them, and the optimizer is not fused (see tests/meta_device.py).
- host: the time of that step, in which nothing is computed, with one thread. The device "meta" updates the weights one
  by one in Python, as no GPU does, so a line has the time without an update.
- outside: the operations that --compile leaves.
- compiled: the functions that inductor generates for network and loss, and the calls of other functions, on a CPU. A
  GPU replays all of them as two graphs.
- targets: their bytes with the rows that pad, over those without; and the time to make those of an image.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from generated import generate
from torch import Tensor, nn
from torch._inductor.codecache import PyCodeCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.meta_device import Launches, meta_device, start
from trainer.bench.measure import cpu_name
from trainer.bench.tables import markdown
from trainer.config import Hyp, Settings
from trainer.distributed.comm import World
from trainer.engine.events import Events
from trainer.engine.meter import LossMeter
from trainer.engine.trainer import Trainer

NETS = ("yolov5n", "yolov5nu")
BATCHES = 8  # whose targets are compared
COMPILED = {"imgsz": 64, "batch": 2}  # the number of kernels does not depend on the size
GENERATED = re.compile(r"^ +(?:cpp|triton)_\w+\(|^ +(?:cpp|triton)_\w+\.run\(", re.MULTILINE)
OTHERS = re.compile(r"\b(?:extern_kernels|torch\.ops|aten)\.\w+(?:\.\w+)*\(")


def settings(net: str, data: Path, **more: Any) -> Settings:
    """Return the settings of a step that updates the weights."""
    how = {
        "device": "cpu",
        "precision": "fp32",
        "workers": 0,
        "noval": True,
        "noautoanchor": True,
        "epochs": 1000,
    }
    return Settings(
        data=str(data), cfg=f"{net}.yaml", **{**how, "hyp": Hyp(nbs=1.0, warmup_epochs=0.0), **more}
    )


def times(run: Callable[[], object], count: int) -> list[float]:
    """Return the milliseconds of each run, after three others."""
    found = []
    for _ in range(count + 3):
        begin = time.perf_counter()
        run()
        found.append(1e3 * (time.perf_counter() - begin))
    return found[3:]


def text(found: list[float]) -> str:
    """Return the median and the minimum."""
    return f"{statistics.median(found):.2f} ({min(found):.2f})"


class _Nothing(torch.autograd.Function):
    """Gives every parameter a gradient, without an operation."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, counts: Tensor, *parameters: Tensor) -> Any:
        ctx.parameters = parameters
        ctx.mark_non_differentiable(counts)
        return sums.view_as(sums), counts.view_as(counts)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, None, *(torch.empty_like(p) for p in ctx.parameters)


def leave_out(network_with_loss: nn.Module, meter: LossMeter, sums: Tensor, counts: Tensor) -> None:
    """Replace what --compile compiles by nothing: network and loss, whose results have these shapes, and the rest."""
    parameters = list(network_with_loss.parameters())
    made = torch.empty_like(sums).requires_grad_(), torch.empty_like(counts)
    network_with_loss._compute = lambda *_: _Nothing.apply(*made, *parameters)
    network_with_loss._loss = lambda sums, _: (sums.detach()[:, 0], sums[0, 0])
    meter._account = lambda *_: None


def on_meta(net: str, data: Path, imgsz: int, batch_size: int, count: int) -> dict[str, str]:
    """Return the operations and the host's time of a step, and the operations that --compile leaves of it."""
    with meta_device():
        run = start(settings(net, data, imgsz=imgsz, batch=batch_size))
        batches = list(islice(run.train_loader.epoch(0), BATCHES))
        batch = batches[0]
        found = {"targets, KiB": size(batches)}
        run.step(batch)
        found["operations"] = operations(run, batch)
        found["host, ms"] = text(times(lambda: run.step(batch), count))
        rarely = start(
            settings(net, data, imgsz=imgsz, batch=batch_size, hyp=Hyp(nbs=1e9, warmup_epochs=0.0))
        )
        found["host without an update, ms"] = text(times(lambda: rarely.step(batch), count))
        leave_out(run._whole, run.meter, *run._whole(*run.task.move(batch, run.device)))
        run.step(batch)
        found["outside: operations"] = operations(run, batch)
    return found


def operations(run: Trainer, batch: Any) -> str:
    """Return the number of a step's operations."""
    with Launches() as launches:
        run.step(batch)
    return str(launches.operations.total())


def size(batches: list[Any]) -> str:
    """Return the mean KiB of the batches' targets."""
    return f"{statistics.mean(sum(t.nbytes for t in batch.targets.values()) for batch in batches) / 1024:.0f}"


def on_cpu(net: str, data: Path, imgsz: int, batch_size: int, count: int) -> dict[str, str]:
    """Return the bytes of the targets that are needed, and the time to make them."""
    run = Trainer(
        settings(net, data, imgsz=imgsz, batch=batch_size), World(), torch.device("cpu"), Events({})
    )
    run.start()
    batches = list(islice(run.train_loader.epoch(0), BATCHES))
    assign = run.task.criterion().assigner(run.model)
    labels = batches[0].labels.numpy()
    made = times(lambda: assign(labels, batch_size, imgsz, imgsz), 5 * count)
    return {
        "targets, KiB needed": size(batches),
        "targets, ms per image": text([ms / batch_size for ms in made]),
    }


def compiled(net: str, data: Path) -> dict[str, str]:
    """Return the number of the generated functions that a compiled step calls, and of the other calls."""
    PyCodeCache.cache_clear()
    run = Trainer(settings(net, data, compile="on", **COMPILED), World(), torch.device("cpu"), Events({}))
    run.start()
    run.local_model.train()
    run.step(next(iter(run.train_loader.epoch(0))))
    sources = [Path(module.__file__ or "").read_text() for module in PyCodeCache.modules]
    calls = [source.partition("def call(")[2] for source in sources if "def call(" in source]
    found = {
        "compiled: graphs": len(calls),
        "compiled: generated": sum(len(GENERATED.findall(c)) for c in calls),
    }
    return {
        k: str(v)
        for k, v in {**found, "compiled: others": sum(len(OTHERS.findall(c)) for c in calls)}.items()
    }


def main() -> None:
    """Print a table with a column per network."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="a data.yaml (default: generated images)")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true", help="leave out what takes minutes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data or generate(Path(folder), 16 * arguments.batch)
        how = data, arguments.imgsz, arguments.batch, arguments.steps
        found = {net: {**on_meta(net, *how), **on_cpu(net, *how)} for net in NETS}
        for net in NETS if not arguments.no_compile else ():
            found[net] |= compiled(net, data)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{cpu_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, load {load}: ", end="")
    print(f"{arguments.imgsz} px, batch {arguments.batch}; times are the median (and the minimum)\n")
    rows = [(key, *(found[net][key] for net in NETS)) for key in found[NETS[0]]]
    print(markdown(("", *NETS), rows, left=1))


if __name__ == "__main__":
    main()
