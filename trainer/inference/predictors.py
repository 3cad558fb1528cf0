"""Predictors: what weights find in an image. A task's predictor is a class and a line in PREDICTORS."""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer.data.dataset import Image
from trainer.detectors import Limits
from trainer.inference.sources import Frame
from trainer.weights.checkpoint import Checkpoint

_DRAWN_PX = 700  # side of an image that gets lines and text of size 1


class Kind(NamedTuple):
    """Predictor of a task."""

    path: str  # of its class, which is imported when needed: torchvision's models and transforms load slowly
    options: frozenset[str] = frozenset()  # settings of `trainer predict` that have no effect on other tasks


PREDICTORS = {
    "detect": Kind(
        "trainer.inference.box_predictor:BoxPredictor",
        frozenset({"cfg", "conf", "iou", "max_det", "classes", "save_txt", "save_conf"}),
    ),
    "classify": Kind("trainer.inference.torchvision_predictors:ClassPredictor"),
    "segment": Kind("trainer.inference.torchvision_predictors:MaskPredictor", frozenset({"save_masks"})),
}
TASK_OPTIONS = frozenset[str]().union(*(kind.options for kind in PREDICTORS.values()))


@dataclass(frozen=True)
class Prediction:
    """What a model found in an image, or in a video's frame; arrays of numpy.

    A detector's entries are its boxes, a classifier's all classes, both by falling score. A segmentation model's are
    the classes in the mask, the largest first.
    """

    source: str  # path of the image or video; "" for an array
    frame: int | None  # number of the video's frame, from 1
    rgb: Image  # the image, uint8 (h, w, 3) in RGB
    names: list[str]  # (n,), class names
    classes: Any  # int64 (n,)
    scores: Any = None  # float32 (n,), 0 to 1; None for a segmentation model
    boxes: Any = None  # float32 (n, 4), x1 y1 x2 y2 in pixels of the image; only a detector's
    mask: Any = None  # uint8 (h, w), the class of each pixel; only a segmentation model's


class Predictor(ABC):
    """Weights of a task on a device; how the command shows what they find."""

    stride = 32  # image sides must be multiples of it

    def __init__(
        self, content: Checkpoint, weights: str, device: torch.device, dtype: torch.dtype, cfg: str
    ) -> None:
        """Build the model of a checkpoint's `content`, from the file `weights`."""
        self.names: list[str] = list(content["names"])
        self.imgsz = int(content["imgsz"])
        self._device = device
        self._dtype = dtype

    @abstractmethod
    def __call__(self, frame: Frame, imgsz: int, limits: Limits) -> Prediction:
        """Predict on an image whose longer side is scaled to `imgsz` px."""

    @abstractmethod
    def entries(self, found: Prediction) -> dict[str, Any]:
        """Return what JSON has of a prediction."""

    @abstractmethod
    def draw(self, found: Prediction) -> Image:
        """Return the image with the prediction drawn on it."""

    def counted(self, found: Prediction) -> list[int]:
        """Return the classes that the summary counts for an image."""
        return [int(c) for c in found.classes]

    def summary(self, counts: Counter[int]) -> str:
        """Return the counted classes of several images, for example `3 cat, 1 dog`."""
        return ", ".join(f"{counts[c]} {self.names[c]}" for c in sorted(counts)) or "nothing found"

    def text(self, found: Prediction) -> str:
        """Return what was found in an image."""
        return self.summary(Counter(self.counted(found)))

    def write(self, found: Prediction, folder: Path, stem: str, *, with_score: bool) -> None:
        """Write the file of --save-txt or --save-masks for an image."""
        raise NotImplementedError("no option of this task asks for it")

    def prediction(self, frame: Frame, classes: Any, **more: Any) -> Prediction:
        """Return a prediction with the names of its classes."""
        names = [self.names[c] for c in classes.tolist()]
        return Prediction(frame.source, frame.number, frame.image, names, classes, **more)


def drawn_scale(image: Image) -> float:
    """Return the size of lines and text on an image."""
    return max(0.8, float(max(image.shape[:2])) / _DRAWN_PX)
