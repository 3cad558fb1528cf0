"""Dataloaders of classification and segmentation: whole images and masks, augmented by torchvision."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from trainer.config import IGNORED, Hyp
from trainer.data.batch import FILL, TrainBatch, empty_images
from trainer.data.loading.batch_sampler import MIX, BatchSpec
from trainer.data.loading.dataloader import Collate, seeded_rng

RANDAUGMENT_OPERATIONS = 2
_PADDED_UP_TO = 64  # px: up to this side, crops are taken from a padded image; above, from RandomResizedCrop
_DECODE_FACTOR = 2  # times the side: most crops of RandomResizedCrop are then not enlarged
_CENTER_CROP = 0.875  # of the side, in the validation of large images; torchvision's weights were scored so
_MIXUP_ALPHA, _CUTMIX_ALPHA = 0.2, 1.0  # as in torchvision's training recipes


def _flips(hyp: Hyp) -> list[Any]:
    flips: list[Any] = [v2.RandomHorizontalFlip(hyp.fliplr)] if hyp.fliplr else []
    return [*flips, v2.RandomVerticalFlip(hyp.flipud)] if hyp.flipud else flips


@dataclass
class ClassificationBatch(TrainBatch):
    """One rank's part of a global batch.

    With MixUp or CutMix, the first image precedes the rank's own in the global batch: the second is mixed with it.
    So the result does not depend on the number of ranks. `images` is then (b + 1, side, side, 3). `targets` has
    `classes`, int64 (b,) or (b + 1,).
    """

    mix_seed: int = -1  # seed of the step's MixUp or CutMix; -1: neither

    @property
    def labels(self) -> Tensor:
        """The classes of the images."""
        return self.targets["classes"]


def _padding(imgsz: int, hyp: Hyp) -> int | None:
    """Return the padding in pixels of a training image; None if RandomResizedCrop is used."""
    if hyp.pad is not None:
        return int(hyp.pad)
    return imgsz // 8 if imgsz <= _PADDED_UP_TO else None


def _decoded_side(imgsz: int, hyp: Hyp | None) -> int:
    """Return the least shorter side in pixels to decode; for validation if `hyp` is None."""
    if hyp:
        return imgsz if _padding(imgsz, hyp) is not None else _DECODE_FACTOR * imgsz
    return imgsz if imgsz <= _PADDED_UP_TO else round(imgsz / _CENTER_CROP)


def train_transform(imgsz: int, hyp: Hyp) -> v2.Compose:
    """Return the augmentation of a training image, uint8 (3, h, w) -> (3, imgsz, imgsz)."""
    padding = _padding(imgsz, hyp)
    steps: list[Any] = []
    if padding is None:
        steps.append(v2.RandomResizedCrop(imgsz, antialias=True))
    else:
        steps += [v2.Resize((imgsz, imgsz), antialias=True), v2.RandomCrop(imgsz, padding=padding)]
    steps += _flips(hyp)
    if hyp.randaugment:
        how = {"interpolation": InterpolationMode.BILINEAR, "fill": [FILL] * 3}
        steps.append(v2.RandAugment(RANDAUGMENT_OPERATIONS, int(hyp.randaugment), **how))
    return v2.Compose(steps)


def val_transform(imgsz: int) -> v2.Compose:
    """Return the validation transform: the whole image up to 64 px, above that a center crop."""
    if imgsz <= _PADDED_UP_TO:
        return v2.Compose([v2.Resize((imgsz, imgsz), antialias=True)])
    return v2.Compose([v2.Resize(_decoded_side(imgsz, None), antialias=True), v2.CenterCrop(imgsz)])


def mix_batch(images: Tensor, labels: Tensor, classes: int, seed: int, hyp: Hyp) -> tuple[Tensor, Tensor]:
    """Apply MixUp (Zhang 2018), CutMix (Yun 2019) or neither, as `seed` decides for the whole step.

    Of `images` float (b + 1, 3, h, w) and `labels` int64 (b + 1,), the first is only mixed into the second. Returns the
    images (b, 3, h, w) and soft labels (b, nc).
    """
    kind = np.random.default_rng(seed).random()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if kind < hyp.mixup:
            images, targets = v2.MixUp(alpha=_MIXUP_ALPHA, num_classes=classes)(images, labels)
        elif kind < hyp.mixup + hyp.cutmix:
            images, targets = v2.CutMix(alpha=_CUTMIX_ALPHA, num_classes=classes)(images, labels)
        else:
            targets = torch.nn.functional.one_hot(labels, classes).float()
    return images[1:], targets[1:]


class ClassificationCollate(Collate[ClassificationBatch]):
    """Collate of classified images; an image's augmentation depends on (seed, epoch, image) alone."""

    extra = 1

    def __init__(self, dataset: Any, imgsz: int, seed: int = 0, hyp: Hyp | None = None) -> None:
        """Use the validation transform if `hyp` is None."""
        super().__init__(dataset)
        self._side = imgsz
        self._seed = seed
        self._mixes = bool(hyp and (hyp.mixup or hyp.cutmix))
        self._min_side = _decoded_side(imgsz, hyp)
        self._transform = train_transform(imgsz, hyp) if hyp else val_transform(imgsz)

    def collate(self, spec: BatchSpec) -> ClassificationBatch:
        """Return the transformed images, with the one before them if images are mixed."""
        indices = [spec.previous, *spec.ids.tolist()] if self._mixes else spec.ids.tolist()
        images = empty_images((len(indices), self._side, self._side, 3))
        for k, index in enumerate(indices):
            image = torch.from_numpy(self.dataset.image(index, self._min_side)).permute(2, 0, 1)
            with seeded_rng(self._seed, spec.epoch, index):
                images[k] = self._transform(image).permute(1, 2, 0)
        labels = torch.tensor([self.dataset.label(index) for index in indices])
        mix_seed = -1
        if self._mixes:
            mix_seed = int(
                np.random.SeedSequence([MIX, self._seed, spec.epoch, spec.step]).generate_state(1)[0]
            )
        return ClassificationBatch(
            images, {"classes": labels}, torch.tensor(spec.ids), spec.global_size, mix_seed
        )


@dataclass
class SegmentationBatch(TrainBatch):
    """One rank's part of a global batch of squares.

    `targets` has `masks`, uint8 (b, side, side): the class or IGNORED; padding is IGNORED.
    """

    @property
    def masks(self) -> Tensor:
        """The classes of the pixels."""
        return self.targets["masks"]


class _ScaleJitter(v2.ScaleJitter):  # type: ignore[misc]
    """ScaleJitter that keeps a pixel of the shorter side of an elongated image."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Return the new height and width."""
        return {"size": [max(1, int(side)) for side in super().make_params(flat_inputs)["size"]]}


class Fit(v2.Transform):  # type: ignore[misc]
    """Resizes the longer side to `side` px, and keeps a pixel of the shorter one."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self._side = side

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Return the resized image or mask."""
        longer = max(inpt.shape[-2:])
        size = [max(1, self._side * side // longer) for side in inpt.shape[-2:]]
        return v2.functional.resize(inpt, size, antialias=True)


def mask_transform(imgsz: int, hyp: Hyp) -> v2.Compose:
    """Return the augmentation of a training image and its mask, both to (imgsz, imgsz).

    The longer side becomes `imgsz` times 1 +- hyp.scale. The result is cropped or padded, then flipped.
    """
    fill = {tv_tensors.Image: FILL, tv_tensors.Mask: IGNORED}
    scale = _ScaleJitter((imgsz, imgsz), (1 - hyp.scale, 1 + hyp.scale), antialias=True)
    return v2.Compose([scale, v2.RandomCrop(imgsz, pad_if_needed=True, fill=fill), *_flips(hyp)])


class SegmentationCollate(Collate[SegmentationBatch]):
    """Collate of images with masks; an image's augmentation depends on (seed, epoch, image) alone."""

    channels = 4  # three colours and the class

    def __init__(self, dataset: Any, imgsz: int, seed: int = 0, hyp: Hyp | None = None) -> None:
        """For validation, with `hyp` None, the longer side of an image becomes `imgsz`."""
        super().__init__(dataset)
        self._side = imgsz
        self._seed = seed
        self._transform = mask_transform(imgsz, hyp) if hyp else Fit(imgsz)

    def collate(self, spec: BatchSpec) -> SegmentationBatch:
        """Return the transformed images and masks."""
        ids = spec.ids.tolist()
        images = empty_images((len(ids), self._side, self._side, 3)).fill_(FILL)
        masks = empty_images((len(ids), self._side, self._side)).fill_(IGNORED)
        for k, index in enumerate(ids):
            image = tv_tensors.Image(torch.from_numpy(self.dataset.image(index)).permute(2, 0, 1))
            truth = tv_tensors.Mask(torch.from_numpy(self.dataset.mask(index)))
            with seeded_rng(self._seed, spec.epoch, index):
                image, mask = self._transform(image, truth)
            height, width = mask.shape
            images[k, :height, :width] = image.permute(1, 2, 0)
            masks[k, :height, :width] = mask
        return SegmentationBatch(images, {"masks": masks}, torch.tensor(spec.ids), spec.global_size)
