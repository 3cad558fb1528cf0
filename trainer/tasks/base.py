"""Bases of the tasks: the data, model, loss and metric of one kind of training."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import Settings, preset_for
from trainer.config.presets import gathered
from trainer.config.settings import option_of
from trainer.data.torchvision_loaders import SquareCollate, SquareLoader, SquareValLoader
from trainer.errors import TrainerError
from trainer.losses import Loss
from trainer.models.torchvision_nets import OWN_WEIGHTS, Classifier, own_weights
from trainer.tasks.detector import to_device
from trainer.weights import checkpoint_file

# Settings of detection only, with their defaults.
_BOXES_ONLY = {"multi_scale": False, "rect": False, "image_weights": False, "single_cls": False, "cache": ""}
_BOXES_ONLY |= {"allow_bad_labels": False, "noautoanchor": False}
# Hyper-parameters with an effect on all models of torchvision.
COMMON_HYP: tuple[str, ...] = (
    "lr0",
    "lrf",
    "momentum",
    "weight_decay",
    "nbs",
    "ema_tau",
    "warmup_epochs",
    "warmup_momentum",
)
COMMON_HYP += ("warmup_bias_lr", "label_smoothing")


class Task(ABC):
    """One kind of training. Construction opens and checks the data and the weights file."""

    kind: str  # its name on the command line
    headlines: Mapping[str, str]  # columns in the console output and the events, with their titles
    columns: tuple[str, ...]  # of the scores in results.csv
    metric_type: type[Any]  # made from the class names; merge() adds another rank's, compute() returns Scores
    terms: tuple[str, ...]  # names of the loss terms, known once the model is built
    names: list[str]  # of the classes
    train_set: Any
    val_set: Any
    left_out: Sequence[Any] = ()  # faulty files that the settings allow to skip
    cfg: dict[str, Any]  # model configuration, stored in checkpoints
    stride: int  # pixels per cell of the coarsest grid, known once the model is built
    least_side: int  # smallest image side in pixels, known once the model is built

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @abstractmethod
    def build(self, say: Callable[[str], None]) -> nn.Module:
        """Return the network for the classes of the data, with the matching tensors of --weights.

        Its initial weights are equal on all ranks by the caller's seed.
        """

    def fit(self, model: Any) -> str:
        """Fit the untrained model to the data and return a message, "" without one."""
        return ""

    @abstractmethod
    def loss_of(self, model: Any) -> Loss:
        """Return the loss for a model on its device."""

    @abstractmethod
    def weight(self, images: Tensor) -> Tensor:
        """Return the factor of the mean loss of a step with `images` images (a scalar)."""

    @abstractmethod
    def train_loader(self, share: Mapping[str, Any]) -> Any:
        """Return this rank's loader of augmented batches; `share` has rank, world, local_size, workers and stride."""

    @abstractmethod
    def val_loader(self, share: Mapping[str, Any]) -> Any:
        """Return this rank's validation batches."""

    @abstractmethod
    def move(self, batch: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        """Move a batch to the device: images float (b, 3, h, w), channels last, and the targets of the loss."""

    def metric(self) -> Any:
        """Return an empty metric."""
        return self.metric_type(self.names)

    @abstractmethod
    def evaluate(
        self, model: Any, batches: Iterable[Any], device: torch.device, dtype: torch.dtype
    ) -> tuple[Any, list[Any]]:
        """Return this rank's metric over its batches, and a few images with their predictions."""


class TorchvisionTask(Task):
    """Training of a model of torchvision."""

    default_cfg: str
    hyp_keys: tuple[str, ...]  # hyper-parameters with an effect
    loss_type: type[Any]
    collate_type: type[SquareCollate[Any]]

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        s = settings
        self._refuse_others()
        self.terms = self.loss_type.terms
        self._weights: Mapping[str, Any] | None = None
        if s.weights and s.weights != OWN_WEIGHTS:
            self._weights = checkpoint_file.load(s.weights)
            checkpoint_file.check_task(self._weights, self.kind, s.weights)
        own = self._weights["cfg"]["torchvision"] if self._weights else self.default_cfg
        self.cfg = {"torchvision": s.cfg or own}

    def _refuse_others(self) -> None:
        """Raise TrainerError for a setting of detection, or a hyper-parameter without effect."""
        s = self._settings
        for field, unset in _BOXES_ONLY.items():
            if getattr(s, field) != unset:
                raise TrainerError(f"{option_of(field)} is for boxes, and this is --task {s.task}", "leave it out")
        usual = dataclasses.asdict(preset_for(s.data, s.task).hyp)
        changed = [k for k, v in dataclasses.asdict(s.hyp).items() if v != usual[k]]
        others = [k for k in changed if k not in self.hyp_keys]
        if others:
            raise TrainerError(
                f"--hyp: {', '.join(others)}: without effect on --task {s.task}",
                f"its keys are {', '.join(self.hyp_keys)}",
            )

    @abstractmethod
    def network(self) -> Classifier:
        """Return the untrained network for the classes of the data."""

    def build(self, say: Callable[[str], None]) -> Classifier:
        """Return the network for the classes of the data, with the matching tensors of --weights."""
        s, model = self._settings, self.network()
        if s.weights:
            state = self._weights["ema"] if self._weights else own_weights(self.cfg["torchvision"], s.imgsz)
            fit, of = checkpoint_file.transfer(model, state, s.weights)
            say(f"weights from {s.weights}: {fit}/{of} tensors")
        return model

    def loss_of(self, model: Classifier) -> Loss:
        """Return the cross-entropy."""
        loss: Loss = self.loss_type(self._settings.hyp.label_smoothing)
        return loss

    def weight(self, images: Tensor) -> Tensor:
        """Return 1 / (accumulated batches), so that the gradient is that of their mean."""
        return torch.full_like(images, 1 / gathered(self._settings.hyp, self._settings.batch))

    def train_loader(self, share: Mapping[str, Any]) -> Any:
        """Return the loader of augmented batches."""
        s = self._settings
        own: dict[str, Any] = {"imgsz": s.imgsz, "batch": s.batch, "seed": s.seed, "hyp": s.hyp, "epochs": s.epochs}
        return SquareLoader(self.collate_type, self.train_set, **own, **share)

    def val_loader(self, share: Mapping[str, Any]) -> Any:
        """Return the loader of validation images, with the batch size of training."""
        batch = -(-self._settings.batch // share["world"])
        return SquareValLoader(self.collate_type, self.val_set, imgsz=self._settings.imgsz, batch=batch, **share)

    def evaluate(
        self, model: Classifier, batches: Iterable[Any], device: torch.device, dtype: torch.dtype
    ) -> tuple[Any, list[Any]]:
        """Return this rank's metric over its batches, and some images with their predictions."""
        metric, shown = self.metric(), list[Any]()
        model.eval()
        with torch.inference_mode():
            for batch in batches:
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    logits = model(to_device(batch.images, device))
                self.count(batch, logits, metric, shown)
        return metric, shown

    @abstractmethod
    def count(self, batch: Any, logits: Tensor, metric: Any, shown: list[Any]) -> None:
        """Add a batch to the metric, and a few of its images to `shown`."""
