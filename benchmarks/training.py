"""Images per second of a training, compared with `ultralytics` on the same images.

    python benchmarks/training.py --data bccd/data.yaml --peer-python ul/bin/python

`ul` is a virtual environment with `ultralytics`. Each round trains every contender for a few epochs, validation off,
and counts all but the first of them. Contenders take turns, because the speed of a shared machine drifts.

Without a GPU: 320 px, batch 16, as many threads as there are cores. With one:
`--device 0 --imgsz 640 --batch 64 --cfg yolov5s.yaml --peer-model yolov5su.yaml`.

    python benchmarks/training.py roofline --data bccd/data.yaml

`roofline` lists the parts of a step in fp32 on the CPU: time, arithmetic, and memory traffic if each operation reads
its inputs and writes its outputs once. The bound (Williams et al. 2009) is the time at the machine's measured peaks.
Caches can exceed it.

    python benchmarks/training.py waiting --data bccd/data.yaml

`waiting` compares how OpenMP's threads wait for each other, alone and beside one and two programs that are busy.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trainer.bench.measure import cpu_name, start_trainer, steps_of
from trainer.bench.tables import markdown
from trainer.cli.bench import settings_of
from trainer.config.presets import Hyp, load_hyp

# Uses the peer's public interface, with callbacks that time its epochs and set the number of threads.
PEER = """
import os, sys, time, torch
from ultralytics import YOLO, settings
data, model, device, imgsz, batch, epochs, threads, project = sys.argv[1:]
settings.update({"sync": False})
yolo, begun = YOLO(model), [0.0]
last = int(epochs)
def start(trainer):
    if device == "cpu":
        torch.set_num_threads(int(threads))
    begun[0] = time.perf_counter()
def end(trainer):
    global last
    print("RATE", len(trainer.train_loader.dataset) / (time.perf_counter() - begun[0]), flush=True)
    last -= 1
    if not last:
        os._exit(0)  # what follows is not measured, and needs further packages
yolo.add_callback("on_train_epoch_start", start)
yolo.add_callback("on_train_epoch_end", end)
yolo.train(data=data, imgsz=int(imgsz), batch=int(batch), epochs=int(epochs), device=device, val=False, plots=False,
           pretrained=False, optimizer="SGD", workers=0 if device == "cpu" else 8, amp=device != "cpu",
           close_mosaic=0, verbose=False, seed=0, project=project, exist_ok=True)
"""


#: Variables of OpenMP: as `trainer` sets them (a short spin), no spin, and the runtime's own default.
WAITING = {
    "as set": {},
    "passive": {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"},
    "OpenMP's default": {"GOMP_SPINCOUNT": "300000"},
}


def ours(
    arguments: argparse.Namespace,
    cfg: str,
    precision: str,
    ranks: int,
    folder: Path,
    variables: Mapping[str, str] | None = None,
) -> list[float]:
    """Return the images per second of each epoch of this trainer, started with these `variables` added."""
    hyp = folder / "hyp.yaml"  # with mosaics in every epoch, as the peer's
    values = {key: value for key, value in asdict(load_hyp("low", Hyp())).items() if value is not None}
    hyp.write_text(yaml.safe_dump({**values, "close_mosaic": 0.0}))
    command = [
        *(sys.executable, "-m", "trainer", "train", "--data", arguments.data, "--cfg", cfg, "--weights", ""),
        *(
            "--imgsz",
            str(arguments.imgsz),
            "--batch",
            str(arguments.batch),
            "--epochs",
            str(arguments.epochs),
        ),
        *(
            "--device",
            arguments.device,
            "--precision",
            precision,
            "--ranks",
            str(ranks),
            "--noval",
            "--hyp",
            str(hyp),
        ),
        *("--project", str(folder), "--name", "run"),
    ]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **(variables or {})})
    (table,) = folder.glob("run*/results.csv")
    with table.open() as file:
        return [float(row["images_per_s"]) for row in csv.DictReader(file)]


class PeerFailed(RuntimeError):
    """The peer has failed; `rates` are those of the epochs before."""

    def __init__(self, reason: str, rates: list[float]) -> None:
        super().__init__(f"the peer failed after {len(rates)} epochs: {reason}")
        self.rates = rates


def peers(
    arguments: argparse.Namespace, model: str, folder: Path, timeout_s: float | None = None
) -> list[float]:
    """Return the images per second of each epoch of the peer; raise PeerFailed."""
    content = yaml.safe_load(Path(arguments.data).read_text())
    content["path"] = str((Path(arguments.data).resolve().parent / content.get("path", ".")).resolve())
    data = folder / "data.yaml"  # the peer resolves relative paths by its own settings
    data.write_text(yaml.safe_dump(content))
    command = [
        *(arguments.peer_python, "-c", PEER, str(data), model, arguments.device),
        *(
            str(arguments.imgsz),
            str(arguments.batch),
            str(arguments.epochs),
            str(os.cpu_count()),
            str(folder),
        ),
    ]
    lines = []
    reason = ""
    with (folder / "out.txt").open("w+") as out, (folder / "errors.txt").open("w+") as errors:
        try:
            subprocess.run(command, check=True, stdout=out, stderr=errors, cwd=folder, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            reason = f"not done after {timeout_s:g} s"
        except subprocess.CalledProcessError as error:
            errors.seek(0)
            reason = f"exit {error.returncode}: {(errors.read().strip().splitlines() or [''])[-1]}"
        out.seek(0)
        lines = out.read().splitlines()
    rates = [float(line.split()[1]) for line in lines if line.startswith("RATE ")]
    if reason or not rates:
        raise PeerFailed(reason or "it printed no epoch", rates)
    return rates


LAYERS = {
    "convolution": "convolution",
    "batch_norm": "batch norm",
    "silu": "SiLU",
}  # by words in the operations' names
OTHER_LAYERS = "joining, adding, pooling, upsampling"
NETWORK_NODES = ("Convolution", "NativeBatchNorm", "Silu", "MaxPool", "Upsample", "Cat")


class Meter(TorchDispatchMode):
    """Adds up the seconds, floating-point operations and bytes of each part of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.section = "loss"
        self.totals = dict[str, list[float]]()

    def of(self, section: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run` with its operations in a section."""

        def inside(*args: Any, **kwargs: Any) -> Any:
            self.section = section
            made = run(*args, **kwargs)
            self.section = "loss"
            return made

        return inside

    def part(self, name: str) -> str:
        """Return the part of the step that an operation belongs to."""
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        layer = next((title for word, title in LAYERS.items() if word in name), OTHER_LAYERS)
        if node is not None:
            return f"backward: {layer if node.name().startswith(NETWORK_NODES) else 'loss'}"
        return f"forward: {layer}" if self.section == "network" else self.section

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = time.perf_counter()
        made = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - begin
        tensors = (
            [] if func.is_view else [t for t in tree_leaves((args, kwargs, made)) if isinstance(t, Tensor)]
        )
        count = flop_registry.get(func.overloadpacket, lambda *_, **__: 0)
        figures = seconds, count(*args, **(kwargs or {}), out_val=made), sum(t.nbytes for t in tensors)
        total = self.totals.setdefault(self.part(str(func)), [0, 0, 0])
        total[:] = [a + b for a, b in zip(total, figures, strict=True)]
        return made


def fastest(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of ten runs."""
    return min(timeit.repeat(run, number=1, repeat=10))


def peaks() -> tuple[float, float, float]:
    """Return the floating-point operations per second of a matrix product and a convolution, and a copy's bytes."""
    a = torch.rand(2048, 2048)
    source = torch.rand(1 << 26)
    target = torch.empty_like(source)
    x, w = (
        torch.rand(shape).to(memory_format=torch.channels_last)
        for shape in ((16, 64, 80, 80), (64, 64, 3, 3))
    )
    product = 2 * 2048**3 / fastest(lambda: a @ a)
    convolution = 2 * x.numel() * w[0].numel() / fastest(lambda: F.conv2d(x, w, padding=1))
    return product, convolution, 2 * source.nbytes / fastest(lambda: target.copy_(source))


def roofline(arguments: argparse.Namespace) -> None:
    """Measure the parts of a step, and print their table."""
    sizes = [
        "--imgsz",
        str(arguments.imgsz),
        "--batch",
        str(arguments.batch),
        "--precision",
        "fp32",
        "--noval",
    ]
    settings = settings_of(["--data", arguments.data, "--cfg", arguments.cfg, *sizes], "cpu")
    hyp = replace(settings.hyp, nbs=float(arguments.batch))  # every step updates the weights
    run = start_trainer(replace(settings, hyp=hyp), os.cpu_count() or 1)
    batch = next(batch for batch in steps_of(run) if len(batch.images) == arguments.batch)
    step = fastest(lambda: run.step(batch))
    meter = Meter()
    steps = list[dict[str, list[float]]]()
    update = run.update
    owners = {
        "network": run.local_model,
        "clip": run.strategy,
        "optimizer": update.optimizer,
        "average": update.ema,
    }
    for (section, owner), method in zip(owners.items(), ("forward", "clip", "step", "update"), strict=True):
        setattr(owner, method, meter.of(section, getattr(owner, method)))
    for _ in range(10):
        meter.totals = {}
        with meter:
            run.step(batch)
        steps.append(meter.totals)

    parts = {part: min(totals[part] for totals in steps) for part in steps[0]}
    whole, (product, convolution, copied), rows = sum(total[0] for total in parts.values()), peaks(), []
    for part, (seconds, flop, moved) in sorted(parts.items(), key=lambda item: -item[1][0]):
        bound = max(flop / max(product, convolution), moved / copied)
        amounts = (1e3 * seconds, 100 * seconds / whole, flop / 1e9, moved / 1e9)
        figures = (*amounts, flop / seconds / 1e9, moved / seconds / 1e9, 1e3 * bound, 100 * bound / seconds)
        rows.append([part, *(f"{figure:.1f}" for figure in figures)])
    print(
        f"{cpu_name()}, {os.cpu_count()} threads, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}: ",
        end="",
    )
    print(f"{arguments.cfg}, {arguments.imgsz} px, batch {arguments.batch}, {1e3 * step:.0f} ms per step")
    peak = f"{product / 1e9:.0f} GFLOP/s (matrix product), {convolution / 1e9:.0f} GFLOP/s (convolution)"
    print(f"Peaks: {peak}, {copied / 1e9:.1f} GB/s (copy)")
    header = ["part", "ms", "%", "GFLOP", "GB", "GFLOP/s", "GB/s", "bound, ms", "% of bound"]
    print(f"\n{markdown(header, rows, left=1)}")


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` programs that keep a core busy each."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def waiting(arguments: argparse.Namespace) -> None:
    """Measure the ways to wait in turns, in each round alone and beside busy programs, and print their table."""
    rates: dict[tuple[int, str], list[float]] = {(count, name): [] for count in range(3) for name in WAITING}
    for number in range(arguments.rounds):
        for (count, name), values in rates.items():
            with tempfile.TemporaryDirectory() as folder, busy(count):
                found = ours(arguments, arguments.cfg, "fp32", 1, Path(folder), WAITING[name])
            values.append(statistics.median(found[1:]))
            print(f"round {number + 1}: {count} busy, {name}: {values[-1]:.1f}", file=sys.stderr, flush=True)
    print(f"{cpu_name()}, {os.cpu_count()} threads, {time.strftime('%Y-%m-%d')}: images/s in fp32 by round\n")
    text = {key: "  ".join(f"{value:.1f}" for value in values) for key, values in rates.items()}
    rows = [[str(count), *(text[count, name] for name in WAITING)] for count in range(3)]
    print(markdown(["busy programs", *WAITING], rows, left=1))


def main() -> None:
    """Run the rounds and print the table, or run `roofline` or `waiting`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=("compare", "roofline", "waiting"), default="compare")
    parser.add_argument("--data", required=True, help="a data.yaml")
    parser.add_argument("--peer-python", help="the interpreter of an environment with ultralytics")
    parser.add_argument("--peer-model", default="yolov5nu.yaml")
    parser.add_argument("--cfg", default="yolov5n.yaml")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if not Path(arguments.data).is_file():
        parser.error(f"--data {arguments.data}: no such file")
    if arguments.part == "compare" and not arguments.peer_python:
        parser.error("compare needs --peer-python")
    if arguments.part == "roofline":
        roofline(arguments)
        return
    if arguments.part == "waiting":
        waiting(arguments)
        return

    peer = f"ultralytics {arguments.peer_model.removesuffix('.yaml')}"
    same = arguments.peer_model  # the same network as the peer's
    cores = os.cpu_count() or 1
    contenders = {
        peer: None,
        f"{arguments.cfg}, bf16": (arguments.cfg, "bf16", 1),
        f"{arguments.cfg}, fp32": (arguments.cfg, "fp32", 1),
        f"{same}, bf16": (same, "bf16", 1),
    }
    if arguments.device == "cpu" and cores > 1:
        contenders[f"{arguments.cfg}, bf16, {cores} ranks"] = (arguments.cfg, "bf16", cores)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(arguments.rounds):
        for name, how in contenders.items():
            with tempfile.TemporaryDirectory() as folder:
                found = (
                    ours(arguments, *how, Path(folder))
                    if how
                    else peers(arguments, arguments.peer_model, Path(folder))
                )
            rates[name].append(statistics.median(found[1:]))
            print(f"round {number + 1}: {name}: {rates[name][-1]:.1f} images/s", file=sys.stderr, flush=True)

    print(
        f"{platform.processor() or platform.machine()}, {cores} cores, {time.strftime('%Y-%m-%d')}: ", end=""
    )
    print(f"{arguments.imgsz} px, batch {arguments.batch}, mosaic, from JPEG, device {arguments.device}")
    print("| contender | images/s (median of the rounds) | ratio to the peer, by round |")
    print("|---|---|---|")
    for name, values in rates.items():
        ratios = "  ".join(f"{a / b:.2f}" for a, b in zip(values, rates[peer], strict=True))
        print(f"| {name} | {statistics.median(values):.1f} | {ratios} |")


if __name__ == "__main__":
    main()
