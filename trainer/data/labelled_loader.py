"""Batches of whole pictures for classification, augmented by torchvision; the same for any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from trainer.config import Hyp
from trainer.data.labelled import Labelled
from trainer.data.squares import SquareLoader, SquareValLoader, drawing
from trainer.data.stream import MIX, Maker, Pinnable, Share, empty

RANDAUGMENT_OPERATIONS = 2
_PADDED_UP_TO = 64  # px: smaller pictures are cropped from inside a border, larger ones in any size
_CROPPED = 2  # times the side: of a file that large, crops of random size are mostly not enlarged
_SHOWN_SHARE = 0.875  # of a large picture's side that validation looks at, as torchvision's weights were scored
_MIXUP_ALPHA, _CUTMIX_ALPHA = 0.2, 1.0  # of torchvision's own training recipes


@dataclass
class LabelledBatch(Pinnable):
    """One rank's share of a global batch.

    Where pictures are mixed, the first one is not the rank's own: it is the one before them in the whole step, with
    which the second is mixed. So the mixture does not depend on how a step is shared out.
    """

    images: Tensor  # uint8 (b, side, side, 3), RGB; (b + 1, ...) where they are mixed
    labels: Tensor  # int64, as many
    ids: Tensor  # int64 (b,)
    global_size: int  # pictures of this step on all ranks together
    mix_seed: int = -1  # of what is drawn once for the whole step; -1: nothing is mixed


def _border(imgsz: int, hyp: Hyp) -> int | None:
    """Pixels beyond a training picture that its crops reach; None where these are of any size."""
    if hyp.pad is not None:
        return int(hyp.pad)
    return imgsz // 8 if imgsz <= _PADDED_UP_TO else None


def needed_side(imgsz: int, hyp: Hyp | None) -> int:
    """Pixels of a file's shorter side that are looked at, in training or, without hyper-parameters, in validation."""
    if hyp:
        return imgsz if _border(imgsz, hyp) is not None else _CROPPED * imgsz
    return imgsz if imgsz <= _PADDED_UP_TO else round(imgsz / _SHOWN_SHARE)


def crops(imgsz: int, hyp: Hyp) -> v2.Compose:
    """The augmentation of one training picture, uint8 (3, h, w) -> (3, imgsz, imgsz)."""
    border = _border(imgsz, hyp)
    steps: list[Any] = []
    if border is None:
        steps.append(v2.RandomResizedCrop(imgsz, antialias=True))
    else:
        steps += [v2.Resize((imgsz, imgsz), antialias=True), v2.RandomCrop(imgsz, padding=border)]
    if hyp.fliplr:
        steps.append(v2.RandomHorizontalFlip(hyp.fliplr))
    if hyp.flipud:
        steps.append(v2.RandomVerticalFlip(hyp.flipud))
    if hyp.randaugment:
        steps.append(
            v2.RandAugment(
                RANDAUGMENT_OPERATIONS, int(hyp.randaugment), interpolation=InterpolationMode.BILINEAR, fill=[114] * 3
            )
        )
    return v2.Compose(steps)


def centre(imgsz: int) -> v2.Compose:
    """What validation sees of a picture: all of a small one, the middle of a large one."""
    if imgsz <= _PADDED_UP_TO:
        return v2.Compose([v2.Resize((imgsz, imgsz), antialias=True)])
    return v2.Compose([v2.Resize(needed_side(imgsz, None), antialias=True), v2.CenterCrop(imgsz)])


def mixed(images: Tensor, labels: Tensor, classes: int, seed: int, hyp: Hyp) -> tuple[Tensor, Tensor]:
    """MixUp (Zhang 2018) or CutMix (Yun 2019) of a step, by its seed, or neither: pictures, and label shares (b, nc).

    `images` float (b + 1, 3, h, w), of which the first only lends itself to the second.
    """
    kind = np.random.default_rng(seed).random()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if kind < hyp.mixup:
            images, shares = v2.MixUp(alpha=_MIXUP_ALPHA, num_classes=classes)(images, labels)
        elif kind < hyp.mixup + hyp.cutmix:
            images, shares = v2.CutMix(alpha=_CUTMIX_ALPHA, num_classes=classes)(images, labels)
        else:
            shares = torch.nn.functional.one_hot(labels, classes).float()
    return images[1:], shares[1:]


class _Maker(Maker[LabelledBatch]):
    def __init__(self, dataset: Labelled, imgsz: int, seed: int, hyp: Hyp | None) -> None:
        """Without hyper-parameters the pictures are validation's."""
        super().__init__(dataset)
        self._side, self._seed, self._mixes = imgsz, seed, bool(hyp and (hyp.mixup or hyp.cutmix))
        self._needed = needed_side(imgsz, hyp)
        self._change = crops(imgsz, hyp) if hyp else centre(imgsz)

    def make(self, share: Share) -> LabelledBatch:
        ids = share.ids.tolist()
        which = [share.before, *ids] if self._mixes else ids
        images = empty((len(which), self._side, self._side, 3))
        for k, index in enumerate(which):
            picture = torch.from_numpy(self.dataset.image(index, self._needed)).permute(2, 0, 1)
            with drawing(self._seed, share.epoch, index):
                images[k] = self._change(picture).permute(1, 2, 0)
        labels = torch.tensor([self.dataset.label(index) for index in which])
        mix_seed = -1
        if self._mixes:
            mix_seed = int(np.random.SeedSequence([MIX, self._seed, share.epoch, share.step]).generate_state(1)[0])
        return LabelledBatch(images, labels, torch.tensor(share.ids), share.global_size, mix_seed)


class LabelledLoader(SquareLoader[LabelledBatch]):
    """Augmented batches; a picture's augmentation follows from (seed, epoch, picture) alone."""

    def __init__(self, dataset: Labelled, *, imgsz: int, seed: int, hyp: Hyp, **share: Any) -> None:
        """`share` is what a SquareLoader needs else."""
        maker = _Maker(dataset, imgsz, seed, hyp)
        super().__init__(dataset, maker, imgsz=imgsz, seed=seed, lent=1, **share)


class LabelledValLoader(SquareValLoader[LabelledBatch]):
    """Validation pictures in their order, every one on exactly one rank."""

    def __init__(self, dataset: Labelled, *, imgsz: int, **share: Any) -> None:
        """`share` is what a SquareValLoader needs else."""
        super().__init__(dataset, _Maker(dataset, imgsz, 0, None), imgsz=imgsz, **share)
