"""The building blocks that a YOLO model file names: convolutions, CSP blocks, pooling."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

COLOUR_CHANNELS = 8  # of an image on a GPU: tensor cores take 16-bit channels in multiples of eight


class BatchNorm2d(nn.BatchNorm2d):
    """Batch norm that does not count its batches: one operation less. A fixed momentum does not need the count."""

    momentum: float

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (b, c, h, w)."""
        statistics = self.running_mean, self.running_var
        return F.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum, self.eps)


@fx.wrap
def concatenate(maps: list[Tensor], dimension: int = 1) -> Tensor:
    """Join maps of one size along a dimension.

    On a CPU their gradients are copied to dense memory, because operations on a slice of few channels are slow:
    SiLU's gradient of 16 channels takes 20 times as long.
    """
    for x in maps:
        if x.requires_grad and x.device.type == "cpu" and not torch.compiler.is_compiling():
            x.register_hook(_dense)  # type: ignore[no-untyped-call]
    return torch.cat(maps, dimension)


def _dense(gradient: Tensor) -> Tensor:
    is_channels_last = gradient.stride(1) == 1
    return gradient.contiguous(memory_format=torch.channels_last if is_channels_last else torch.contiguous_format)


class ColourConv2d(nn.Conv2d):
    """Convolution of an image's three colours, which on a GPU computes with five more channels of zeros.

    cuDNN has no kernel for tensor cores with three input channels: the gradient of these few weights took a
    twelfth of yolov5n's step on an H200.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(b, 3, h, w) -> (b, c2, h', w')."""
        if x.device.type != "cuda":
            return super().forward(x)
        zeros = (0, 0, 0, 0, 0, COLOUR_CHANNELS - 3)
        padded: Tensor = self._conv_forward(F.pad(x, zeros), F.pad(self.weight, zeros), self.bias)
        return padded


class Conv(nn.Module):
    """Convolution without bias, batch norm, SiLU: (b, c1, h, w) -> (b, c2, h / stride, w / stride)."""

    def __init__(self, c1: int, c2: int, k: int = 1, s: int = 1, p: int | None = None, g: int = 1) -> None:
        super().__init__()
        kind = ColourConv2d if c1 == 3 else nn.Conv2d
        self.conv = kind(c1, c2, k, s, k // 2 if p is None else p, groups=g, bias=False)
        self.bn: nn.Module = BatchNorm2d(c2, eps=1e-3, momentum=0.03)
        self.act = nn.SiLU()  # not in place: the gradient needs its input, of which autograd would keep a copy

    def forward(self, x: Tensor) -> Tensor:
        """(b, c1, h, w) -> (b, c2, h', w')."""
        return self.act(self.bn(self.conv(x)))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """Two convolutions, by default 1x1 and 3x3, with the input added where the channels allow it."""

    def __init__(
        self, c1: int, c2: int, shortcut: bool = True, g: int = 1, e: float = 0.5, k: tuple[int, int] = (1, 3)
    ) -> None:
        super().__init__()
        hidden = int(c2 * e)
        self.cv1 = Conv(c1, hidden, k[0])
        self.cv2 = Conv(hidden, c2, k[1], g=g)
        self.add = shortcut and c1 == c2

    def forward(self, x: Tensor) -> Tensor:
        """(b, c1, h, w) -> (b, c2, h, w)."""
        y: Tensor = self.cv2(self.cv1(x))
        return x + y if self.add else y


class C3(nn.Module):
    """Cross-stage-partial block: n bottlenecks parallel to a 1x1 branch, joined by a 1x1 convolution."""

    def __init__(self, c1: int, c2: int, n: int = 1, shortcut: bool = True, g: int = 1, e: float = 0.5) -> None:
        super().__init__()
        hidden = int(c2 * e)
        self.cv1 = Conv(c1, hidden)
        self.cv2 = Conv(c1, hidden)
        self.cv3 = Conv(2 * hidden, c2)
        self.m = nn.Sequential(*(Bottleneck(hidden, hidden, shortcut, g, e=1.0) for _ in range(n)))

    def forward(self, x: Tensor) -> Tensor:
        """(b, c1, h, w) -> (b, c2, h, w)."""
        return self.cv3(concatenate([self.m(self.cv1(x)), self.cv2(x)]))  # type: ignore[no-any-return]


class C2f(nn.Module):
    """Cross-stage-partial block of YOLOv8: n bottlenecks, whose outputs are all joined by a 1x1 convolution."""

    def __init__(self, c1: int, c2: int, n: int = 1, shortcut: bool = False, g: int = 1, e: float = 0.5) -> None:
        super().__init__()
        hidden = int(c2 * e)
        self.cv1 = Conv(c1, 2 * hidden)
        self.cv2 = Conv((2 + n) * hidden, c2)
        self.m = nn.ModuleList(Bottleneck(hidden, hidden, shortcut, g, e=1.0, k=(3, 3)) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        """(b, c1, h, w) -> (b, c2, h, w)."""
        kept, last = self.cv1(x).chunk(2, 1)
        maps = [kept, last]
        for block in self.m:
            maps.append(block(maps[-1]))
        return self.cv2(concatenate(maps))  # type: ignore[no-any-return]


class SPPF(nn.Module):
    """Spatial pyramid pooling (He et al. 2014): max-pools of 5, 9 and 13 px, as three chained ones of 5 px."""

    def __init__(self, c1: int, c2: int, k: int = 5) -> None:
        super().__init__()
        self.cv1 = Conv(c1, c1 // 2)
        self.cv2 = Conv(c1 // 2 * 4, c2)
        self.m = nn.MaxPool2d(k, 1, k // 2)

    def forward(self, x: Tensor) -> Tensor:
        """(b, c1, h, w) -> (b, c2, h, w)."""
        maps = [self.cv1(x)]
        for _ in range(3):
            maps.append(self.m(maps[-1]))
        return self.cv2(concatenate(maps))  # type: ignore[no-any-return]


class Concat(nn.Module):
    """Joins several maps of one size along a dimension."""

    def __init__(self, dimension: int = 1) -> None:
        super().__init__()
        self.dimension = dimension

    def forward(self, maps: list[Tensor]) -> Tensor:
        """[(b, c_i, h, w)] -> (b, sum c_i, h, w)."""
        return concatenate(maps, self.dimension)


# By the names in model files. A block's first two arguments are the channels of its input and output.
CHANNEL_BLOCKS: dict[str, Callable[..., nn.Module]] = {
    "Conv": Conv,
    "Bottleneck": Bottleneck,
    "C3": C3,
    "C2f": C2f,
    "SPPF": SPPF,
}
REPEATS_INSIDE = ("C3", "C2f")  # these take the number of repeats as an argument instead of being chained
PLAIN_BLOCKS: dict[str, Callable[..., nn.Module]] = {
    "nn.Upsample": nn.Upsample,
    "nn.MaxPool2d": nn.MaxPool2d,
    "nn.ZeroPad2d": nn.ZeroPad2d,
}
