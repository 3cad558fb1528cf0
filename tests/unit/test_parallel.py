"""Every strategy gives the gradients of one device, and checkpoints that every other strategy resumes from."""

import copy
import csv
import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves
from torchvision.models import resnet18

from tests.unit.settings import settings as small_settings
from tests.unit.test_resume import content
from tests.unit.trainer_process import TINY, Ended, call, ranks, run, start, wait
from tests.unit.yolo_folder import squares
from trainer.bench.processes import request_of
from trainer.config import Hyp, Settings, preset_for
from trainer.distributed import comm
from trainer.distributed.comm import World
from trainer.engine.timing import StepTimer
from trainer.errors import TrainerError
from trainer.losses.cross_entropy import ClassificationLoss
from trainer.models.blocks import Conv
from trainer.models.yolo import build_yolo, load_cfg
from trainer.strategies.cut import part, split, trace
from trainer.strategies.ddp import Ddp
from trainer.strategies.dp import Dp, Outputs
from trainer.strategies.fsdp import blocks, full_tensor
from trainer.strategies.network_with_loss import NetworkWithLoss
from trainer.strategies.strategy import Conditions
from trainer.strategies.sync_batch_norm import synchronise

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return squares(tmp_path_factory.mktemp("squares"), train=10)


def train(folder: Path, count: int, data: Path, *more: str, code: int = 0) -> list[Ended]:
    arguments = [
        "--data",
        str(data),
        "--imgsz",
        "64",
        "--batch",
        "4",
        "--epochs",
        "2",
        "--device",
        "cpu",
        "--sync-bn",
    ]
    return wait(
        start(folder, ranks(count), "train", *arguments, "--log-steps", "--project", ".", *more), code=code
    )


def settings(batch: int = 8, **more: Any) -> Settings:
    """Settings on digits whose every step updates the weights."""
    hyp = dataclasses.replace(preset_for("digits").hyp, nbs=float(batch), warmup_epochs=0.0)
    # Fitting the anchors would take longer than the steps.
    usual = {"epochs": 100, "hyp": hyp, "noval": True, "sync_bn": True, "noautoanchor": True}
    return small_settings("digits", batch=batch, **{**usual, **more})


def steps(
    folder: Path, count: int, number: int = 2, wide: bool = True, **more: Any
) -> list[dict[str, torch.Tensor]]:
    """Return loss and gradient of the first steps, as `trainer verify` records them."""
    request = folder / "request.json"
    path = folder / "found.pt"
    request.write_text(json.dumps(request_of("verify", settings(**more), 1, steps=number, wide=wide)))
    wait(start(folder, ranks(count), "bench", "rank", str(request), str(path)), code=0)
    found: list[dict[str, torch.Tensor]] = torch.load(path, weights_only=True)
    return found


def without_batch_norm(nc: int) -> nn.Module:
    """A detector whose gradient of an image does not depend on the other images of the batch."""
    return _with_group_norm(build_yolo(load_cfg("yolov5n.yaml"), nc=nc))


def without_anchors(nc: int) -> nn.Module:
    """The same with the head whose loss divides by a sum over its outputs."""
    cfg = load_cfg("yolov5n.yaml")
    cfg["head"] = [*cfg["head"][:-1], [[17, 20, 23], 1, "DetectDFL", ["nc"]]]
    return _with_group_norm(build_yolo(cfg, nc=nc))


def _with_group_norm(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Conv):
            module.bn = nn.GroupNorm(1, module.bn.num_features)
    return model


def losses(run: Path) -> list[float]:
    """Return the sum of the loss terms of every step."""
    with (run / "steps.csv").open() as file:
        return [sum(map(float, row[1:])) for row in list(csv.reader(file))[1:]]


def off(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the relative distance of a step's gradient from another's."""
    return float((found["gradient"] - wanted["gradient"]).norm() / wanted["gradient"].norm())


def test_gradients_are_clipped_to_a_joint_norm_of_ten() -> None:
    a = torch.zeros(2, requires_grad=True)
    b = torch.zeros(1, requires_grad=True)
    a.grad = torch.tensor([30.0, 0.0])
    b.grad = torch.tensor([40.0])
    strategy = Ddp(settings(), World(), CPU)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD([a, b])
    assert strategy.clip(scaler, optimizer, [a, b], Hyp().clip_norm) == 50
    assert a.grad.tolist() == pytest.approx([6, 0], rel=1e-5)
    assert b.grad.tolist() == pytest.approx([8], rel=1e-5)


def test_shards_give_the_gradients_of_one_device(tmp_path: Path) -> None:
    """Shares of different size, and layers with fewer rows than there are ranks."""
    wanted = steps(tmp_path, 1, batch=6)
    assert wanted[0]["gradient"].norm() > 10  # clipped by the norm over all shards
    for count in (2, 4):
        found = steps(tmp_path, count, batch=6, parallel="fsdp")
        assert off(found[0], wanted[0]) < 1e-6
        assert off(found[1], wanted[1]) < 1e-4
        assert torch.isclose(found[1]["loss"], wanted[1]["loss"], rtol=1e-4)


def gather_shards() -> None:
    """Gather five rows from three shards by torch's function and ours, and check the collective of each."""
    torch.distributed.init_process_group("gloo")
    whole = torch.arange(10.0).reshape(5, 2)
    shards = distribute_tensor(whole, init_device_mesh("cpu", (3,)), [Shard(0)])
    for gather, collectives in (
        (DTensor.full_tensor, ["c10d::allgather_into_tensor_coalesced_"]),
        (full_tensor, ["c10d::_allgather_base_"]),
    ):
        with torch.profiler.profile() as seen:
            assert torch.equal(gather(shards), whole)
        assert [event.key for event in seen.key_averages() if "allgather" in event.key] == collectives
    torch.distributed.destroy_process_group()


def test_shards_are_gathered_without_the_collective_that_crashes(tmp_path: Path) -> None:
    """gloo's coalesced all-gather crashes once in hundreds of trainings."""
    call(gather_shards, tmp_path, ranks(3))


def test_stages_give_the_gradients_of_one_device(tmp_path: Path) -> None:
    """With one micro-batch, batch norm sees the whole batch."""
    wanted = steps(tmp_path, 1, batch=5)
    found = steps(tmp_path, 2, batch=5, parallel="pipeline", micro_batches=1)
    assert [off(f, w) < 1e-6 for f, w in zip(found, wanted, strict=True)] == [True, True]


def test_micro_batches_of_any_size_give_the_gradients_of_one_device(tmp_path: Path) -> None:
    """Seven images in three micro-batches, on one pipeline and on two."""
    for cfg in ("tests.unit.test_parallel:without_batch_norm", "tests.unit.test_parallel:without_anchors"):
        wanted = steps(tmp_path, 1, batch=7, cfg=cfg)
        count, stages = (2, 2) if cfg.endswith("batch_norm") else (4, 2)
        found = steps(tmp_path, count, batch=7, cfg=cfg, parallel="pipeline", stages=stages, micro_batches=3)
        assert off(found[0], wanted[0]) < 1e-6
        assert off(found[1], wanted[1]) < 1e-4


def test_batch_norm_counts_a_micro_batch_over_all_pipelines(tmp_path: Path) -> None:
    """With --sync-bn, two pipelines have the gradients of one with all their images."""
    one = steps(tmp_path, 1, 1, parallel="pipeline", micro_batches=2)
    assert off(steps(tmp_path, 4, 1, parallel="pipeline", stages=2, micro_batches=2)[0], one[0]) < 1e-6
    alone = steps(tmp_path, 2, 1, parallel="pipeline", stages=1, micro_batches=2, sync_bn=False)
    assert off(alone[0], one[0]) > 0.01


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_all_ranks_skip_a_step_that_overflows(data: Path, tmp_path: Path, strategy: str) -> None:
    """fp16 first with a loss scaled too far up; the scale falls as on one device, and the losses stay the same."""
    more = ["--precision", "fp16", "--optimizer", "SGD", "--epochs", "1", "--noval"]
    train(tmp_path, 1, data, *more, "--name", "alone")
    more += ["--parallel", strategy, "--name", strategy] + (
        ["--micro-batches", "1"] if strategy == "pipeline" else []
    )
    train(tmp_path, 2, data, *more)
    scales = [content(tmp_path / name / "last.pt")["scaler"]["scale"] for name in ("alone", strategy)]
    assert scales[0] == scales[1]
    assert losses(tmp_path / strategy) == pytest.approx(losses(tmp_path / "alone"), rel=0.05)


def test_stages_unfreeze_together(data: Path, tmp_path: Path) -> None:
    """Also the stage without frozen layers: its inputs have gradients from then on."""
    more = ["--freeze", "3", "--unfreeze", "1", "--precision", "fp32", "--optimizer", "SGD", "--noval"]
    train(tmp_path, 1, data, *more, "--name", "alone")
    more += ["--parallel", "pipeline", "--micro-batches", "1", "--name", "stages"]
    train(tmp_path, 2, data, *more)
    assert losses(tmp_path / "stages") == pytest.approx(losses(tmp_path / "alone"), rel=0.01)


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_half_precision_is_that_of_one_device(tmp_path: Path, strategy: str) -> None:
    one = steps(
        tmp_path, 1, 1, wide=False, precision="bf16", cfg="tests.unit.test_parallel:without_batch_norm"
    )
    more = {"parallel": strategy, "precision": "bf16", "cfg": "tests.unit.test_parallel:without_batch_norm"}
    assert off(steps(tmp_path, 2, 1, wide=False, **more)[0], one[0]) < 0.05


@pytest.mark.parametrize(
    ("optimizer", "first", "others"),
    [
        ("SGD", ["fsdp"], [(2, ["fsdp"]), (2, ["ddp"]), (1, ["ddp"])]),
        (
            "AdamW",
            ["pipeline", "--micro-batches", "1"],
            [(2, ["pipeline", "--micro-batches", "1"]), (1, ["ddp"])],
        ),
    ],
)
def test_every_strategy_resumes_from_the_checkpoint_of_another(
    data: Path, tmp_path: Path, optimizer: str, first: list[str], others: list[tuple[int, list[str]]]
) -> None:
    options = ["--optimizer", optimizer, "--save-period", "1", *([] if len(others) == 2 else ["--noval"])]
    train(tmp_path, 2, data, "--parallel", *first, *options, "--name", "first")
    whole = losses(tmp_path / "first")
    assert len(whole) == 6
    wanted = content(tmp_path / "first" / "last.pt")
    begun = content(tmp_path / "first" / "epoch1.pt")
    for count, strategy in others:
        name = f"{strategy[0]}{count}"
        (tmp_path / name).mkdir()
        shutil.copy(tmp_path / "first" / "epoch1.pt", tmp_path / name / "last.pt")
        shutil.copy(tmp_path / "first" / "steps.csv", tmp_path / name)
        ended = train(tmp_path, count, data, "--parallel", *strategy, *options, "--resume", name)
        assert "resuming in epoch 2" in ended[0].stdout
        found = content(tmp_path / name / "last.pt")
        assert found["model"].keys() == wanted["model"].keys()
        if strategy == first:
            assert losses(tmp_path / name) == whole
            assert all(torch.equal(found["model"][k], v) for k, v in wanted["model"].items())
        # Rounding grows from step to step, and Adam divides small gradients by themselves. Without the optimizer's
        # state, the weights would move elsewhere.
        for kind in ("model", "ema"):
            near = 0.1 if optimizer == "SGD" else 0.5
            assert apart(found[kind], wanted[kind]) < near * apart(begun[kind], wanted[kind])
        assert shapes(found["optimizer"]) == shapes(wanted["optimizer"])


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the distance of two states of a model."""
    return float(
        torch.stack([(a[k].double() - b[k].double()).norm() for k in b if b[k].is_floating_point()]).norm()
    )


def shapes(optimizer: dict[str, Any]) -> dict[int, dict[str, torch.Size]]:
    return {
        k: {name: value.shape for name, value in state.items()} for k, state in optimizer["state"].items()
    }


#: A network with few kernels, because each takes a compiler a second.
ONE_LEVEL = TINY.replace("tiny", "one_level")


def losses_of_two_ranks(folder: Path, data: Path, name: str, *more: str) -> tuple[torch.Tensor, list[Ended]]:
    """Train for two steps on two ranks; return steps.csv (2, columns) and the processes."""
    arguments = (
        "train",
        "--data",
        str(data),
        "--cfg",
        ONE_LEVEL,
        "--imgsz",
        "64",
        "--batch",
        "6",
        "--epochs",
        "1",
    )
    arguments += (
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--log-steps",
        "--noval",
        "--project",
        ".",
        "--name",
        name,
    )
    ended = wait(start(folder, ranks(2), *arguments, *more), code=0)
    rows = (folder / name / "steps.csv").read_text().splitlines()[1:]
    assert len(rows) == 2
    return torch.tensor([[float(value) for value in row.split(",")] for row in rows]), ended


def test_compiled_ranks_have_the_losses_of_uncompiled_ones(data: Path, tmp_path: Path) -> None:
    """The second batch has four images instead of six, for which the ranks compile again."""
    expected, _ = losses_of_two_ranks(tmp_path, data, "eager")
    found, _ = losses_of_two_ranks(tmp_path, data, "compiled", "--compile", "on")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_kept_gradients_do_not_change_the_losses_of_compiled_ranks(tmp_path: Path) -> None:
    """On a CPU, --compile graphs works without graphs but keeps the gradients. One shape: what compiling again does
    to losses, the test above shows, and each compilation takes seconds."""
    data = squares(tmp_path / "even", train=12)
    expected, _ = losses_of_two_ranks(tmp_path, data, "eager")
    found, ended = losses_of_two_ranks(tmp_path, data, "graphs", "--compile", "graphs")
    assert "without CUDA graphs, which need a GPU" in str(ended)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_unsupported_combinations_are_errors(data: Path, tmp_path: Path) -> None:
    for count, more, message in (
        (1, ["--parallel", "fsdp"], "error: --parallel fsdp needs two or more ranks"),
        (1, ["--parallel", "all"], "error: --parallel all: unknown"),
        (1, ["--stages", "2"], "error: --stages has no effect with --parallel ddp"),
        (
            1,
            ["--parallel", "pipeline", "--stages", "2"],
            "error: --stages 2: the number of ranks, 1, is not a multiple",
        ),
        (1, ["--parallel", "pipeline", "--micro-batches", "4"], "error: --micro-batches 4: too many for a"),
        (
            1,
            ["--parallel", "pipeline", "--compile", "on"],
            "error: --compile on: --parallel pipeline cannot be compiled",
        ),
        (2, ["--parallel", "pipeline", "--freeze", "backbone"], "parameters (all of its layers are frozen)"),
    ):
        ended = train(tmp_path, count, data, *more, code=2)
        assert any(message in each.stderr for each in ended), ended


def test_a_split_is_even_and_sends_little() -> None:
    assert split([1.0, 1.0, 1.0, 1.0, 4.0], [0, 9, 9, 9, 9, 9], 2) == [0, 4, 5]
    assert split([1.0, 1.0, 4.0], [0, 9, 9, 9], 1) == [0, 3]
    assert split([1.0, 0.01, 0.01, 1.0], [0, 900, 5, 900, 0], 2) == [
        0,
        2,
        4,
    ]  # within the tolerance, the least is sent
    assert split([1.0, 0.5, 0.5, 1.0], [0, 1, 900, 1, 0], 2) == [0, 2, 4]  # beyond it, time decides
    assert split([1.0, 1.0, 1.0], [0, math.inf, 5, 0], 2) == [0, 2, 3]  # a size or a parameter is not sent
    assert split([1.0] * 6, [0, 9, 9, 9, 9, 9, 0], 3) == [0, 2, 4, 6]
    with pytest.raises(TrainerError, match="too few operations"):
        split([1.0, 1.0, 1.0], [0, math.inf, 5, 0], 3)


class Resized(nn.Module):
    """A model that reads the image size first and uses it last, like torchvision's segmentation models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(3, 3, 3, 2) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-2:]
        return nn.functional.interpolate(self.layers(x), size=size)


@pytest.mark.parametrize(
    "model", [build_yolo(load_cfg("yolov5n.yaml"), nc=3), resnet18(num_classes=5), Resized()]
)
def test_the_parts_of_a_model_are_the_model(model: nn.Module) -> None:
    """Also with layers that change their input in place."""
    images = torch.rand(2, 3, 64, 64)
    expected = tree_leaves(copy.deepcopy(model).eval()(images))
    graph = trace(model)
    end = len(graph.nodes) - 1
    cuts = [0, end // 4, end // 2, end - 3, end]
    parts = [part(model, graph, a, b).eval() for a, b in itertools.pairwise(cuts)]
    found: Any = []
    for stage in parts:
        found = stage(images, *found)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(found), expected, strict=True))
    names = [name for stage in parts for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x))


class DataDependent(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("model", "message"), [(Twice(), "the layer layer runs twice"), (DataDependent(), "cannot be split")]
)
def test_a_model_that_cannot_be_split_is_an_error(model: nn.Module, message: str) -> None:
    with pytest.raises(TrainerError, match=message) as error:
        trace(model)
    assert "fsdp" in error.value.hint


def test_blocks_are_the_members_of_a_models_lists() -> None:
    assert (
        len(list(blocks(build_yolo(load_cfg("yolov5n.yaml"), nc=3)))) == 19
    )  # upsampling and concatenation have none
    assert [type(block).__name__ for block in blocks(resnet18())] == ["BasicBlock"] * 8


def test_a_replica_computes_in_its_precision_in_any_thread() -> None:
    """DataParallel runs each replica in a thread, and autocast is local to a thread."""
    found: list[torch.dtype] = []
    bf16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    wrapped = NetworkWithLoss(nn.Conv2d(3, 4, 1), ClassificationLoss(0.0, 1), bf16)
    for net in (nn.Conv2d(3, 4, 1), Outputs(wrapped)):
        with bf16():
            thread = threading.Thread(target=lambda net=net: found.append(net(torch.rand(1, 3, 8, 8)).dtype))
            thread.start()
            thread.join()
    assert found == [torch.float32, torch.bfloat16]
    strategy = Dp(settings(parallel="dp", sync_bn=False), World(), CPU)
    conditions = Conditions(StepTimer(CPU), 32, 32, always_syncs=True, min_share=2)
    strategy.setup(wrapped, copy.deepcopy(wrapped.network), conditions)
    strategy._gpus = [0, 1]  # DataParallel ignores missing GPUs
    strategy.refresh()
    assert isinstance(strategy._outputs.module, Outputs)


def test_dp_reports_unsupported_options_and_missing_gpus(tmp_path: Path, data: Path) -> None:
    options = {"batch": 4, "sync_bn": False}
    assert off(steps(tmp_path, 1, parallel="dp", **options)[0], steps(tmp_path, 1, **options)[0]) == 0
    strategy = Dp(settings(parallel="dp", sync_bn=False), World(), CPU)
    assert "training on cpu only" in strategy.summary
    with pytest.raises(TrainerError, match="needs a single process, but WORLD_SIZE is 2"):
        Dp(settings(parallel="dp", sync_bn=False), World(size=2, launched=True), CPU)
    for option, value in (("--sync-bn", {"sync_bn": True}), ("--grad-compress", {"grad_compress": "bf16"})):
        with pytest.raises(TrainerError, match=f"--parallel dp does not support {option}"):
            Dp(settings(parallel="dp", **{"sync_bn": False, **value}), World(), CPU)
    arguments = ["train", "--parallel", "dp", "--device", "0,1", "--data", str(data)]
    code, _, err = run(tmp_path, *arguments)
    assert (code, "no GPU can be used" in err) == (2, True), err  # one process, not two


assert_close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


def differentiate(norm, x, upstream):
    x = x.clone().requires_grad_()
    norm.zero_grad()
    y = norm(x)
    (y * upstream).sum().backward()
    return y.detach(), x.grad, norm.weight.grad.clone(), norm.bias.grad.clone()


def compare_with_one_process() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4, 6, 5)
    x[5:] = x[5:] * 3 + 10
    upstream = torch.randn_like(x)
    norm = nn.BatchNorm2d(4, momentum=0.03)
    nn.init.uniform_(norm.weight)
    whole_norm = copy.deepcopy(norm)
    whole = differentiate(whole_norm, x, upstream)

    world = comm.world_of(os.environ)
    comm.join(world, CPU)
    mine = slice(0, 5) if world.rank == 0 else slice(5, 8)
    synchronise(norm, CPU)
    y, of_x, of_weight, of_bias = differentiate(norm, x[mine], upstream[mine])
    assert_close(y, whole[0][mine])
    assert_close(of_x, whole[1][mine])
    for summed, expected in ((of_weight, whole[2]), (of_bias, whole[3])):
        comm.wait(comm.start_sum(summed))
        assert_close(summed, expected)
    for name, value in norm.state_dict().items():
        assert_close(value, whole_norm.state_dict()[name])
    comm.leave()


def test_outputs_and_gradients_of_uneven_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    """Five images on one rank and three, far brighter, on the other. `trainer verify` compares whole detectors."""
    call(compare_with_one_process, tmp_path, ranks(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_batch_norm_in_one_process_and_in_evaluation(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 4, dtype=dtype)
    plain = nn.BatchNorm2d(3)
    synchronised = nn.BatchNorm2d(3)
    before = {name: tensor.data_ptr() for name, tensor in synchronised.state_dict().items()}
    synchronise(synchronised, CPU)
    assert {name: tensor.data_ptr() for name, tensor in synchronised.state_dict().items()} == before
    assert type(synchronised) is not nn.BatchNorm2d
    assert torch.equal(plain(x), synchronised(x))
    assert torch.equal(plain.eval()(x), synchronised.eval()(x))
