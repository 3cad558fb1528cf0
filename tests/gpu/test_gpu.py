"""The trainer on GPUs: `make test-gpu` on a machine that has at least one; `make test-gpu DEVICE=cpu` rehearses it.

Nothing is simulated. With one GPU, the tests of several ranks are skipped.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.trainer_process import TINY
from tests.unit.yolo_folder import squares
from trainer.config import Hyp
from trainer.data.augment import recipe_of
from trainer.data.device_painter import DevicePainter, pack
from trainer.data.paint import paint
from trainer.data.registry import open_dataset

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(480)]
DEVICE = os.environ.get("DEVICE") or "cuda"
RANKS = torch.cuda.device_count() if DEVICE == "cuda" else 2
several = pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    assert DEVICE == "cpu" or torch.cuda.is_available(), "no GPU that torch can use (DEVICE=cpu rehearses the tests)"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return squares(tmp_path_factory.mktemp("squares"), train=32)


def start(folder: Path, *arguments: str, ranks: int = 1, device: str = DEVICE) -> subprocess.Popen[str]:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    words = [sys.executable, *torchrun, "-m", "trainer", *arguments, "--device", device, "--project", "."]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def train(folder: Path, *arguments: str, **more: Any) -> str:
    process = start(folder, "train", *arguments, **more)
    text, _ = process.communicate(timeout=400)
    assert process.returncode == 0, text
    return text


def small(data: Path, name: str, *more: str) -> list[str]:
    """Four steps an epoch of a small detector."""
    words = ["--data", str(data), "--cfg", TINY, "--imgsz", "64", "--batch", "8", "--name", name, "--log-steps"]
    # The default painter differs between a GPU and a CPU, by a few gray levels.
    return [*words, "--epochs", "3", "--noval", "--augment-on", "device", *more]


def losses(run: Path) -> torch.Tensor:
    rows = list(csv.reader((run / "steps.csv").read_text().splitlines()))[1:]
    return torch.tensor([[float(value) for value in row] for row in rows])


def weights(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(run / "last.pt", weights_only=True, map_location="cpu")["model"]
    return found


def test_fp32_losses_are_those_of_the_cpu(data: Path, tmp_path: Path) -> None:
    for name, device in (("device", DEVICE), ("cpu", "cpu")):
        train(tmp_path, *small(data, name, "--precision", "fp32"), device=device)
    found, expected = losses(tmp_path / "device"), losses(tmp_path / "cpu")
    print(f"largest relative difference: {((found - expected).abs() / expected.abs()).max():.1e}")
    assert torch.allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16", *(["fp16"] if DEVICE != "cpu" else [])])
def test_each_precision_learns_the_digits(precision: str, tmp_path: Path) -> None:
    train(tmp_path, "--epochs", "4", "--precision", precision, "--name", "digits")
    score = float(list(csv.DictReader((tmp_path / "digits" / "results.csv").read_text().splitlines()))[-1]["map50"])
    print(f"{precision}: mAP50 {score:.3f} after 4 epochs")
    assert score > 0.4


def test_a_killed_run_resumes_bit_for_bit(data: Path, tmp_path: Path) -> None:
    exact = ["--deterministic", "--save-every", "1steps"]
    train(tmp_path, *small(data, "whole", *exact))
    process = start(tmp_path, "train", *small(data, "cut", *exact))
    until = time.time() + 200
    while not (tmp_path / "cut" / "steps.csv").exists() or len(losses(tmp_path / "cut")) < 5:
        assert process.poll() is None, process.communicate()[0]
        assert time.time() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    text = train(tmp_path, *small(data, "cut", *exact, "--resume", "cut"))
    assert "resuming in epoch" in text
    assert torch.equal(losses(tmp_path / "cut"), losses(tmp_path / "whole"))
    cut, whole = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(cut[name], value) for name, value in whole.items())


def test_compiled_losses_are_those_of_eager_ones(data: Path, tmp_path: Path) -> None:
    graphs = ["--compile", "--compile-mode", "reduce-overhead"]
    for name, more in (("eager", []), ("compiled", ["--compile"]), ("graphs", graphs)):
        train(tmp_path, *small(data, name, "--precision", "fp32", *more))
    for name in ("compiled", "graphs"):
        assert torch.allclose(losses(tmp_path / name), losses(tmp_path / "eager"), rtol=1e-3), name


@pytest.mark.parametrize("hyp", [Hyp(mixup=0.5), Hyp(degrees=20.0, perspective=0.001)], ids=["upright", "warped"])
def test_images_painted_on_the_device_are_those_of_the_workers(hyp: Hyp, data: Path) -> None:
    images = open_dataset(str(data), "train", imgsz=160)
    near = np.arange(len(images))
    made = [recipe_of(images, k, near, hyp, np.random.default_rng(k), (160, 160)) for k in range(16)]
    expected = np.empty((16, 160, 160, 3), np.uint8)
    for recipe, out in zip(made, expected, strict=True):
        paint(recipe, lambda k: images.image(k, 160), out)
    found = DevicePainter(torch.device(DEVICE))(pack(made, lambda k: images.image(k, 160), None)).cpu().numpy()
    near_enough = (np.abs(found.astype(int) - expected) <= 2).mean()
    print(f"{near_enough:.2%} of the values within 2 gray levels")
    assert near_enough >= 0.99


def test_images_that_stay_on_the_device_give_the_same_losses(data: Path, tmp_path: Path) -> None:
    for name, more in (("none", ["--workers", "0"]), ("auto", ["--workers", "0"]), ("auto", ["--workers", "2"])):
        name_of_run = f"{name}{more[-1]}"
        text = train(tmp_path, *small(data, name_of_run, "--deterministic", "--cache", name, *more))
        assert ("images stay on" in text) == (name == "auto")
        assert torch.equal(losses(tmp_path / name_of_run), losses(tmp_path / "none0"))


@several
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_ranks_have_the_losses_of_one_process(strategy: str, data: Path, tmp_path: Path) -> None:
    more = ["--micro-batches", "1"] if strategy == "pipeline" else ["--sync-bn"]  # batch norm over the whole batch
    train(tmp_path, *small(data, "one", "--precision", "fp32"))
    train(tmp_path, *small(data, "many", "--precision", "fp32", "--parallel", strategy, *more), ranks=2)
    assert torch.allclose(losses(tmp_path / "many"), losses(tmp_path / "one"), rtol=1e-3)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_out_of_memory_names_the_batch(data: Path, tmp_path: Path) -> None:
    words = ["train", "--data", str(data), "--cfg", "yolov5x.yaml", "--imgsz", "1280", "--batch", "100000"]
    text, _ = (process := start(tmp_path, *words, "--noval")).communicate(timeout=400)
    assert process.returncode == 2, text
    assert "out of memory" in text
    assert "Traceback" not in text


def test_validation_scores_as_on_the_cpu(tmp_path: Path) -> None:
    train(tmp_path, "--epochs", "2", "--name", "digits")
    scores = []
    for device in (DEVICE, "cpu"):
        words = ["val", "--weights", "digits/best.pt", "--data", "digits", "--precision", "fp32", "--json"]
        process = subprocess.run(
            [sys.executable, "-m", "trainer", *words, "--device", device],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        assert process.returncode == 0, process.stderr
        scores.append(json.loads(process.stdout)["map50"])
    assert scores[0] == pytest.approx(scores[1], abs=2e-3)
