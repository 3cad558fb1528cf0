"""Detection heads: raw outputs of a model's last layer, and their decoding to boxes."""

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trainer.models.blocks import Conv


def _cells(ny: int, nx: int, device: torch.device) -> Tensor:
    """The column and row of each cell (ny, nx, 2)."""
    y, x = torch.meshgrid(torch.arange(ny, device=device), torch.arange(nx, device=device), indexing="ij")
    return torch.stack((x, y), -1)


class Detect(nn.Module):
    """YOLOv5's anchor head: one biased 1x1 convolution per level.

    `anchors` is kept in grid units (pixels over stride), as a buffer of shape (levels, anchors, 2).
    """

    anchors: Tensor

    def __init__(self, nc: int, anchors: Sequence[Sequence[float]], channels: Sequence[int]) -> None:
        super().__init__()
        self.nc = nc
        self.values = nc + 5  # x, y, w, h, objectness, classes
        self.per_cell = len(anchors[0]) // 2
        self.strides: list[int] = []  # set by place, once the network's strides are known
        self.register_buffer("anchors", torch.tensor(anchors).float().view(len(anchors), -1, 2))
        self.m = nn.ModuleList(nn.Conv2d(c, self.values * self.per_cell, 1) for c in channels)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """[(b, c_i, ny, nx)] -> raw outputs [(b, anchors, ny, nx, nc + 5)], one per level."""
        raw = []
        for conv, x in zip(self.m, maps, strict=True):
            y = conv(x)
            b, _, ny, nx = y.shape
            raw.append(y.view(b, self.per_cell, self.values, ny, nx).permute(0, 1, 3, 4, 2))
        return raw

    def place(self, strides: Sequence[int]) -> None:
        """Turn the anchors from pixels into grid units and set the biases' prior, for known strides.

        The prior (RetinaNet's idea): about 8 objects in an image of 640 px, and classes at a
        probability of 0.6 / nc, so that an untrained model predicts few objects.
        """
        self.strides = list(strides)
        self.anchors /= torch.tensor(strides, dtype=self.anchors.dtype).view(-1, 1, 1)
        for conv, stride in zip(self.m, strides, strict=True):
            assert isinstance(conv, nn.Conv2d)
            assert conv.bias is not None
            bias = conv.bias.detach().view(self.per_cell, -1)
            bias[:, 4] += math.log(8 / (640 / stride) ** 2)
            bias[:, 5:] += math.log(0.6 / (self.nc - 0.99999))

    def decode(self, raw: list[Tensor]) -> Tensor:
        """Raw outputs -> (b, sum of anchors * ny * nx, nc + 5): centre x, y, w, h in pixels, then probabilities.

        x = (2 sigmoid(tx) - 0.5 + gx) * stride, w = (2 sigmoid(tw))^2 * anchor width; y and h alike.
        """
        levels = []
        for level, (t, stride) in enumerate(zip(raw, self.strides, strict=True)):
            b, _, ny, nx, _ = t.shape
            p = t.float().sigmoid()
            centre = (p[..., :2] * 2 - 0.5 + _cells(ny, nx, t.device)) * stride
            size = (p[..., 2:4] * 2) ** 2 * (self.anchors[level].float().view(1, -1, 1, 1, 2) * stride)
            levels.append(torch.cat((centre, size, p[..., 4:]), -1).reshape(b, -1, self.values))
        return torch.cat(levels, 1)


class DetectDFL(nn.Module):
    """The anchor-free head: per level one branch for boxes and one for classes, and no objectness.

    A box is given by its four distances from a point, left, top, right, bottom, in strides; each distance is the
    mean of a distribution over `bins` whole numbers (distribution focal loss, Li et al. 2020). The points are
    the middles of the cells. The names `cv2` and `cv3` are the same as in published checkpoints.
    """

    bins = 16
    is_end_to_end = False  # whether each object is found once, so that no suppression is needed

    def __init__(self, channels: Sequence[int], nc: int, separable: bool = False) -> None:
        """With `separable`, YOLO11's head: the 3x3 convolutions for classes are depth-wise, and 1x1 ones follow."""
        super().__init__()
        self.nc = nc
        self.strides: list[int] = []  # set by place, once the network's strides are known
        box = max(16, channels[0] // 4, 4 * self.bins)
        cls = max(channels[0], min(nc, 100))
        block = self._separable if separable else self._dense
        self.cv2 = nn.ModuleList(self._branch(c, box, 4 * self.bins, self._dense) for c in channels)
        self.cv3 = nn.ModuleList(self._branch(c, cls, nc, block) for c in channels)

    @staticmethod
    def _branch(c1: int, hidden: int, c2: int, block: Callable[[int, int], nn.Module]) -> nn.Sequential:
        return nn.Sequential(block(c1, hidden), block(hidden, hidden), nn.Conv2d(hidden, c2, 1))

    @staticmethod
    def _dense(c1: int, c2: int) -> nn.Module:
        return Conv(c1, c2, 3)

    @staticmethod
    def _separable(c1: int, c2: int) -> nn.Module:
        return nn.Sequential(Conv(c1, c1, 3, g=c1), Conv(c1, c2))

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """[(b, c_i, ny, nx)] -> raw outputs [(b, ny, nx, 4 * bins + nc)], one per level."""
        return self._raw(self.cv2, self.cv3, maps)

    @staticmethod
    def _raw(boxes: nn.ModuleList, classes: nn.ModuleList, maps: list[Tensor]) -> list[Tensor]:
        branches = zip(boxes, classes, maps, strict=True)
        return [torch.cat((box(x), cls(x)), 1).permute(0, 2, 3, 1) for box, cls, x in branches]

    @torch.no_grad()
    def place(self, strides: Sequence[int]) -> None:
        """Set the biases' prior for known strides: about 5 objects in an image of 640 px, over all classes."""
        self.strides = list(strides)
        self._set_biases(self.cv2, self.cv3, 1.0)

    def _set_biases(self, boxes: nn.ModuleList, classes: nn.ModuleList, distance: float) -> None:
        for box, cls, stride in zip(boxes, classes, self.strides, strict=True):
            box[-1].bias.fill_(distance)  # type: ignore[index]
            cls[-1].bias.fill_(math.log(5 / self.nc / (640 / stride) ** 2))  # type: ignore[index]

    def decode(self, raw: list[Tensor]) -> Tensor:
        """Raw outputs -> (b, sum of ny * nx, nc + 5): as the anchor head's, with an objectness of 1 throughout."""
        levels = []
        for t, stride in zip(raw[-len(self.strides) :], self.strides, strict=True):
            b, ny, nx, _ = t.shape
            t = t.float()
            before, after = torch.split(distances(t[..., : 4 * self.bins], self.bins), 2, -1)
            point = _cells(ny, nx, t.device) + 0.5
            centre = (point + (after - before) / 2) * stride
            size = (before + after) * stride
            one = torch.ones_like(size[..., :1])
            scores = t[..., 4 * self.bins :].sigmoid()
            levels.append(torch.cat((centre, size, one, scores), -1).reshape(b, ny * nx, 5 + self.nc))
        return torch.cat(levels, 1)


def distances(raw: Tensor, bins: int) -> Tensor:
    """Raw outputs (..., 4 * bins) float32 -> distances left, top, right, bottom (..., 4) in strides.

    They are the means of distributions over `bins` whole numbers; with one bin, the outputs themselves.
    """
    if bins == 1:
        return raw
    numbers = torch.arange(bins, dtype=torch.float32, device=raw.device)
    return raw.reshape(*raw.shape[:-1], 4, bins).softmax(-1) @ numbers


class DetectEndToEnd(DetectDFL):
    """YOLO26's head, whose predictions need no suppression: it predicts distances directly, with two sets of branches.

    `cv2` and `cv3` learn to find an object from several points, as in DetectDFL, and train the network's features. The
    branches `one2one_cv2` and `one2one_cv3` learn to find it from one point, from features that they leave alone, and
    predict (Wang et al. 2024, YOLOv10). They start as copies of the others.
    """

    bins = 1
    is_end_to_end = True
    returns_all = False  # whether the outputs of all branches are returned outside of training too

    def __init__(self, channels: Sequence[int], nc: int) -> None:
        super().__init__(channels, nc, separable=True)
        self.one2one_cv2, self.one2one_cv3 = copy.deepcopy(self.cv2), copy.deepcopy(self.cv3)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """[(b, c_i, ny, nx)] -> raw outputs [(b, ny, nx, 4 + nc)], one per level.

        With `returns_all` and in training, those of the other branches come first.
        """
        once = self._raw(self.one2one_cv2, self.one2one_cv3, [x.detach() for x in maps])
        return [*self._raw(self.cv2, self.cv3, maps), *once] if self.training or self.returns_all else once

    @torch.no_grad()
    def place(self, strides: Sequence[int]) -> None:
        """Set the biases' prior, as in DetectDFL, and boxes of four strides."""
        self.strides = list(strides)
        self._set_biases(self.cv2, self.cv3, 2.0)
        self._set_biases(self.one2one_cv2, self.one2one_cv3, 2.0)


Head = Detect | DetectDFL  # with its subclasses
# By the names in model files.
HEADS: dict[str, Callable[..., Head]] = {
    "Detect": Detect,
    "DetectDFL": DetectDFL,
    "DetectEndToEnd": DetectEndToEnd,
}
