r"""Your own dataset, model and callback: squares on a gray background, and a small network.

cd examples
trainer train --data own_parts:data --cfg own_parts:Net --callback own_parts:Log --imgsz 64 --batch 64 \
    --optimizer AdamW --epochs 10
"""

# ruff: noqa: D102 (the protocol Dataset describes the members)
import numpy as np
from torch import nn

from trainer import Callback
from trainer.models.blocks import Conv
from trainer.models.heads import Detect


class Squares:
    """Images with one light or dark square each. trainer.data.dataset.Dataset describes the members."""

    names = ("dark", "light")
    flips = True

    def __init__(self, split, side):
        self.split = split
        self.side = side
        self.count = {"train": 256, "val": 64}[split]

    def __len__(self):
        return self.count

    def _square(self, index):
        """Return the class, left, top and side of an image's square; the same ones at every call."""
        random = np.random.default_rng([self.split == "val", index])
        side = int(random.integers(self.side // 4, self.side // 2))
        left, top = random.integers(0, self.side - side, 2).tolist()
        return index % 2, left, top, side

    def size(self, index):
        return self.side, self.side

    def name(self, index):
        return f"{self.split}{index}"

    def image(self, index, min_side=0):
        kind, left, top, side = self._square(index)
        image = np.full((self.side, self.side, 3), 128, np.uint8)
        image[top : top + side, left : left + side] = (0, 255)[kind]
        return image

    def labels(self, index):
        kind, left, top, side = self._square(index)
        centre = (left + side / 2) / self.side, (top + side / 2) / self.side
        return np.array([[kind, *centre, side / self.side, side / self.side]], np.float32)

    def segments(self, index):
        return [np.zeros((0, 2), np.float32)]  # no outline


def data(split, imgsz):
    """Return the dataset of a split, "train" or "val"."""
    return Squares(split, imgsz)


class Net(nn.Module):
    """A detector with four convolutions before the head, at a stride of 8 px."""

    def __init__(self, nc):
        super().__init__()
        self.body = nn.Sequential(Conv(3, 16, 3, 2), Conv(16, 32, 3, 2), Conv(32, 64, 3, 2), Conv(64, 64, 3))
        self.detect = Detect(nc, [[16, 16, 24, 24]], [64])  # per level: anchors in pixels, and channels
        self.detect.place([8])  # the stride of each level

    def forward(self, images):  # (b, 3, h, w) in [0, 1]
        return self.detect([self.body(images)])


class Log(Callback):
    """Prints the score of each epoch, on rank 0."""

    def on_epoch_end(self, metrics):
        print(f"epoch {metrics['epoch']} of {metrics['epochs']}: mAP50 {metrics['map50']:.3f}", flush=True)
