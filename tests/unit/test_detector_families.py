"""Detector families other than the YOLO networks."""

import sys
from pathlib import Path

import pytest
import torch

from trainer.config import Hyp
from trainer.detectors import FAMILIES, Limits, Parts, build, load_weights, read_cfg
from trainer.errors import TrainerError

LABELS = torch.tensor([[0, 1, 0.4, 0.4, 0.5, 0.4], [0, 2, 0.7, 0.3, 0.5, 0.5], [1, 0, 0.5, 0.6, 0.9, 0.8]])


SMALL = {"retinanet": "torchvision:retinanet_resnet18_fpn", "fcos": "torchvision:fcos_resnet50_fpn"}
each_model = pytest.mark.parametrize("name", SMALL)


def family(name: str) -> Parts:
    torch.manual_seed(0)
    return build(read_cfg(SMALL[name]), nc=3, where="--cfg", hyp=Hyp(), imgsz=64)


def terms(parts: Parts, outputs: dict[str, torch.Tensor], labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    images = len(outputs["cls_logits"])
    return parts.criterion(outputs, parts.criterion.assigner(parts.model)(labels.numpy(), images, 64, 64))  # type: ignore[no-any-return]


@each_model
def test_the_loss_is_torchvisions_own(name: str) -> None:
    parts, images = family(name), torch.rand(2, 3, 64, 64)
    sums, counts = terms(parts, parts.model(images), LABELS)
    net, boxes = parts.model.net, parts.criterion.assigner(parts.model)(LABELS.numpy(), 2, 64, 64)["boxes"]
    net.transform.min_size, net.transform.max_size = (64,), 64
    own = net(list(images), [{"boxes": b[:, 2:], "labels": b[:, 1].long()} for b in (boxes[:2], boxes[2:])])
    own.pop("matched", None)
    assert (sums / counts)[:, 0].tolist() == pytest.approx([v.item() for v in own.values()], rel=1e-5)
    (sums / counts).sum().backward()
    assert all(p.grad is not None for p in parts.model.parameters())


@each_model
def test_shares_of_uneven_ranks_add_up_and_need_no_boxes(name: str) -> None:
    parts = family(name)
    outputs = parts.model(torch.rand(3, 3, 64, 64))
    whole, count = terms(parts, outputs, LABELS)
    shared = ("anchors", "cells")
    first = {k: v if k in shared else v[:2] for k, v in outputs.items()}
    second = {k: v if k in shared else v[2:] for k, v in outputs.items()}
    (sums, counts), (other, others) = terms(parts, first, LABELS), terms(parts, second, LABELS[:0])
    torch.testing.assert_close((sums + other) / (counts + others), whole / count, rtol=1e-5, atol=1e-7)
    other.sum().backward()
    assert all(p.grad is not None for p in parts.model.parameters())


@each_model
def test_only_the_wanted_classes_are_found(name: str) -> None:
    parts = family(name)
    outputs = parts.model.eval()(torch.rand(2, 3, 64, 64))
    found = parts.postprocess(parts.model, outputs, Limits(confidence=0.001, most=5, classes=(1,)))
    assert [set(each.classes.tolist()) for each in found] == [{1}, {1}]
    assert [len(each.scores) for each in found] == [5, 5]


def test_an_unknown_model_is_named_with_those_that_exist() -> None:
    with pytest.raises(TrainerError, match="no detector 'yolos'") as error:
        build(read_cfg("torchvision:yolos"), nc=3, where="--cfg torchvision:yolos", hyp=Hyp(), imgsz=64)
    assert "torchvision:retinanet_resnet50_fpn" in error.value.hint


def test_a_family_without_its_package_is_one_error_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (*FAMILIES.values(), "trainer.detectors.transformers_nets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for package in ("transformers", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TrainerError, match="dfine-n: requires the package") as error:
        build(read_cfg("dfine-n"), nc=3, where="dfine-n", hyp=Hyp(), imgsz=64)
    assert error.value.hint == "pip install 'clusterctl[transformers]'"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TrainerError, match="requires the package"):
        load_weights(str(tmp_path))


def test_a_folder_that_is_no_snapshot_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"a folder without config\.json") as error:
        load_weights(str(tmp_path))
    assert "best.pt" in error.value.hint
