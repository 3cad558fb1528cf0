import math

import pytest
import torch
import torch.nn.functional as F

from trainer.config import Hyp
from trainer.errors import TrainerError
from trainer.losses.aligned import AlignedLoss
from trainer.losses.boxes import ciou
from trainer.models.yolo import build_yolo, load_cfg

SIDE, BINS = 64, 16
TARGETS = torch.tensor([[0, 1, 0.4, 0.4, 0.3, 0.2], [0, 2, 0.7, 0.3, 0.5, 0.5], [1, 0, 0.5, 0.6, 0.9, 0.8]])


def loss_for(**hyp: float) -> AlignedLoss:
    return AlignedLoss((8, 16, 32), BINS, Hyp(**hyp))


def outputs(images: int, nc: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(images, SIDE // s, SIDE // s, 4 * BINS + nc, requires_grad=True) for s in (8, 16, 32)]


def terms_of(loss: AlignedLoss, raw: list[torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    assigned = loss.assign(targets, raw[0].shape[0], SIDE, SIDE)
    matched, late = loss.match(raw, assigned)
    return loss(raw, matched, torch.cat((assigned.counts, late)))


def test_terms_are_the_published_ones() -> None:
    """The same loss, spelled out one point at a time."""
    loss, raw = loss_for(), outputs(2)
    (found, matched), late = loss.match(raw, loss.assign(TARGETS, 2, SIDE, SIDE))
    flat = torch.cat([t.flatten(1, 2) for t in raw], 1).detach()
    wanted = torch.zeros(2, 84, 3)
    box = dfl = 0.0
    for image, point, cls, target, weight in zip(
        matched.image, matched.point, matched.cls, matched.target, matched.weight, strict=True
    ):
        wanted[image, point, cls] = weight
        bins = flat[image, point, :64].view(4, BINS)
        x, y = found.points[point].tolist()
        stride = found.strides[point].item()
        sides = [sum(k * p for k, p in enumerate(b.softmax(0).tolist())) * stride for b in bins]
        got = torch.tensor([[x + (sides[2] - sides[0]) / 2, y + (sides[3] - sides[1]) / 2]])
        got = torch.cat((got, torch.tensor([[sides[0] + sides[2], sides[1] + sides[3]]])), 1)
        box += weight.item() * (1 - ciou(got, target[None]).item())
        cx, cy, w, h = target.tolist()
        for b, distance in zip(bins, (x - cx + w / 2, y - cy + h / 2, cx + w / 2 - x, cy + h / 2 - y), strict=True):
            steps = distance / stride
            low = math.floor(steps)
            nll = -b.log_softmax(0)
            dfl += weight.item() * (nll[low] * (low + 1 - steps) + nll[low + 1] * (steps - low)).item() / 4
    cls_sum = F.binary_cross_entropy_with_logits(flat[..., 64:], wanted, reduction="sum").item()
    total = matched.weight.sum().item()
    assert len(matched.weight) > 15
    assert total > 1
    assert late.item() == pytest.approx(total)
    expected = [7.5 * box / total, 0.5 * cls_sum / total, 1.5 * dfl / total]
    assert terms_of(loss, raw, TARGETS).tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("nc", [1, 3])
def test_a_batch_without_boxes_has_a_finite_loss_and_a_gradient_for_every_parameter(nc: int) -> None:
    torch.manual_seed(0)
    model = build_yolo(load_cfg("yolov5nu.yaml"), nc=nc)
    terms = terms_of(loss_for(), model(torch.rand(2, 3, SIDE, SIDE)), torch.zeros(0, 6))
    terms.sum().backward()
    assert terms.isfinite().all()
    assert terms[0] == terms[2] == 0
    assert terms[1] > 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_hyper_parameters_change_the_terms() -> None:
    raw = outputs(2)
    plain = terms_of(loss_for(), raw, TARGETS)
    doubled = terms_of(loss_for(dfl_box=15.0, dfl_cls=1.0, dfl=3.0), raw, TARGETS)
    torch.testing.assert_close(doubled, 2 * plain)
    # YOLOv5's own gains are for the other head.
    torch.testing.assert_close(terms_of(loss_for(box=0.5, obj=3.0, cls=0.1), raw, TARGETS), plain)
    assert terms_of(loss_for(cls_pw=2.0), raw, TARGETS)[1] > plain[1]
    assert terms_of(loss_for(fl_gamma=1.5), raw, TARGETS)[1] < plain[1]
    with pytest.raises(TrainerError, match="label smoothing"):
        loss_for(label_smoothing=0.1)


@pytest.mark.parametrize("split", [1, 3, 5])
def test_shares_of_uneven_ranks_add_up_to_the_whole(split: int) -> None:
    """Pictures 0 and 1 hold all boxes: the second share has none at all where it begins later."""
    loss, raw = loss_for(), outputs(6)
    whole = terms_of(loss, raw, TARGETS)
    first = TARGETS[TARGETS[:, 0] < split]
    second = TARGETS[TARGETS[:, 0] >= split] - torch.tensor([split, 0, 0, 0, 0, 0])
    parts = [([t[:split] for t in raw], first), ([t[split:] for t in raw], second)]
    matches = [loss.match(part, loss.assign(targets, part[0].shape[0], SIDE, SIDE)) for part, targets in parts]
    counts = torch.cat((torch.tensor([6.0]), matches[0][1] + matches[1][1]))
    shares = [loss(part, matched, counts) for (part, _), (matched, _) in zip(parts, matches, strict=True)]
    torch.testing.assert_close(shares[0] + shares[1], whole, rtol=1e-6, atol=1e-7)


def test_a_network_learns_a_picture_by_heart() -> None:
    """The head, its loss and its decoding agree: after some steps the boxes are found where they are."""
    torch.manual_seed(0)
    cfg = load_cfg("yolov5nu.yaml")
    model = build_yolo(cfg, nc=3)
    images = torch.rand(2, 3, SIDE, SIDE)
    loss = loss_for()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
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
