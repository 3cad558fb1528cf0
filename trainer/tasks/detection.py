"""Detection as a task: boxes, a YOLO model, its loss and its mean average precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.config import Hyp, Settings, check_data_path
from trainer.data import Batch, Dataset, TrainLoader, ValBatch, ValLoader, left_out, open_dataset
from trainer.errors import TrainerError
from trainer.losses import Loss
from trainer.losses.aligned import AlignedLoss
from trainer.losses.detection import DetectionLoss
from trainer.metrics import BoxMAP, BoxScores
from trainer.metrics.table import scores_text
from trainer.models.heads import Detect
from trainer.models.yolo import Yolo, build_yolo, freeze, load_cfg
from trainer.tasks.autoanchor import fit_anchors
from trainer.tasks.inference import Detections, Detector, Limits, to_device, to_original
from trainer.weights import checkpoint

DEFAULT_CFG = "yolov5n.yaml"
LOSSES: dict[str, type[Loss]] = {"Detect": DetectionLoss, "DetectDFL": AlignedLoss}
SHOWN = 12  # validation pictures that are kept for the picture of predictions
SHOWN_CONFIDENCE = 0.25  # mAP needs the doubtful boxes too, a picture does not
_TABLE_CLASSES = 25  # of more classes, the table at the end would push the rest off the screen

Shown = tuple[Any, Any, Any, Any]  # a picture uint8 (h, w, 3) RGB, boxes (n, 4) xyxy in px, scores (n,), classes (n,)


class Detection:
    """Trains a YOLO model on boxes."""

    kind = "detect"
    headlines: Mapping[str, str] = {"map50": "mAP50", "map": "mAP50-95"}
    columns: tuple[str, ...] = ("precision", "recall", "map50", "map")

    def __init__(self, settings: Settings) -> None:
        self._settings = s = settings
        for key in ("cutmix", "randaugment", "pad"):
            if getattr(s.hyp, key) != getattr(Hyp(), key):
                raise TrainerError(f"--hyp: {key} has no effect on boxes", "leave it out, or use --task classify")
        check_data_path(s.data)
        self._weights = checkpoint.load(s.weights) if s.weights else None
        if self._weights:
            checkpoint.check_task(self._weights, "detect", s.weights)
        self._where = s.cfg or (s.weights if self._weights else DEFAULT_CFG)
        self.cfg = self._weights["cfg"] if self._weights and not s.cfg else load_cfg(self._where)
        how: dict[str, Any] = {"imgsz": s.imgsz, "single_cls": s.single_cls, "allow_bad_labels": s.allow_bad_labels}
        self.train_set = open_dataset(s.data, "train", **how)
        self.val_set = open_dataset(s.data, "val", **how)
        self.left_out: list[Any] = left_out(self.train_set, self.val_set)
        self.names = self.train_set.names
        self._head = "" if "import" in self.cfg else self.cfg["head"][-1][2]  # a user's own model has none before
        self.stride = self.least_side = 0  # known once the model is built

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the loss's terms; the model's head, a model file's last row, decides on the loss."""
        return LOSSES[self._head].terms

    @property
    def close_mosaic(self) -> float:
        """How many of a run's last epochs are without mosaic; the anchor-free head is tuned for 10."""
        if self._settings.hyp.close_mosaic is not None:
            return self._settings.hyp.close_mosaic
        return 10 if self.terms == AlignedLoss.terms else 0

    def build(self, say: Callable[[str], None]) -> Yolo:
        """The network for this data's classes, with the tensors of --weights that fit it."""
        s = self._settings
        model = build_yolo(self.cfg, nc=len(self.names), where=self._where)
        self._head = "Detect" if isinstance(model.detect, Detect) else "DetectDFL"
        self.stride = max(model.detect.strides)
        self.least_side = 2 * self.stride
        if self._weights:
            taken, kept = self._weights["ema"], other_anchors(model, self._weights["ema"]) if s.cfg else ()
            fit, of = checkpoint.transfer(model, {k: v for k, v in taken.items() if k not in kept}, s.weights)
            say(
                f"weights from {s.weights}: {fit}/{of} tensors"
                + (f"; the anchors are those of {self._where}" if kept else "")
            )
        return model

    def freeze(self, model: Yolo, layers: Sequence[int]) -> int:
        """Keep the layers with these numbers as they are; -1 means all but the head."""
        return freeze(model, range(len(model.model) - 1) if tuple(layers) == (-1,) else layers)

    def fit(self, model: Yolo) -> str:
        """Other anchors where the model's fit too few of the boxes."""
        s = self._settings
        self.cfg, said = fit_anchors(
            model, self.cfg, self.train_set, imgsz=s.imgsz, anchor_t=s.hyp.anchor_t, seed=s.seed
        )
        return said

    def loss_of(self, model: Yolo) -> Loss:
        """The loss for a model that is on its device; its head decides which."""
        return loss_of(model, self._settings.hyp, self._settings.imgsz)

    def weight(self, images: Tensor) -> Tensor:
        """The pictures: YOLOv5's loss is the batch's mean times its pictures."""
        return images

    def train_loader(self, share: Mapping[str, Any]) -> TrainLoader:
        """Augmented batches."""
        s = self._settings
        return TrainLoader(
            self.train_set,
            imgsz=s.imgsz,
            batch=s.batch,
            seed=s.seed,
            hyp=s.hyp,
            epochs=s.epochs,
            close_mosaic=self.close_mosaic,
            multi_scale=s.multi_scale,
            rect=s.rect,
            image_weights=s.image_weights,
            **share,
        )

    def val_loader(self, share: Mapping[str, Any]) -> ValLoader:
        """Letterboxed batches."""
        return ValLoader(self.val_set, imgsz=self._settings.imgsz, batch=self._settings.batch, **share)

    def move(self, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
        """A training batch on the device: its pictures in 0..1, and its targets."""
        return to_device(batch.images, device), batch.targets.to(device, non_blocking=True)

    def metric(self) -> BoxMAP:
        """An empty metric; those of several ranks can be merged."""
        return BoxMAP(self.names)

    def evaluate(
        self, model: Yolo, batches: Iterable[ValBatch], device: torch.device, dtype: torch.dtype
    ) -> tuple[BoxMAP, list[Any]]:
        """This rank's metric over its batches, and its first pictures with what was found in them."""
        metric, shown = self.metric(), list[Shown]()
        for image_id, found in detect(Detector(model, device, dtype, Limits()), batches):
            count(metric, self.val_set, image_id, found)
            if len(shown) < SHOWN:
                shown.append(sure_of(self.val_set, image_id, found))
        return metric, shown

    def table(self, scores: BoxScores) -> str:
        """Precision, recall and mAP of every class, where these are few."""
        return scores_text(scores) if len(scores.per_class) <= _TABLE_CLASSES else ""

    def validation(self, folder: str) -> list[str]:
        """The command line that scores best.pt anew, with the table and the curves."""
        s = self._settings
        command = ["trainer", "val", "--weights", f"{folder}/best.pt", "--data", s.data]
        command += ["--cfg", s.cfg] if "import" in self.cfg else []
        command += ["--single-cls"] if s.single_cls else []
        return command + (["--allow-bad-labels"] if s.allow_bad_labels else [])


def loss_of(model: Yolo, hyp: Hyp, imgsz: int) -> Loss:
    """The loss that goes with a model's head, for a model that is on its device."""
    head = model.detect
    if isinstance(head, Detect):
        return DetectionLoss(head.anchors, head.strides, head.nc, hyp, imgsz)
    return AlignedLoss(head.strides, head.bins, hyp)


def other_anchors(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """The names of the model's anchors, where those of `state` are others of the same number."""
    own = {k: v for k, v in model.state_dict().items() if k.endswith(".anchors") and k in state}
    return [k for k, v in own.items() if v.shape == state[k].shape and not torch.allclose(v, state[k].to(v), rtol=1e-3)]


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


def pixel_corners(boxes: Any, height: int, width: int) -> Any:
    """Normalised cx, cy, w, h (n, 4) -> x1, y1, x2, y2 in pixels, as NumPy arrays."""
    centre, half = boxes[:, :2], boxes[:, 2:4] / 2
    return np.concatenate((centre - half, centre + half), 1) * np.array([width, height, width, height])
