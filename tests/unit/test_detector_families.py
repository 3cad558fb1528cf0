"""Detector families other than the YOLO networks."""

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.unit.test_resume import assert_resumes
from tests.unit.trainer_process import run
from tests.unit.yolo_folder import squares
from trainer.config import FAMILIES, Hyp
from trainer.detectors import Limits, Parts, build, load_weights, read_cfg
from trainer.errors import TrainerError
from trainer.models.torchvision_nets import MEAN, STD

LABELS = torch.tensor([[0, 1, 0.4, 0.4, 0.5, 0.4], [0, 2, 0.7, 0.3, 0.5, 0.5], [1, 0, 0.5, 0.6, 0.9, 0.8]])


SMALL = {
    "retinanet": "torchvision:retinanet_resnet18_fpn",
    "fcos": "torchvision:fcos_resnet50_fpn",
    "ssdlite": "torchvision:ssdlite320_mobilenet_v3_large",
    "rcnn": "torchvision:fasterrcnn_mobilenet_v3_large_320_fpn",
}
# torchvision's losses, in the order of ours.
NAMES = ["classification", "loss_classifier", "bbox_regression", "loss_box_reg", "bbox_ctrness"]
NAMES += ["loss_objectness", "loss_rpn_box_reg"]
each_model = pytest.mark.parametrize("name", SMALL)
Terms = tuple[torch.Tensor, torch.Tensor]


def family(name: str) -> Parts:
    torch.manual_seed(0)
    parts = build(read_cfg(SMALL[name]), nc=3, where="--cfg", hyp=Hyp(), imgsz=64)
    if name == "rcnn":  # fewer proposals than there are, and fewer chosen than proposed
        parts.model.net.rpn._post_nms_top_n = {"training": 40, "testing": 40}
        parts.model.net.roi_heads.fg_bg_sampler.batch_size_per_image = 20
    return parts


def targets_of(parts: Parts, labels: torch.Tensor, images: int) -> dict[str, torch.Tensor]:
    return parts.criterion.assigner(parts.model)(labels.numpy(), images, 64, 64)  # type: ignore[no-any-return]


def terms(parts: Parts, images: torch.Tensor, labels: torch.Tensor) -> Terms:
    """Return the sums and counts of the first step."""
    if hasattr(parts.model, "steps"):
        parts.model.steps.zero_()
    targets = targets_of(parts, labels, len(images))
    outputs = parts.criterion.outputs_of(parts.model, images, targets)
    return parts.criterion(outputs, targets, (64, 64))  # type: ignore[no-any-return]


@each_model
def test_the_loss_is_torchvisions_own(name: str) -> None:
    parts = family(name)
    images = torch.rand(2, 3, 64, 64)
    sums, counts = terms(parts, images, LABELS)
    net = parts.model.net
    boxes = targets_of(parts, LABELS, 2)["boxes"]
    first = int(name in ("ssdlite", "rcnn"))
    net.transform.min_size = (64,)
    net.transform.max_size = 64
    net.transform.fixed_size = None
    net.transform.image_mean = MEAN
    net.transform.image_std = STD
    net.transform.size_divisible = 32
    own = net(
        list(images), [{"boxes": b[:, 2:], "labels": b[:, 1].long() + first} for b in (boxes[:2], boxes[2:])]
    )
    own.pop("matched", None)
    expected = sorted(own.items(), key=lambda item: NAMES.index(item[0]))
    assert (sums / counts).sum(1).tolist() == pytest.approx([value.item() for _, value in expected], rel=1e-5)
    (sums / counts).sum().backward()
    assert all(p.grad is not None for p in parts.model.parameters())


@each_model
def test_shares_of_uneven_ranks_add_up_and_need_no_boxes(name: str) -> None:
    """The network is in evaluation mode, since batch norm would see other images in each share."""
    parts = family(name)
    images = torch.rand(3, 3, 64, 64)
    parts.model.eval()
    (sums, counts), (other, others) = terms(parts, images[:2], LABELS), terms(parts, images[2:], LABELS[:0])
    whole, count = terms(parts, images, LABELS)
    torch.testing.assert_close((sums + other) / (counts + others), whole / count, rtol=1e-5, atol=1e-7)
    other.sum().backward()
    assert all(p.grad is not None for p in parts.model.parameters())


def test_anchors_and_proposals_are_chosen_by_the_image_and_the_step() -> None:
    parts = family("rcnn")
    image = torch.rand(1, 3, 64, 64)
    parts.model.eval()
    labels = LABELS[:1]

    def chosen(images: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        wanted = targets_of(parts, rows, len(images))
        return parts.criterion.outputs_of(parts.model, images, wanted)["proposals"]  # type: ignore[no-any-return]

    twice = torch.cat((labels, labels))
    twice[1, 0] = 1
    first, same = chosen(image.repeat(2, 1, 1, 1), twice)
    torch.testing.assert_close(first, same)
    (later,) = chosen(image, labels)
    assert len(later) == len(first) == 20
    assert not torch.equal(later, first)


@each_model
def test_the_loss_of_outputs_that_are_not_finite_is_not_finite(name: str) -> None:
    parts = family(name)
    images = torch.rand(2, 3, 64, 64)
    images[0, 0, 0, 0] = torch.nan
    sums, _ = terms(parts, images, LABELS)
    assert not bool(sums.isfinite().all())


def test_levels_of_one_cell_have_exact_gradients_in_bf16() -> None:
    """Elsewhere than in freed memory full of NaN, what an operation does not write would be finite."""
    parts = family("ssdlite")
    images = torch.rand(2, 3, 64, 64).to(memory_format=torch.channels_last)
    model = parts.model.to(memory_format=torch.channels_last)
    targets = targets_of(parts, LABELS, 2)
    seen = []
    for _ in range(20):
        junk = [torch.full((n,), torch.nan) for n in (33, 70, 640, 1000, 1152, 4608)]
        del junk
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = parts.criterion.outputs_of(model, images, targets)
        sums, counts = parts.criterion(outputs, targets, (64, 64))
        (sums / counts).sum().backward()
        seen.append(torch.cat([p.grad.flatten() for p in model.net.backbone.extra.parameters()]))
    assert all(torch.equal(each, seen[0]) for each in seen[1:])


@each_model
def test_only_the_wanted_classes_are_found(name: str) -> None:
    parts = family(name)
    outputs = parts.model.eval()(torch.rand(2, 3, 64, 64))
    everything = parts.postprocess(parts.model, outputs, Limits(confidence=0.001, most=500))
    found = parts.postprocess(parts.model, outputs, Limits(confidence=0.001, most=5, classes=(1,)))
    assert [set(each.classes.tolist()) for each in found] == [{1}, {1}]
    for each, every in zip(found, everything, strict=True):
        assert len(each.scores) == 5
        assert set(every.classes.tolist()) == {0, 1, 2}
        torch.testing.assert_close(each.scores, every.scores[every.classes == 1][:5])


@each_model
def test_parameters_and_gflops_are_printed(name: str, tmp_path: Path) -> None:
    shown = run(tmp_path, "info", "--cfg", SMALL[name], "--imgsz", "64", code=0).stdout
    with torch.device("meta"):
        model = build(read_cfg(SMALL[name]), nc=80, where="", hyp=Hyp(), imgsz=64).model
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in shown
    assert re.search(r"[1-9.]+ GFLOPs for an image of 64 px", shown)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ssdlite", "rcnn"])
def test_two_killed_ranks_resume_bit_for_bit_and_find_boxes(name: str, tmp_path: Path) -> None:
    best = assert_resumes(tmp_path, SMALL[name]) / "best.pt"
    shown = run(
        tmp_path, "val", "--weights", str(best), "--data", str(tmp_path / "squares/data.yaml"), code=0
    ).stdout
    assert re.search(r"green +2 +2 ", shown), shown
    options = ["--conf-thres", "0.001", "--save-txt", "--name", "found", "--device", "cpu"]
    run(
        tmp_path,
        "predict",
        "--weights",
        str(best),
        "--source",
        str(tmp_path / "squares/images/val"),
        *options,
        code=0,
    )
    assert any((tmp_path / "runs/found").rglob("*.txt"))


def test_one_image_on_a_rank_is_too_little_for_the_batch_norm_of_small_levels(tmp_path: Path) -> None:
    task = [
        "train",
        "--data",
        str(squares(tmp_path / "squares")),
        "--cfg",
        SMALL["ssdlite"],
        "--device",
        "cpu",
    ]
    ended = run(tmp_path, *task, "--imgsz", "320", "--batch", "1", code=2)
    assert "can be one image of 320 x 320 px, and batch norm cannot" in ended.stderr


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
    assert error.value.hint == "in the project folder: pip install '.[transformers]'"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TrainerError, match="requires the package"):
        load_weights(str(tmp_path))


def test_a_folder_that_is_no_snapshot_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"a folder without config\.json") as error:
        load_weights(str(tmp_path))
    assert "best.pt" in error.value.hint
