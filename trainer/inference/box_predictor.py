"""Predictor of a detector: finds boxes."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.data.augment.paint import letterbox
from trainer.data.dataset import Image
from trainer.detectors import Detections, Limits, Parts
from trainer.detectors.detector import Detector, to_original
from trainer.inference.formats import write_labels
from trainer.inference.predictors import Prediction, Predictor, drawn_scale
from trainer.inference.sources import Frame
from trainer.inference.trained import build_trained
from trainer.plots import draw_boxes
from trainer.weights.checkpoint import Checkpoint


class BoxPredictor(Predictor):
    """Weights of a detector."""

    def __init__(
        self, content: Checkpoint, weights: str, device: torch.device, dtype: torch.dtype, cfg: str
    ) -> None:
        super().__init__(content, weights, device, dtype, cfg)
        trained = build_trained(content, weights, cfg)
        self._parts = trained.parts
        self.stride = trained.stride
        self._detector = Detector(trained.model, trained.parts, device, dtype, Limits())

    def __call__(self, frame: Frame, imgsz: int, limits: Limits) -> Prediction:
        """Find boxes."""
        self._detector.limits = limits
        found = detect_in(self._detector, frame.image, imgsz, self._parts)
        scores = found.scores.numpy()
        boxes = found.boxes.numpy()
        return self.prediction(frame, found.classes.numpy(), scores=scores, boxes=boxes)

    def entries(self, found: Prediction) -> dict[str, Any]:
        """Return the boxes."""
        rows = zip(
            found.boxes.tolist(), found.scores.tolist(), found.classes.tolist(), found.names, strict=True
        )
        boxes = [
            {"class": c, "name": name, "score": round(score, 6), "xyxy": [round(v, 2) for v in box]}
            for box, score, c, name in rows
        ]
        return {"boxes": boxes}

    def draw(self, found: Prediction) -> Image:
        """Draw the boxes on the image, in place."""
        draw_boxes(found.rgb, found.boxes, found.scores, found.classes, self.names, drawn_scale(found.rgb))
        return found.rgb

    def summary(self, counts: Counter[int]) -> str:
        """Return the number of boxes of each class."""
        return super().summary(counts) if counts else "no boxes"

    def write(self, found: Prediction, folder: Path, stem: str, *, with_score: bool) -> None:
        """Write the boxes as labels in YOLO's format."""
        path = folder / "labels" / f"{stem}.txt"
        write_labels(path, found.boxes, found.scores, found.classes, found.rgb.shape[:2], with_score)


def detect_in(detector: Detector, image: Image, imgsz: int, parts: Parts) -> Detections:
    """Return the detections of an image in its pixels.

    The image is padded to the next multiple of the stride, or to a square if the model needs one.
    """
    height, width = image.shape[:2]
    scale = imgsz / max(height, width)
    sides = [math.ceil(max(1, round(side * scale)) / parts.stride) * parts.stride for side in (height, width)]
    if parts.needs_squares:
        sides = [max(sides)] * 2
    boxed = np.empty((*sides, 3), np.uint8)
    pad = letterbox(image, imgsz, boxed)
    (found,) = detector(torch.from_numpy(boxed)[None])
    return Detections(to_original(found.boxes, list(pad), height, width), found.scores, found.classes)
