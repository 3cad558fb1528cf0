"""Detector families other than the YOLO networks."""

import pytest
import torch

from trainer.config import Hyp
from trainer.detectors import Limits, Parts, build, read_cfg
from trainer.errors import TrainerError

LABELS = torch.tensor([[0, 1, 0.4, 0.4, 0.5, 0.4], [0, 2, 0.7, 0.3, 0.5, 0.5], [1, 0, 0.5, 0.6, 0.9, 0.8]])


def retinanet() -> Parts:
    torch.manual_seed(0)
    return build(read_cfg("torchvision:retinanet_resnet18_fpn"), nc=3, where="--cfg", hyp=Hyp(), imgsz=64)


def test_the_loss_of_retinanet_is_torchvisions_own_mean_over_the_images() -> None:
    parts, images = retinanet(), torch.rand(2, 3, 64, 64)
    targets = parts.criterion.assigner(parts.model)(LABELS.numpy(), 2, 64, 64)
    sums, counts = parts.criterion(parts.model(images), targets)
    net, boxes = parts.model.net, targets["boxes"]
    net.transform.min_size, net.transform.max_size = (64,), 64
    own = net(list(images), [{"boxes": b[:, 2:], "labels": b[:, 1].long()} for b in (boxes[:2], boxes[2:])])
    assert (sums / counts)[:, 0].tolist() == pytest.approx([v.item() for v in own.values()], rel=1e-5)
    (sums / counts).sum().backward()
    assert all(p.grad is not None for p in parts.model.parameters())


def test_retinanet_finds_only_the_wanted_classes() -> None:
    parts = retinanet()
    outputs = parts.model.eval()(torch.rand(2, 3, 64, 64))
    found = parts.postprocess(parts.model, outputs, Limits(confidence=0.001, most=5, classes=(1,)))
    assert [set(each.classes.tolist()) for each in found] == [{1}, {1}]
    assert [len(each.scores) for each in found] == [5, 5]


def test_an_unknown_model_is_named_with_those_that_exist() -> None:
    with pytest.raises(TrainerError, match="no detector 'fcos'") as error:
        build(read_cfg("torchvision:fcos"), nc=3, where="--cfg torchvision:fcos", hyp=Hyp(), imgsz=64)
    assert "torchvision:retinanet_resnet50_fpn" in error.value.hint
