"""The building blocks that a YOLO model file names: convolutions, CSP blocks, pooling."""

from collections.abc import Callable, Sequence

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
    return gradient.contiguous(
        memory_format=torch.channels_last if is_channels_last else torch.contiguous_format
    )


class ColourConv2d(nn.Conv2d):
    """Convolution of an image's three colours, which on a GPU computes with five more channels of zeros.

    cuDNN has no kernel for tensor cores with three input channels: the gradient of these few weights took a
    twelfth of yolov5n's step on an H200.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(b, 3, h, w) -> (b, c2, h', w')."""
        return self.padded(x) if x.device.type == "cuda" else super().forward(x)

    def padded(self, x: Tensor) -> Tensor:
        """Return the same, computed with COLOUR_CHANNELS channels."""
        zeros = (0, 0, 0, 0, 0, COLOUR_CHANNELS - 3)
        made: Tensor = self._conv_forward(F.pad(x, zeros), F.pad(self.weight, zeros), self.bias)
        return made


class Conv(nn.Module):
    """Convolution without bias, batch norm, SiLU: (b, c1, h, w) -> (b, c2, h / stride, w / stride)."""

    def __init__(
        self, c1: int, c2: int, k: int = 1, s: int = 1, p: int | None = None, g: int = 1, *, act: bool = True
    ) -> None:
        """Without `act` it ends with the batch norm."""
        super().__init__()
        kind = ColourConv2d if c1 == 3 else nn.Conv2d
        self.conv = kind(c1, c2, k, s, k // 2 if p is None else p, groups=g, bias=False)
        self.bn: nn.Module = BatchNorm2d(c2, eps=1e-3, momentum=0.03)
        # Not in place: SiLU's gradient needs its input, of which autograd would keep a copy.
        self.act = nn.SiLU() if act else nn.Identity()

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

    kernels = (1, 3)  # of the bottlenecks' convolutions

    def __init__(
        self, c1: int, c2: int, n: int = 1, shortcut: bool = True, g: int = 1, e: float = 0.5
    ) -> None:
        super().__init__()
        hidden = int(c2 * e)
        self.cv1 = Conv(c1, hidden)
        self.cv2 = Conv(c1, hidden)
        self.cv3 = Conv(2 * hidden, c2)
        self.m = nn.Sequential(
            *(Bottleneck(hidden, hidden, shortcut, g, 1.0, self.kernels) for _ in range(n))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(b, c1, h, w) -> (b, c2, h, w)."""
        return self.cv3(concatenate([self.m(self.cv1(x)), self.cv2(x)]))  # type: ignore[no-any-return]


class C3k(C3):
    """C3 whose bottlenecks have two 3x3 convolutions."""

    kernels = (3, 3)


class SplitBlock(nn.Module):
    """Cross-stage-partial block whose inner blocks' outputs are all joined by a 1x1 convolution.

    Each inner block takes the output of the one before it, the first one half of the input's 1x1 convolution.
    """

    def __init__(self, c1: int, c2: int, hidden: int, inner: Sequence[nn.Module]) -> None:
        super().__init__()
        self.cv1 = Conv(c1, 2 * hidden)
        self.cv2 = Conv((2 + len(inner)) * hidden, c2)
        self.m = nn.ModuleList(inner)

    def forward(self, x: Tensor) -> Tensor:
        """(b, c1, h, w) -> (b, c2, h, w)."""
        kept, last = self.cv1(x).chunk(2, 1)
        maps = [kept, last]
        for block in self.m:
            maps.append(block(maps[-1]))
        return self.cv2(concatenate(maps))  # type: ignore[no-any-return]


class C2f(SplitBlock):
    """YOLOv8's block: n bottlenecks of two 3x3 convolutions."""

    def __init__(
        self, c1: int, c2: int, n: int = 1, shortcut: bool = False, g: int = 1, e: float = 0.5
    ) -> None:
        hidden = int(c2 * e)
        super().__init__(
            c1, c2, hidden, [Bottleneck(hidden, hidden, shortcut, g, 1.0, (3, 3)) for _ in range(n)]
        )


class Attention(nn.Module):
    """Self-attention over the cells of a map, plus a depth-wise convolution of the values for their positions.

    As in YOLOv10 (Wang et al. 2024): heads of 64 channels, whose queries and keys have half as many, and batch norm
    instead of layer norm.
    """

    def __init__(self, c: int) -> None:
        super().__init__()
        self.heads = max(c // 64, 1)
        self.value = c // self.heads  # channels of a head
        self.key = self.value // 2
        self.qkv = Conv(c, self.heads * (2 * self.key + self.value), act=False)
        self.proj = Conv(c, c, act=False)
        self.pe = Conv(c, c, 3, g=c, act=False)

    def forward(self, x: Tensor) -> Tensor:
        """(b, c, h, w) -> (b, c, h, w)."""
        b, c, h, w = x.shape
        joined = self.qkv(x).view(b, self.heads, 2 * self.key + self.value, h * w)
        q, k, v = joined.split((self.key, self.key, self.value), 2)
        seen = F.scaled_dot_product_attention(q.mT, k.mT, v.mT).mT.reshape(b, c, h, w)
        return self.proj(seen + self.pe(v.reshape(b, c, h, w)))  # type: ignore[no-any-return]


class PSABlock(nn.Module):
    """Attention, then a network of two 1x1 convolutions, each added to its input."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.attn = Attention(c)
        self.ffn = nn.Sequential(Conv(c, 2 * c), Conv(2 * c, c, act=False))

    def forward(self, x: Tensor) -> Tensor:
        """(b, c, h, w) -> (b, c, h, w)."""
        x = x + self.attn(x)
        return x + self.ffn(x)  # type: ignore[no-any-return]


class C2PSA(nn.Module):
    """Partial self-attention (YOLOv10's PSA): n blocks with attention on half of the channels."""

    def __init__(self, c1: int, c2: int, n: int = 1, e: float = 0.5) -> None:
        super().__init__()
        hidden = int(c2 * e)
        self.cv1 = Conv(c1, 2 * hidden)
        self.cv2 = Conv(2 * hidden, c2)
        self.m = nn.Sequential(*(PSABlock(hidden) for _ in range(n)))

    def forward(self, x: Tensor) -> Tensor:
        """(b, c1, h, w) -> (b, c2, h, w)."""
        kept, seen = self.cv1(x).chunk(2, 1)
        return self.cv2(concatenate([kept, self.m(seen)]))  # type: ignore[no-any-return]


class C3k2(SplitBlock):
    """The block of YOLO11 and YOLO26: n narrow bottlenecks.

    With `c3k` there are n blocks of two bottlenecks instead, with `attn` n bottlenecks each followed by attention.
    """

    def __init__(
        self,
        c1: int,
        c2: int,
        n: int = 1,
        c3k: bool = False,
        e: float = 0.5,
        attn: bool = False,
        shortcut: bool = True,
        g: int = 1,
    ) -> None:
        hidden = int(c2 * e)

        def inner() -> nn.Module:
            if c3k and not attn:
                return C3k(hidden, hidden, 2, shortcut, g)
            bottleneck = Bottleneck(hidden, hidden, shortcut, g, k=(3, 3))
            return nn.Sequential(bottleneck, PSABlock(hidden)) if attn else bottleneck

        super().__init__(c1, c2, hidden, [inner() for _ in range(n)])


class SPPF(nn.Module):
    """Spatial pyramid pooling (He et al. 2014): max-pools of 5, 9 and 13 px, as three chained ones of 5 px.

    With `shortcut`, as in YOLO26, the input is added where the channels allow it, and the pools see values before SiLU.
    """

    def __init__(self, c1: int, c2: int, k: int = 5, shortcut: bool = False) -> None:
        super().__init__()
        self.cv1 = Conv(c1, c1 // 2, act=not shortcut)
        self.cv2 = Conv(c1 // 2 * 4, c2)
        self.m = nn.MaxPool2d(k, 1, k // 2)
        self.add = shortcut and c1 == c2

    def forward(self, x: Tensor) -> Tensor:
        """(b, c1, h, w) -> (b, c2, h, w)."""
        maps = [self.cv1(x)]
        for _ in range(3):
            maps.append(self.m(maps[-1]))
        y: Tensor = self.cv2(concatenate(maps))
        return x + y if self.add else y


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
    "C3k2": C3k2,
    "C2PSA": C2PSA,
    "SPPF": SPPF,
}
# These take the number of repeats as an argument instead of being chained.
REPEATS_INSIDE = ("C3", "C2f", "C3k2", "C2PSA")
PLAIN_BLOCKS: dict[str, Callable[..., nn.Module]] = {
    "nn.Upsample": nn.Upsample,
    "nn.MaxPool2d": nn.MaxPool2d,
    "nn.ZeroPad2d": nn.ZeroPad2d,
}
