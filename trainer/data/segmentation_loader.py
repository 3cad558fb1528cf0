"""Dataloaders of segmentation: images and masks, augmented together by torchvision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from trainer.config import IGNORED, Hyp
from trainer.data.batch_sampler import BatchSpec
from trainer.data.dataloader import Collate, EpochLoader, Pinnable, SquareValLoader, empty_images, seeded_rng
from trainer.data.segmentation import SegmentedImages

_GREY = 114  # padding around an image
_CHANNELS = 4  # bytes of a pixel: three colours and the class


@dataclass
class SegmentationBatch(Pinnable):
    """One rank's part of a global batch."""

    images: Tensor  # uint8 (b, side, side, 3), RGB
    masks: Tensor  # uint8 (b, side, side): the class, or IGNORED; padding is IGNORED
    ids: Tensor  # int64 (b,)
    global_size: int  # images of this step on all ranks together


def train_transform(imgsz: int, hyp: Hyp) -> v2.Compose:
    """Return the augmentation of a training image and its mask, both to (imgsz, imgsz).

    The longer side becomes `imgsz` times 1 +- hyp.scale. The result is cropped or padded, then flipped.
    """
    steps: list[Any] = [
        v2.ScaleJitter((imgsz, imgsz), (1 - hyp.scale, 1 + hyp.scale), antialias=True),
        v2.RandomCrop(imgsz, pad_if_needed=True, fill={tv_tensors.Image: _GREY, tv_tensors.Mask: IGNORED}),
    ]
    if hyp.fliplr:
        steps.append(v2.RandomHorizontalFlip(hyp.fliplr))
    if hyp.flipud:
        steps.append(v2.RandomVerticalFlip(hyp.flipud))
    return v2.Compose(steps)


class _Collate(Collate[SegmentationBatch]):
    def __init__(self, dataset: SegmentedImages, imgsz: int, seed: int, hyp: Hyp | None) -> None:
        """Use the validation transform if `hyp` is None: the whole image, its longer side `imgsz`."""
        super().__init__(dataset)
        self._side, self._seed = imgsz, seed
        self._transform = train_transform(imgsz, hyp) if hyp else v2.Resize(None, max_size=imgsz, antialias=True)

    def collate(self, spec: BatchSpec) -> SegmentationBatch:
        ids = spec.ids.tolist()
        images = empty_images((len(ids), self._side, self._side, 3)).fill_(_GREY)
        masks = empty_images((len(ids), self._side, self._side)).fill_(IGNORED)
        for k, index in enumerate(ids):
            image = tv_tensors.Image(torch.from_numpy(self.dataset.image(index)).permute(2, 0, 1))
            truth = tv_tensors.Mask(torch.from_numpy(self.dataset.mask(index)))
            with seeded_rng(self._seed, spec.epoch, index):
                image, mask = self._transform(image, truth)
            height, width = mask.shape
            images[k, :height, :width] = image.permute(1, 2, 0)
            masks[k, :height, :width] = mask
        return SegmentationBatch(images, masks, torch.tensor(spec.ids), spec.global_size)


class SegmentationLoader(EpochLoader[SegmentationBatch]):
    """Training dataloader; an image's augmentation depends on (seed, epoch, image) alone."""

    def __init__(self, dataset: SegmentedImages, *, imgsz: int, seed: int, hyp: Hyp, **options: Any) -> None:
        """Open the loader; `options` are the other arguments of EpochLoader."""
        collate, sides = _Collate(dataset, imgsz, seed, hyp), range(imgsz, imgsz + 1)
        super().__init__(dataset, collate, sides=sides, seed=seed, channels=_CHANNELS, **options)


class SegmentationValLoader(SquareValLoader[SegmentationBatch]):
    """Validation dataloader: the images in order, each on exactly one rank."""

    def __init__(self, dataset: SegmentedImages, *, imgsz: int, **options: Any) -> None:
        """Open the loader; `options` are the other arguments of SquareValLoader."""
        super().__init__(dataset, _Collate(dataset, imgsz, 0, None), imgsz=imgsz, channels=_CHANNELS, **options)
