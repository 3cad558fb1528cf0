"""The trainer as real processes, for the tests: alone or as several ranks, to be waited for or killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

import cv2
import numpy as np

ROOT = Path(__file__).parents[2]


def squares(folder: Path, train: int = 7, val: int = 3) -> Path:
    """Pictures of coloured squares, of two classes, the first one empty; returns the data.yaml."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True)
        for k in range(count):
            picture = np.full((64, 80, 3), 30, np.uint8)
            lines = []
            for cls in range(2) if k else []:
                x, y = rng.integers(0, 40), rng.integers(0, 30)
                picture[y : y + 24, x : x + 24] = (200, 60, 60) if cls else (60, 200, 60)
                lines.append(f"{cls} {(x + 12) / 80} {(y + 12) / 64} {24 / 80} {24 / 64}")
            cv2.imwrite(str(folder / "images" / split / f"{k}.png"), picture)
            (folder / "labels" / split / f"{k}.txt").write_text("\n".join(lines))
    path = folder / "data.yaml"
    path.write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: [green, red]\n")
    return path


def environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CLUSTER_")}
    return {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def ranks(count: int, nodes: int = 1) -> list[dict[str, str]]:
    """The environment of each of `count` ranks, of one process alone for a single one."""
    if count == 1:
        return [{}]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    each = count // nodes
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(each), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**shared, "RANK": str(r), "LOCAL_RANK": str(r % each), "GROUP_RANK": str(r // each)} for r in range(count)]


def start(
    cwd: Path, places: list[dict[str, str]], *arguments: str, stderr: IO[str] | int = subprocess.PIPE, **more: str
) -> list[subprocess.Popen[str]]:
    """`trainer ARGUMENTS`, once for each place."""
    return [
        subprocess.Popen(
            [sys.executable, "-m", "trainer", *arguments],
            cwd=cwd,
            env=environment(**more, **place),
            text=True,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        for place in places
    ]


def wait(processes: list[subprocess.Popen[str]], timeout_s: float = 240) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each; none is left behind."""
    try:
        said = [p.communicate(timeout=timeout_s) for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, said, strict=True)]
