"""Detection as a task: the model, its loss and its metric, for the loop to put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.config import Hyp
from trainer.data import Batch, Dataset, ValBatch
from trainer.losses import Loss
from trainer.losses.aligned import AlignedLoss
from trainer.losses.detection import DetectionLoss
from trainer.metrics import BoxMAP
from trainer.models.heads import Detect
from trainer.models.yolo import Yolo, build_yolo
from trainer.tasks.inference import Detections, Detector, Limits, to_device, to_original

LOSSES: dict[str, type[Loss]] = {"Detect": DetectionLoss, "DetectDFL": AlignedLoss}
SHOWN = 12  # validation pictures that are kept for the picture of predictions
SHOWN_CONFIDENCE = 0.25  # mAP needs the doubtful boxes too, a picture does not

Shown = tuple[Any, Any, Any, Any]  # a picture uint8 (h, w, 3) RGB, boxes (n, 4) xyxy in px, scores (n,), classes (n,)


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
        self._head = "" if "import" in cfg else cfg["head"][-1][2]  # a user's own model has none before it is built

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the loss's terms; the model's head, a model file's last row, decides on the loss."""
        return LOSSES[self._head].terms

    @property
    def close_mosaic(self) -> float:
        """How many of a run's last epochs are without mosaic; the anchor-free head is tuned for 10."""
        if self._hyp.close_mosaic is not None:
            return self._hyp.close_mosaic
        return 10 if self.terms == AlignedLoss.terms else 0

    def build(self) -> Yolo:
        """The untrained network for this data's classes."""
        model = build_yolo(self._cfg, nc=len(self.names), where=self._where)
        self._head = "Detect" if isinstance(model.detect, Detect) else "DetectDFL"
        return model

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
    ) -> tuple[BoxMAP, list[Shown]]:
        """This rank's metric over its batches, and its first pictures with what was found in them."""
        metric, shown = self.metric(), list[Shown]()
        for image_id, found in detect(Detector(model, device, dtype, Limits()), batches):
            count(metric, dataset, image_id, found)
            if len(shown) < SHOWN:
                shown.append(sure_of(dataset, image_id, found))
        return metric, shown


def detect(detector: Detector, batches: Iterable[ValBatch]) -> Iterator[tuple[int, Detections]]:
    """Each picture's number with what was found in it, in its own pixels."""
    for batch in batches:
        pads = batch.pads.tolist()
        for i, (image_id, found) in enumerate(zip(batch.ids.tolist(), detector(batch.images), strict=True)):
            height, width = batch.shapes[i]
            boxes = to_original(found.boxes, pads[i], height, width)
            yield image_id, dataclasses.replace(found, boxes=boxes)


def count(metric: BoxMAP, dataset: Dataset, image_id: int, found: Detections) -> None:
    """Add a picture with its ground truth to the metric."""
    labels = dataset.labels(image_id)
    truth = pixel_corners(labels[:, 1:], *dataset.size(image_id))
    metric.update(image_id, found.boxes, found.scores, found.classes, truth, labels[:, 0])


def sure_of(dataset: Dataset, image_id: int, found: Detections) -> Shown:
    """A picture with those of its detections that are worth showing."""
    sure = found.scores >= SHOWN_CONFIDENCE
    boxes, scores, classes = (part[sure].numpy() for part in (found.boxes, found.scores, found.classes))
    return dataset.image(image_id), boxes, scores, classes


def prepare(batch: Batch, loss: Loss, device: torch.device) -> Prepared:
    """A training batch on the device, its targets assigned."""
    images = to_device(batch.images, device)
    b, _, height, width = images.shape
    targets = batch.targets.to(device, non_blocking=True)
    return Prepared(images, loss.assign(targets, b, height, width))


def pixel_corners(boxes: Any, height: int, width: int) -> Any:
    """Normalised cx, cy, w, h (n, 4) -> x1, y1, x2, y2 in pixels, as NumPy arrays."""
    centre, half = boxes[:, :2], boxes[:, 2:4] / 2
    return np.concatenate((centre - half, centre + half), 1) * np.array([width, height, width, height])
