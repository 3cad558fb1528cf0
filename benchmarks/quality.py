"""Scores of networks trained from random weights, compared with `ultralytics` on the same images.

    python benchmarks/quality.py --data bccd/data.yaml --peer-python ul/bin/python --runs quality

`ul` is a virtual environment with `ultralytics`. Both train each network with their own defaults, once for each seed,
without pretrained weights. A training takes minutes, all of them hours: results are kept in the folder --runs, and a
second call does only what is missing. Each trainer scores its own best epoch: mAP50-95 of the validation images.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import yaml

from trainer import train
from trainer.bench.measure import cpu_name
from trainer.bench.tables import markdown

NETWORKS = ("yolov8n", "yolo11n", "yolo26n")
#: Uses the peer's public interface.
PEER = """
import json, sys, torch
from ultralytics import YOLO, settings
data, network, imgsz, batch, epochs, seed, device, threads, folder = sys.argv[1:]
settings.update({"sync": False})
yolo = YOLO(network + ".yaml")
if device == "cpu":
    yolo.add_callback("on_train_epoch_start", lambda trainer: torch.set_num_threads(int(threads)))
found = yolo.train(data=data, imgsz=int(imgsz), batch=int(batch), epochs=int(epochs), seed=int(seed), device=device,
                   pretrained=False, plots=False, verbose=False, workers=0 if device == "cpu" else 8,
                   project=folder, name="run", exist_ok=True)
with open(folder + "/score.json", "w") as file:
    json.dump({"map50": float(found.box.map50), "map": float(found.box.map)}, file)
"""


def ours(arguments: argparse.Namespace, network: str, seed: int, folder: Path) -> dict[str, float]:
    """Return the best epoch's scores of this trainer."""
    sizes = {"imgsz": arguments.imgsz, "batch": arguments.batch, "epochs": arguments.epochs}
    where = {"project": str(folder), "name": "run", "exist_ok": True, "device": arguments.device}
    done = train(data=arguments.data, cfg=f"{network}.yaml", weights="", seed=seed, **sizes, **where)
    return {"map50": done.map50, "map": done.map}


def peers(arguments: argparse.Namespace, network: str, seed: int, folder: Path) -> dict[str, float]:
    """Return the best epoch's scores of the peer."""
    content = yaml.safe_load(Path(arguments.data).read_text())
    content["path"] = str((Path(arguments.data).resolve().parent / content.get("path", ".")).resolve())
    data = folder / "data.yaml"  # the peer resolves relative paths by its own settings
    data.write_text(yaml.safe_dump(content))
    sizes = map(str, (arguments.imgsz, arguments.batch, arguments.epochs, seed))
    command = [arguments.peer_python, "-c", PEER, str(data), network, *sizes, arguments.device]
    with (folder / "output.txt").open("w") as output:
        subprocess.run([*command, str(os.cpu_count()), str(folder)], check=True, stdout=output, stderr=output)
    found: dict[str, float] = json.loads((folder / "score.json").read_text())
    return found


CONTENDERS = {"ours": ours, "ultralytics": peers}


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="a data.yaml")
    parser.add_argument(
        "--peer-python", required=True, help="the interpreter of an environment with ultralytics"
    )
    parser.add_argument(
        "--runs", type=Path, required=True, help="the folder of the trainings and their scores"
    )
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    if not Path(arguments.data).is_file():
        parser.error(f"--data {arguments.data}: no such file")

    rows = []
    for network in arguments.networks:
        for contender in arguments.contenders:
            scores = []
            for seed in arguments.seeds:
                folder = (arguments.runs / f"{network}-{contender}-{seed}").resolve()
                result = folder / "result.json"
                if not result.exists():
                    folder.mkdir(parents=True, exist_ok=True)
                    began = time.monotonic()
                    found = CONTENDERS[contender](arguments, network, seed, folder)
                    minutes = (time.monotonic() - began) / 60
                    print(f"{folder.name}: {found}, {minutes:.1f} min", file=sys.stderr, flush=True)
                    result.write_text(json.dumps(found))
                scores.append(json.loads(result.read_text())["map"])
            mean = statistics.mean(scores)
            rows.append([network, contender, "  ".join(f"{score:.3f}" for score in scores), f"{mean:.3f}"])
    sizes = f"{arguments.imgsz} px, batch {arguments.batch}, {arguments.epochs} epochs"
    print(f"{cpu_name()}, {time.strftime('%Y-%m-%d')}: {arguments.data}, {sizes}, mAP50-95 of the seeds\n")
    print(markdown(["network", "trainer", "by seed", "mean"], rows, left=3))


if __name__ == "__main__":
    main()
