import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from trainer.config import Hyp
from trainer.losses.boxes import ciou
from trainer.losses.detection import DetectionLoss
from trainer.models.heads import Detect
from trainer.models.yolo import Yolo, build_yolo, load_cfg

SIDE = 64


def nano(nc: int) -> Yolo:
    torch.manual_seed(0)
    return build_yolo(load_cfg("yolov5n.yaml"), nc=nc)


def loss_for(nc: int = 3, **hyp: float) -> DetectionLoss:
    head = nano(nc).detect
    assert isinstance(head, Detect)
    return DetectionLoss(head.anchors, head.strides, nc, Hyp(**hyp), SIDE)


def outputs(images: int, nc: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(images, 3, SIDE // s, SIDE // s, nc + 5, requires_grad=True) for s in (8, 16, 32)]


TARGETS = torch.tensor([[0, 1, 0.4, 0.4, 0.3, 0.2], [0, 2, 0.7, 0.3, 0.5, 0.5], [1, 0, 0.5, 0.6, 0.9, 0.8]])


def terms_of(loss: DetectionLoss, raw: list[torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    assignment = loss.assign(targets, raw[0].shape[0], SIDE, SIDE)
    return loss(raw, assignment, assignment.counts)


def test_ciou_of_a_box_with_itself_is_one() -> None:
    boxes = torch.tensor([[3.0, 4.0, 2.0, 1.0], [0.0, 0.0, 5.0, 9.0]])
    torch.testing.assert_close(ciou(boxes, boxes), torch.ones(2), rtol=0, atol=1e-6)


def test_ciou_against_the_formula_by_hand() -> None:
    a, b = (1.0, 1.0, 2.0, 2.0), (2.0, 1.5, 2.0, 1.0)  # centre x, y, w, h
    intersection = 1.0 * 1.0
    iou = intersection / (4 + 2 - intersection)
    distance = (1.0**2 + 0.5**2) / (3.0**2 + 2.0**2)
    v = 4 / math.pi**2 * (math.atan(2.0 / 1.0) - math.atan(2.0 / 2.0)) ** 2
    expected = iou - distance - v / (v - iou + 1) * v
    assert ciou(torch.tensor([a]), torch.tensor([b])).item() == pytest.approx(expected, abs=1e-6)


def test_ciou_holds_the_weight_of_the_aspect_constant() -> None:
    box, other = (1.0, 1.0, 2.0, 2.0), torch.tensor([[2.0, 1.5, 2.0, 1.0]])
    v = 4 / math.pi**2 * (math.atan(2.0) - math.atan(1.0)) ** 2
    a = torch.tensor([box], requires_grad=True)
    ciou(a, other).sum().backward()
    w = torch.tensor(2.0, requires_grad=True)
    intersection = (w / 2 + 1 - 1) * 1.0
    iou = intersection / (w * 2 + 2 - intersection)
    distance = (1.0**2 + 0.5**2) / ((w / 2 + 1 + 1) ** 2 + 2.0**2)
    aspect = 4 / math.pi**2 * (math.atan(2.0) - torch.atan(w / 2)) ** 2
    (iou - distance - v / (v - iou.item() + 1) * aspect).backward()
    assert a.grad is not None
    assert w.grad is not None
    assert a.grad[0, 2].item() == pytest.approx(w.grad.item(), abs=1e-5)


def test_ciou_of_boxes_apart_is_negative_and_pulls_them_together() -> None:
    a = torch.tensor([[0.0, 0.0, 1.0, 1.0]], requires_grad=True)
    value = ciou(a, torch.tensor([[10.0, 0.0, 1.0, 1.0]]))
    value.sum().backward()
    assert value.item() < 0
    assert a.grad is not None
    assert a.grad[0, 0] > 0


def test_ciou_of_an_empty_box_has_a_finite_gradient() -> None:
    a = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 2.0]], requires_grad=True)
    ciou(a, torch.tensor([[1.0, 1.0, 2.0, 2.0]] * 2)).sum().backward()
    assert a.grad is not None
    assert a.grad.isfinite().all()


def test_terms_are_the_published_ones() -> None:
    """The same loss, spelled out one positive at a time."""
    loss, raw = loss_for(), outputs(2)
    assignment = loss.assign(TARGETS, 2, SIDE, SIDE)
    box, obj, cls = 0.0, 0.0, 0.0
    for i, (t, level) in enumerate(zip(raw, assignment.levels, strict=True)):
        n = len(level.image)
        wanted = torch.zeros(t.shape[:4])
        for k in range(n):
            p = t[level.image[k], level.anchor[k], level.row[k], level.column[k]]
            xy, wh = p[:2].sigmoid() * 2 - 0.5, (p[2:4].sigmoid() * 2) ** 2 * level.anchor_wh[k]
            quality = ciou(torch.cat((xy, wh))[None], level.box[k][None])[0]
            box += (1 - quality).item() / n
            cls += F.binary_cross_entropy_with_logits(p[5:], F.one_hot(level.cls[k], 3).float()).item() / n
            wanted[level.image[k], level.anchor[k], level.row[k], level.column[k]] = max(quality.item(), 0)
        obj += (4.0, 1.0, 0.4)[i] * F.binary_cross_entropy_with_logits(t[..., 4], wanted).item()
    expected = [0.05 * box, 1.0 * (SIDE / 640) ** 2 * obj, 0.5 * 3 / 80 * cls]
    assert sum(len(level.image) for level in assignment.levels) > 20
    assert terms_of(loss, raw, TARGETS).tolist() == pytest.approx(expected, rel=1e-5)


def test_a_batch_without_boxes_has_a_finite_loss_and_a_gradient_for_every_parameter() -> None:
    for nc in (1, 3):
        model = nano(nc)
        head = model.detect
        loss = DetectionLoss(head.anchors, head.strides, nc, Hyp(), SIDE)
        terms = terms_of(loss, model(torch.rand(2, 3, SIDE, SIDE)), torch.zeros(0, 6))
        terms.sum().backward()
        assert terms.isfinite().all()
        assert terms[0] == 0
        assert terms[1] > 0
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


def test_a_single_class_has_no_class_loss() -> None:
    targets = TARGETS * torch.tensor([1, 0, 1, 1, 1, 1])
    assert terms_of(loss_for(1), outputs(2, 1), targets)[2] == 0


def test_hyper_parameters_change_the_terms() -> None:
    raw = outputs(2)
    plain = terms_of(loss_for(), raw, TARGETS)
    for changes, term in (
        ({"box": 0.1}, 0),
        ({"obj": 2.0}, 1),
        ({"obj_pw": 2.0}, 1),
        ({"cls": 1.0}, 2),
        ({"cls_pw": 2.0}, 2),
        ({"label_smoothing": 0.1}, 2),
        ({"fl_gamma": 1.5}, 2),
    ):
        changed = terms_of(loss_for(**changes), raw, TARGETS)
        different = [
            not math.isclose(a, b, rel_tol=1e-6) for a, b in zip(plain.tolist(), changed.tolist(), strict=True)
        ]
        assert different[term], changes
    assert len(dataclasses.fields(Hyp)) > 20


@pytest.mark.parametrize("split", [1, 3, 5])
def test_shares_of_uneven_ranks_add_up_to_the_whole(split: int) -> None:
    """Pictures 0 and 1 hold all boxes: the second share has none at all where it begins later."""
    loss, raw = loss_for(), outputs(6)
    whole = terms_of(loss, raw, TARGETS)
    first = TARGETS[TARGETS[:, 0] < split]
    second = TARGETS[TARGETS[:, 0] >= split] - torch.tensor([split, 0, 0, 0, 0, 0])
    parts = [([t[:split] for t in raw], first), ([t[split:] for t in raw], second)]
    assigned = [loss.assign(targets, part[0].shape[0], SIDE, SIDE) for part, targets in parts]
    counts = assigned[0].counts + assigned[1].counts
    shares = [loss(part, a, counts) for (part, _), a in zip(parts, assigned, strict=True)]
    torch.testing.assert_close(shares[0] + shares[1], whole, rtol=1e-6, atol=1e-7)
