"""Small data sets in YOLO's format, in a folder."""

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import torch

from trainer.models.yolo import build_yolo, load_cfg
from trainer.weights import checkpoint_file

DATA_YAML = "path: .\ntrain: images/train\nval: images/val\nnc: 2\nnames: [cat, dog]\n"


def write_image(path: Path, height: int = 48, width: int = 64, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    cv2.imwrite(str(path), cv2.resize(coarse, (width, height)))


def make_yolo_set(root: Path, train: int = 4, val: int = 2) -> Path:
    """data.yaml of a set whose image k has k % 3 boxes (none means: no label file either)."""
    for split, count in (("train", train), ("val", val)):
        for k in range(count):
            seed = k + (100 if split == "val" else 0)  # no image in both splits
            write_image(root / "images" / split / f"{k:03}.jpg", width=64 + 8 * k, seed=seed)
            if k % 3:
                label = root / "labels" / split / f"{k:03}.txt"
                label.parent.mkdir(parents=True, exist_ok=True)
                label.write_text("".join(f"{j} 0.{j + 3} 0.5 0.2 0.4\n" for j in range(k % 3)))
    (root / "data.yaml").write_text(DATA_YAML)
    return root / "data.yaml"


def squares(
    folder: Path, train: int = 7, val: int = 3, test: int = 0, widths: Sequence[int] = (80,), first: int = 0
) -> Path:
    """data.yaml of a set of coloured squares of two classes; the first image of each split is empty."""
    rng = np.random.default_rng(0)
    splits = {"train": train, "val": val, **({"test": test} if test else {})}
    for split, count in splits.items():
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True)
        for k in range(count):
            width = widths[k % len(widths)]
            image = np.full((64, width, 3), 30, np.uint8)
            lines = []
            for cls in range(2) if k else []:
                x = rng.integers(0, width - 40)
                y = rng.integers(0, 30)
                image[y : y + 24, x : x + 24] = (200, 60, 60) if cls else (60, 200, 60)
                lines.append(f"{cls} {(x + 12) / width} {(y + 12) / 64} {24 / width} {24 / 64}")
            cv2.imwrite(str(folder / "images" / split / f"{first + k}.png"), image)
            (folder / "labels" / split / f"{first + k}.txt").write_text("\n".join(lines))
    path = folder / "data.yaml"
    listed = "".join(f"{split}: images/{split}\n" for split in splits)
    path.write_text(f"path: {folder}\n{listed}names: [green, red]\n")
    return path


def untrained(path: Path) -> Path:
    """The checkpoint of an untrained detector of squares: a few of its many boxes match by chance."""
    torch.manual_seed(1)
    cfg = load_cfg("yolov5n.yaml")
    model = build_yolo(cfg, nc=2)
    content = {key: {} for key in checkpoint_file.KEYS} | {
        "format": checkpoint_file.FORMAT,
        "cfg": cfg,
        "imgsz": 64,
    }
    content |= {"names": ["green", "red"], "ema": model.state_dict(), "model": model.state_dict()}
    checkpoint_file.save(path, content)
    return path
