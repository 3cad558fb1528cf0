"""What a training step launches and moves on a GPU, and what that allows at most, found on a machine without a GPU.

    python benchmarks/on_paper.py --out on_paper.md

For each network and batch it prints the kernels by kind, the bytes that they read and write, and three bounds for each
GPU: a step cannot be faster than its bytes by the memory's bandwidth, its convolutions and matrix products by the peak
of the tensor cores in bf16, and its kernels by the least time of a launch. They are bounds, not speeds. Bytes are those
between a kernel and memory if nothing stays in the cache, and a kernel is assumed to read its inputs once.

The kernels of network and loss are those that inductor generates for an H100 (tests/gpu_code.py); all are compiled by
ptxas for each GPU. What runs outside of the graphs is recorded on the CPU, with the fused and foreach operations of a
GPU. A network that is not compiled (D-FINE) is recorded as a whole, with one kernel for each operation.

`benchmarks/on_paper.json` has the kernels for gpu.py, which compares them with a real GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from generated import generate
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tests import gpu_code
from trainer.bench.measure import cpu_name
from trainer.bench.tables import markdown
from trainer.config import Hyp, Settings
from trainer.distributed.comm import World
from trainer.engine.events import Events
from trainer.engine.trainer import Trainer


@dataclass(frozen=True)
class Gpu:
    """A GPU's published figures."""

    name: str
    capability: int
    bytes_per_s: float
    flops_per_s: float  # bf16, dense


#: From NVIDIA's data sheets "H100 Tensor Core GPU" (SXM), "A100 80GB" (SXM) and "L4"; without sparsity.
GPUS = (
    Gpu("H100", 90, 3.35e12, 989e12),
    Gpu("A100", 80, 2.039e12, 312e12),
    Gpu("L4", 89, 0.300e12, 121e12),
)
#: Of a kernel in a graph, beyond its own time: NVIDIA's "Getting Started with CUDA Graphs" (a V100: 3.4 - 2.9 us).
LAUNCH_S = 0.5e-6
NETS = ("yolov5n", "yolov5nu", "yolov5s", "dfine-n")
BATCHES = (16, 64)
EAGER_BATCHES = (
    2,
    4,
)  # computed on the CPU; the kernels do not depend on the batch, and bytes grow linearly with it
KINDS = ("pointwise", "reduction", "convolution, matmul", "other")
PARTS = {
    ("_eager", False): "forward",
    ("_eager", True): "backward",
    ("_eager_loss", False): "division by the counts",
}
PARTS |= {("_eager_loss", True): "division by the counts", ("_account", False): "sums of the loss"}
REDUCTIONS = ("sum", "mean", "norm", "softmax", "max", "min", "any", "all", "argmax", "topk", "sort", "pool")
# Of a launch on lists of tensors, by the number of lists, with 4 KiB of arguments; larger ones make it fewer.
MOST_TENSORS = (110, 64, 48, 36, 30)
MOST_BLOCKS = 320
CHUNK = 65536
MOST_CONCATENATED = 128  # tensors in a launch


@dataclass
class Part:
    """A part of a step: its kernels by kind, and the bytes that they read and write."""

    kernels: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    bytes: int = 0
    flops: int = 0

    def add(self, other: Part) -> None:
        """Add another part."""
        self.kernels = {kind: self.kernels[kind] + other.kernels[kind] for kind in KINDS}
        self.bytes = self.bytes + other.bytes
        self.flops = self.flops + other.flops


@dataclass
class Step:
    """A step of a network and batch."""

    net: str
    batch: int
    is_compiled: bool
    parts: dict[str, Part] = field(default_factory=dict)
    nodes: list[gpu_code.Node] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)

    def part(self, name: str) -> Part:
        """Return a part, which is empty at first."""
        return self.parts.setdefault(name, Part())

    @property
    def total(self) -> Part:
        """The whole step."""
        made = Part()
        for part in self.parts.values():
            made.add(part)
        return made


class Recorder(TorchDispatchMode):
    """Adds the operations on tensors to a part: one kernel each, and the launches of those on lists of tensors."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        schema = func._schema
        name = func._schema.name.removeprefix("aten::")
        is_view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        if is_view or name.startswith("empty") or name in ("_local_scalar_dense", "detach", "lift_fresh"):
            return made
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | (kwargs or {})
        written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        if name == "_fused_sgd_":
            written.discard("grads")  # only with a scaler
        new = [] if written else tensors(made)
        changed = [t for key in written for t in tensors(given.get(key))]
        self.part.bytes += sum(t.nbytes for t in (*tensors(list(given.values())), *changed, *new))
        lists = [given[key] for key in given if isinstance(given[key], (list, tuple)) and tensors(given[key])]
        if name.startswith(("_foreach", "_fused")):
            # The result of a norm is small, and has its own kernel.
            more = [made] if not written and name != "_foreach_norm" else []
            count = list_launches([*lists, *more]) + (name == "_foreach_norm")
        else:
            count = -(-len(lists[0]) // MOST_CONCATENATED) if name in ("cat", "stack") else 1
        self.part.kernels[kind_of(name)] += count
        return made


def tensors(of: Any) -> list[Tensor]:
    """Return the tensors in arguments."""
    return [each for each in tree_leaves(of) if isinstance(each, Tensor)]


def kind_of(operation: str) -> str:
    """Return the kind of an operation's kernel."""
    if any(word in operation for word in gpu_code.MULTIPLICATIONS):
        return "convolution, matmul"
    words = operation.replace("_", " ").split()
    return "reduction" if any(word in words for word in REDUCTIONS) else "pointwise"


def list_launches(lists: Sequence[Sequence[Tensor]]) -> int:
    """Return the launches of torch's multi_tensor_apply: a block for each chunk of a tensor."""
    most = MOST_TENSORS[min(len(lists), len(MOST_TENSORS)) - 1]
    launches = count = blocks = 0
    for tensor in lists[0]:
        count += 1
        for chunk in range(left := -(-tensor.numel() // CHUNK)):
            blocks += 1
            if blocks == MOST_BLOCKS or (count == most and chunk == left - 1):
                launches = launches + 1
                blocks = 0
                count = int(chunk < left - 1)
    return launches + (blocks > 0)


@contextlib.contextmanager
def recording(run: Trainer, step: Step) -> Iterator[None]:
    """Record what a step does outside of network and loss."""

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with Recorder(step.part(name)):
                return function(*args, **kwargs)

        return call

    update = run.update
    places = [
        ("gradient norm and clipping", run.strategy, "clip"),
        ("optimizer", update.optimizer, "step"),
        ("average of the weights", update.ema, "update"),
        ("sums of the loss", run.meter, "start_sum"),
    ]
    with contextlib.ExitStack() as stack:
        for name, owner, method in places:
            stack.enter_context(mock.patch.object(owner, method, recorded(name, getattr(owner, method))))
        # As on a GPU.
        stack.enter_context(mock.patch("torch.nn.utils.clip_grad._has_foreach_support", return_value=True))
        yield


def started(net: str, data: Path, imgsz: int, batch: int) -> Trainer:
    """Return a training whose every step updates the weights."""
    how = {
        "device": "cpu",
        "precision": "bf16",
        "workers": 0,
        "noval": True,
        "noautoanchor": True,
        "epochs": 1000,
    }
    settings = Settings(
        data=str(data), cfg=net, imgsz=imgsz, batch=batch, **how, hyp=Hyp(nbs=1.0, warmup_epochs=0.0)
    )
    run = Trainer(settings, World(), torch.device("cpu"), Events({}))
    if run.task.can_compile:
        run.compilation = type(run.compilation)("reduce-overhead", settings, run.display.print)
    run.start()
    run.local_model.train()
    return run


def measure(net: str, data: Path, imgsz: int, size: int) -> Step:
    """Return the kernels and bytes of a step."""
    run = started(net, data, imgsz, EAGER_BATCHES[0])
    step = Step(Path(net).stem, size, run.task.can_compile)
    if step.is_compiled:
        run = started(net, data, imgsz, size)
        batch = next(iter(run.train_loader.epoch(0)))
        for graph in gpu_code.trace(run, batch):
            made = gpu_code.lower(graph)
            moved = sum(node.bytes for node in made.nodes)
            step.part(PARTS[graph.part, graph.is_backward]).add(Part(made.kernels, moved, made.flops))
            step.nodes += made.nodes
            step.sources |= made.sources
    else:
        step.parts["forward and backward"] = eager(net, data, imgsz, size)
        batch = next(iter(run.train_loader.epoch(0)))
        run.step(batch)
    with recording(run, step), mock.patch.object(run.meter, "_account", return_value=None):
        run.step(batch)
    images, targets = run.task.move(batch, run.device)
    share = size / len(images)
    moved = tensors(targets)
    target_bytes = round(share * sum(t.nbytes for t in moved))
    image_bytes = round(share * images.nbytes)
    none = dict.fromkeys(KINDS, 0)
    if step.is_compiled:  # an operation on lists for each dtype
        dtypes = len({t.dtype for t in (images, *moved)})
        copies = Part({**none, "pointwise": dtypes}, 2 * (target_bytes + image_bytes))
        step.parts["copies of the batch into the graphs"] = copies
    step.parts[f"targets to the GPU ({len(moved)} copies, no kernels)"] = Part(none, target_bytes)
    step.parts["painter"] = Part({**none, "pointwise": 1}, 2 * image_bytes)  # it reads as much, at the least
    return step


def eager(net: str, data: Path, imgsz: int, size: int) -> Part:
    """Return forward and backward pass of a network that is not compiled."""
    found = []
    for batch_size in EAGER_BATCHES:
        run = started(net, data, imgsz, batch_size)
        batch = next(iter(run.train_loader.epoch(0)))
        run.step(batch)
        part = Part()
        with FlopCounterMode(display=False) as flops, Recorder(part):
            images, targets = run.task.move(batch, run.device)
            run.train_step.differentiate(images, targets, sync=True)
        found.append((part, flops.get_total_flops()))
    (small, small_flops), (large, large_flops) = found
    factor = (size - EAGER_BATCHES[0]) / (EAGER_BATCHES[1] - EAGER_BATCHES[0])
    small.bytes += round(factor * (large.bytes - small.bytes))
    small.flops = small_flops + round(factor * (large_flops - small_flops))
    return small


def bounds(step: Step, gpu: Gpu) -> dict[str, float]:
    """Return the least milliseconds of a step, by what they come from."""
    total = step.total
    return {
        "memory": 1e3 * total.bytes / gpu.bytes_per_s,
        "arithmetic": 1e3 * total.flops / gpu.flops_per_s,
        "launches": 1e3 * sum(total.kernels.values()) * LAUNCH_S,
    }


def compiled(sources: dict[str, str], capability: int) -> list[tuple[str, int, int]]:
    """Compile kernels; return the name, registers and spilled bytes of each. Runs in a separate process."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, source in sources.items():
            usage = gpu_code.compile_kernel(
                gpu_code.kernel_of(name, source, Path(folder)), capability, Path(folder)
            )
            found.append((name, usage.registers, usage.spilled))
    return found


def compile_table(steps: Sequence[Step], workers: int) -> str:
    """Compile all kernels for each GPU, and return registers and spills as a table."""
    rows = []
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [
            (step, gpu, pool.submit(compiled, step.sources, gpu.capability))
            for step in steps
            for gpu in GPUS
            if step.sources
        ]
        for step, gpu, future in waiting:
            usage = future.result()
            registers = sorted(each[1] for each in usage)
            spilled = [f"{name}: {spill}" for name, _, spill in usage if spill]
            median = registers[len(registers) // 2]
            cells = f"{step.net}, batch {step.batch}", f"{gpu.name}, sm_{gpu.capability}", str(len(usage))
            rows.append((*cells, f"{median} / {registers[-1]}", "; ".join(spilled) or "none"))
    titles = ("step", "GPU", "kernels compiled", "registers: median / most", "spilled bytes of a thread")
    return markdown(titles, rows, left=2)


def parts_table(step: Step) -> str:
    """Return the kernels and bytes of each part of a step."""
    rows = []
    for name, part in [*step.parts.items(), ("together", step.total)]:
        counts = [str(part.kernels[kind] or "") for kind in KINDS]
        rows.append((name, *counts, str(sum(part.kernels.values())), f"{part.bytes / step.batch / 1e6:.2f}"))
    return markdown((f"{step.net}, batch {step.batch}", *KINDS, "kernels", "MB per image"), rows, left=1)


def nodes_table(step: Step, count: int = 10) -> str:
    """Return the largest nodes of a step."""
    nodes = sorted(step.nodes, key=lambda node: -node.bytes)[:count]
    rows = [(f"{node.bytes / step.batch / 1e6:.1f}", shortened(node.what)) for node in nodes]
    return markdown(("MB per image", f"largest nodes of {step.net}, batch {step.batch}"), rows, left=2)


def shortened(text: str, most: int = 90) -> str:
    """Return the beginning and the shape of a node's description."""
    words, _, shape = text.rpartition(" -> ")
    return f"{words if len(words) <= most else words[:most].rpartition(' ')[0] + ' ...'} -> {shape}"


def bounds_table(steps: Sequence[Step]) -> str:
    """Return the bounds of all steps."""
    rows = []
    for step in steps:
        for gpu in GPUS:
            least = bounds(step, gpu)
            rows.append(
                (
                    f"{step.net}, batch {step.batch}" + ("" if step.is_compiled else ", not compiled"),
                    gpu.name,
                    *(f"{ms:.2f}" for ms in least.values()),
                    f"{1e3 * step.batch / max(least.values()):,.0f}",
                )
            )
    titles = ("step", "GPU", "memory, ms", "arithmetic, ms", "launches, ms", "images/s, at most")
    return markdown(titles, rows, left=2)


def loss_line(step: Step) -> str:
    """Return the share of the loss."""
    own = [node for node in step.nodes if node.in_loss]
    share = 100 * sum(node.bytes for node in own) / sum(node.bytes for node in step.nodes)
    of = f"{len(own)} of {len(step.nodes)} nodes and {share:.1f} % of their bytes"
    return f"{step.net}, batch {step.batch}: {of} belong to the loss."


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="a data.yaml (default: generated images)")
    parser.add_argument("--nets", nargs="+", default=NETS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument(
        "--workers", type=int, default=2, help="processes that compile kernels; 0 compiles none"
    )
    parser.add_argument("--out", type=Path, help="a file for the tables")
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).with_suffix(".json"), help="a file for gpu.py"
    )
    arguments = parser.parse_args()
    steps = []
    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data or generate(Path(folder), max(arguments.batches))
        for net in arguments.nets:
            for batch in arguments.batches:
                cfg = net if net.endswith(".yaml") or "dfine" in net else f"{net}.yaml"
                steps.append(measure(cfg, data, arguments.imgsz, batch))
    lines = [
        f"torch {torch.__version__}, {cpu_name()}, {time.strftime('%Y-%m-%d')}, {arguments.imgsz} px, bf16",
        *(
            text
            for step in steps
            for text in (parts_table(step), *([nodes_table(step)] if step.nodes else []))
        ),
        "\n".join(loss_line(step) for step in steps if step.nodes),
        bounds_table(steps),
    ]
    first = arguments.batches[0]
    if arguments.workers:
        lines.append(compile_table([step for step in steps if step.batch == first], arguments.workers))
    text = "\n\n".join(lines) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    print(text)
    content = {
        f"{s.net}, batch {s.batch}": {name: part.kernels for name, part in s.parts.items()} for s in steps
    }
    arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"wrote {arguments.json}; {most:.1f} GiB of memory", file=sys.stderr)


if __name__ == "__main__":
    main()
