"""Segmentation as a task: a class for every pixel, by torchvision's models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.config import Settings, gathered
from trainer.data.masked import open_masked
from trainer.data.masked_loader import MaskedBatch, MaskedLoader, MaskedValLoader
from trainer.errors import TrainerError
from trainer.losses import Loss
from trainer.losses.segmentation import SegmentationLoss
from trainer.metrics.overlap import Confusion, Overlap
from trainer.metrics.table import overlap_text
from trainer.models.classifier import freeze_parts
from trainer.models.segmenter import Segmenter, build_segmenter
from trainer.tasks.classification import refuse_others
from trainer.tasks.inference import to_device
from trainer.tasks.own_weights import OWN_WEIGHTS, own_weights
from trainer.weights import checkpoint

DEFAULT_CFG = "lraspp_mobilenet_v3_large"  # small enough for a CPU
SHOWN = 9  # validation pictures that are kept for the picture of predictions
STRIDE = 16  # pixels that the coarsest normalised map's cells stand for
LEAST_SIDE = 64
_TABLE_CLASSES = 25  # of more classes, the table at the end would push the rest off the screen
_HYP: tuple[str, ...] = ("lr0", "lrf", "momentum", "weight_decay", "nbs", "ema_tau", "warmup_epochs", "warmup_momentum")
_HYP += ("warmup_bias_lr", "label_smoothing", "scale", "flipud", "fliplr")


class Segmentation:
    """Trains a torchvision model on pictures with a class for every pixel."""

    kind = "segment"
    headlines: Mapping[str, str] = {"miou": "mIoU", "accuracy": "pixel accuracy"}
    columns: tuple[str, ...] = ("miou", "accuracy")
    terms: tuple[str, ...] = SegmentationLoss.terms
    least_side = LEAST_SIDE

    def __init__(self, settings: Settings) -> None:
        self._settings = s = settings
        refuse_others(s, _HYP)
        if s.hyp.scale >= 1:
            raise TrainerError(
                f"--hyp: scale is {s.hyp.scale:g}, it must be below 1", "0.5 is from half to one and a half"
            )
        self._weights: Mapping[str, Any] | None = None
        if s.weights and s.weights != OWN_WEIGHTS:
            self._weights = checkpoint.load(s.weights)
            checkpoint.check_task(self._weights, "segment", s.weights)
        self.cfg = {"torchvision": s.cfg or (self._weights["cfg"]["torchvision"] if self._weights else DEFAULT_CFG)}
        self.stride = STRIDE
        self.train_set, self.val_set = open_masked(s.data, s.imgsz)
        self.names = self.train_set.names
        self.left_out: list[Any] = []

    def build(self, say: Callable[[str], None]) -> Segmenter:
        """The network for this data's classes, with the tensors of --weights that fit it."""
        s, name = self._settings, self.cfg["torchvision"]
        model = build_segmenter(name, len(self.names))
        if model.pools:
            self.stride = s.imgsz
        if s.weights:
            state = self._weights["ema"] if self._weights else own_weights(name, s.imgsz)
            fit, of = checkpoint.transfer(model, state, s.weights)
            say(f"weights from {s.weights}: {fit}/{of} tensors")
        return model

    def freeze(self, model: Segmenter, layers: Sequence[int]) -> int:
        """Keep the network's parts with these numbers as they are; -1 means all but the head."""
        return freeze_parts(model, layers)

    def fit(self, model: Segmenter) -> str:
        """Nothing: there are no anchors."""
        return ""

    def loss_of(self, model: Segmenter) -> Loss:
        """Cross-entropy of every pixel."""
        return SegmentationLoss(self._settings.hyp.label_smoothing)

    def weight(self, images: Tensor) -> Tensor:
        """One over the batches that are gathered: the mean of them all is what is descended."""
        return torch.full_like(images, 1 / gathered(self._settings.hyp, self._settings.batch))

    def train_loader(self, share: Mapping[str, Any]) -> MaskedLoader:
        """Augmented batches."""
        s = self._settings
        own: dict[str, Any] = {"imgsz": s.imgsz, "batch": s.batch, "seed": s.seed, "hyp": s.hyp, "epochs": s.epochs}
        return MaskedLoader(self.train_set, **own, **share)

    def val_loader(self, share: Mapping[str, Any]) -> MaskedValLoader:
        """The validation pictures, as many at a time as a rank trains on."""
        batch = -(-self._settings.batch // share["world"])
        return MaskedValLoader(self.val_set, imgsz=self._settings.imgsz, batch=batch, **share)

    def move(self, batch: MaskedBatch, device: torch.device) -> tuple[Tensor, Tensor]:
        """A training batch on the device: its pictures in 0..1, and its masks."""
        return to_device(batch.images, device), batch.masks.to(device, non_blocking=True)

    def metric(self) -> Confusion:
        """An empty metric."""
        return Confusion(self.names)

    def evaluate(
        self, model: Segmenter, batches: Iterable[MaskedBatch], device: torch.device, dtype: torch.dtype
    ) -> tuple[Confusion, list[Any]]:
        """This rank's metric over its batches, and its first pictures with what was found in them.

        A picture that is shown is (uint8 (h, w, 3) RGB, its mask (h, w), the found classes (h, w)).
        """
        metric, shown = self.metric(), list[Any]()
        model.eval()
        with torch.inference_mode():
            for batch in batches:
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    logits = model(to_device(batch.images, device))
                found = logits.argmax(1).to(torch.uint8)
                metric.update(found, batch.masks.to(device))
                for k in range(min(len(batch.ids), SHOWN - len(shown))):
                    shown.append((batch.images[k].numpy(), batch.masks[k].numpy(), found[k].cpu().numpy()))
        return metric, shown

    def table(self, scores: Overlap) -> str:
        """The IoU of every class, where these are few."""
        return overlap_text(scores) if len(scores.per_class) <= _TABLE_CLASSES else ""

    def validation(self, folder: str) -> list[str]:
        """The command line that scores best.pt anew."""
        return ["trainer", "val", "--weights", f"{folder}/best.pt", "--data", self._settings.data]
