"""Predictors of torchvision's models: classifiers score the classes, segmentation models give pixels a class."""

from abc import abstractmethod
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor

from trainer.data.batch import FILL
from trainer.data.dataset import Image
from trainer.data.loading.torchvision_loaders import Fit, val_transform
from trainer.detectors import Limits
from trainer.errors import TrainerError
from trainer.inference.predictors import Prediction, Predictor, drawn_scale
from trainer.inference.sources import Frame
from trainer.models.precision import as_input
from trainer.models.torchvision_nets import Classifier, build_classifier, build_segmenter
from trainer.plots import draw_class
from trainer.plots.segment import coloured
from trainer.weights import checkpoint_file
from trainer.weights.checkpoint import Checkpoint

_MOST_CLASSES = 5  # of a classifier's JSON


class _TorchvisionPredictor(Predictor):
    """Weights of one of torchvision's networks."""

    def __init__(
        self, content: Checkpoint, weights: str, device: torch.device, dtype: torch.dtype, cfg: str
    ) -> None:
        super().__init__(content, weights, device, dtype, cfg)
        self._weights = weights
        described = content["cfg"]
        if not isinstance(described, dict) or not isinstance(described.get("torchvision"), str):
            raise TrainerError(
                f"--weights {weights}: it does not name a torchvision model", "take a best.pt or last.pt"
            )
        net = self._build(described["torchvision"])
        checkpoint_file.transfer_all(net, content["ema"], weights)
        self._net = net.eval().to(device)

    @abstractmethod
    def _build(self, name: str) -> Classifier:
        """Return the untrained network."""

    @torch.inference_mode()
    def _logits(self, image: Tensor) -> Tensor:
        """uint8 (3, h, w) -> float32 logits of the image, on the CPU."""
        batch = image.permute(1, 2, 0)[None].to(self._device)
        try:
            with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
                logits: Tensor = self._net(as_input(batch))
        except AssertionError as error:  # a vision transformer takes images of one side
            what = f"--imgsz {image.shape[-1]}: the network does not accept such images: {error}"
            raise TrainerError(what, f"it was trained with --imgsz {self.imgsz}") from None
        return logits[0].float().cpu()


class ClassPredictor(_TorchvisionPredictor):
    """Weights of a classifier."""

    def _build(self, name: str) -> Classifier:
        return build_classifier(name, len(self.names), self.imgsz)

    def __call__(self, frame: Frame, imgsz: int, limits: Limits) -> Prediction:
        """Score all classes; the image is scaled and cropped as in the validation of a training."""
        image = val_transform(imgsz)(torch.from_numpy(frame.image).permute(2, 0, 1))
        scores, classes = self._logits(image).softmax(0).sort(descending=True, stable=True)
        return self.prediction(frame, classes.numpy(), scores=scores.numpy())

    def entries(self, found: Prediction) -> dict[str, Any]:
        """Return the classes with the highest scores."""
        rows = zip(found.classes.tolist(), found.names, found.scores.tolist(), strict=True)
        classes = [{"class": c, "name": name, "score": round(score, 6)} for c, name, score in rows]
        return {"classes": classes[:_MOST_CLASSES]}

    def draw(self, found: Prediction) -> Image:
        """Draw the class with the highest score on the image, in place."""
        draw_class(
            found.rgb, self.names, int(found.classes[0]), float(found.scores[0]), drawn_scale(found.rgb)
        )
        return found.rgb

    def counted(self, found: Prediction) -> list[int]:
        """Return the class with the highest score."""
        return [int(found.classes[0])]

    def text(self, found: Prediction) -> str:
        """Return the class with the highest score, and the score."""
        return f"{found.names[0]} {found.scores[0]:.2f}"


class MaskPredictor(_TorchvisionPredictor):
    """Weights of a segmentation model."""

    def _build(self, name: str) -> Classifier:
        return build_segmenter(name, len(self.names))

    def __call__(self, frame: Frame, imgsz: int, limits: Limits) -> Prediction:
        """Find the class of each pixel; the image is scaled and padded as in the validation of a training."""
        small = Fit(imgsz)(torch.from_numpy(frame.image).permute(2, 0, 1))
        height, width = small.shape[1:]
        square = torch.full((3, imgsz, imgsz), FILL, dtype=torch.uint8)
        square[:, :height, :width] = small
        mask = _enlarged(self._logits(square)[:, :height, :width].numpy(), frame.image.shape[:2])
        pixels = np.bincount(mask.ravel(), minlength=len(self.names))
        classes = np.argsort(-pixels, kind="stable")[: np.count_nonzero(pixels)]
        return self.prediction(frame, classes, mask=mask)

    def entries(self, found: Prediction) -> dict[str, Any]:
        """Return the number of pixels of each class."""
        rows = zip(found.classes.tolist(), found.names, strict=True)
        return {
            "classes": [
                {"class": c, "name": name, "pixels": int((found.mask == c).sum())} for c, name in rows
            ]
        }

    def text(self, found: Prediction) -> str:
        """Return the share of each class of the image's pixels."""
        rows = zip(found.classes.tolist(), found.names, strict=True)
        return ", ".join(f"{name} {(found.mask == c).mean():.0%}" for c, name in rows)

    def draw(self, found: Prediction) -> Image:
        """Return the image with the colours of its classes, except class 0."""
        drawn: Image = coloured(found.rgb, found.mask)
        return drawn

    def write(self, found: Prediction, folder: Path, stem: str, *, with_score: bool) -> None:
        """Write the mask as a PNG file of class numbers, as `--task segment` reads them."""
        path = folder / "masks" / f"{stem}.png"
        path.parent.mkdir(exist_ok=True)
        checkpoint_file.write_bytes(path, cv2.imencode(".png", found.mask)[1].tobytes())


def _enlarged(logits: Any, size: tuple[int, int]) -> Any:
    """Return the class of each pixel of an image of `size` (h, w), uint8, from logits float32 (nc, small h, small w).

    One class is enlarged at a time: all logits of a large image could exhaust the memory.
    """
    height, width = size
    best = np.full(size, -np.inf, np.float32)
    mask = np.zeros(size, np.uint8)
    for c, small in enumerate(logits):
        values = cv2.resize(np.ascontiguousarray(small), (width, height), interpolation=cv2.INTER_LINEAR)
        mask[values > best] = c
        np.maximum(best, values, out=best)
    return mask
