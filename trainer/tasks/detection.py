"""Detection as a task: the model, its loss and its metric, for the loop to put together."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import batched_nms

from trainer.config import Hyp
from trainer.data import Batch, Dataset, ValBatch
from trainer.losses import Loss
from trainer.losses.aligned import AlignedLoss
from trainer.losses.detection import DetectionLoss
from trainer.metrics import BoxMAP
from trainer.models.heads import Detect
from trainer.models.yolo import Yolo, build_yolo, fuse

CONFIDENCE = 0.001
NMS_IOU = 0.6
MAX_DETECTIONS = 300
# YOLOv5 lets 30 000 boxes into NMS. An untrained model fills that with noise for minutes of CPU time; what lies
# below the best 3 000 of a picture practically never reaches the 300 (COCO: 100) that count.
MAX_CANDIDATES = 3000
LOSSES: dict[str, type[Loss]] = {"Detect": DetectionLoss, "DetectDFL": AlignedLoss}
SHOWN = 12  # validation pictures that are kept for the picture of predictions
SHOWN_CONFIDENCE = 0.25  # mAP needs the doubtful boxes too, a picture does not


@dataclass(frozen=True)
class Detections:
    """What was found in one picture: boxes (n, 4) x1 y1 x2 y2 in its own pixels, scores (n,), classes (n,)."""

    boxes: Tensor
    scores: Tensor
    classes: Tensor


@dataclass(frozen=True)
class Prepared:
    """A batch on the device: `images` float (b, 3, h, w) in 0..1, channels last, and what its loss assigned."""

    images: Tensor
    assignment: Any


class Detection:
    """Trains a YOLO model on boxes."""

    def __init__(self, cfg: dict[str, Any], where: str, names: list[str], hyp: Hyp, imgsz: int) -> None:
        self.names, self.imgsz = names, imgsz
        self._cfg, self._where, self._hyp = cfg, where, hyp

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the loss's terms; the model file's last row decides on the loss."""
        return LOSSES[self._cfg["head"][-1][2]].terms

    def build(self) -> Yolo:
        """The untrained network for this data's classes."""
        return build_yolo(self._cfg, nc=len(self.names), where=self._where)

    def loss_of(self, model: Yolo) -> Loss:
        """The loss for a model that is on its device; its head decides which."""
        head = model.detect
        if isinstance(head, Detect):
            return DetectionLoss(head.anchors, head.strides, head.nc, self._hyp, self.imgsz)
        return AlignedLoss(head.strides, head.bins, self._hyp)

    def metric(self) -> BoxMAP:
        """An empty metric; those of several ranks can be merged."""
        return BoxMAP(self.names)

    def evaluate(
        self,
        model: Yolo,
        batches: Iterable[ValBatch],
        dataset: Dataset,
        device: torch.device,
        dtype: torch.dtype,
    ) -> tuple[BoxMAP, list[tuple[Any, Any, Any, Any]]]:
        """This rank's metric over its batches, and its first pictures with what was found in them."""
        metric = self.metric()
        shown: list[tuple[Any, Any, Any, Any]] = []
        fused = fuse(copy.deepcopy(model)).eval()
        with torch.inference_mode(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            for batch in batches:
                decoded = fused.detect.decode(fused(to_device(batch.images, device))).cpu()
                pads = batch.pads.tolist()
                for i, image_id in enumerate(batch.ids.tolist()):
                    height, width = batch.shapes[i]
                    found = select(decoded[i])
                    boxes = to_original(found.boxes, pads[i], height, width).numpy()
                    scores, classes = found.scores.numpy(), found.classes.numpy()
                    labels = dataset.labels(image_id)
                    truth = pixel_corners(labels[:, 1:], height, width)
                    metric.update(image_id, boxes, scores, classes, truth, labels[:, 0])
                    if len(shown) < SHOWN:
                        sure = scores >= SHOWN_CONFIDENCE
                        shown.append((dataset.image(image_id), boxes[sure], scores[sure], classes[sure]))
        return metric, shown


def prepare(batch: Batch, loss: Loss, device: torch.device) -> Prepared:
    """A training batch on the device, its targets assigned."""
    images = to_device(batch.images, device)
    b, _, height, width = images.shape
    targets = batch.targets.to(device, non_blocking=True)
    return Prepared(images, loss.assign(targets, b, height, width))


def to_device(images: Tensor, device: torch.device) -> Tensor:
    """uint8 (b, h, w, 3) -> float (b, 3, h, w) in 0..1 on the device; the permuted view is channels last for free."""
    return images.to(device, non_blocking=True).permute(0, 3, 1, 2).float().div_(255)


def select(decoded: Tensor) -> Detections:
    """The detections of one picture, from (n, 5 + nc) decoded outputs: confidence, then NMS per class.

    A box may be found for several classes. Score = objectness * class probability.
    """
    decoded = decoded[decoded[:, 4] > CONFIDENCE]
    scores = decoded[:, 4:5] * decoded[:, 5:]
    row, cls = (scores > CONFIDENCE).nonzero(as_tuple=True)
    score = scores[row, cls]
    if len(score) > MAX_CANDIDATES:
        score, best = score.topk(MAX_CANDIDATES)
        row, cls = row[best], cls[best]
    centre, half = decoded[row, :2], decoded[row, 2:4] / 2
    boxes = torch.cat((centre - half, centre + half), 1)
    keep = batched_nms(boxes, score, cls, NMS_IOU)[:MAX_DETECTIONS]
    return Detections(boxes[keep], score[keep], cls[keep])


def to_original(boxes: Tensor, pad: list[float], height: int, width: int) -> Tensor:
    """Boxes (n, 4) of a letterboxed picture in the original's pixels; `pad` is (scale, pad_x, pad_y)."""
    scale, pad_x, pad_y = pad
    moved = (boxes - boxes.new_tensor([pad_x, pad_y, pad_x, pad_y])) / scale
    return torch.minimum(moved.clamp(min=0), moved.new_tensor([width, height, width, height]))


def pixel_corners(boxes: Any, height: int, width: int) -> Any:
    """Normalised cx, cy, w, h (n, 4) -> x1, y1, x2, y2 in pixels, as NumPy arrays."""
    centre, half = boxes[:, :2], boxes[:, 2:4] / 2
    return np.concatenate((centre - half, centre + half), 1) * np.array([width, height, width, height])
