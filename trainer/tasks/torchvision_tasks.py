"""Tasks of torchvision's models: classification, one class per image, and segmentation, one class per pixel."""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.config import Settings, hyp_keys, preset_for
from trainer.config.presets import gathered
from trainer.config.settings import option_of
from trainer.data.batch import TrainBatch
from trainer.data.dataset import NoImages
from trainer.data.formats.classification import open_classification
from trainer.data.formats.segmentation import open_segmentation
from trainer.data.loading.batch_sampler import BatchSpec
from trainer.data.loading.dataloader import EpochLoader, EvalLoader
from trainer.data.loading.torchvision_loaders import (
    ClassificationBatch,
    ClassificationCollate,
    SegmentationBatch,
    SegmentationCollate,
    mix_batch,
)
from trainer.distributed.comm import LoaderShare
from trainer.errors import TrainerError
from trainer.losses.criterion import Criterion, LossSums
from trainer.losses.cross_entropy import ClassificationLoss, SegmentationLoss
from trainer.metrics.confusion import Accuracy, Confusion, Overlap, TopK
from trainer.models.precision import as_input, size_of
from trainer.models.torchvision_nets import (
    OWN_WEIGHTS,
    Classifier,
    Segmenter,
    build_classifier,
    build_segmenter,
    own_weights,
)
from trainer.tasks import Evaluation, Task
from trainer.weights import checkpoint_file

# Settings of detection only.
_BOXES_ONLY = (
    *("augment_on", "multi_scale", "rect", "image_weights"),
    *("single_cls", "cache", "allow_bad_labels", "noautoanchor"),
)
_SHOWN_IMAGES, _SHOWN_MASKS = 12, 9  # validation images in the plot of predictions
_MAGNITUDES = 30  # the strongest of torchvision's 31


class TorchvisionTask(Task):
    """Training of a model of torchvision."""

    default_cfg: str
    loss_type: type[ClassificationLoss]
    collate_type: type[Any]

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        s = settings
        for field in _BOXES_ONLY:
            if getattr(s, field) != getattr(Settings, field):
                raise TrainerError(
                    f"{option_of(field)} is for boxes, but this is --task {s.task}", "leave it out"
                )
        usual = dataclasses.asdict(preset_for(s.data, s.task).hyp)
        changed = [k for k, v in dataclasses.asdict(s.hyp).items() if v != usual[k]]
        known = hyp_keys(self.kind)
        if others := [k for k in changed if k not in known]:
            what = f"--hyp: {', '.join(others)} has no effect on --task {s.task}"
            raise TrainerError(what, f"its keys are {', '.join(known)}")
        self.terms = self.loss_type.terms
        self._weights: Mapping[str, Any] | None = None
        self._resumed = checkpoint_file.resumed(s.resume) if s.weights else None
        if s.weights and s.weights != OWN_WEIGHTS and not self._resumed:
            self._weights = checkpoint_file.load(s.weights)
            checkpoint_file.check_task(self._weights, self.kind, s.weights)
        made = self._weights or self._resumed
        own = made["cfg"]["torchvision"] if made else self.default_cfg
        self.cfg = {"torchvision": s.cfg or own}

    @abstractmethod
    def network(self) -> Classifier:
        """Return the untrained network for the classes of the data."""

    def build(self, say: Callable[[str], None]) -> Classifier:
        """Return the network for the classes of the data, with the matching tensors of --weights."""
        s = self._settings
        model = self.network()
        if s.weights and not self._resumed:
            state = self._weights["ema"] if self._weights else own_weights(self.cfg["torchvision"], s.imgsz)
            fit, of = checkpoint_file.transfer(model, state, s.weights)
            say(f"weights from {s.weights}: {fit}/{of} tensors")
        return model

    def criterion(self) -> Criterion:
        """Return the cross-entropy."""
        hyp = self._settings.hyp
        return self.loss_type(hyp.label_smoothing, gathered(hyp, self._settings.batch))

    def train_loader(self, share: LoaderShare, device: torch.device) -> EpochLoader[TrainBatch]:
        """Return the loader of augmented batches."""
        s = self._settings
        collate = self.collate_type(self.train_set, s.imgsz, s.seed, s.hyp)
        sides = range(s.imgsz, s.imgsz + 1)
        return EpochLoader(collate, batch=s.batch, seed=s.seed, epochs=s.epochs, sides=sides, **share)

    def val_loader(self, share: LoaderShare) -> EvalLoader[Any]:
        """Return the loader of validation images, each on one rank, with the batch size of training."""
        side = self._settings.imgsz
        batch = -(-self._settings.batch // share["world"])
        mine = np.array_split(np.arange(len(self.val_set)), share["world"])[share["rank"]]
        specs = [BatchSpec(mine[k : k + batch], (side, side)) for k in range(0, len(mine), batch)]
        return EvalLoader(self.collate_type(self.val_set, side), specs, share["workers"], share["local_size"])

    def evaluate(
        self,
        model: Classifier,
        batches: Iterable[Any],
        device: torch.device,
        dtype: torch.dtype,
        criterion: Criterion | None = None,
    ) -> Evaluation:
        """Evaluate on this rank's batches."""
        metric = self.metric()
        shown = list[Any]()
        losses = LossSums()
        model.eval()
        with torch.inference_mode():
            for batch in batches:
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    inputs = as_input(batch.images.to(device, non_blocking=True))
                    logits = model(inputs)
                self.count(batch, logits, metric, shown)
                if criterion:
                    targets = {name: values.to(device) for name, values in batch.targets.items()}
                    losses.add(*criterion(logits, targets, size_of(inputs)))
        return Evaluation(metric, shown, losses)

    @abstractmethod
    def count(self, batch: Any, logits: Tensor, metric: Any, shown: list[Any]) -> None:
        """Add a batch to the metric, and a few of its images to `shown`."""


class Classification(TorchvisionTask):
    """Training of a torchvision model on images with one class each.

    An image that is shown is (uint8 (h, w, 3) RGB, its class, the predicted class, its score).
    """

    kind = "classify"
    headlines: Mapping[str, str] = {"top1": "top-1", "top5": "top-5"}
    columns = Accuracy.COLUMNS
    default_cfg = "resnet18"
    loss_type = ClassificationLoss
    collate_type = ClassificationCollate
    stride = 32  # of nearly all torchvision models

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        s = settings
        if s.hyp.mixup + s.hyp.cutmix > 1:
            raise TrainerError("--hyp: mixup and cutmix are shares of the steps, together at most 1")
        if s.hyp.randaugment % 1 or not 0 <= s.hyp.randaugment <= _MAGNITUDES:
            what = f"--hyp: randaugment must be a whole number from 0 to {_MAGNITUDES}, not {s.hyp.randaugment:g}"
            raise TrainerError(what, "use 9, the usual value, or 0 to turn it off")
        self.train_set = open_classification(s.data, "train")
        self.names = self.train_set.names
        self.val_set = NoImages(self.names) if s.noval else open_classification(s.data, "val")
        if self.val_set.names != self.names:
            odd = sorted(set(self.names) ^ set(self.val_set.names))
            what = f"--data {s.data}: training and validation have different classes: {', '.join(odd[:5])}"
            raise TrainerError(what, "each needs a folder for every class")
        self.least_side = s.imgsz

    def network(self) -> Classifier:
        """Return the untrained network for the classes of the data."""
        return build_classifier(self.cfg["torchvision"], len(self.names), self._settings.imgsz)

    def move(self, batch: TrainBatch, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
        """Move a batch to the device, and mix its images with MixUp or CutMix."""
        assert isinstance(batch, ClassificationBatch)
        images, targets = super().move(batch, device)
        if batch.mix_seed < 0:
            return images, targets
        mixed = as_input(images), targets["classes"], len(self.names), batch.mix_seed, self._settings.hyp
        images, classes = mix_batch(*mixed)
        return images.contiguous(memory_format=torch.channels_last), {"classes": classes}

    def metric(self) -> TopK:
        """Return an empty metric."""
        return TopK(self.names)

    def count(self, batch: ClassificationBatch, logits: Tensor, metric: TopK, shown: list[Any]) -> None:
        """Add a batch to the metric, and some images of all classes to `shown`."""
        logits = logits.float().cpu()
        metric.update(logits, batch.labels)
        sure, found = logits.softmax(1).max(1)
        for k in range(len(batch.ids)):
            seen = sum(s[1] == int(batch.labels[k]) for s in shown)
            if len(shown) < _SHOWN_IMAGES and seen <= len(shown) // len(self.names):
                shown.append((batch.images[k].numpy(), int(batch.labels[k]), int(found[k]), float(sure[k])))


class Segmentation(TorchvisionTask):
    """Training of a torchvision model on images with one class per pixel.

    An image that is shown is (uint8 (h, w, 3) RGB, its mask (h, w), the found classes (h, w)).
    """

    kind = "segment"
    headlines: Mapping[str, str] = {"miou": "mIoU", "accuracy": "pixel accuracy"}
    columns = Overlap.COLUMNS
    default_cfg = "lraspp_mobilenet_v3_large"  # small enough for a CPU
    loss_type = SegmentationLoss
    collate_type = SegmentationCollate
    stride = 16  # of the coarsest normalised feature map
    least_side = 64

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if settings.hyp.scale >= 1:
            what = f"--hyp: scale must be below 1, not {settings.hyp.scale:g}"
            raise TrainerError(what, "0.5 is from half to one and a half")
        self.train_set, self.val_set = open_segmentation(
            settings.data, settings.imgsz, validates=not settings.noval
        )
        self.names = self.train_set.names

    def network(self) -> Segmenter:
        """Return the untrained network for the classes of the data."""
        model = build_segmenter(self.cfg["torchvision"], len(self.names))
        if model.pools:
            self.stride = self._settings.imgsz
        return model

    def metric(self) -> Confusion:
        """Return an empty metric."""
        return Confusion(self.names)

    def count(self, batch: SegmentationBatch, logits: Tensor, metric: Confusion, shown: list[Any]) -> None:
        """Add a batch to the metric, and its first images to `shown`."""
        found = logits.argmax(1).to(torch.uint8)
        metric.update(found, batch.masks.to(found.device))
        for k in range(min(len(batch.ids), _SHOWN_MASKS - len(shown))):
            shown.append((batch.images[k].numpy(), batch.masks[k].numpy(), found[k].cpu().numpy()))
