"""Batches of pictures and their masks, augmented together by torchvision; the same for any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from trainer.config import IGNORED, Hyp
from trainer.data.masked import Masked
from trainer.data.squares import SquareLoader, SquareValLoader, drawing
from trainer.data.stream import Maker, Pinnable, Share, empty

_GREY = 114  # what is beside a picture
_CHANNELS = 4  # bytes of a pixel: three colours and the class


@dataclass
class MaskedBatch(Pinnable):
    """One rank's share of a global batch."""

    images: Tensor  # uint8 (b, side, side, 3), RGB
    masks: Tensor  # uint8 (b, side, side): the class, or IGNORED, as beside the picture
    ids: Tensor  # int64 (b,)
    global_size: int  # pictures of this step on all ranks together


def crops(imgsz: int, hyp: Hyp) -> v2.Compose:
    """The augmentation of a training picture and its mask, both to (imgsz, imgsz).

    In another size, its longer side `imgsz` times 1 +- hyp.scale, then a crop of it or a border around it; mirrored.
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


class _Maker(Maker[MaskedBatch]):
    def __init__(self, dataset: Masked, imgsz: int, seed: int, hyp: Hyp | None) -> None:
        """Without hyper-parameters the pictures are validation's: whole, the longer side `imgsz`."""
        super().__init__(dataset)
        self._side, self._seed = imgsz, seed
        self._change = crops(imgsz, hyp) if hyp else v2.Resize(None, max_size=imgsz, antialias=True)

    def make(self, share: Share) -> MaskedBatch:
        ids = share.ids.tolist()
        images = empty((len(ids), self._side, self._side, 3)).fill_(_GREY)
        masks = empty((len(ids), self._side, self._side)).fill_(IGNORED)
        for k, index in enumerate(ids):
            picture = tv_tensors.Image(torch.from_numpy(self.dataset.image(index)).permute(2, 0, 1))
            truth = tv_tensors.Mask(torch.from_numpy(self.dataset.mask(index)))
            with drawing(self._seed, share.epoch, index):
                image, mask = self._change(picture, truth)
            height, width = mask.shape
            images[k, :height, :width] = image.permute(1, 2, 0)
            masks[k, :height, :width] = mask
        return MaskedBatch(images, masks, torch.tensor(share.ids), share.global_size)


class MaskedLoader(SquareLoader[MaskedBatch]):
    """Augmented batches; a picture's augmentation follows from (seed, epoch, picture) alone."""

    def __init__(self, dataset: Masked, *, imgsz: int, seed: int, hyp: Hyp, **share: Any) -> None:
        """`share` is what a SquareLoader needs else."""
        maker = _Maker(dataset, imgsz, seed, hyp)
        super().__init__(dataset, maker, imgsz=imgsz, seed=seed, channels=_CHANNELS, **share)


class MaskedValLoader(SquareValLoader[MaskedBatch]):
    """Validation pictures in their order, every one on exactly one rank."""

    def __init__(self, dataset: Masked, *, imgsz: int, **share: Any) -> None:
        """`share` is what a SquareValLoader needs else."""
        super().__init__(dataset, _Maker(dataset, imgsz, 0, None), imgsz=imgsz, channels=_CHANNELS, **share)
