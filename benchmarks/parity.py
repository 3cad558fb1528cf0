"""YOLOv8, YOLO11 and YOLO26 compared with `ultralytics`, number by number.

    python benchmarks/parity.py --data bccd/data.yaml --peer-python ul/bin/python

`ul` is a virtual environment with `ultralytics`, 8.4 or newer. For each network it writes a checkpoint with random
weights, which this trainer reads. Both then compute the raw outputs in training mode (batch norm with the batch's
statistics), the decoded boxes and scores in evaluation mode, and the terms of the loss on the same images, in float32.

The table has the number of parameters, the largest difference of the outputs, as a share of the largest output (boxes:
in pixels, as a share of the image's side), and the largest relative difference of the loss's terms.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor

from trainer.bench.tables import markdown
from trainer.data.registry import open_dataset
from trainer.inference.trained import load_trained
from trainer.losses.criterion import mean_terms

NETS = tuple(f"{family}{size}" for family in ("yolov8", "yolo11", "yolo26") for size in "nsmlx")
TOLERANCE = 1e-4

# Uses the peer's public interface. The weights of batch norm and of the last layers, which have the only biases, are
# random too, as in a new network they are constants that would hide errors.
PEER = """
import sys, torch
from ultralytics import YOLO, __version__
from ultralytics.cfg import get_cfg
name, batch_file, checkpoint, result = sys.argv[1:]
batch = torch.load(batch_file)
torch.manual_seed(0)
yolo = YOLO(f"{name}.yaml")
net = yolo.model
norms = [m for m in net.modules() if isinstance(m, torch.nn.BatchNorm2d)]
with torch.no_grad():
    for norm in norms:
        norm.weight.uniform_(0.7, 1.3)
        norm.bias.uniform_(-0.3, 0.3)
        norm.momentum = 0.5
    for layer in net.modules():
        if isinstance(layer, torch.nn.Conv2d) and layer.bias is not None:
            layer.weight.normal_(0, layer.weight[0].numel() ** -0.5)
            if layer.out_channels == net.yaml["nc"]:
                layer.bias.uniform_(-4, 0)
            else:
                layer.bias.add_(torch.rand_like(layer.bias))
    net.train()
    for _ in range(4):
        net(batch["img"])
    for norm in norms:
        norm.momentum = 0.03
        norm.running_mean.add_(norm.running_var.sqrt() * torch.empty_like(norm.running_mean).uniform_(-0.2, 0.2))
        norm.running_var.mul_(torch.empty_like(norm.running_var).uniform_(0.8, 1.25))
yolo.save(checkpoint)
net = YOLO(checkpoint).model.float()  # the file has half the precision

def flat(raw):
    if isinstance(raw, dict):
        return [torch.cat((raw["boxes"], raw["scores"]), 1)] if "boxes" in raw else flat([*raw.values()])
    if isinstance(raw[0], dict):
        return [t for each in raw for t in flat(each)]
    return [torch.cat([t.flatten(2) for t in raw], 2)]

if hasattr(net.model[-1], "one2one_cv2"):
    net.set_head_attr(end2end=True)  # predictions of the one-to-one branches, without suppression
with torch.no_grad():
    decoded, _ = net.eval()(batch["img"])
    raw = flat(net.train()(batch["img"]))
    net.args = get_cfg()
    loss, _ = net.loss(batch)
parameters = sum(p.numel() for name, p in net.named_parameters() if ".dfl." not in name)
torch.save({"decoded": decoded, "raw": raw, "terms": loss / len(batch["img"]), "parameters": parameters,
            "version": __version__}, result)
"""


@dataclass
class Compared:
    """The comparison of a network: parameters of both, and the largest differences."""

    parameters: int
    peers_parameters: int
    raw: float
    boxes: float
    scores: float
    terms: list[float]
    version: str

    @property
    def agrees(self) -> bool:
        """Whether the numbers of parameters are equal, and all differences within the tolerance."""
        differences = (self.raw, self.boxes, self.scores, *self.terms)
        return self.parameters == self.peers_parameters and all(value <= TOLERANCE for value in differences)


def read_batch(data: str, images: int, side: int) -> dict[str, Tensor]:
    """Return training images of a data set, stretched to squares, with their boxes, as the peer takes them."""
    dataset = open_dataset(data, "train", imgsz=side)
    pixels = []
    labels = []
    for k in range(images):
        pixels.append(cv2.resize(dataset.image(k), (side, side)).transpose(2, 0, 1))
        own = dataset.labels(k)
        labels.append(np.concatenate((np.full((len(own), 1), k), own), 1))
    rows = torch.from_numpy(np.concatenate(labels)).float()
    image = torch.from_numpy(np.stack(pixels)).float() / 255
    return {"img": image, "batch_idx": rows[:, 0], "cls": rows[:, 1:2], "bboxes": rows[:, 2:]}


@torch.no_grad()
def ours(checkpoint: Path, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return what the peer returns, from its checkpoint."""
    trained = load_trained(str(checkpoint))
    net = trained.model
    criterion = trained.parts.criterion
    decoded = net.detect.decode(net.eval()(batch["img"]))
    outputs = net.train()(batch["img"])
    levels = len(net.detect.strides)
    groups = [outputs[k : k + levels] for k in range(0, len(outputs), levels)]
    labels = torch.cat((batch["batch_idx"][:, None], batch["cls"], batch["bboxes"]), 1).numpy()
    images, _, height, width = batch["img"].shape
    targets = criterion.assigner(net)(labels, images, height, width)
    return {
        "decoded": torch.cat((decoded[..., :4], decoded[..., 5:]), 2),
        "raw": [torch.cat([t.flatten(1, 2) for t in group], 1).mT for group in groups],
        "terms": mean_terms(*criterion(outputs, targets, (height, width)), criterion.gains),
        "parameters": sum(p.numel() for p in net.parameters()),
    }


def of_candidates(candidates: Tensor, found: Tensor) -> tuple[float, float]:
    """Return the largest differences of boxes (pixels) and scores between the peer's detections and these candidates.

    `candidates` (b, n, 4 + nc) are centre x, y, w, h and scores. `found` (b, 4 + nc, n) are the same, or (b, m, 6) the
    best pairs of a box and a class: x1, y1, x2, y2, score, class.
    """
    if found.shape[2] != 6:
        difference = (candidates - found.mT).abs()
        return difference[..., :4].max().item(), difference[..., 4:].max().item()
    centre = candidates[..., :2]
    half = candidates[..., 2:4] / 2
    corners = torch.cat((centre - half, centre + half), 2)
    scores = candidates[..., 4:]
    worst_box = worst_score = 0.0
    for k, rows in enumerate(found):
        best = scores[k].flatten().topk(len(rows)).values
        worst_score = max(worst_score, (best - rows[:, 4]).abs().max().item())
        for *box, score, cls in rows.tolist():
            apart = (corners[k] - corners.new_tensor(box)).abs().amax(1)
            off = (scores[k, :, int(cls)] - score).abs()
            nearest = (apart + off).argmin()
            worst_box = max(worst_box, apart[nearest].item())
            worst_score = max(worst_score, off[nearest].item())
    return worst_box, worst_score


def compare(peer_python: str, name: str, batch: dict[str, Tensor], folder: Path) -> Compared:
    """Let both compute a network's numbers."""
    batch_file, checkpoint, result = (folder / file for file in ("batch.pt", f"{name}.pt", "result.pt"))
    torch.save(batch, batch_file)
    command = [peer_python, "-c", PEER, name, str(batch_file), str(checkpoint), str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        sys.exit(f"{name}: the peer failed: {(done.stderr.strip().splitlines() or [''])[-1]}")
    theirs = torch.load(result, weights_only=True)
    mine = ours(checkpoint, batch)
    checkpoint.unlink()
    boxes, scores = of_candidates(mine["decoded"], theirs["decoded"])
    raw = [
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(mine["raw"], theirs["raw"], strict=True)
    ]
    terms = (mine["terms"] - theirs["terms"]).abs() / theirs["terms"].abs()
    return Compared(
        mine["parameters"],
        theirs["parameters"],
        max(raw),
        boxes / batch["img"].shape[3],
        scores,
        terms.tolist(),
        theirs["version"],
    )


def main() -> None:
    """Compare the networks and print the table; exit with 1 if one differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="a data.yaml")
    parser.add_argument(
        "--peer-python", required=True, help="the interpreter of an environment with ultralytics"
    )
    parser.add_argument("--nets", nargs="+", default=NETS, choices=NETS, metavar="NET")
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--images", type=int, default=4)
    arguments = parser.parse_args()
    if not Path(arguments.data).is_file():
        parser.error(f"--data {arguments.data}: no such file")
    batch = read_batch(arguments.data, arguments.images, arguments.imgsz)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.nets:
            found[name] = compare(arguments.peer_python, name, batch, Path(folder))
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    versions = ", ".join(sorted({each.version for each in found.values()}))
    print(f"ultralytics {versions}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}: ", end="")
    print(f"{len(batch['img'])} images of {arguments.imgsz} px with {len(batch['cls'])} boxes\n")
    header = [
        "network",
        "parameters",
        "theirs",
        "raw outputs",
        "boxes",
        "scores",
        "box",
        "cls",
        "dfl or l1",
        "",
    ]
    rows = []
    for name, each in found.items():
        counts = f"{each.parameters:,}", f"{each.peers_parameters:,}"
        differences = (f"{value:.1e}" for value in (each.raw, each.boxes, each.scores, *each.terms))
        rows.append([name, *counts, *differences, "equal" if each.agrees else "DIFFERENT"])
    print(markdown(header, rows, left=1))
    sys.exit(not all(each.agrees for each in found.values()))


if __name__ == "__main__":
    main()
