"""Training speed on a GPU, and with a peer compared with `ultralytics`: writes gpu.md.

    python benchmarks/gpu.py --peer-python ul/bin/python

Runs in pieces, each of which is a line in the file `--state`. After `--minutes` no further piece starts; the same
command then continues. `ul` is a virtual environment with `ultralytics`. Without `--data` it generates images.
`--device cpu` is a rehearsal without a GPU: one network, and small images.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import yaml
from training import ours, peers

IMAGES = 512
PAIRS = [("yolov5nu.yaml", "yolov5nu.yaml"), ("yolov5n.yaml", "yolov5nu.yaml"), ("yolov5n.yaml", "yolo11n.yaml")]
Result = dict[str, Any]


def generate(folder: Path) -> Path:
    """Write a dataset of JPEG images with coloured boxes, and return its data.yaml."""
    rng = np.random.default_rng(0)
    for split, count in (("train", IMAGES), ("val", 16)):
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
        for k in range(count):
            image = cv2.resize(rng.integers(0, 256, (60, 80, 3), np.uint8), (640, 480))
            cv2.rectangle(image, (200, 150), (440, 330), rng.integers(0, 256, 3).tolist(), -1)
            cv2.imwrite(str(folder / "images" / split / f"{k}.jpg"), image)
            (folder / "labels" / split / f"{k}.txt").write_text("0 0.5 0.5 0.375 0.375\n")
    data = folder / "data.yaml"
    data.write_text(yaml.safe_dump({"path": ".", "train": "images/train", "val": "images/val", "names": ["box"]}))
    return data


def trainer(arguments: argparse.Namespace, *words: str) -> str:
    """Return the output of a trainer command on the device."""
    command = [sys.executable, "-m", "trainer", *words, "--data", str(arguments.data), "--imgsz", str(arguments.imgsz)]
    command += ["--noval", "--device", arguments.device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def speed(arguments: argparse.Namespace, cfg: str, batch: int, *more: str) -> Result:
    """Return images per second, memory and share of waiting of a training from decoded images."""
    steps = () if arguments.device != "cpu" else ("--steps", "2")
    words = ("--ranks", "1", "--rounds", "1", "--batch", str(batch), "--cfg", cfg, "--cache", "ram", "--json", *steps)
    (row,) = json.loads(trainer(arguments, "bench", "scaling", *words, *more).splitlines()[-1])["rows"]
    return {key: row[key] for key in ("train_images_per_s", "device_bytes", "host_bytes", "data_share", "failure")}


def largest(arguments: argparse.Namespace, cfg: str) -> Result:
    """Double the batch until the memory is exhausted; return the last that fits, with its speed."""
    best, batch = Result(batch=0), 128
    while batch <= IMAGES and not (found := speed(arguments, cfg, batch))["failure"]:
        best = {"batch": batch, **found}
        batch *= 2
    return best


def against(arguments: argparse.Namespace, cfg: str, model: str, batch: int) -> Result:
    """Return the images per second of a few epochs from JPEG: this trainer's and the peer's, one after the other."""
    own = argparse.Namespace(**{**vars(arguments), "batch": batch, "epochs": 3})
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        rates = ours(own, cfg, "auto", 1, Path(one)), peers(own, model, Path(two))
    return {"ours": statistics.median(rates[0][1:]), "peer": statistics.median(rates[1][1:])}


GRAPHS = ["--compile", "graphs"]


def pieces(arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Result]]]:
    """Yield the pieces: a name, and what measures it."""
    on_gpu = arguments.device != "cpu"
    for cfg in ("yolov5n.yaml", "yolov5s.yaml", "yolov5m.yaml")[: 3 if on_gpu else 1]:
        for batch in (16, 64)[: 2 if on_gpu else 1]:
            yield f"{cfg}, batch {batch}", partial(speed, arguments, cfg, batch)
        if on_gpu:
            yield f"{cfg}, largest batch", partial(largest, arguments, cfg)
    for more in (
        ["--augment-on", "workers"],
        *([["--augment-on", "device"]] if on_gpu else []),
        ["--compile", "on"],
        GRAPHS,
    ):
        yield f"yolov5n.yaml, batch 16 {' '.join(more)}", partial(speed, arguments, "yolov5n.yaml", 16, *more)
    profile = ("profile", "--cfg", "yolov5n.yaml", "--batch", "16", "--out", str(arguments.state.with_suffix(".json")))
    yield "profile of yolov5n.yaml, batch 16", lambda: {"text": trainer(arguments, *profile)}
    for number in range(arguments.rounds if arguments.peer_python else 0):
        for cfg, model in PAIRS[: 3 if on_gpu else 1]:
            name = f"round {number + 1}: {cfg} against {model}, batch 16"
            yield name, partial(against, arguments, cfg, model, 16)


def main() -> None:
    """Run the pieces that are not done, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a data.yaml")
    parser.add_argument("--peer-python", help="the interpreter of an environment with ultralytics")
    parser.add_argument("--device", default="0")
    parser.add_argument("--imgsz", type=int, help="default: 640, on a CPU 64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--state", type=Path, default=Path("gpu.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("gpu.md"))
    arguments = parser.parse_args()
    on_gpu = arguments.device != "cpu"
    arguments.imgsz = arguments.imgsz or (640 if on_gpu else 64)
    arguments.data = arguments.data or generate(arguments.state.resolve().with_suffix(".data"))
    lines = arguments.state.read_text().splitlines() if arguments.state.exists() else []
    done: dict[str, Result] = dict(json.loads(line) for line in lines)
    until = time.monotonic() + arguments.minutes * 60
    for name, measure in pieces(arguments):
        if name in done:
            continue
        if time.monotonic() > until:
            print(f"{name} and later pieces are left: run the same command again")
            break
        done[name] = measure()
        with arguments.state.open("a") as file:
            file.write(json.dumps([name, done[name]]) + "\n")
        print(f"{name}: { {k: v for k, v in done[name].items() if k != 'text'} }", flush=True)
    machine = torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine()
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda if on_gpu else 'none'}"
    rows = [f"{machine}, {os.cpu_count()} cores, {versions}, {time.strftime('%Y-%m-%d')}, {arguments.imgsz} px", ""]
    rows += ["| piece | result |", "|---|---|"]
    for name, result in done.items():
        if "text" not in result:
            if "peer" in result:
                result["ratio"] = result["ours"] / result["peer"]
            cells = (
                f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items() if v not in (None, "")
            )
            rows.append(f"| {name} | {', '.join(cells)} |")
    rows += ["", *(f"```\n{result['text']}```" for result in done.values() if "text" in result)]
    arguments.out.write_text("\n".join(rows) + "\n")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
