"""Both detection losses: their terms, and CIoU."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from trainer.config import Hyp
from trainer.data.loading.detection_loader import Capacity
from trainer.errors import TrainerError
from trainer.losses.aligned import ONE_TO_MANY, ONE_TO_ONE, AlignedLoss, candidates
from trainer.losses.anchored import DetectionLoss, assign_level, ciou
from trainer.losses.criterion import mean_terms
from trainer.models.yolo import Yolo, build_yolo, load_cfg

SIDE = 64
BINS = 16
TARGETS = torch.tensor([[0, 1, 0.4, 0.4, 0.3, 0.2], [0, 2, 0.7, 0.3, 0.5, 0.5], [1, 0, 0.5, 0.6, 0.9, 0.8]])
CFGS = {"anchors": "yolov5n.yaml", "anchor-free": "yolov5nu.yaml", "end-to-end": "yolo26n.yaml"}
HEADS = pytest.mark.parametrize("head", CFGS)


def nano(head: str, nc: int) -> Yolo:
    torch.manual_seed(0)
    return build_yolo(load_cfg(CFGS[head]), nc=nc)


NANO = nano("anchors", 3)


def loss_for(head: str, nc: int = 3, **hyp: float) -> Any:
    if head == "anchor-free":
        return AlignedLoss((8, 16, 32), BINS, Hyp(**hyp))
    if head == "end-to-end":
        return AlignedLoss((8, 16, 32), 1, Hyp(**hyp), (ONE_TO_MANY, ONE_TO_ONE))
    return DetectionLoss(3, (8, 16, 32), nc, Hyp(**hyp), SIDE)


def outputs(head: str, images: int, nc: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(2)
    shape = {"anchors": [3, nc + 5], "anchor-free": [4 * BINS + nc], "end-to-end": [4 + nc]}[head]
    strides = (8, 16, 32) * (2 if head == "end-to-end" else 1)
    *before, values = shape
    raw = [torch.randn(images, *before, SIDE // s, SIDE // s, values) for s in strides]
    if head == "end-to-end":
        for t in raw:
            t[..., :4] = t[..., :4].abs() * 2  # distances
    return [t.requires_grad_() for t in raw]


def targets_of(
    loss: Any, raw: list[torch.Tensor], labels: torch.Tensor, **more: Any
) -> dict[str, torch.Tensor]:
    targets: dict[str, torch.Tensor] = loss.assigner(NANO)(
        labels.numpy(), raw[0].shape[0], SIDE, SIDE, **more
    )
    return targets


def terms_of(loss: Any, raw: list[torch.Tensor], labels: torch.Tensor, **more: Any) -> torch.Tensor:
    return mean_terms(*loss(raw, targets_of(loss, raw, labels, **more), (SIDE, SIDE)), loss.gains)


def test_ciou_against_the_formula_by_hand() -> None:
    a, b = (1.0, 1.0, 2.0, 2.0), (2.0, 1.5, 2.0, 1.0)  # centre x, y, w, h
    intersection = 1.0 * 1.0
    iou = intersection / (4 + 2 - intersection)
    distance = (1.0**2 + 0.5**2) / (3.0**2 + 2.0**2)
    v = 4 / math.pi**2 * (math.atan(2.0 / 1.0) - math.atan(2.0 / 2.0)) ** 2
    expected = iou - distance - v / (v - iou + 1) * v
    assert ciou(torch.tensor([a]), torch.tensor([b])).item() == pytest.approx(expected, abs=1e-6)


def test_ciou_holds_the_weight_of_the_aspect_constant() -> None:
    box = (1.0, 1.0, 2.0, 2.0)
    other = torch.tensor([[2.0, 1.5, 2.0, 1.0]])
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


def test_ciou_of_boxes_apart_or_empty_has_a_finite_gradient() -> None:
    a = torch.tensor([[0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 2.0]], requires_grad=True)
    value = ciou(a, torch.tensor([[10.0, 0.0, 1.0, 1.0]] + [[1.0, 1.0, 2.0, 2.0]] * 2))
    value.sum().backward()
    assert value[0].item() < 0
    assert a.grad is not None
    assert a.grad.isfinite().all()
    assert a.grad[0, 0] > 0  # towards the other box


def test_terms_of_the_anchor_head_are_the_published_ones() -> None:
    """The same loss, spelled out one positive at a time."""
    loss = loss_for("anchors")
    raw = outputs("anchors", 2)
    assigner = loss.assigner(NANO)
    pairs = 0
    box = 0.0
    obj = 0.0
    cls = 0.0
    for i, t in enumerate(raw):
        level = assign_level(TARGETS.numpy(), assigner.anchors[i], *t.shape[2:4], 4.0)
        n = len(level.image)
        pairs += n
        wanted = torch.zeros(t.shape[:4])
        for k in range(n):
            p = t[level.image[k], level.anchor[k], level.row[k], level.column[k]]
            xy = p[:2].sigmoid() * 2 - 0.5
            wh = (p[2:4].sigmoid() * 2) ** 2 * torch.tensor(level.anchor_wh[k])
            quality = ciou(torch.cat((xy, wh))[None], torch.tensor(level.box[k])[None])[0]
            box += (1 - quality).item() / n
            cls += (
                F.binary_cross_entropy_with_logits(
                    p[5:], F.one_hot(torch.tensor(level.cls[k]), 3).float()
                ).item()
                / n
            )
            wanted[level.image[k], level.anchor[k], level.row[k], level.column[k]] = max(quality.item(), 0)
        obj += (4.0, 1.0, 0.4)[i] * F.binary_cross_entropy_with_logits(t[..., 4], wanted).item()
    expected = [0.05 * box, 1.0 * (SIDE / 640) ** 2 * obj, 0.5 * 3 / 80 * cls]
    assert pairs > 20
    assert terms_of(loss, raw, TARGETS).tolist() == pytest.approx(expected, rel=1e-5)


def test_terms_of_the_anchor_free_head_are_the_published_ones() -> None:
    """The same loss, spelled out one point at a time."""
    loss = loss_for("anchor-free")
    raw = outputs("anchor-free", 2)
    targets = targets_of(loss, raw, TARGETS)
    found = candidates(targets)
    flat = torch.cat([t.flatten(1, 2) for t in raw], 1).detach()
    matched = loss.match(flat, found)
    wanted = torch.zeros(2, 84, 3)
    box = dfl = 0.0
    for image, point, at, cls, target, weight in zip(*matched, strict=True):
        wanted[image, point, cls] += weight
        bins = flat[image, point, :64].view(4, BINS)
        x, y, stride = at.tolist()
        sides = [sum(k * p for k, p in enumerate(b.softmax(0).tolist())) * stride for b in bins]
        got = torch.tensor([[x + (sides[2] - sides[0]) / 2, y + (sides[3] - sides[1]) / 2]])
        got = torch.cat((got, torch.tensor([[sides[0] + sides[2], sides[1] + sides[3]]])), 1)
        box += weight.item() * (1 - ciou(got, target[None]).item())
        cx, cy, w, h = target.tolist()
        for b, distance in zip(
            bins, (x - cx + w / 2, y - cy + h / 2, cx + w / 2 - x, cy + h / 2 - y), strict=True
        ):
            steps = distance / stride
            low = math.floor(steps)
            nll = -b.log_softmax(0)
            dfl += weight.item() * (nll[low] * (low + 1 - steps) + nll[low + 1] * (steps - low)).item() / 4
    cls_sum = F.binary_cross_entropy_with_logits(flat[..., 64:], wanted, reduction="sum").item()
    total = matched.weight.sum().item()
    assert int((matched.weight > 0).sum()) > 15
    assert total > 1
    assert loss(raw, targets, (SIDE, SIDE))[1].tolist() == pytest.approx([2, total])
    expected = [7.5 * box / total, 0.5 * cls_sum / total, 1.5 * dfl / total]
    assert terms_of(loss, raw, TARGETS).tolist() == pytest.approx(expected, rel=1e-4)


def test_one_to_one_gives_a_box_its_best_point_and_the_distances_are_fractions_of_the_image() -> None:
    """Spelled out: one pair per box, whose weight is its overlap (times the guard), and a plain L1 distance."""
    loss = loss_for("end-to-end")
    raw = outputs("end-to-end", 2)
    found = candidates(targets_of(loss, raw, TARGETS))
    flat = torch.cat([t.flatten(1, 2) for t in raw[3:]], 1).detach()
    matched = loss.match(flat, found, ONE_TO_ONE)
    kept = matched.weight > 0
    assert sorted(matched.cls[kept].tolist()) == [0, 1, 2]
    many = loss.match(flat, found, ONE_TO_MANY)
    for cls in range(3):  # of the ten points, the one with the largest weight
        best = many.weight[many.cls == cls].argmax()
        assert matched.point[kept & (matched.cls == cls)] == many.point[many.cls == cls][best]
    l1 = 0.0
    for image, point, at, target, weight in zip(*(matched[k][kept] for k in (0, 1, 2, 4, 5)), strict=True):
        x, y, stride = at.tolist()
        cx, cy, w, h = target.tolist()
        sides = torch.tensor([x - cx + w / 2, y - cy + h / 2, cx + w / 2 - x, cy + h / 2 - y])
        l1 += weight.item() * ((flat[image, point, :4] * stride - sides).abs() / SIDE).mean().item()
    sums, counts = loss(raw, targets_of(loss, raw, TARGETS), (SIDE, SIDE))
    assert counts[2].item() == pytest.approx(matched.weight.sum().item())
    assert (sums[2, 2] / loss.shares[1]).item() == pytest.approx(l1, rel=1e-5)


def test_the_weight_of_one_to_many_falls_from_epoch_to_epoch() -> None:
    loss = loss_for("end-to-end")
    raw = outputs("end-to-end", 2)
    targets = targets_of(loss, raw, TARGETS)
    found = []
    for epoch in range(6):  # the sixth: after the last
        loss.begin_epoch(epoch, 5)
        found.append(loss(raw, targets, (SIDE, SIDE))[0])
    many, one = (torch.stack([sums[:, k] for sums in found]) for k in (1, 2))
    torch.testing.assert_close(
        many / many[0], torch.tensor([0.8, 0.625, 0.45, 0.275, 0.1, 0.1])[:, None] / 0.8 + 0 * many
    )
    torch.testing.assert_close(
        one / one[0], torch.tensor([0.2, 0.375, 0.55, 0.725, 0.9, 0.9])[:, None] / 0.2 + 0 * one
    )


@HEADS
@pytest.mark.parametrize("nc", [1, 3])
def test_a_batch_without_boxes_has_a_finite_loss_and_a_gradient_for_every_parameter(
    head: str, nc: int
) -> None:
    model = nano(head, nc)
    terms = terms_of(loss_for(head, nc), model(torch.rand(2, 3, SIDE, SIDE)), torch.zeros(0, 6))
    terms.sum().backward()
    assert terms.isfinite().all()
    assert terms[0] == 0
    assert terms[1] > 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_a_single_class_has_no_class_loss() -> None:
    targets = TARGETS * torch.tensor([1, 0, 1, 1, 1, 1])
    assert terms_of(loss_for("anchors", 1), outputs("anchors", 2, 1), targets)[2] == 0


@pytest.mark.parametrize(
    ("head", "change", "term"),
    [
        ("anchors", {"box": 0.1}, 0),
        ("anchors", {"obj": 2.0}, 1),
        ("anchors", {"obj_pw": 2.0}, 1),
        ("anchors", {"cls": 1.0}, 2),
        ("anchors", {"cls_pw": 2.0}, 2),
        ("anchors", {"label_smoothing": 0.1}, 2),
        ("anchors", {"fl_gamma": 1.5}, 2),
        ("anchor-free", {"cls_pw": 2.0}, 1),
        ("anchor-free", {"fl_gamma": 1.5}, 1),
        ("anchor-free", {"dfl_box": 15.0}, 0),
        ("anchor-free", {"dfl_cls": 1.0}, 1),
        ("anchor-free", {"dfl": 3.0}, 2),
        ("end-to-end", {"dfl": 3.0}, 2),
    ],
)
def test_hyper_parameters_change_their_term(head: str, change: dict[str, float], term: int) -> None:
    raw = outputs(head, 2)
    plain, changed = (terms_of(loss_for(head, **hyp), raw, TARGETS).tolist() for hyp in ({}, change))
    assert not math.isclose(plain[term], changed[term], rel_tol=1e-6)


def test_the_anchor_free_head_ignores_the_gains_of_the_other_and_refuses_label_smoothing() -> None:
    raw = outputs("anchor-free", 2)
    plain, other = (loss_for("anchor-free", **hyp) for hyp in ({}, {"box": 0.5, "obj": 3.0, "cls": 0.1}))
    torch.testing.assert_close(terms_of(other, raw, TARGETS), terms_of(plain, raw, TARGETS))
    with pytest.raises(TrainerError, match="label smoothing"):
        loss_for("anchor-free", label_smoothing=0.1)


@HEADS
@pytest.mark.parametrize("split", [1, 3, 5])
def test_shares_of_uneven_ranks_add_up_to_the_whole(head: str, split: int) -> None:
    """Images 0 and 1 have all boxes, so the second share has none if it begins later."""
    loss = loss_for(head)
    raw = outputs(head, 6)
    whole = terms_of(loss, raw, TARGETS)
    first = TARGETS[TARGETS[:, 0] < split]
    second = TARGETS[TARGETS[:, 0] >= split] - torch.tensor([split, 0, 0, 0, 0, 0])
    parts = [([t[:split] for t in raw], first), ([t[split:] for t in raw], second)]
    size = SIDE, SIDE
    (sums, counts), (other_sums, other_counts) = (
        loss(part, targets_of(loss, part, boxes), size) for part, boxes in parts
    )
    shares = [mean_terms(each, counts + other_counts, loss.gains) for each in (sums, other_sums)]
    torch.testing.assert_close(shares[0] + shares[1], whole, rtol=1e-6, atol=1e-7)


@HEADS
def test_rows_that_pad_change_neither_the_loss_nor_a_gradient(head: str) -> None:
    loss = loss_for(head)
    found = []
    for rows in ({}, {"rows": Capacity({"positives": 256, "pairs": 1024, "top": 256, "boxes": 16})}):
        raw = outputs(head, 3)
        terms = terms_of(loss, raw, TARGETS, **rows)
        terms.sum().backward()
        found.append((terms.detach(), *(t.grad for t in raw)))
    for padded, plain in zip(*found, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-6, atol=1e-9)


@HEADS
def test_the_shapes_of_the_targets_do_not_depend_on_the_labels(head: str) -> None:
    loss = loss_for(head)
    raw = outputs(head, 3)
    rows = Capacity({"positives": 64, "pairs": 512, "top": 64, "boxes": 8})
    shapes = {
        tuple((name, values.shape) for name, values in targets_of(loss, raw, TARGETS[:n], rows=rows).items())
        for n in range(4)
    }
    assert len(shapes) == 1
    assert Capacity({})("pairs", 5) == 8  # more than the least: the next power of two
    assert Capacity({"pairs": 4})("pairs", 8) == 8


@pytest.mark.parametrize("head", ["anchor-free", "end-to-end"])
def test_a_network_learns_an_image_by_heart(head: str) -> None:
    """The head, its loss and its decoding agree: after some steps the boxes are found where they are."""
    torch.manual_seed(0)
    cfg = load_cfg(CFGS[head]) | {"width_multiple": 0.125}
    model = build_yolo(cfg, nc=3)
    images = torch.rand(2, 3, SIDE, SIDE)
    loss = loss_for(head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(80):
        terms = terms_of(loss, model(images), TARGETS)
        optimizer.zero_grad()
        terms.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        decoded = model.detect.decode(model(images))
    for image, cls, *box in TARGETS.tolist():
        scores = decoded[int(image), :, 5 + int(cls)]
        best = decoded[int(image), scores.argmax(), :4]
        assert scores.max() > 0.5
        assert ciou(best[None], torch.tensor([box]) * SIDE) > 0.7
