"""A generated dataset: JPEG images of 640 x 480 px with smooth backgrounds and about 13 boxes each, like bccd's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import yaml

NAMES = ["platelet", "red", "white"]
SHARES = (0.1, 0.8, 0.1)  # of the classes
SIDES = ((25, 45), (85, 120), (130, 220))  # of their boxes, in pixels of the full size


def generate(folder: Path, images: int, width: int = 640, height: int = 480) -> Path:
    """Write a dataset with `images` training images, unless the folder has it, and return its data.yaml."""
    data = folder / "data.yaml"
    if data.exists():
        return data
    for split, count in (("train", images), ("val", 16)):
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor() as pool:  # OpenCV works without the interpreter's lock
            list(pool.map(partial(_write, folder, split, width, height), range(count)))
    content = {"path": str(folder.resolve()), "train": "images/train", "val": "images/val", "names": NAMES}
    data.write_text(yaml.safe_dump(content))
    return data


def _write(folder: Path, split: str, width: int, height: int, number: int) -> None:
    rng = np.random.default_rng([number, split == "train"])
    image = cv2.resize(
        rng.integers(150, 256, (12, 16, 3), np.uint8), (width, height), interpolation=cv2.INTER_CUBIC
    )
    rows = []
    for cls in rng.choice(len(NAMES), rng.integers(5, 22), p=SHARES).tolist():
        w, h = rng.integers(*SIDES[cls], 2) * width // 640
        x = rng.integers(w // 2, width - w // 2)
        y = rng.integers(h // 2, height - h // 2)
        axes = (int(w) // 2, int(h) // 2)
        cv2.ellipse(image, (int(x), int(y)), axes, 0, 0, 360, rng.integers(0, 200, 3).tolist(), -1)
        rows.append(f"{cls} {x / width:.5f} {y / height:.5f} {w / width:.5f} {h / height:.5f}\n")
    cv2.imwrite(str(folder / "images" / split / f"{number}.jpg"), image)
    (folder / "labels" / split / f"{number}.txt").write_text("".join(rows))
