"""Images per second of a training, compared with `ultralytics` on the same images.

    python benchmarks/training.py --data bccd/data.yaml --peer-python ul/bin/python

`ul` is a virtual environment with `ultralytics`. Each round trains every contender for a few epochs, validation off,
and counts all but the first of them. Contenders take turns, because the speed of a shared machine drifts.

Without a GPU: 320 px, batch 16, as many threads as there are cores. With one:
`--device 0 --imgsz 640 --batch 64 --cfg yolov5s.yaml --peer-model yolov5su.yaml`.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

# Uses the peer's public interface, with callbacks that time its epochs and set the number of threads.
PEER = """
import sys, time, torch
from ultralytics import YOLO, settings
data, model, device, imgsz, batch, epochs, threads, project = sys.argv[1:]
settings.update({"sync": False})
yolo, begun = YOLO(model), [0.0]
def start(trainer):
    if device == "cpu":
        torch.set_num_threads(int(threads))
    begun[0] = time.perf_counter()
def end(trainer):
    print("RATE", len(trainer.train_loader.dataset) / (time.perf_counter() - begun[0]), flush=True)
yolo.add_callback("on_train_epoch_start", start)
yolo.add_callback("on_train_epoch_end", end)
yolo.train(data=data, imgsz=int(imgsz), batch=int(batch), epochs=int(epochs), device=device, val=False, plots=False,
           pretrained=False, optimizer="SGD", workers=0 if device == "cpu" else 8, amp=device != "cpu",
           close_mosaic=0, verbose=False, seed=0, project=project, exist_ok=True)
"""


def ours(arguments: argparse.Namespace, cfg: str, precision: str, ranks: int, folder: Path) -> list[float]:
    """Return the images per second of each epoch of this trainer."""
    command = [
        *(sys.executable, "-m", "trainer", "train", "--data", arguments.data, "--cfg", cfg, "--weights", ""),
        *("--imgsz", str(arguments.imgsz), "--batch", str(arguments.batch), "--epochs", str(arguments.epochs)),
        *("--device", arguments.device, "--precision", precision, "--ranks", str(ranks), "--noval", "--hyp", "low"),
        *("--project", str(folder), "--name", "run"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (table,) = folder.glob("run*/results.csv")
    with table.open() as file:
        return [float(row["images_per_s"]) for row in csv.DictReader(file)]


def peers(arguments: argparse.Namespace, model: str, folder: Path) -> list[float]:
    """Return the images per second of each epoch of the peer."""
    content = yaml.safe_load(Path(arguments.data).read_text())
    content["path"] = str((Path(arguments.data).resolve().parent / content.get("path", ".")).resolve())
    data = folder / "data.yaml"  # the peer resolves relative paths by its own settings
    data.write_text(yaml.safe_dump(content))
    command = [
        *(arguments.peer_python, "-c", PEER, str(data), model, arguments.device),
        *(str(arguments.imgsz), str(arguments.batch), str(arguments.epochs), str(os.cpu_count()), str(folder)),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("RATE ")]


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a data.yaml")
    parser.add_argument("--peer-python", required=True, help="the interpreter of an environment with ultralytics")
    parser.add_argument("--peer-model", default="yolov5nu.yaml")
    parser.add_argument("--cfg", default="yolov5n.yaml")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

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
                    ours(arguments, *how, Path(folder)) if how else peers(arguments, arguments.peer_model, Path(folder))
                )
            rates[name].append(statistics.median(found[1:]))
            print(f"round {number + 1}: {name}: {rates[name][-1]:.1f} images/s", file=sys.stderr, flush=True)

    print(f"{platform.processor() or platform.machine()}, {cores} cores, {time.strftime('%Y-%m-%d')}: ", end="")
    print(f"{arguments.imgsz} px, batch {arguments.batch}, mosaic, from JPEG, device {arguments.device}")
    print("| contender | images/s (median of the rounds) | ratio to the peer, by round |")
    print("|---|---|---|")
    for name, values in rates.items():
        ratios = "  ".join(f"{a / b:.2f}" for a, b in zip(values, rates[peer], strict=True))
        print(f"| {name} | {statistics.median(values):.1f} | {ratios} |")


if __name__ == "__main__":
    main()
