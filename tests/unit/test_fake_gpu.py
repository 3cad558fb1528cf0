"""The trainer's code for GPUs on the simulated GPUs of tests/fake_gpu.py: all tasks, and all strategies on two of them.

Steps raise an error for tensors on the wrong device and for a wait of the host, and their losses are those of the CPU.
The workers paint: Triton cannot use simulated GPUs.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.fake_gpu import DeviceMismatch, HostWait, simulated_gpus, step
from tests.unit import test_classification, test_segmentation
from tests.unit.settings import settings
from tests.unit.trainer_process import TINY, call, ranks
from tests.unit.yolo_folder import squares
from trainer.config import Hyp
from trainer.data.batch import FILL
from trainer.distributed import comm
from trainer.distributed.comm import World
from trainer.engine.events import Events
from trainer.engine.trainer import Trainer
from trainer.losses.criterion import mean_terms
from trainer.models import blocks
from trainer.models.precision import as_input
from trainer.plots import DRAWINGS
from trainer.strategies import cut, network_with_loss
from trainer.strategies.network_with_loss import NetworkWithLoss
from trainer.weights import checkpoint_file

STATE = ("model", "ema", "optimizer", "scaler", "total", "ranks")
GPU = torch.device("cuda", 1)
CPU = torch.device("cpu")
STRATEGIES = [("ddp", "fp32"), ("ddp", "bf16"), ("fsdp", "bf16"), ("pipeline", "fp32"), ("pipeline", "bf16")]


@pytest.fixture
def gpus() -> Iterator[None]:
    with simulated_gpus():
        yield


def started(place: torch.device, world: World | None = None, **more: Any) -> Trainer:
    if place.type == "cuda":
        torch.cuda.set_device(place)  # as comm.join does
    training = Trainer(settings(**more), world or World(), place, Events({}))
    training.start()
    # A CPU's targets have no rows that pad, with which sums have another order.
    training.task.prepare_targets(training.train_loader, training.evaluator.loader, training.model, pads=True)
    training.local_model.train()
    return training


def three_steps(training: Trainer) -> list[list[float]]:
    """Take three steps, and return their loss terms."""
    losses = []
    batches = training.batches()
    for _ in range(3):
        # A pipeline's ranks exchange the shapes of their tensors in the first step.
        with step() if losses or training.settings.parallel != "pipeline" else contextlib.nullcontext():
            result = training.step(next(batches))
        assert (result.stop, result.save) == (False, False)  # values of a copy that has not ended are NaN
        losses.append(training.meter.terms.tolist())
    training.meter.check_finite()
    assert all(sum(terms) > 0 for terms in losses) or not training.strategy.computes_loss
    return losses


def outcome(training: Trainer) -> tuple[Any, ...]:
    """Take three steps, validate, and return losses, scores, detections and the state as values of the CPU."""
    losses = three_steps(training)
    scores = training.validate(training.evaluator.loader)
    state = training.state_dict()
    tensors = [
        leaf.cpu() if isinstance(leaf, Tensor) else leaf for key in STATE for leaf in tree_leaves(state[key])
    ]
    return losses, scores, pickle.dumps(training.evaluator.metric), tensors


def assert_equal(gpu: tuple[Any, ...], cpu: tuple[Any, ...]) -> None:
    assert gpu[:3] == cpu[:3]
    assert len(gpu[3]) == len(cpu[3])
    for one, other in zip(gpu[3], cpu[3], strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def anchors(folder: Path) -> dict[str, Any]:
    return {
        "data": str(squares(folder / "set", train=12)),
        "cfg": TINY,
        "hyp": Hyp(),
        "augment_on": "workers",
    }


def anchor_free(folder: Path) -> dict[str, Any]:
    cfg = folder / "free.yaml"
    cfg.write_text(Path(TINY).read_text().replace("Detect, [nc, anchors]", "DetectDFL, [nc]"))
    return {**anchors(folder), "cfg": str(cfg)}


def classify(folder: Path) -> dict[str, Any]:
    data = test_classification.folders(folder / "set")
    how = {"task": "classify", "cfg": test_classification.SMALL, "imgsz": 32, "optimizer": "AdamW"}
    return {"data": str(data), **how, "hyp": Hyp(mosaic=0.0, mixup=0.5)}


def segment(folder: Path) -> dict[str, Any]:
    data = test_segmentation.folders(folder / "set", train=12)
    return {"data": str(data), "task": "segment", "hyp": Hyp(mosaic=0.0)}


@pytest.mark.parametrize(
    ("task", "precision"),
    [
        (anchors, "fp32"),
        (anchors, "bf16"),
        (anchors, "fp16"),
        (anchor_free, "fp32"),
        (anchor_free, "bf16"),
        (classify, "fp32"),
        (classify, "bf16"),
        (segment, "fp32"),
    ],
)
def test_a_task_on_a_gpu_has_the_values_of_the_cpu(
    task: Callable[[Path], dict[str, Any]],
    precision: str,
    gpus: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit: three steps without a wait of the host, and a validation. Without channels of zeros, which change
    the order of a CPU's sums in fp16."""
    monkeypatch.setattr(blocks, "COLOUR_CHANNELS", 3)
    more = {**task(tmp_path), "precision": precision}
    assert_equal(outcome(started(GPU, **more)), outcome(started(CPU, **more)))


class GrayKernel:
    """In place of the painter's Triton kernel, which cannot run here: makes each image gray."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def launch(images: Tensor, *arguments: Any, **_: Any) -> None:
            assert grid[2] == len(images)
            assert {images.device, *(each.device for each in arguments if isinstance(each, Tensor))} == {GPU}
            images.fill_(FILL)

        return launch


@pytest.fixture
def gray_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "trainer.data.augment.paint_kernel", SimpleNamespace(paint_batch=GrayKernel())
    )


@pytest.mark.parametrize("task", [anchors, classify, segment])
def test_the_first_batch_on_a_gpu_is_drawn(
    task: Callable[[Path], dict[str, Any]], gpus: None, tmp_path: Path
) -> None:
    training = started(GPU, **task(tmp_path))
    batch = next(training.batches())
    assert batch.images.device == GPU
    DRAWINGS[training.task.kind].batch(batch, training.task.names, tmp_path / "batch.jpg")
    assert (tmp_path / "batch.jpg").stat().st_size > 1000


@pytest.mark.parametrize(("augment_on", "expected"), [("auto", GPU), ("device", GPU), ("workers", CPU)])
def test_images_are_painted_on_a_gpu_by_default(
    augment_on: str, expected: torch.device, gpus: None, gray_kernel: None, tmp_path: Path
) -> None:
    training = started(GPU, **{**anchors(tmp_path), "augment_on": augment_on})
    assert next(training.train_loader.epoch(0, 0)).images.device == expected


def test_the_host_does_not_wait_for_the_painter(gpus: None, gray_kernel: None, tmp_path: Path) -> None:
    training = started(GPU, **{**anchors(tmp_path), "augment_on": "device"})
    with step():
        batches = list(training.train_loader.epoch(0, 0))
    assert all((batch.images.cpu() == FILL).all() for batch in batches)
    three_steps(training)


def test_channels_of_zeros_change_neither_outputs_nor_gradients(gpus: None) -> None:
    torch.manual_seed(0)
    conv = blocks.Conv(3, 4, 6, 2, 2).conv
    found = []
    for place in (CPU, GPU):
        weight = conv.weight.detach().to(place).requires_grad_()
        images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)).to(place)
        made = torch.func.functional_call(conv, {"weight": weight}, images)
        made.square().sum().backward()
        assert weight.grad is not None
        found.append((made.detach().cpu(), weight.grad.cpu()))
    for cpu, gpu in zip(*found, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("workers", [0, 2])
def test_images_stay_on_the_gpu_without_a_wait_of_the_host(
    workers: int, gpus: None, gray_kernel: None, tmp_path: Path
) -> None:
    """Once the pool is open, each batch brings what it lacks, and in the end it has every image."""
    more = {**anchors(tmp_path), "workers": workers, "epochs": 4, "augment_on": "device"}
    said = list[str]()
    training = started(GPU, **more)
    loader = training.train_loader
    data = training.task.train_set
    loader.cache("auto", [], World(), lambda value: [value], 1, said.append)
    for _ in range(4):
        batches = training.batches()
        with step():
            assert len(list(batches)) == loader.steps
        training.begin_epoch()
    resident = loader._painter.resident
    assert resident.is_open
    assert resident.pixels.device == GPU
    pixels = resident.pixels.cpu()
    for k in range(len(data)):
        image = data.image(k, 64)
        first = resident.table.first_pixel(k)
        assert torch.equal(
            pixels[first : first + image.shape[0] * image.shape[1]], torch.tensor(image).view(-1, 3)
        )
    assert len(said) == 1
    assert "images stay on cuda:1: decoded they need 0.00 GiB of 1.0 GiB free" in said[0]
    loader.close()  # the garbage collector would wait 20 s for the workers


def test_a_checkpoint_of_a_gpu_resumes_on_another(gpus: None, tmp_path: Path) -> None:
    more = anchors(tmp_path)
    first = started(GPU, **more)
    batches = list(zip(first.batches(), range(3), strict=False))
    for batch, _ in batches[:2]:
        first.step(batch)
    checkpoint_file.save(tmp_path / "last.pt", first.state_dict())
    second = started(torch.device("cuda", 0), **more)
    second.load_state_dict(checkpoint_file.load(str(tmp_path / "last.pt")))
    for training in (first, second):
        torch.cuda.set_device(training.device)
        training.step(batches[2][0])
    assert first.meter.terms.tolist() == second.meter.terms.tolist()


def test_data_parallel_on_two_gpus_has_the_losses_of_one(gpus: None, tmp_path: Path) -> None:
    """In evaluation mode: batch norm of a GPU's own images differs from that of all."""
    more = {**anchors(tmp_path), "parallel": "dp"}
    losses = []
    for place, numbers in ((torch.device("cuda", 0), "0,1"), (CPU, "cpu")):
        training = started(place, **more, device=numbers)
        training.local_model.eval()
        losses.append(three_steps(training))
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=1e-6)


def one_rank(data: str) -> None:
    """Compare a rank on its simulated GPU with one on the CPU, by gloo and under every strategy of several ranks."""
    world = comm.world_of(os.environ)
    comm.join(world, CPU)
    measure = cut.measure

    def equal_times(*given: Any) -> tuple[list[float], list[float]]:
        seconds, sent = measure(*given)
        return [1.0] * len(seconds), sent

    cut.measure = equal_times  # the position of the cut can change the last bit of a gradient
    # 18 outputs per cell are the same number of rows on both ranks. FSDP pads others, but not those of a subclass.
    more = {"data": data, "cfg": TINY, "hyp": Hyp(), "single_cls": True, "augment_on": "workers"}
    with simulated_gpus():
        for parallel, precision in STRATEGIES:
            options = {**more, "parallel": parallel, "precision": precision}
            gpu = outcome(started(torch.device("cuda", world.local_rank), world, **options))
            assert_equal(gpu, outcome(started(CPU, world, **options)))
            print("equal:", parallel, precision)
    comm.leave()


def test_every_strategy_on_two_gpus_has_the_values_of_two_cpus(tmp_path: Path) -> None:
    data = squares(tmp_path / "set", train=12)
    for rank in call(one_rank, tmp_path, ranks(2), str(data)):
        assert re.findall("equal: (.+) (.+)", rank.stdout) == STRATEGIES


def test_a_copy_to_the_host_has_values_after_its_event_only(gpus: None) -> None:
    values = torch.tensor([1.0, 2.0], device=GPU)
    with step():
        copy = values.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    assert copy.isnan().all()
    event.synchronize()
    assert copy.tolist() == [1, 2]


def plant(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Change the loss terms by a fault."""
    patch.setattr(network_with_loss, "mean_terms", lambda *given: change(mean_terms(*given)))


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        (lambda terms: terms * terms.sum().item(), HostWait, "_local_scalar_dense"),
        (lambda terms: terms * sum(terms.tolist()), HostWait, "blocking copy"),
        (lambda terms: terms * bool(terms.sum() > 0), HostWait, "_local_scalar_dense"),
        (lambda terms: terms + len((terms > 0).nonzero()), HostWait, "nonzero"),
        (lambda terms: terms[terms > 0], HostWait, "aten.index"),
        (lambda terms: terms + torch.tensor([1.0, 2.0, 3.0], device=terms.device), HostWait, "blocking copy"),
        (lambda terms: terms.cpu().to(terms.device), HostWait, "blocking copy"),
        (lambda terms: (torch.cuda.synchronize(), terms)[1], HostWait, "synchronize"),
        (lambda terms: terms + torch.ones(3), DeviceMismatch, r"\(3,\) on cuda:1, \(3,\) on cpu"),
        (
            lambda terms: terms + torch.ones(3, device="cuda:0"),
            DeviceMismatch,
            r"\(3,\) on cuda:1, \(3,\) on cuda:0",
        ),
        (lambda terms: (torch.zeros(()).add_(terms.sum()), terms)[1], DeviceMismatch, "aten.add_"),
        (lambda terms: torch.cat((terms, torch.ones((1,)))), DeviceMismatch, "aten.cat"),
        (lambda terms: terms.bfloat16() @ torch.ones(3, device=terms.device), RuntimeError, "dtype"),
    ],
)
def test_a_fault_in_the_loss_is_an_error(
    fault: Callable[[Tensor], Tensor],
    error: type[Exception],
    said: str,
    gpus: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = started(GPU, **anchors(tmp_path))
    batch = next(iter(training.train_loader.epoch(0, 0)))
    training.step(batch)
    plant(monkeypatch, fault)
    with pytest.raises(error, match=said), step():
        training.step(batch)


def test_a_hard_coded_gpu_is_an_error_on_another(
    gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = started(GPU, **anchors(tmp_path))
    to_first = staticmethod(lambda images: as_input(images).to("cuda:0", non_blocking=True))
    monkeypatch.setattr(NetworkWithLoss, "inputs", to_first)
    with pytest.raises(DeviceMismatch, match="cuda:0"):
        three_steps(training)
