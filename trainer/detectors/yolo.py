"""YOLO detectors: networks of model files in YOLOv5's syntax, with an anchor head or an anchor-free one."""

from typing import Any

import torch
from torch import Tensor
from torchvision.ops import batched_nms

from trainer.config import Hyp, ModelCfg
from trainer.detectors import Detections, Limits, Parts, best_pairs
from trainer.detectors.autoanchor import fit_anchors
from trainer.losses.aligned import ONE_TO_MANY, ONE_TO_ONE, AlignedLoss
from trainer.losses.anchored import DetectionLoss
from trainer.models.heads import Detect
from trainer.models.yolo import build_yolo, check_cfg

# Boxes that go into a round of suppression, surest first, until enough are found: an untrained model has thousands,
# and all at once they would cost more time than the network.
ROUND = 512
MAX_CANDIDATES = 30000  # YOLOv5's own limit
PLAIN_EPOCHS = 10  # of an anchor-free head, at the end without mosaics


def build(cfg: ModelCfg, *, nc: int, where: str, hyp: Hyp, imgsz: int) -> Parts:
    """Build a model description, of a model file or {"import": path}, for `nc` classes."""
    model = build_yolo(check_cfg(cfg, where), nc=nc, where=where)
    head = model.detect
    stride = max(model.detect.strides)
    if isinstance(head, Detect):
        return Parts(
            model,
            DetectionLoss(len(head.anchors), head.strides, nc, hyp, imgsz),
            postprocess,
            stride,
            least_side=2 * stride,
            decode=decode,
            fit=fit_anchors,
        )
    matchings = (ONE_TO_MANY, ONE_TO_ONE) if head.is_end_to_end else (ONE_TO_MANY,)
    return Parts(
        model,
        AlignedLoss(head.strides, head.bins, hyp, matchings),
        postprocess_end_to_end if head.is_end_to_end else postprocess,
        stride,
        least_side=2 * stride,
        close_mosaic=PLAIN_EPOCHS,
        decode=decode,
    )


def decode(model: Any, outputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return all boxes (b, n, 4) xyxy px, and their scores (b, n, nc): objectness * class probability."""
    decoded = model.detect.decode(outputs)
    centre = decoded[..., :2]
    half = decoded[..., 2:4] / 2
    boxes = torch.cat((centre - half, centre + half), -1)
    scores = decoded[..., 4:5] * decoded[..., 5:]
    return boxes, scores


def postprocess_end_to_end(model: Any, outputs: list[Tensor], limits: Limits) -> list[Detections]:
    """Return the detections of each image from the raw outputs of an end-to-end head, without suppression."""
    return best_pairs(*decode(model, outputs), limits)


def postprocess(model: Any, outputs: list[Tensor], limits: Limits) -> list[Detections]:
    """Return the detections of each image from the raw outputs of the model's head."""
    return select(model.detect.decode(outputs), limits)


def select(decoded: Tensor, limits: Limits) -> list[Detections]:
    """Return the detections of each image, on the CPU, from decoded outputs (b, n, 5 + nc): confidence, NMS per class.

    A box may be found for several classes. Score = objectness * class probability.
    """
    image, row = (decoded[..., 4] > limits.confidence).nonzero(as_tuple=True)
    likely = decoded[image, row]  # (m, 5 + nc), of all images together
    scores = likely[:, 4:5] * likely[:, 5:]
    if limits.classes is not None:
        wanted = torch.zeros(scores.shape[1], dtype=scores.dtype, device=scores.device)
        wanted[list(limits.classes)] = 1
        scores = scores * wanted
    box, cls = (scores > limits.confidence).nonzero(as_tuple=True)
    score = scores[box, cls]
    centre = likely[:, :2]
    half = likely[:, 2:4] / 2
    corners = torch.cat((centre - half, centre + half), 1)
    # The pairs of a box and a class are in the order of the images.
    counts = torch.bincount(image[box], minlength=len(decoded)).tolist()
    of_images = (torch.split(values, counts) for values in (box, score, cls))
    detections = []
    for own_box, own_score, own_cls in zip(*of_images, strict=True):
        detections.append(_suppress(corners[own_box], own_score, own_cls, limits))
    return detections


def _suppress(boxes: Tensor, score: Tensor, cls: Tensor, limits: Limits) -> Detections:
    """Return one image's boxes (n, 4) without those that overlap a box of their class with a higher score.

    Whether a box stays depends only on surer ones that stay, so that a round needs those and its own boxes alone.
    """
    score, order = score.sort(descending=True, stable=True)
    boxes = boxes[order]
    cls = cls[order]
    keep = order[:0]
    candidates = min(len(order), MAX_CANDIDATES)
    for start in range(0, candidates, ROUND):
        more = torch.arange(start, min(start + ROUND, candidates), device=order.device)
        keep = torch.cat((keep, more))
        keep = keep[batched_nms(boxes[keep], score[keep], cls[keep], limits.iou)]
        if len(keep) >= limits.most:
            break
    keep = keep[: limits.most]
    return Detections(boxes[keep].cpu(), score[keep].cpu(), cls[keep].cpu())
