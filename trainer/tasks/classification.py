"""Classification as a task: one class for a whole picture, by any of torchvision's models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.config import Settings, gathered, preset_for
from trainer.data.labelled import open_labelled
from trainer.data.labelled_loader import LabelledBatch, LabelledLoader, LabelledValLoader, mixed
from trainer.errors import TrainerError
from trainer.losses import Loss
from trainer.losses.classification import ClassificationLoss
from trainer.metrics.accuracy import Accuracy, TopK
from trainer.metrics.table import accuracy_text
from trainer.models.classifier import Classifier, build_classifier, freeze_parts
from trainer.tasks.inference import to_device
from trainer.tasks.own_weights import OWN_WEIGHTS, own_weights
from trainer.weights import checkpoint

DEFAULT_CFG = "resnet18"
SHOWN = 12  # validation pictures that are kept for the picture of predictions
STRIDE = 32  # pixels that the last map's cells stand for in nearly all of torchvision's models
_MAGNITUDES = 30  # the strongest of torchvision's 31
_TABLE_CLASSES = 25  # of more classes, the table at the end would push the rest off the screen
# Settings that only boxes have, with what they are when nobody asked for them.
_BOXES_ONLY = {"multi_scale": False, "rect": False, "image_weights": False, "single_cls": False, "cache": ""}
_BOXES_ONLY |= {"allow_bad_labels": False, "autoanchor": True}
_HYP: tuple[str, ...] = ("lr0", "lrf", "momentum", "weight_decay", "nbs", "ema_tau", "warmup_epochs", "warmup_momentum")
_HYP += ("warmup_bias_lr", "label_smoothing", "flipud", "fliplr", "mixup", "cutmix", "randaugment", "pad")


def refuse_others(s: Settings, keys: Sequence[str]) -> None:
    """An error for a setting that only boxes have, and for a hyper-parameter that is none of the task's `keys`."""
    for field, unset in _BOXES_ONLY.items():
        if getattr(s, field) != unset:
            option = "--noautoanchor" if field == "autoanchor" else "--" + field.replace("_", "-")
            raise TrainerError(f"{option} is for boxes, and this is --task {s.task}", "leave it out")
    usual = dataclasses.asdict(preset_for(s.data, s.task).hyp)
    others = [k for k, v in dataclasses.asdict(s.hyp).items() if k not in keys and v != usual[k]]
    if others:
        raise TrainerError(
            f"--hyp: {', '.join(others)}: without effect on --task {s.task}", f"its keys are {', '.join(keys)}"
        )


class Classification:
    """Trains a torchvision model on pictures with one class each."""

    kind = "classify"
    headlines: Mapping[str, str] = {"top1": "top-1", "top5": "top-5"}
    columns: tuple[str, ...] = ("top1", "top5")
    terms: tuple[str, ...] = ClassificationLoss.terms
    stride = STRIDE

    def __init__(self, settings: Settings) -> None:
        self._settings = s = settings
        refuse_others(s, _HYP)
        if s.hyp.mixup + s.hyp.cutmix > 1:
            raise TrainerError("--hyp: mixup and cutmix are shares of the steps, together at most 1")
        if s.hyp.randaugment % 1 or not 0 <= s.hyp.randaugment <= _MAGNITUDES:
            raise TrainerError(
                f"--hyp: randaugment is {s.hyp.randaugment:g}, it must be a whole number from 0 to {_MAGNITUDES}",
                "9 is usual, 0 is off",
            )
        self._weights: Mapping[str, Any] | None = None
        if s.weights and s.weights != OWN_WEIGHTS:
            self._weights = checkpoint.load(s.weights)
            checkpoint.check_task(self._weights, "classify", s.weights)
        self.cfg = {"torchvision": s.cfg or (self._weights["cfg"]["torchvision"] if self._weights else DEFAULT_CFG)}
        self.train_set, self.val_set = open_labelled(s.data, "train"), open_labelled(s.data, "val")
        self.names = self.train_set.names
        if self.val_set.names != self.names:
            odd = sorted(set(self.names) ^ set(self.val_set.names))
            raise TrainerError(
                f"--data {s.data}: training and validation have not the same classes: {', '.join(odd[:5])}",
                "each needs a folder for every class",
            )
        self.left_out: list[Any] = []
        self.least_side = s.imgsz

    def build(self, say: Callable[[str], None]) -> Classifier:
        """The network for this data's classes, with the tensors of --weights that fit it."""
        s, name = self._settings, self.cfg["torchvision"]
        model = build_classifier(name, len(self.names), s.imgsz)
        if s.weights:
            state = self._weights["ema"] if self._weights else own_weights(name, s.imgsz)
            fit, of = checkpoint.transfer(model, state, s.weights)
            say(f"weights from {s.weights}: {fit}/{of} tensors")
        return model

    def freeze(self, model: Classifier, layers: Sequence[int]) -> int:
        """Keep the network's parts with these numbers as they are; -1 means all but the head."""
        return freeze_parts(model, layers)

    def fit(self, model: Classifier) -> str:
        """Nothing: there are no anchors."""
        return ""

    def loss_of(self, model: Classifier) -> Loss:
        """Cross-entropy."""
        return ClassificationLoss(self._settings.hyp.label_smoothing)

    def weight(self, images: Tensor) -> Tensor:
        """One over the batches that are gathered: the mean of them all is what is descended."""
        return torch.full_like(images, 1 / gathered(self._settings.hyp, self._settings.batch))

    def train_loader(self, share: Mapping[str, Any]) -> LabelledLoader:
        """Augmented batches."""
        s = self._settings
        own: dict[str, Any] = {"imgsz": s.imgsz, "batch": s.batch, "seed": s.seed, "hyp": s.hyp, "epochs": s.epochs}
        return LabelledLoader(self.train_set, **own, **share)

    def val_loader(self, share: Mapping[str, Any]) -> LabelledValLoader:
        """The validation pictures, as many at a time as a rank trains on."""
        batch = -(-self._settings.batch // share["world"])
        return LabelledValLoader(self.val_set, imgsz=self._settings.imgsz, batch=batch, **share)

    def move(self, batch: LabelledBatch, device: torch.device) -> tuple[Tensor, Tensor]:
        """A training batch on the device: its pictures in 0..1, and its classes, mixed where they are to be."""
        images, labels = to_device(batch.images, device), batch.labels.to(device, non_blocking=True)
        if batch.mix_seed >= 0:
            images, labels = mixed(images, labels, len(self.names), batch.mix_seed, self._settings.hyp)
            images = images.contiguous(memory_format=torch.channels_last)
        return images, labels

    def metric(self) -> TopK:
        """An empty metric."""
        return TopK(self.names)

    def evaluate(
        self, model: Classifier, batches: Iterable[LabelledBatch], device: torch.device, dtype: torch.dtype
    ) -> tuple[TopK, list[Any]]:
        """This rank's metric over its batches, and its first pictures, from all classes, with what they were taken for.

        A picture that is shown is (uint8 (h, w, 3) RGB, class, found class, its probability).
        """
        metric, shown = self.metric(), list[Any]()
        model.eval()
        with torch.inference_mode():
            for batch in batches:
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    logits = model(to_device(batch.images, device)).float().cpu()
                metric.update(logits, batch.labels)
                sure, found = logits.softmax(1).max(1)
                for k in range(len(batch.ids)):
                    seen = sum(s[1] == int(batch.labels[k]) for s in shown)
                    if len(shown) < SHOWN and seen <= len(shown) // len(self.names):
                        shown.append((batch.images[k].numpy(), int(batch.labels[k]), int(found[k]), float(sure[k])))
        return metric, shown

    def table(self, scores: Accuracy) -> str:
        """Precision and recall of every class, where these are few."""
        return accuracy_text(scores) if len(scores.per_class) <= _TABLE_CLASSES else ""

    def validation(self, folder: str) -> list[str]:
        """The command line that scores best.pt anew."""
        return ["trainer", "val", "--weights", f"{folder}/best.pt", "--data", self._settings.data]
