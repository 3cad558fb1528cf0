"""Images per second of D-FINE's training, compared with `Trainer` of transformers on the same images.

    python -m venv --system-site-packages peer
    peer/bin/pip install accelerate albumentations
    python benchmarks/families.py --data bccd/data.yaml --peer-python peer/bin/python

The peer follows transformers' example for object detection: images and boxes by albumentations, the
library's image processor, and `Trainer`. Both train the same random weights from the same JPEG files, with
validation off. Each round trains every contender for a few epochs, and counts all but the first of
them: images per second, and CPU seconds per image, which other work on the machine changes less.

    python benchmarks/families.py loss --data bccd/data.yaml --peer-python peer/bin/python

`loss` gives both the same batches for 20 steps, in fp32 and with the same noise, and compares their losses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import DFineForObjectDetection

from trainer import Callback
from trainer.bench.measure import cpu_name, steps_of
from trainer.bench.tables import markdown
from trainer.cli.bench import settings_of
from trainer.config import Hyp
from trainer.data.registry import open_datasets
from trainer.detectors import build, read_cfg
from trainer.detectors.transformers_nets import labels_of
from trainer.distributed import comm
from trainer.engine.events import Events
from trainer.engine.trainer import Trainer
from trainer.models.precision import as_input

ROOT = Path(__file__).resolve().parents[1]
CFG = "dfine-n"
OURS = "trainer"
THEIRS = "Trainer of transformers"
STEPS = 20  # of `loss`
LR = 1e-4  # of `loss`
# What `loss` trains with: the library's Trainer has one learning rate, and no warm-up by default.
PLAIN = {"warmup_epochs": 0, "backbone_lr": 1, "lr0": LR}

# The peer of the comparison of speed. `photos` are [path, [[class, x, y, w, h in px], ...]].
PEER = """
import json, os, sys, time
import albumentations as A
import cv2, numpy as np, torch
from transformers import AutoModelForObjectDetection, RTDetrImageProcessor, Trainer, TrainerCallback, TrainingArguments
photos, snapshot, out, imgsz, batch, epochs, precision = sys.argv[1:]
photos, side = json.loads(open(photos).read()), int(imgsz)
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
model = AutoModelForObjectDetection.from_pretrained(snapshot)
processor = RTDetrImageProcessor(do_resize=True, size={"height": side, "width": side}, do_normalize=False)
augment = A.Compose(
    [A.Perspective(p=0.1), A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=0.5), A.HueSaturationValue(p=0.1)],
    bbox_params=A.BboxParams(format="coco", label_fields=["category"], clip=True, min_area=25),
)
class Photos(torch.utils.data.Dataset):
    def __len__(self):
        return len(photos)
    def __getitem__(self, index):
        path, rows = photos[index]
        image = cv2.cvtColor(cv2.imread(path), cv2.COLOR_BGR2RGB)
        made = augment(image=image, bboxes=[row[1:] for row in rows], category=[row[0] for row in rows])
        found = [
            {"image_id": index, "category_id": int(c), "bbox": list(b), "area": b[2] * b[3], "iscrowd": 0}
            for c, b in zip(made["category"], made["bboxes"])
        ]
        labels = {"image_id": index, "annotations": found}
        done = processor(images=made["image"], annotations=labels, return_tensors="pt")
        return {"pixel_values": done["pixel_values"][0], "labels": done["labels"][0]}
def collate(rows):
    images = torch.stack([row["pixel_values"] for row in rows])
    return {"pixel_values": images, "labels": [row["labels"] for row in rows]}
class Clock(TrainerCallback):
    def on_epoch_begin(self, *_, **__):
        self.wall, self.cpu = time.perf_counter(), time.process_time()
    def on_epoch_end(self, *_, **__):
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        print("EPOCH", len(photos) / wall, cpu, flush=True)
arguments = TrainingArguments(
    out, per_device_train_batch_size=int(batch), num_train_epochs=int(epochs), use_cpu=True, bf16=precision == "bf16",
    learning_rate=1e-4, max_grad_norm=0.1, weight_decay=1e-4, lr_scheduler_type="constant", save_strategy="no",
    report_to=[], remove_unused_columns=False, dataloader_num_workers=0, disable_tqdm=True, logging_strategy="no",
)
Trainer(model, arguments, data_collator=collate, train_dataset=Photos(), callbacks=[Clock()]).train()
"""
# The peer of `loss`: it gets the batches, and seeds the noise of each step as this trainer does.
SAME = """
import os, sys, torch
from transformers import AutoModelForObjectDetection, Trainer, TrainerCallback, TrainingArguments
from trainer.engine.state import seed_generators
batches, snapshot, out, lr, seed = sys.argv[1:]
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
batches = torch.load(batches, weights_only=True)
model = AutoModelForObjectDetection.from_pretrained(snapshot)
class Seeded(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        seed_generators(int(seed), state.global_step, 0)
    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            print("LOSS", logs["loss"], flush=True)
arguments = TrainingArguments(
    out, per_device_train_batch_size=1, max_steps=len(batches), use_cpu=True, learning_rate=float(lr), adam_beta1=0.9,
    max_grad_norm=0.1, weight_decay=1e-4, lr_scheduler_type="constant", save_strategy="no", report_to=[],
    remove_unused_columns=False, dataloader_num_workers=0, disable_tqdm=True, logging_strategy="steps",
    logging_steps=1, train_sampling_strategy="sequential", optim="adamw_torch_fused",
)
Trainer(model, arguments, data_collator=lambda rows: rows[0], train_dataset=batches, callbacks=[Seeded()]).train()
"""


class Clock(Callback):
    """Prints the CPU seconds of each epoch."""

    def __init__(self) -> None:
        self.cpu = time.process_time()

    def on_epoch_end(self, metrics: Any) -> None:
        """Print the images per second, and the CPU seconds since the last epoch."""
        now = time.process_time()
        print("EPOCH", metrics["images_per_s"], now - self.cpu, flush=True)
        self.cpu = now


def figures(command: list[object], folder: Path, threads: int) -> list[list[float]]:
    """Run a command in a folder, and return the figures of the lines that begin with EPOCH or LOSS."""
    path = f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}"
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, cwd=folder, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command[:4]))[:200]} failed: {done.stderr.strip()[-2000:]}")
    lines = (line.split() for line in done.stdout.splitlines() if line.startswith(("EPOCH ", "LOSS ")))
    return [[*map(float, words)] for _, *words in lines]


def prepare(arguments: argparse.Namespace, folder: Path) -> Path:
    """Write a data set of the first training images, the same for the peer, and a snapshot of random weights."""
    (data,) = open_datasets(arguments.data, ["train"], imgsz=arguments.imgsz)
    count = min(arguments.images, len(data))
    listed = [str(data.name(k)) for k in range(count)]
    (folder / "train.txt").write_text("\n".join(listed))
    names = {"names": data.names, "nc": len(data.names)}
    (folder / "data.yaml").write_text(
        yaml.safe_dump({"path": str(folder), "train": "train.txt", "val": "train.txt", **names})
    )
    photos = []
    for k in range(count):
        (height, width), labels = data.size(k), data.labels(k)
        corner = labels[:, 1:3] - labels[:, 3:] / 2
        rows = [
            [int(c), x * width, y * height, w * width, h * height]
            for c, (x, y), (w, h) in zip(labels[:, 0], corner.tolist(), labels[:, 3:].tolist(), strict=True)
        ]
        photos.append([listed[k], rows])
    (folder / "photos.json").write_text(json.dumps(photos))
    torch.manual_seed(0)
    net = build(read_cfg(CFG), nc=len(data.names), where=CFG, hyp=Hyp(), imgsz=arguments.imgsz).model.net
    whole = DFineForObjectDetection(net.config)
    whole.model.load_state_dict(net.state_dict())
    whole.save_pretrained(folder / "snapshot")
    return folder / "data.yaml"


def speed(arguments: argparse.Namespace, folder: Path) -> None:
    """Train every contender in each round, and print the table."""
    data = prepare(arguments, folder)
    count = len((folder / "train.txt").read_text().splitlines())
    sizes = [arguments.imgsz, arguments.batch, arguments.epochs]
    kinds = arguments.precision.split(",")
    found: dict[tuple[str, str], list[list[float]]] = {
        (who, kind): [] for kind in kinds for who in (THEIRS, OURS)
    }
    for number, (who, kind) in itertools.product(range(arguments.rounds), found):
        if who == THEIRS:
            words = [folder / "photos.json", folder / "snapshot", folder / "peer", *sizes, kind]
            epochs = figures([arguments.peer_python, "-c", PEER, *words], folder, arguments.threads)
        else:
            command = [sys.executable, "-m", "trainer", "train", "--data", data, "--cfg", CFG, "--noval"]
            command += [
                "--weights",
                folder / "snapshot",
                "--cache",
                "none",
                "--workers",
                0,
                "--device",
                "cpu",
            ]
            command += ["--callback", "families:Clock", "--project", folder / "runs", "--precision", kind]
            command += ["--imgsz", arguments.imgsz, "--batch", arguments.batch, "--epochs", arguments.epochs]
            epochs = figures(command, folder, arguments.threads)
        rate, cpu = (statistics.median(values) for values in zip(*epochs[1:], strict=True))
        found[who, kind].append([rate, cpu / count])
        print(
            f"round {number + 1}: {who}, {kind}: {rate:.2f} images/s, {cpu / count:.3f} CPU s",
            file=sys.stderr,
        )
    print(
        f"{cpu_name()}, {arguments.threads} threads, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}: ",
        end="",
    )
    print(f"{CFG}, {arguments.imgsz} px, batch {arguments.batch}, {count} images from JPEG, no workers\n")
    rows = []
    for (who, kind), rounds in found.items():
        base = found[THEIRS, kind]
        medians = [statistics.median(values) for values in zip(*rounds, strict=True)]
        ratios = [
            [f"{mine[0] / theirs[0]:.2f}" for mine, theirs in zip(rounds, base, strict=True)],
            [f"{theirs[1] / mine[1]:.2f}" for mine, theirs in zip(rounds, base, strict=True)],
        ]
        rows.append(
            [
                f"{who}, {kind}",
                f"{medians[0]:.1f}",
                "  ".join(ratios[0]),
                f"{medians[1]:.3f}",
                "  ".join(ratios[1]),
            ]
        )
    head = ["contender", "images/s", "ratio by round", "CPU s per image", "peer's / own, by round"]
    print(markdown(head, rows, left=1))


def loss(arguments: argparse.Namespace, folder: Path) -> None:
    """Train both on the same batches, and print their losses."""
    data = prepare(arguments, folder)
    (folder / "hyp.yaml").write_text(yaml.safe_dump(PLAIN))
    words = [
        "--data",
        str(data),
        "--cfg",
        CFG,
        "--weights",
        str(folder / "snapshot"),
        "--hyp",
        str(folder / "hyp.yaml"),
    ]
    words += [
        "--imgsz",
        str(arguments.imgsz),
        "--batch",
        str(arguments.batch),
        "--precision",
        "fp32",
        "--workers",
        "0",
    ]
    torch.set_num_threads(arguments.threads)
    world = comm.world_of({})
    device = torch.device("cpu")
    run = Trainer(settings_of([*words, "--noval"], "cpu"), world, device, Events({}))
    comm.join(world, device)
    run.start()
    run.local_model.train()
    ours = []
    batches = []
    for batch in itertools.islice(steps_of(run), STEPS):
        labels = labels_of(batch.targets["labels"], len(batch.images))
        batches.append({"pixel_values": as_input(batch.images).contiguous(), "labels": labels})
        run.step(batch)
        ours.append(float(run.meter.terms.sum()))
    torch.save(batches, folder / "batches.pt")
    words = [
        str(folder / "batches.pt"),
        str(folder / "snapshot"),
        str(folder / "peer"),
        str(LR),
        str(run.settings.seed),
    ]
    theirs = [
        value for (value,) in figures([arguments.peer_python, "-c", SAME, *words], folder, arguments.threads)
    ]
    rows = [
        [str(k), f"{a:.4f}", f"{b:.4f}", f"{100 * (a / b - 1):+.3f} %"]
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1)
    ]
    print(f"{CFG}, {arguments.imgsz} px, batch {arguments.batch}, fp32, AdamW at {LR:g}, the same batches\n")
    print(markdown(["step", OURS, THEIRS, "difference"], rows, left=1))


def main() -> None:
    """Run `speed` or `loss`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=("speed", "loss"), default="speed")
    parser.add_argument("--data", required=True, help="a data.yaml")
    parser.add_argument(
        "--peer-python", required=True, help="the interpreter of an environment with accelerate"
    )
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--images", type=int, default=96, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="1 where other work would make them wait"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="fp32,bf16", help="fp32, bf16 or both")
    arguments = parser.parse_args()
    if not Path(arguments.data).is_file():
        parser.error(f"--data {arguments.data}: no such file")
    arguments.peer_python = str(Path(arguments.peer_python).absolute())
    with tempfile.TemporaryDirectory() as folder:
        (loss if arguments.part == "loss" else speed)(arguments, Path(folder))


if __name__ == "__main__":
    main()
