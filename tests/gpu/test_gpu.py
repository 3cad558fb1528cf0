"""The trainer on GPUs: `make test-gpu` on a machine that has at least one; `make test-gpu DEVICE=cpu` rehearses it.

Nothing is simulated. On one GPU, two ranks share it and communicate over gloo; the tests with NCCL are skipped. On a
CPU, Triton's interpreter paints.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import wait_until
from tests.unit.test_device_painter import Scenes, painted, recipes
from tests.unit.trainer_process import ROOT, TINY
from tests.unit.yolo_folder import squares
from trainer.config import Hyp, Settings
from trainer.data.augment.device_painter import DevicePainter, pack
from trainer.data.cache.image_cache import Layout
from trainer.data.cache.resident_images import PASS, ResidentImages
from trainer.distributed.spawn import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(480)]
DEVICE = os.environ.get("DEVICE") or "cuda"
RANKS = torch.cuda.device_count() if DEVICE == "cuda" else 2
several = pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")
CACHES = next(each for each in fields(Settings) if each.name == "cache").metadata["known"]
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
RUN = "from trainer.__main__ import run; run()"
# PAYS_FROM is the number of steps from which --compile auto compiles.
SHORT_RUNS_PAY = f"from trainer.engine import compilation; compilation.PAYS_FROM = 1; {RUN}"
LITTLE_MEMORY = (
    f"import torch; torch.cuda.set_per_process_memory_fraction(0.05); {RUN}"  # tests run at the same time
)


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    assert DEVICE == "cpu" or torch.cuda.is_available(), (
        "no GPU that torch can use (DEVICE=cpu rehearses the tests)"
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return squares(tmp_path_factory.mktemp("squares"), train=32)


def start(
    folder: Path, *arguments: str, ranks: int = 1, device: str = DEVICE, program: str = "", **more: str
) -> subprocess.Popen[str]:
    """Start `trainer ARGUMENTS`, or a Python program with these arguments, with `more` in the environment."""
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-port",
        str(free_port()),
    ]
    what = [*(torchrun if ranks > 1 else []), *(["-c", program] if program else ["-m", "trainer"])]
    words = [sys.executable, *what, *arguments, "--device", device, "--project", "."]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1" if device == "cpu" else "0",
        **more,
    }
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
    words = [
        "--data",
        str(data),
        "--cfg",
        TINY,
        "--imgsz",
        "64",
        "--batch",
        "8",
        "--name",
        name,
        "--log-steps",
    ]
    # The workers' images differ from those of the device by a few gray levels.
    return [*words, "--epochs", "3", "--noval", "--augment-on", "device", *more]


def losses(run: Path) -> torch.Tensor:
    rows = list(csv.reader((run / "steps.csv").read_text().splitlines()))[1:]
    return torch.tensor([[float(value) for value in row] for row in rows])


def weights(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(run / "last.pt", weights_only=True, map_location="cpu")[
        "model"
    ]
    return found


def test_fp32_losses_are_those_of_the_cpu(data: Path, tmp_path: Path) -> None:
    for name, device in (("device", DEVICE), ("cpu", "cpu")):
        train(tmp_path, *small(data, name, "--precision", "fp32"), device=device)
    found = losses(tmp_path / "device")
    expected = losses(tmp_path / "cpu")
    print(f"largest relative difference: {((found - expected).abs() / expected.abs()).max():.1e}")
    assert torch.allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16", *(["fp16"] if DEVICE != "cpu" else [])])
def test_each_precision_learns_the_digits(precision: str, tmp_path: Path) -> None:
    train(tmp_path, "--epochs", "6", "--precision", precision, "--name", "digits")
    score = float(
        list(csv.DictReader((tmp_path / "digits" / "results.csv").read_text().splitlines()))[-1]["map50"]
    )
    print(f"{precision}: mAP50 {score:.3f} after 6 epochs")
    assert score > 0.6


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
    cut = weights(tmp_path / "cut")
    whole = weights(tmp_path / "whole")
    assert all(torch.equal(cut[name], value) for name, value in whole.items())


def test_compiled_losses_are_those_of_eager_ones(data: Path, tmp_path: Path) -> None:
    for name, more in (("eager", "off"), ("compiled", "on"), ("graphs", "graphs")):
        train(tmp_path, *small(data, name, "--precision", "fp32", "--compile", more))
    for name in ("compiled", "graphs"):
        assert torch.allclose(losses(tmp_path / name), losses(tmp_path / "eager"), rtol=1e-3), name


@needs_gpu
def test_auto_compiles_a_long_run_and_keeps_its_losses(data: Path, tmp_path: Path) -> None:
    said = {}
    for name in ("off", "auto"):
        more = ["--precision", "fp32", "--compile", name]
        said[name] = train(tmp_path, *small(data, name, *more), program=SHORT_RUNS_PAY)
    assert "compiling network and loss" not in said["off"]
    assert "compiling network and loss" in said["auto"]
    assert "compiled in" in said["auto"], said["auto"]
    assert torch.allclose(losses(tmp_path / "auto"), losses(tmp_path / "off"), rtol=1e-3)


@pytest.mark.skipif("auto" not in CACHES, reason="--cache has no auto")
def test_cached_images_give_the_same_training(data: Path, tmp_path: Path) -> None:
    exact = ["--deterministic", "--precision", "fp32"]
    for name in ("none", "auto"):
        train(tmp_path, *small(data, name, *exact, "--cache", name))
    assert torch.equal(losses(tmp_path / "auto"), losses(tmp_path / "none"))


#: Two ranks on one GPU, which NCCL refuses.
SHARED: dict[str, Any] = {
    "ranks": 2,
    "device": "0" if DEVICE == "cuda" else DEVICE,
    "TRAINER_BACKEND": "gloo",
}


def test_two_ranks_on_one_gpu_have_the_losses_of_one_process(data: Path, tmp_path: Path) -> None:
    train(tmp_path, *small(data, "one", "--precision", "fp32"))
    text = train(tmp_path, *small(data, "two", "--precision", "fp32", "--sync-bn"), **SHARED)
    assert "2 ranks over gloo" in text
    assert torch.allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-3)


def test_two_compiled_ranks_on_one_gpu_have_the_losses_of_eager_ones(data: Path, tmp_path: Path) -> None:
    for name in ("off", "on"):
        train(tmp_path, *small(data, name, "--precision", "fp32", "--compile", name), **SHARED)
    assert torch.allclose(losses(tmp_path / "on"), losses(tmp_path / "off"), rtol=1e-3)


def test_batch_norm_over_the_ranks_is_not_compiled(data: Path, tmp_path: Path) -> None:
    process = start(tmp_path, "train", *small(data, "two", "--sync-bn", "--compile", "on"), **SHARED)
    text, _ = process.communicate(timeout=400)
    assert process.returncode
    assert "--compile on: with --sync-bn the ranks communicate within the network" in text


@pytest.mark.skipif(not find_spec("pydantic"), reason="the launcher needs pydantic")
def test_top_shows_what_a_launched_job_uses(clusterctl: Any, job_name: str, data: Path) -> None:
    job = ["--backend", "local", "--gpus", "1", "--device", DEVICE, "--name", job_name, "--detach"]
    training = [
        "--data",
        str(data),
        "--cfg",
        "yolov5n.yaml",
        "--imgsz",
        "320",
        "--batch",
        "16",
        "--epochs",
        "10000",
    ]
    clusterctl.expect(0, "launch", *job, "--", "train", *training, "--noval")

    def use() -> Any:
        (node,) = json.loads(clusterctl.expect(0, "top", job_name, "--json"))["nodes"]
        (rank,) = (node["usage"] or {}).get("ranks") or [{}]
        return rank if rank.get("use" if DEVICE == "cuda" else "cpu") else None

    try:
        rank = wait_until(use, timeout_s=90, pause_s=0.5)
        print(rank)
        assert rank
        assert rank["rss"] > 1 << 20
        if DEVICE == "cuda":
            assert 0 < rank["use"] <= 100
            assert 1 << 28 < rank["memory"] < rank["memory_total"]
    finally:
        clusterctl.run("stop", job_name)


WARPED = Hyp(degrees=20.0, shear=5.0, copy_paste=0.5, mixup=0.5, flipud=0.5)


def kernel_of(patch: pytest.MonkeyPatch, device: str = DEVICE) -> DevicePainter:
    """Return a painter whose kernel is imported again, into the interpreter on a CPU."""
    patch.setenv("TRITON_INTERPRET", "1" if device == "cpu" else "0")
    patch.delitem(sys.modules, "trainer.data.augment.paint_kernel", raising=False)
    return DevicePainter(torch.device(device))


@pytest.mark.parametrize(
    ("hyp", "shape", "count"),
    [
        (Hyp(mixup=0.5), (160, 160), 16),
        (WARPED, (160, 160), 16),
        (replace(WARPED, perspective=0.001), (160, 160), 16),
        (Hyp(mosaic=0.0, degrees=10.0), (97, 131), 16),
        (replace(WARPED, mosaic=0.5), (640, 640), 64 if DEVICE == "cuda" else 1),
    ],
    ids=["upright", "warped", "perspective", "odd size", "64 of 640 px"],
)
def test_images_painted_on_the_device_are_those_of_the_workers(
    hyp: Hyp, shape: tuple[int, int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = Scenes()
    made = recipes(images, hyp, shape, count)
    found = kernel_of(monkeypatch)(pack(made, images.image, None)).cpu().numpy()
    near = (np.abs(found.astype(int) - painted(images, made)) <= 2).mean((1, 2, 3))
    print(f"within 2 gray levels: {near.mean():.4%} of the values, {near.min():.2%} of the worst image's")
    assert near.mean() >= 0.99
    assert near.min() >= 0.96


def interpreted(path: str) -> None:
    """Paint in the interpreter, and save the images."""
    images = Scenes()
    with pytest.MonkeyPatch.context() as patch:
        painter = kernel_of(patch, "cpu")
        np.save(path, painter(pack(recipes(images, WARPED), images.image, None)).numpy())


def test_the_kernel_has_the_values_of_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose tests need no GPU. Its fused multiplications and additions are exact in recent versions of Triton only."""
    text = f"from tests.gpu.test_gpu import interpreted; interpreted({str(tmp_path / 'images.npy')!r})"
    subprocess.run([sys.executable, "-c", text], cwd=ROOT, check=True, timeout=400)
    images = Scenes()
    found = kernel_of(monkeypatch)(pack(recipes(images, WARPED), images.image, None)).cpu().numpy()
    off = np.abs(found.astype(int) - np.load(tmp_path / "images.npy"))
    print(f"equal: {(off == 0).mean():.4%}")
    assert off.max() <= 1
    assert (off == 0).mean() >= 0.999


@needs_gpu
def test_the_painter_never_waits_and_compiles_one_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    painter = kernel_of(monkeypatch)
    images = Scenes()
    batches = [
        recipes(images, hyp, shape, 4)
        for hyp in (Hyp(), WARPED)
        for shape in ((64, 64), (96, 160), (97, 131))
    ]
    paintings = [pack(made, images.image, None).pin_memory() for made in batches]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # a wait is an error
    try:
        found = [painter(painting) for painting in paintings]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for made, result in zip(batches, found, strict=True):
        assert (np.abs(result.cpu().numpy().astype(int) - painted(images, made)) <= 2).mean() >= 0.99
    assert len(list(tmp_path.rglob("*.cubin"))) == 1


def test_resident_sources_give_the_same_images(monkeypatch: pytest.MonkeyPatch) -> None:
    images = Scenes()
    made = recipes(images, WARPED)
    painter = kernel_of(monkeypatch)
    packed = painter(pack(made, images.image))
    room: dict[str, Any] = {"largest_batch": 1, "local_size": 1, "refused": print}
    painter.resident = ResidentImages(images, Layout(images, 160), painter.device, **room)
    painter.resident.open()
    assert torch.equal(painter(pack(made, images.image, painter.resident.table, PASS)), packed)


def test_images_that_stay_on_the_device_give_the_same_losses(data: Path, tmp_path: Path) -> None:
    for name, more in (
        ("none", ["--workers", "0"]),
        ("auto", ["--workers", "0"]),
        ("auto", ["--workers", "2"]),
    ):
        name_of_run = f"{name}{more[-1]}"
        text = train(tmp_path, *small(data, name_of_run, "--deterministic", "--cache", name, *more))
        assert ("images stay on" in text) == (name == "auto")
        assert torch.equal(losses(tmp_path / name_of_run), losses(tmp_path / "none0"))


@several
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_ranks_have_the_losses_of_one_process(strategy: str, data: Path, tmp_path: Path) -> None:
    more = (
        ["--micro-batches", "1"] if strategy == "pipeline" else ["--sync-bn"]
    )  # batch norm over the whole batch
    train(tmp_path, *small(data, "one", "--precision", "fp32"))
    train(tmp_path, *small(data, "many", "--precision", "fp32", "--parallel", strategy, *more), ranks=2)
    assert torch.allclose(losses(tmp_path / "many"), losses(tmp_path / "one"), rtol=1e-3)


@needs_gpu
def test_out_of_memory_names_the_batch(data: Path, tmp_path: Path) -> None:
    words = ["train", "--data", str(data), "--cfg", "yolov5x.yaml", "--imgsz", "1280", "--batch", "100000"]
    text, _ = (process := start(tmp_path, *words, "--noval", program=LITTLE_MEMORY)).communicate(timeout=400)
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
