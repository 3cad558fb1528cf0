"""Detector and non-maximum suppression."""

import pytest
import torch
from torchvision.ops import nms

from trainer.config import Hyp
from trainer.detectors import Limits, build
from trainer.detectors.detector import Detector, to_original
from trainer.detectors.yolo import select
from trainer.models.yolo import load_cfg


def decoded(images, boxes, classes, seed=0, spread=300.0):
    """Random outputs (images, boxes, 5 + classes): many boxes over few places, so that most are suppressed."""
    random = torch.Generator().manual_seed(seed)
    centre = torch.rand(images, boxes, 2, generator=random) * spread
    size = 20 + 20 * torch.rand(images, boxes, 2, generator=random)
    return torch.cat((centre, size, torch.rand(images, boxes, 1 + classes, generator=random)), 2)


def all_at_once(image, limits):
    """Return rows x1 y1 x2 y2 score class after suppression of each class in one round."""
    rows = []
    for c in range(image.shape[1] - 5):
        score = image[:, 4] * image[:, 5 + c]
        mine = score > limits.confidence
        half = image[mine, 2:4] / 2
        boxes = torch.cat((image[mine, :2] - half, image[mine, :2] + half), 1)
        keep = nms(boxes, score[mine], limits.iou)
        rows.append(
            torch.cat((boxes[keep], score[mine][keep, None], torch.full((len(keep), 1), float(c))), 1)
        )
    whole = torch.cat(rows)
    return whole[whole[:, 4].argsort(descending=True)][: limits.most]


@pytest.mark.parametrize("boxes", [0, 3, 700, 6000])
@pytest.mark.parametrize("spread", [60.0, 2000.0])  # keeps few boxes, or nearly all
def test_suppression_in_rounds_equals_one_round(boxes, spread):
    limits = Limits(confidence=0.05, iou=0.5, most=300)
    outputs = decoded(2, boxes, 3, spread=spread)
    outputs[1, :, 4] *= 0.2  # the images do not share a threshold
    for image, found in zip(outputs, select(outputs, limits), strict=True):
        expected = all_at_once(image, limits)
        ours = torch.cat((found.boxes, found.scores[:, None], found.classes[:, None].float()), 1)
        torch.testing.assert_close(ours, expected)


def test_limits_are_applied():
    outputs = decoded(1, 500, 2)
    (many,) = select(outputs, Limits(confidence=0.1, iou=0.9))
    (sure,) = select(outputs, Limits(confidence=0.5, iou=0.9))
    (few,) = select(outputs, Limits(confidence=0.1, iou=0.9, most=7))
    (apart,) = select(outputs, Limits(confidence=0.1, iou=0.1))
    assert many.scores.min() > 0.1
    assert sure.scores.min() > 0.5
    assert len(apart.scores) < len(many.scores)
    assert torch.equal(few.boxes, many.boxes[:7])


def test_detector_equals_the_model_and_does_not_change_it():
    torch.manual_seed(0)
    parts = build(load_cfg("yolov5n.yaml"), nc=3, where="", hyp=Hyp(), imgsz=64)
    model = parts.model
    before = {k: v.clone() for k, v in model.state_dict().items()}
    detector = Detector(model, parts, torch.device("cpu"), torch.float32, Limits(confidence=0.0001))
    images = torch.randint(0, 256, (2, 64, 96, 3), dtype=torch.uint8)
    found = detector(images)
    assert {k: torch.equal(v, before[k]) for k, v in model.state_dict().items()} == dict.fromkeys(
        before, True
    )
    assert model.training
    assert (detector.images, detector.network_s > 0, detector.nms_s > 0) == (2, True, True)
    with torch.no_grad():
        raw = model.eval()(images.permute(0, 3, 1, 2).float() / 255)
        expected = select(model.detect.decode(raw), Limits(confidence=0.0001))
    for one, other in zip(found, expected, strict=True):
        assert len(one.scores) == len(other.scores) > 0
        torch.testing.assert_close(one.scores, other.scores, rtol=1e-3, atol=1e-6)


def test_boxes_are_mapped_to_the_original_and_clipped():
    boxes = torch.tensor([[10.0, 30, 60, 80], [-5, 0, 110, 200]])
    back = to_original(boxes, [0.5, 0.0, 20.0], height=100, width=200)
    assert back.tolist() == [[20, 20, 120, 100], [0, 0, 200, 100]]
