"""Everything that is to be measured on a GPU, in one command: writes gpu.jsonl and gpu.md.

    python3 benchmarks/gpu.py --peer-python ul/bin/python

The pieces run in one process, the most telling first. Each is a line of gpu.jsonl as soon as it is done, and gpu.md has
the table with the goals. The command stops after `--minutes`; run it again to continue, also after a piece that took
the process down. A piece that fails is a row with its reason; `--retry` runs it again. `ul` is an environment with
`ultralytics`. `--device cpu` rehearses all of it with small images and networks, in two minutes.

Decoded images that stay on the GPU are called resident. Host: the time in which the host starts a step. Kernels: the
sum of their times on the GPU. Launches: calls that start a kernel or a graph. All are means over steps with and without
an update of the weights, as they alternate in a training. The first piece compares a compiled step that updates the
weights with the table of on_paper.py (on_paper.json): its kernels by kind. It also has their time.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import importlib.util
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path("gpu.compiled").resolve()))
os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as `trainer` sets it, before torch is loaded
NEEDED = ("torch", "torchvision", "numpy", "cv2", "yaml", "faster_coco_eval", "typer", "rich", "matplotlib")
NEEDED += ("tensorboard", "PIL", "sklearn")
if MISSING := [name for name in NEEDED if not importlib.util.find_spec(name)]:
    sys.exit(
        f"missing packages: {', '.join(MISSING)}\nhint: python3 -m pip install -r requirements/trainer.txt"
    )

import torch  # noqa: E402
from generated import generate  # noqa: E402
from painting import paint_times  # noqa: E402
from training import PeerFailed, peers  # noqa: E402

from trainer.bench.measure import Effort, cpu_name, start_trainer, steps_of, time_run  # noqa: E402
from trainer.bench.tables import markdown  # noqa: E402
from trainer.config import Settings  # noqa: E402
from trainer.distributed import comm  # noqa: E402
from trainer.engine.loop import train  # noqa: E402
from trainer.engine.trainer import Trainer  # noqa: E402
from trainer.errors import TrainerError  # noqa: E402

IMAGES = 1920  # a multiple of the batches: a compiled step is compiled again for another number of images
LARGE = [batch for batch in range(IMAGES, 64, -32) if IMAGES % batch == 0]
NETS = ("yolov5n", "yolov5nu", "yolov5s", "yolov5m")
LIMIT_S, COMPILED_LIMIT_S = 40, 120  # of a piece; most need half of it
TIMED_IMAGES = 2400
CYCLES = 5  # on a GPU: updates of the weights while the host is timed
RESIDENT = "auto" if "auto" in {f.name: f for f in fields(Settings)}["cache"].metadata["known"] else "ram"
Result = dict[str, Any]
Done = dict[str, Result]


class TookTooLong(BaseException):
    """Raised in a piece that exceeds its limit. No part of the trainer catches it."""


@dataclass(frozen=True)
class Plan:
    """What the arguments ask for."""

    data: str
    device: str
    imgsz: int
    batches: tuple[int, int]
    nets: tuple[str, ...]
    epochs: int
    rounds: int
    peer: str  # an interpreter; "" without a peer

    @property
    def on_gpu(self) -> bool:
        """Whether this is no rehearsal."""
        return self.device != "cpu"

    def settings(self, net: str, batch: int, **more: Any) -> Settings:
        """Return the settings of a training of a network."""
        cfg = net if net.endswith(".yaml") else f"{net}.yaml"
        sizes = {"imgsz": self.imgsz, "batch": batch, "device": self.device}
        made = Settings(
            data=self.data, cfg=cfg, hyp="low", noval=True, noautoanchor=True, **{**sizes, **more}
        )
        return replace(made, hyp=replace(made.hyp, close_mosaic=0.0))  # mosaics in every epoch, as the peer's


@dataclass(frozen=True)
class Piece:
    """A measurement, and the seconds that it may take."""

    name: str
    measure: Callable[[], Result]
    limit_s: float = LIMIT_S


def start(settings: Settings) -> Trainer:
    """Return a training that keeps its decoded images, with one thread, as `trainer train` has on a GPU."""
    run = start_trainer(replace(settings, cache=RESIDENT), comm.usable_cores())  # which decode
    torch.set_num_threads(1)
    return run


def synchronise(run: Trainer) -> None:
    """Wait for the GPU."""
    comm.now(run.device)


def step_figures(settings: Settings) -> Result:
    """Measure training steps on resident images, and then one batch again and again."""
    run = start(settings)
    batch = next(steps_of(run))
    begin = comm.now(run.device)
    run.step(batch)  # compiles
    first = comm.now(run.device) - begin
    on_gpu = run.device.type == "cuda"
    found = time_run(run, Effort(steps=max(4, TIMED_IMAGES // settings.batch) if on_gpu else 4))
    cycle = run.schedule.accumulate
    steps = (CYCLES if on_gpu else 1) * cycle
    for _ in range(cycle):
        run.step(batch)
    host = []
    for _ in range(steps):
        synchronise(run)  # a full queue would make the host wait
        begin = time.perf_counter()
        run.step(batch)
        host.append(1e3 * (time.perf_counter() - begin))
    begin = comm.now(run.device)
    for _ in range(steps):
        run.step(batch)
    alone = (comm.now(run.device) - begin) / steps
    return {
        "images_per_s": found["train_images_per_s"],
        "step_images_per_s": settings.batch / alone,
        "host_ms": statistics.mean(statistics.median(host[k::cycle]) for k in range(cycle)),
        **launches(run, batch, cycle),
        "first_step_s": first,
        "gib": (found["device_bytes"] or 0) / 2**30,
        "waiting": 100 * found["data_share"],
    }


def launches(run: Trainer, batch: Any, steps: int) -> Result:
    """Profile steps; return the kernels' milliseconds, the launches and the copies per step."""
    if run.device.type != "cuda":
        return {"kernel_ms": None, "launches": None, "copies": None}
    synchronise(run)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run.step(batch)
        synchronise(run)
    events = profiler.key_averages()
    on_gpu = [
        e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation
    ]
    calls = {
        word: sum(e.count for e in events if word in e.key)
        for word in ("LaunchKernel", "GraphLaunch", "Async")
    }
    return {
        "kernel_ms": sum(e.self_device_time_total for e in on_gpu) / 1e3 / steps,
        "launches": (calls["LaunchKernel"] + calls["GraphLaunch"]) / steps,
        "copies": calls["Async"] / steps,  # cudaMemcpyAsync and cudaMemsetAsync
    }


def paper_figures(settings: Settings, expected: dict[str, dict[str, int]]) -> Result:
    """Compare the kernels of a step, by kind, with those on paper; None where this device cannot be profiled."""
    run = start(replace(settings, hyp=replace(settings.hyp, nbs=1.0, warmup_epochs=0.0)))
    batch = next(steps_of(run))
    for _ in range(3):
        run.step(batch)
    found: dict[str, int] | None = None
    kernel_ms = None
    if run.device.type == "cuda":
        synchronise(run)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run.step(batch)
            synchronise(run)
        events = [
            event
            for event in profiler.key_averages()
            if event.device_type == torch.autograd.DeviceType.CUDA
            and not event.key.startswith(("Mem", "## "))
        ]
        found = kinds_of({e.key: e.count for e in events})
        kernel_ms = sum(e.self_device_time_total for e in events) / 1e3
    inside = {
        name: part for name, part in expected.items() if name != "painter"
    }  # which has painted this batch
    kinds = dict.fromkeys(kind for part in inside.values() for kind in part)
    rows = {
        kind: [sum(part[kind] for part in inside.values()), found[kind] if found else None] for kind in kinds
    }
    return {"on paper, found": "", **rows, "kernel_ms": kernel_ms}


def kinds_of(counts: dict[str, int]) -> dict[str, int]:
    """Return the number of kernels by the kinds of on_paper.py, from their numbers by name."""
    found = dict.fromkeys(("pointwise", "reduction", "convolution, matmul", "other"), 0)
    for name, count in counts.items():
        low = name.lower()
        if any(word in low for word in ("triton_red", "triton_per", "reduce", "lpnorm", "norm")):
            kind = "reduction"
        elif any(word in low for word in ("triton_poi", "elementwise", "multi_tensor", "catarray")):
            kind = "pointwise"
        elif any(
            word in low for word in ("conv", "gemm", "xmma", "cutlass", "cudnn", "wgrad", "dgrad", "fprop")
        ):
            kind = "convolution, matmul"
        else:
            kind = "other"
        found[kind] += count
    return found


def large_batches(plan: Plan, net: str, done: Done) -> list[int]:
    """Return the batches that should need at most nine tenths of the GPU's memory, the largest first."""
    small, large = plan.batches
    if not plan.on_gpu:
        return [2 * large]
    known = [done.get(step_name(net, batch, "off"), {}).get("gib") for batch in (small, large)]
    if not all(known):
        raise TrainerError(f"the memory that {net} needs for batch {small} and {large} is not known")
    per_image = max(0.001, (known[1] - known[0]) / (large - small))
    room = 0.9 * torch.cuda.get_device_properties(0).total_memory / 2**30 - known[1]
    return [batch for batch in LARGE if batch - large <= room / per_image]


def largest_step(plan: Plan, net: str, done: Done, mode: str) -> Result:
    """Measure the largest batch that fits."""
    for batch in large_batches(plan, net, done):
        with contextlib.suppress(torch.OutOfMemoryError):
            return {"batch": batch, **step_figures(plan.settings(net, batch, compile=mode))}
        free()
    raise TrainerError(f"no batch above {plan.batches[1]} fits")


def painter_figures(settings: Settings) -> Result:
    """Measure the painter on a batch of resident images."""
    run = start(settings)
    loader = run.train_loader
    painter = loader._painter
    if painter is None:
        raise TrainerError(
            f"the dataloader workers paint: {'; '.join(loader.notes) or 'there is no painter'}"
        )
    time_run(run, Effort(steps=2))  # fills the cache
    paintings: list[Any] = []

    def keep(painting: Any) -> Any:
        paintings.append(painting)
        return painter(painting)

    loader._painter = keep
    next(steps_of(run))
    times = paint_times(painter, paintings[0], 50 if run.device.type == "cuda" else 2)
    return {"resident": painter.is_resident, **times._asdict(), "gpu_ms": times.kernel_ms + times.copies_ms}


def train_figures(settings: Settings) -> Result:
    """Train from the files with the default cache; return the images per second of each epoch."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        train(replace(settings, project=folder, name="run"))
        with (Path(folder) / "run" / "results.csv").open() as file:
            rates = [float(row["images_per_s"]) for row in csv.DictReader(file)]
    return {
        "epochs": rates,
        "images_per_s": statistics.median(rates[1:]),
        "seconds": time.monotonic() - begin,
    }


def peer_figures(plan: Plan, model: str, batch: int) -> Result:
    """Train with the peer in a process of its own; return the images per second of each epoch."""
    how = {
        "data": plan.data,
        "peer_python": plan.peer,
        "device": plan.device,
        "imgsz": plan.imgsz,
        "batch": batch,
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            rates = peers(argparse.Namespace(**how, epochs=plan.epochs), model, Path(folder), timeout_s=90)
        except PeerFailed as error:
            if not error.rates:
                raise TrainerError(str(error)) from None
            return {"epochs": error.rates, "images_per_s": error.rates[-1], "note": str(error)}
    return {"epochs": rates, "images_per_s": statistics.median(rates[1:])}


def step_name(net: str, batch: object, mode: str) -> str:
    """Return the name of a step's piece."""
    return f"{Path(net).stem}, batch {batch}, {'eager' if mode == 'off' else f'--compile {mode}'}"


def pieces(plan: Plan, done: Done) -> Iterator[Piece]:
    """Yield the pieces, the most telling first."""
    first, second, *others = plan.nets
    small, large = plan.batches
    modes = ("graphs", "on") if plan.on_gpu else ("on",)

    def step(net: str, batch: int, mode: str) -> Piece:
        measure = partial(step_figures, plan.settings(net, batch, compile=mode))
        return Piece(step_name(net, batch, mode), measure, LIMIT_S if mode == "off" else COMPILED_LIMIT_S)

    def painter(batch: int) -> Piece:
        options = {"compile": "off"} if plan.on_gpu else {"compile": "off", "augment_on": "device"}
        return Piece(
            f"painter, batch {batch}", partial(painter_figures, plan.settings(first, batch, **options))
        )

    def training(net: str, number: int) -> Piece:
        mode = "graphs" if plan.on_gpu else "off"
        settings = plan.settings(net, small, epochs=plan.epochs, compile=mode)
        name = f"round {number}: trainer train {Path(net).stem}, batch {small}, --compile {mode}"
        return Piece(name, partial(train_figures, settings), COMPILED_LIMIT_S)

    paper = json.loads(Path(__file__).with_name("on_paper.json").read_text())

    def on_paper(net: str, batch: int) -> Piece:
        name = f"{Path(net).stem}, batch {batch}"
        # A rehearsal compares with another network.
        expected = paper.get(name if plan.on_gpu else "yolov5n, batch 16", {})
        settings = plan.settings(net, batch, compile=modes[0])
        return Piece(f"on paper: {name}", partial(paper_figures, settings, expected), COMPILED_LIMIT_S)

    yield on_paper(first, small)
    yield step(first, small, "off")
    yield step(first, small, modes[0])
    yield step(first, large, "off")
    if plan.on_gpu:
        yield step(first, large, modes[0])
    yield painter(small)
    yield painter(large)
    for number in range(1, plan.rounds + 1):
        yield training(second, number)
        if plan.peer:
            name = f"round {number}: ultralytics yolov5nu, batch {small}"
            yield Piece(name, partial(peer_figures, plan, "yolov5nu.yaml", small), COMPILED_LIMIT_S)
        yield training(first, number)
        if number == 1:
            yield step(second, small, "off")
            if plan.on_gpu:
                yield step(second, large, "off")
                yield from (step(second, batch, modes[0]) for batch in plan.batches)
    for net in others:
        yield from (step(net, batch, "off") for batch in plan.batches)
    for net in plan.nets:
        if plan.on_gpu or net == first:
            yield Piece(
                step_name(net, "largest", "off"), partial(largest_step, plan, net, done, "off"), 2 * LIMIT_S
            )
    if plan.on_gpu:
        compared = [(net, batch) for net in plan.nets for batch in plan.batches]
        for net, batch in compared:
            if (net, batch) != (first, small) and f"{Path(net).stem}, batch {batch}" in paper:
                yield on_paper(net, batch)
        yield step(first, small, "on")
        for net in others:
            yield step(net, large, "graphs")
        for net in plan.nets:
            yield from (step(net, batch, mode) for mode in modes for batch in plan.batches)
        for net in plan.nets:
            largest = partial(largest_step, plan, net, done, "graphs")
            yield Piece(step_name(net, "largest", "graphs"), largest, COMPILED_LIMIT_S)


def free() -> None:
    """Give back what a piece has left on the GPU."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TookTooLong after some seconds."""

    def stop(*_: object) -> None:
        raise TookTooLong

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def attempt(piece: Piece, log: Path, left_s: float) -> Result:
    """Run a piece, with its output in the log; a failure is a result. Return {} if the time left was too short."""
    limit_s = piece.limit_s * (1 if torch.cuda.is_available() else 4)
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        print(f"\n== {piece.name}", flush=True)
        try:
            with limited(min(limit_s, left_s)):
                return piece.measure()
        except TookTooLong:
            return {"failure": f"took longer than {limit_s:g} s"} if limit_s <= left_s else {}
        except TrainerError as error:
            return {"failure": error.message}
        except Exception as error:  # of any type: compilers, CUDA, the peer
            return {"failure": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:200]}


def speed(done: Done, word: str) -> float | None:
    """Return the median images per second of the pieces whose name has a word; None if there are none."""
    found = [
        result["images_per_s"] for name, result in done.items() if word in name and "images_per_s" in result
    ]
    return statistics.median(found) if found else None


def ratio(done: Done, word: str) -> float | None:
    """Return how many times as fast as the peer the trainings with a word in their name were."""
    own = speed(done, word)
    peer = speed(done, "ultralytics")
    return own / peer if own and peer else None


def goals(done: Done) -> str:
    """Return the goals beside what was measured, as a table."""
    on_16 = done.get(step_name("yolov5n", 16, "graphs"), {})
    painted = done.get("painter, batch 64", {})
    rows: list[tuple[str, str, float | None]] = [
        ("yolov5n, resident images, batch 16", "1,700 images/s", on_16.get("images_per_s")),
        (
            "yolov5n, resident images, batch 64",
            "2,800 images/s",
            speed(done, step_name("yolov5n", 64, "graphs")),
        ),
        ("yolov5n from JPEG, epoch 2 and later, batch 16", "1,600 images/s", speed(done, "train yolov5n,")),
        ("yolov5nu: times ultralytics yolov5nu", "3.5", ratio(done, "train yolov5nu,")),
        ("yolov5n: times ultralytics yolov5nu", "5", ratio(done, "train yolov5n,")),
        ("painter, batch 64, on the GPU", "0.5 ms", painted.get("gpu_ms")),
        ("painter, batch 64, on the host", "0.2 ms", painted.get("host_ms")),
        ("launches of a step, batch 16, --compile graphs", "60", on_16.get("launches")),
    ]
    return markdown(("goal", "wanted", "measured"), [(a, b, shown(c)) for a, b, c in rows], left=1)


def shown(value: Any) -> str:
    """Return a figure as text."""
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


COLUMNS = {"images_per_s": "images/s", "step_images_per_s": "one batch, images/s", "host_ms": "host, ms"}
COLUMNS |= {
    "kernel_ms": "kernels, ms",
    "launches": "launches",
    "copies": "copies",
    "first_step_s": "first step, s",
}
COLUMNS |= {"gib": "GiB", "waiting": "waiting for data, %"}


def report(plan: Plan, done: Done, left: int) -> str:
    """Return gpu.md."""
    machine = torch.cuda.get_device_name() if plan.on_gpu else f"{cpu_name()} (a rehearsal)"
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda if plan.on_gpu else 'none'}"
    where = f"{machine}, {comm.usable_cores()} cores, {versions}, Python {platform.python_version()}"
    lines = [f"{where}, {time.strftime('%Y-%m-%d')}, {plan.imgsz} px, {plan.data}", "", goals(done), ""]
    steps = {
        name: result for name, result in done.items() if "host_ms" in result and "first_step_s" in result
    }
    cells = [
        (
            f"{name} ({result['batch']})" if "batch" in result else name,
            *(shown(result[key]) for key in COLUMNS),
        )
        for name, result in steps.items()
    ]
    others = [
        (name, "; ".join(f"{key} {shown(value)}" for key, value in result.items()))
        for name, result in done.items()
        if name not in steps
    ]
    lines += [markdown(("step", *COLUMNS.values()), cells, left=1), ""] if cells else []
    lines += [markdown(("other pieces", "figures"), others, left=2), ""] if others else []
    lines += [f"{left} pieces are left: run the same command again.", ""] if left else []
    return "\n".join(lines)


def read(state: Path, device: str, retry: bool) -> Done:
    """Return the results of this device in the state file, without the failures if they are tried again."""
    lines = state.read_text().splitlines() if state.exists() else []
    done = {name: result for name, of, result in map(json.loads, lines) if of == device}
    return {name: result for name, result in done.items() if result and not (retry and "failure" in result)}


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return the plan, with its images generated unless --data names some."""
    on_gpu = arguments.device != "cpu"
    has_peer = importlib.util.find_spec("ultralytics") is not None
    folder = arguments.state.resolve().with_suffix(".images")
    sizes = (IMAGES, 640, 480) if on_gpu else (32, 160, 120)
    return Plan(
        data=str(arguments.data or generate(folder if on_gpu else folder.with_suffix(".small"), *sizes)),
        device=arguments.device,
        imgsz=640 if on_gpu else 64,
        batches=(16, 64) if on_gpu else (4, 8),
        nets=NETS if on_gpu else (str(ROOT / "tests/unit/tiny.yaml"), "yolov5nu"),
        epochs=3 if on_gpu else 2,
        rounds=arguments.rounds if on_gpu else 1,
        peer=arguments.peer_python or (sys.executable if has_peer else ""),
    )


def main() -> None:
    """Run the pieces that are not done, and write the table after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="a data.yaml; best with a multiple of 64 images (default: generated)"
    )
    parser.add_argument("--peer-python", help="the interpreter of an environment with ultralytics")
    parser.add_argument("--device", default="0")
    parser.add_argument("--rounds", type=int, default=2, help="of trainings in turns with the peer's")
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--retry", action="store_true", help="run the pieces again that failed")
    parser.add_argument("--state", type=Path, default=Path("gpu.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("gpu.md"))
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.minutes * 60
    if arguments.device == "cpu":
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    elif not torch.cuda.is_available():
        sys.exit("no GPU that torch can use\nhint: --device cpu rehearses the pieces")
    plan = plan_of(arguments)
    device = torch.cuda.get_device_name(int(arguments.device)) if plan.on_gpu else "cpu"
    done = read(arguments.state, device, arguments.retry)

    def keep(name: str, result: Result) -> None:
        done.update({name: result} if result else {})
        with arguments.state.open("a") as file:
            file.write(json.dumps([name, device, result]) + "\n")

    left = [piece for piece in {p.name: p for p in pieces(plan, done)}.values() if piece.name not in done]
    while left and (left_s := until - time.monotonic()) > 0:
        piece = left[0]
        keep(piece.name, {"failure": "the process ended in this piece"})
        begin = time.monotonic()
        result = attempt(piece, arguments.state.with_suffix(".log"), left_s)
        del done[piece.name]
        keep(piece.name, result)
        if result:
            del left[0]
        figures = "; ".join(f"{key} {shown(value)}" for key, value in result.items()) or "no time left"
        print(f"{piece.name} [{time.monotonic() - begin:.0f} s]: {figures}", flush=True)
        arguments.out.write_text(report(plan, done, len(left)))
        try:
            free()
        except RuntimeError as error:
            sys.exit(
                f"the GPU cannot be used any more in this process: {error}\nhint: run the same command again"
            )
    arguments.out.write_text(report(plan, done, len(left)))
    print(
        f"wrote {arguments.out}"
        + (f"; {len(left)} pieces are left: run the same command again" if left else "")
    )


if __name__ == "__main__":
    main()
