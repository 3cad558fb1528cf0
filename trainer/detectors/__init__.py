"""Detector families: networks that find boxes. One is a file here and a line in config/families.py."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trainer.config import FAMILIES, Hyp, ModelCfg, Settings, family_of, named_families, traits_of
from trainer.data.dataset import Dataset
from trainer.errors import TrainerError
from trainer.losses.criterion import Criterion, Outputs
from trainer.models.yolo import load_cfg
from trainer.weights import checkpoint_file
from trainer.weights.checkpoint import Checkpoint

EXTRAS = dict.fromkeys(("transformers", "huggingface_hub"), ".[transformers]")  # by package


@dataclass(frozen=True)
class Limits:
    """Limits of detections: minimum score, maximum IoU of two boxes of a class, maximum boxes per image."""

    confidence: float = 0.001
    iou: float = 0.6
    most: int = 300
    classes: tuple[int, ...] | None = None  # only these

    def __post_init__(self) -> None:
        for option, value in (("--conf", self.confidence), ("--iou", self.iou)):
            if not 0 <= value < 1:
                raise TrainerError(f"{option} must be 0 or more and below 1, not {value:g}")
        if self.most < 1:
            raise TrainerError(f"--max-det must be 1 or more, not {self.most}")


@dataclass(frozen=True)
class Detections:
    """Detections of one image by falling score: boxes (n, 4) xyxy in px, scores (n,), classes (n,)."""

    boxes: Tensor
    scores: Tensor
    classes: Tensor


# (model, its outputs, limits) -> the detections of each image, on the CPU and in pixels of the images.
Postprocess = Callable[[Any, Outputs, Limits], list[Detections]]


class Fit(Protocol):
    """Fits the untrained model to the boxes of the data, as AutoAnchor does."""

    def __call__(
        self, model: Any, cfg: ModelCfg, dataset: Dataset, /, *, imgsz: int, anchor_t: float, seed: int
    ) -> tuple[ModelCfg, str]:
        """Return the new description of the model, and a message for the user. A collective."""


@dataclass(frozen=True)
class Sample:
    """A validation image uint8 (h, w, 3) RGB with its labels and its detections, for a plot.

    Boxes are (n, 4) xyxy in px of the image, scores and classes (n,).
    """

    image: npt.NDArray[np.uint8]
    true_boxes: npt.ArrayLike
    true_classes: npt.ArrayLike
    boxes: npt.ArrayLike
    scores: npt.ArrayLike
    classes: npt.ArrayLike


@dataclass(frozen=True)
class Parts:
    """What a family's `build` returns: all that the trainer asks of a detector.

    `model` takes images float32 (b, 3, h, w) in 0..1, whose sides are multiples of `stride` px. Its outputs are the
    family's own, and in bf16 or fp16 where the precision is: they go to `criterion`, or with the model and limits to
    `postprocess`, which returns the detections of each image on the CPU, in pixels of the images.
    """

    model: nn.Module
    criterion: Criterion
    postprocess: Postprocess
    stride: int = 32
    least_side: int = 64  # pixels of the smallest image that the model takes
    # Whether it predicts fractions of an image's sides, and so learns only squares.
    needs_squares: bool = False
    norm_stride: int = 0  # pixels per value of the coarsest batch norm; 0: the stride
    close_mosaic: int = 0  # last epochs without mosaics, if the hyper-parameters do not say
    can_compile: bool = True  # whether the loss has no shapes that depend on values
    # Whether the model reads values of tensors, which the meta device does not have.
    reads_values: bool = False
    # Prefix of the names of the backbone's parameters, for the hyper-parameter backbone_lr.
    backbone: str = ""
    has_dropout: bool = False  # whether the hyper-parameter dropout has an effect
    needs_targets: bool = False  # whether the model takes the targets in training
    can_split: bool = True  # whether torch.fx can trace the model and cut it between its layers
    # For an export: (model, outputs) -> boxes (b, n, 4) xyxy in px, scores (b, n, nc). None: it cannot be exported.
    decode: Callable[[Any, Outputs], tuple[Tensor, Tensor]] | None = None
    # Whether rounding can swap rows of `decode`, which are in the order of scores.
    has_ranked_rows: bool = False
    exports_any_size: bool = True  # whether an exported file can take images of any number and size
    fit: Fit | None = None

    def check(self, settings: Settings, where: str) -> None:
        """Raise TrainerError for settings that the family does not support; `where` names the model."""
        strategy = traits_of(settings.parallel)
        lacks_targets = self.needs_targets and not strategy.passes_targets
        cannot_split = strategy.splits_layers and not self.can_split
        if lacks_targets or cannot_split:
            what = f"--parallel {settings.parallel}: {where} cannot be trained with it"
            raise TrainerError(what, "leave --parallel out")
        if settings.rect and self.needs_squares:
            raise TrainerError(f"--rect: {where} can only be trained with squares", "leave --rect out")
        for key, has_effect in (("backbone_lr", self.backbone), ("dropout", self.has_dropout)):
            is_default = getattr(settings.hyp, key) == getattr(Hyp(), key)
            if not is_default and not has_effect:
                raise TrainerError(f"--hyp: {key} has no effect on {where}", "leave it out")


class Build(Protocol):
    """A family's function `build`."""

    def __call__(self, cfg: ModelCfg, /, *, nc: int, where: str, hyp: Hyp, imgsz: int) -> Parts:
        """Build the model `cfg` of the family for `nc` classes; errors name its origin `where`."""


def best_pairs(boxes: Tensor, scores: Tensor, limits: Limits) -> list[Detections]:
    """Return the best pairs of a box and a class of each image, without suppression, on the CPU.

    `boxes` (b, n, 4) are xyxy px, `scores` (b, n, nc).
    """
    if limits.classes is not None:
        wanted = torch.zeros(scores.shape[2], device=scores.device)
        wanted[list(limits.classes)] = 1
        scores = scores * wanted
    classes = scores.shape[2]
    count = min(limits.most, scores[0].numel())
    best_scores, best = scores.flatten(1).topk(count, dim=1)  # a pair's number: box * classes + class
    detections = []
    for image_boxes, score, pair in zip(boxes, best_scores, best, strict=True):
        keep = score > limits.confidence
        kept = pair[keep]
        box = image_boxes[kept // classes]
        detections.append(Detections(box.cpu(), score[keep].cpu(), (kept % classes).cpu()))
    return detections


def read_cfg(cfg: str) -> ModelCfg:
    """Return the description of --cfg: a family's model, else a model file or the import path of a function."""
    family, model = family_of(cfg)
    return {family: model} if family else load_cfg(cfg)


def build(cfg: ModelCfg, *, nc: int, where: str, hyp: Hyp, imgsz: int) -> Parts:
    """Build the detector of a description for `nc` classes; errors name its origin `where`."""
    family = next((name for name in named_families() if name in cfg), "")
    build_family: Build = _import(f"{FAMILIES[family]}:build", where)
    return build_family(cfg, nc=nc, where=where, hyp=hyp, imgsz=imgsz)


def load_weights(weights: str) -> Checkpoint:
    """Load a checkpoint, or a snapshot of the Hugging Face hub: its folder, or hf://OWNER/NAME@COMMIT."""
    folder = Path(weights)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise TrainerError(
            f"--weights {weights}: a folder without config.json",
            "give the folder of a snapshot of the Hugging Face hub, or the file of a checkpoint, such as best.pt in it",
        )
    if folder.is_dir() or weights.startswith("hf://"):
        load_snapshot = _import("trainer.detectors.transformers_nets:load_snapshot", weights)
        snapshot: Checkpoint = load_snapshot(weights)
        return snapshot
    return checkpoint_file.load(weights)


def _import(path: str, where: str) -> Any:
    """Import an object of a family; TrainerError if its package is not installed."""
    try:
        return pkgutil.resolve_name(path)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        hint = f"in the project folder: pip install '{EXTRAS[error.name]}'"
        raise TrainerError(f"{where}: requires the package {error.name}", hint) from None
