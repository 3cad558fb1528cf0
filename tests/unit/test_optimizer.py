import math
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn

from trainer.config import Hyp, Settings
from trainer.engine.ema import Ema, float_state
from trainer.engine.musgd import MuSGD
from trainer.engine.optimizer import build_optimizer, parameter_groups, set_rates
from trainer.engine.schedule import Rates, Schedule, too_few_steps
from trainer.errors import TrainerError
from trainer.models.yolo import build_yolo, load_cfg

STEPS = 50  # per epoch: the warm-up lasts 150 steps
SCHEDULE = Schedule(Hyp(), epochs=100, steps=STEPS, batch=16)


def test_warmup_at_its_beginning_middle_and_end() -> None:
    begin = SCHEDULE.at(0)
    middle = SCHEDULE.at(75)
    end = SCHEDULE.at(150)
    assert begin == Rates(accumulate=1, lr_bias=0.1, lr=0.0, momentum=0.8)
    lr1 = 0.01 * (0.99 * 0.99 + 0.01)  # epoch 1
    assert middle.accumulate == round(2.5)
    assert SCHEDULE.at(45).accumulate == round(1.9)
    assert middle.lr == pytest.approx(lr1 / 2)
    assert middle.lr_bias == pytest.approx((0.1 + lr1) / 2)
    assert middle.momentum == pytest.approx((0.8 + 0.937) / 2)
    lr3 = 0.01 * (0.97 * 0.99 + 0.01)
    assert end.accumulate == 4
    assert (end.lr, end.lr_bias, end.momentum) == pytest.approx((lr3, lr3, 0.937))
    assert SCHEDULE.at(151) == Rates(4, pytest.approx(lr3), pytest.approx(lr3), 0.937)


def test_warmup_lasts_at_least_a_hundred_steps_unless_switched_off() -> None:
    assert Schedule(Hyp(), 3, 19, 16).warmup_steps == 100
    assert Schedule(Hyp(), 3, 200, 16).warmup_steps == 600
    off = Schedule(Hyp(warmup_epochs=0), 3, 19, 16)
    assert off.at(0) == Rates(4, 0.01, 0.01, 0.937)


def test_a_run_with_too_few_steps_is_noted() -> None:
    """The number of epochs that a note suggests is enough: with it, there is no note."""
    eight_images = Schedule(Hyp(), epochs=60, steps=1, batch=16)
    assert "--epochs 300 or more" in too_few_steps(eight_images, has_weights=False)
    assert not too_few_steps(replace(eight_images, epochs=300), has_weights=False)
    assert "warms up for 100 steps" in too_few_steps(eight_images, has_weights=True)
    assert not too_few_steps(replace(eight_images, hyp=Hyp(warmup_epochs=0)), has_weights=True)
    assert not too_few_steps(replace(eight_images, kind="one-cycle"), has_weights=True)
    assert too_few_steps(replace(eight_images, kind="one-cycle"), has_weights=False)
    assert not too_few_steps(SCHEDULE, has_weights=False)


@pytest.mark.parametrize(("batch", "expected"), [(16, 4), (20, 3), (32, 2), (64, 1), (256, 1), (1, 64)])
def test_small_batches_are_accumulated_to_about_64(batch: int, expected: int) -> None:
    assert Schedule(Hyp(), 100, 1000, batch).at(10**4).accumulate == expected
    assert Schedule(Hyp(nbs=batch), 100, 1000, batch).at(10**4).accumulate == 1


def test_rates_fall_to_lrf_along_a_line_or_a_cosine() -> None:
    line = Schedule(Hyp(lrf=0.1), 10, 1000, 64)
    cosine = Schedule(Hyp(lrf=0.1), 10, 1000, 64, "cosine")
    assert line.factor(0) == cosine.factor(0) == pytest.approx(1)
    assert line.factor(5) == cosine.factor(5) == pytest.approx(0.55)
    assert (line.factor(10), cosine.factor(10)) == pytest.approx((0.1, 0.1))
    assert line.factor(2) == pytest.approx(0.82)
    assert cosine.factor(2) == pytest.approx((1 - math.cos(0.2 * math.pi)) / 2 * -0.9 + 1)


def test_sgd_without_momentum() -> None:
    model = build_yolo(load_cfg("yolov5n.yaml"), nc=80)
    optimizer = build_optimizer(model, "SGD", Hyp(momentum=0.0), 20, parameter_groups(model))
    assert {(group["momentum"], group["nesterov"]) for group in optimizer.param_groups} == {(0.0, False)}


@pytest.mark.parametrize(("name", "kind"), [("SGD", torch.optim.SGD), ("Adam", torch.optim.Adam)])
def test_only_weights_decay_and_biases_come_first(name: str, kind: type[torch.optim.Optimizer]) -> None:
    model = build_yolo(load_cfg("yolov5n.yaml"), nc=80)
    optimizer = build_optimizer(model, name, Hyp(), 20, parameter_groups(model))
    assert type(optimizer) is kind
    groups = optimizer.param_groups
    assert [len(g["params"]) for g in groups] == [60, 57, 60]
    assert [g["weight_decay"] for g in groups] == [0, 0, pytest.approx(5e-4 * 20 * 3 / 64)]
    assert all(p.ndim == 1 for g in groups[:2] for p in g["params"])
    assert all(p.ndim == 4 for p in groups[2]["params"])
    set_rates(optimizer, Rates(1, 0.1, 0.02, 0.85))
    assert [g["lr"] for g in groups] == [0.1, 0.02, 0.02]
    if name == "SGD":
        assert all(g["nesterov"] and g["momentum"] == 0.85 for g in groups)
    else:
        assert all(g["betas"] == (0.937, 0.999) for g in groups)


def test_a_backbone_has_groups_with_a_share_of_the_rate() -> None:
    model = nn.Sequential(
        OrderedDict(backbone=nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), head=nn.Linear(4, 2))
    )
    groups = parameter_groups(model, "backbone.")
    assert groups == [
        *(["head.bias"], [], ["head.weight"]),
        *(["backbone.0.bias", "backbone.1.bias"], ["backbone.1.weight"], ["backbone.0.weight"]),
    ]
    optimizer = build_optimizer(model, "AdamW", Hyp(backbone_lr=0.1, nbs=0.0), 20, groups)
    set_rates(optimizer, Rates(1, 0.5, 0.02, 0.9))
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.5, 0.02, 0.02, 0.05, 0.002, 0.002])
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0, 0, 5e-4] * 2


def test_ema_decay_table() -> None:
    ema = Ema(torch.nn.Linear(1, 1), tau=2000)
    assert ema.decay(1) == pytest.approx(4.998e-4, rel=1e-3)
    assert ema.decay(2000) == pytest.approx(0.9999 * (1 - 1 / math.e))
    assert ema.decay(10**9) == pytest.approx(0.9999)


def test_ema_follows_every_float_tensor() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    start = [t.clone() for t in float_state(model)]
    ema = Ema(model, tau=2000)
    with torch.no_grad():
        for t in float_state(model):
            t += 1
    for _ in range(2):
        ema.update()
    keep = ema.decay(1) * ema.decay(2)
    assert len(start) == 6  # batch norm's running statistics included, its counter not
    for old, new in zip(start, float_state(ema.model), strict=True):
        torch.testing.assert_close(new, old * keep + (old + 1) * (1 - keep))
    assert not ema.model.training
    assert not any(p.requires_grad for p in ema.model.parameters())


def test_one_cycle_is_torchs() -> None:
    """Rate and momentum of every step of a run, against torch's own scheduler."""
    hyp = Hyp(lr0=0.2, momentum=0.95)
    ours = Schedule(hyp, 5, 20, 64, "one-cycle")
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    judge = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.2, total_steps=100, base_momentum=0.85, max_momentum=0.95
    )
    for step in range(100):
        rates = ours.at(step)
        group = optimizer.param_groups[0]
        assert (rates.lr, rates.momentum) == pytest.approx((group["lr"], group["momentum"]), rel=1e-6), step
        assert rates.lr_bias == rates.lr
        optimizer.step()
        judge.step()


def test_without_a_nominal_batch_every_batch_moves_the_weights() -> None:
    for batch in (4, 64, 512):
        schedule = Schedule(Hyp(nbs=0.0, warmup_epochs=1.0), 3, 200, batch)
        assert {schedule.at(step).accumulate for step in range(600)} == {1}
        model = torch.nn.Linear(2, 2)
        optimizer = build_optimizer(
            model, "SGD", Hyp(nbs=0.0, weight_decay=5e-4), batch, parameter_groups(model)
        )
        assert optimizer.param_groups[2]["weight_decay"] == pytest.approx(5e-4)


def test_musgd_adds_a_step_with_equal_singular_values_to_that_of_sgd() -> None:
    """The expected step has the singular vectors of the gradient, and its values put through the polynomial."""
    torch.manual_seed(0)
    shapes = {"conv": (8, 4, 3, 3), "tall": (12, 4), "bias": (6,), "other": (8, 4, 3, 3)}
    ours, plain = (
        {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()} for _ in range(2)
    )
    optimizer = MuSGD([{"params": [*ours.values()], "weight_decay": 0.01, "muon": 0.2}], lr=0.1, momentum=0.9)
    sgd = torch.optim.SGD(plain.values(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    average = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for _ in range(3):
        before = {name: p.detach().clone() for name, p in ours.items()}
        for name, shape in shapes.items():
            ours[name].grad = plain[name].grad = torch.randn(shape)
            plain[name].data.copy_(before[name])
        optimizer.step()
        sgd.step()
        for name, shape in shapes.items():
            muon = torch.zeros(shape)
            if len(shape) > 1:
                gradient = plain[name].grad
                assert gradient is not None
                average[name] = 0.9 * average[name] + 0.1 * gradient
                u, s, v = torch.linalg.svd(
                    (0.1 * gradient + 0.9 * average[name]).flatten(1), full_matrices=False
                )
                s = s / s.norm()
                for _ in range(5):
                    s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
                assert s.min() > 0.5
                assert s.max() < 1.25
                scale = math.sqrt(3) if name == "tall" else 1
                muon = 0.2 * scale * (u * s @ v).reshape(shape)
            torch.testing.assert_close(ours[name], plain[name] - 0.1 * muon, rtol=1e-4, atol=1e-4)


def test_only_weights_get_muons_share() -> None:
    model = build_yolo(load_cfg("yolo26n.yaml"), nc=3)
    optimizer = build_optimizer(model, "MuSGD", Hyp(), 64, parameter_groups(model))
    assert [(group["muon"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0, 0),
        (0, 0),
        (0.2, 5e-4),
    ]
    with pytest.raises(TrainerError, match="MuSGD needs whole weights"):
        Settings(optimizer="MuSGD", parallel="fsdp")
