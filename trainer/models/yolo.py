"""Builds a detector from a model file in YOLOv5's syntax: rows of [from, number, module, arguments]."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from trainer import imports
from trainer.errors import TrainerError
from trainer.models.blocks import C3, SPP, SPPF, Bottleneck, Concat, Conv
from trainer.models.heads import Detect, DetectDFL

# A user's own models by import path, once the command line has named them: a checkpoint names what built its model,
# and must not get it imported by that.
_IMPORTED: dict[str, Callable[[int], Any]] = {}
KEYS = ("nc", "depth_multiple", "width_multiple", "backbone", "head")
OPTIONAL_KEYS = ("anchors",)  # what Detect cannot do without, and DetectDFL needs not
CHANNEL_BLOCKS: dict[str, Callable[..., nn.Module]] = {
    "Conv": Conv,
    "Bottleneck": Bottleneck,
    "C3": C3,
    "SPP": SPP,
    "SPPF": SPPF,
}
REPEATS_INSIDE = ("C3",)  # these take the number of repeats as an argument instead of being chained
PLAIN_BLOCKS: dict[str, Callable[..., nn.Module]] = {
    "nn.Upsample": nn.Upsample,
    "nn.MaxPool2d": nn.MaxPool2d,
    "nn.ZeroPad2d": nn.ZeroPad2d,
}
Head = Detect | DetectDFL
HEADS: dict[str, type[Head]] = {"Detect": Detect, "DetectDFL": DetectDFL}
JOINING = ("Concat", *HEADS)  # these take a list of maps
MODULES = (*CHANNEL_BLOCKS, *PLAIN_BLOCKS, *JOINING)


@dataclass(frozen=True)
class Row:
    """One row of a model file, checked: `sources` are absolute layer numbers (-1 is the picture)."""

    where: str
    sources: tuple[int, ...]
    repeats: int
    module: str
    args: tuple[Any, ...]


class Yolo(nn.Module):
    """A detector: pictures (b, 3, h, w) in 0..1 -> raw outputs per level, of the shape that its head says."""

    def __init__(self, layers: list[nn.Module], rows: list[Row]) -> None:
        super().__init__()
        self.model = nn.Sequential(*layers)
        self.rows = rows
        self.kept = {s for i, row in enumerate(rows) for s in row.sources if s != i - 1}
        self.detect.place(self._strides())

    @property
    def detect(self) -> Head:
        """The detection head, always the last layer."""
        head = self.model[-1]
        assert isinstance(head, Head)
        return head

    def forward(self, x: Tensor) -> list[Tensor]:
        """(b, 3, h, w), h and w multiples of the largest stride -> one raw output per level."""
        kept: dict[int, Any] = {-1: x} if -1 in self.kept else {}
        out: Any = x
        for i, (layer, row) in enumerate(zip(self.model, self.rows, strict=True)):
            if row.sources == (i - 1,) and row.module not in JOINING:
                out = layer(out)
            else:
                maps = [out if s == i - 1 else kept[s] for s in row.sources]
                out = layer(maps if row.module in JOINING else maps[0])
            if i in self.kept:
                kept[i] = out
        return out  # type: ignore[no-any-return]

    @torch.no_grad()
    def _strides(self) -> list[int]:
        """The stride of each level, from a dry run of a 256 px picture on the meta device (no arithmetic)."""
        meta = {k: v.to("meta") for k, v in (*self.named_parameters(), *self.named_buffers())}
        self.eval()  # a batch of one picture would upset batch norm
        try:
            raw = torch.func.functional_call(self, meta, torch.empty(1, 3, 256, 256, device="meta"))
        except RuntimeError as error:
            where = self.rows[0].where.rsplit(" row", 1)[0]
            first = str(error).splitlines()[0]
            raise TrainerError(f"{where}: the layers do not fit together: {first}") from error
        finally:
            self.train()
        return [256 // t.shape[2] for t in raw]


def load_cfg(cfg: str) -> dict[str, Any]:
    """Read a model file: a packaged name (yolov5n.yaml) or a path; its keys are checked, its rows not yet.

    An import path, package.module:function, is {"import": path} instead: function(nc) makes the model.
    """
    path = Path(cfg)
    if imports.is_import_path(cfg) and not path.is_file():
        _IMPORTED[cfg] = imports.load(cfg, "--cfg")
        return {"import": cfg}
    if not path.is_file() and path.name == cfg:
        path = Path(__file__).parent / cfg
    if not path.is_file():
        packaged = ", ".join(sorted(p.name for p in Path(__file__).parent.glob("*.yaml")))
        raise TrainerError(f"{cfg}: no such model file", f"give a path, or one of {packaged}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TrainerError(f"{cfg}: not a YAML file: {' '.join(str(error).split())}") from error
    return check_cfg(content, cfg)


def check_cfg(content: Any, where: str) -> dict[str, Any]:
    """The model description itself, once it has exactly the keys it needs; an error names `where` it came from."""
    if not isinstance(content, dict):
        raise TrainerError(f"{where}: a model file is a mapping with the keys {', '.join(KEYS)}")
    if "import" in content:
        if content["import"] not in _IMPORTED:
            raise TrainerError(
                f"{where}: its model is made by {content['import']}, which no checkpoint may call by itself",
                f"name it: --cfg {content['import']}",
            )
        return content
    known = (*KEYS, *OPTIONAL_KEYS)
    for key in content:
        if key not in known:
            raise TrainerError(f"{where}: unknown key {key!r}", f"the keys are {', '.join(known)}")
    for key in KEYS:
        if key not in content:
            raise TrainerError(f"{where}: the key {key!r} is missing", f"the keys are {', '.join(KEYS)}")
    for key in ("nc", "depth_multiple", "width_multiple"):
        if isinstance(content[key], bool) or not isinstance(content[key], (int, float)) or content[key] <= 0:
            raise TrainerError(f"{where}: {key} is {content[key]!r}, it must be a number above 0")
    anchors = content.get("anchors", [])
    if not isinstance(anchors, list) or not all(
        isinstance(level, list) and level and len(level) % 2 == 0 and len(level) == len(anchors[0]) for level in anchors
    ):
        raise TrainerError(
            f"{where}: anchors must be one list of width, height, width, height, ... (in pixels) per level",
            "every level needs the same number of anchors",
        )
    return content


def parse_rows(cfg: dict[str, Any], where: str) -> list[Row]:
    """The rows of backbone and head, checked; layer numbers are made absolute. `where` names the file."""
    rows: list[Row] = []
    for part in ("backbone", "head"):
        if not isinstance(cfg[part], list):
            raise TrainerError(f"{where}: {part} must be a list of rows [from, number, module, arguments]")
        for position, raw in enumerate(cfg[part]):
            here = f"{where}: {part} row {position}"
            rows.append(_parse_row(raw, len(rows), here))
    if not rows or rows[-1].module not in HEADS or any(r.module in HEADS for r in rows[:-1]):
        raise TrainerError(f"{where}: the last row of the head, and only that, must be one of {', '.join(HEADS)}")
    return rows


def _parse_row(raw: Any, index: int, here: str) -> Row:
    if not isinstance(raw, list) or len(raw) != 4:
        raise TrainerError(f"{here}: {raw!r} is not [from, number, module, arguments]")
    source, repeats, module, args = raw
    if module not in MODULES:
        raise TrainerError(f"{here}: unknown module {module!r}", f"the modules are {', '.join(MODULES)}")
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise TrainerError(f"{here}: the number of repeats is {repeats!r}, it must be 1 or more")
    if not isinstance(args, list):
        raise TrainerError(f"{here}: the arguments {args!r} are not a list")
    sources = source if isinstance(source, list) else [source]
    absolute = []
    for s in sources:
        if isinstance(s, bool) or not isinstance(s, int):
            raise TrainerError(f"{here}: 'from' is {s!r}, it must be a layer number")
        layer = index + s if s < 0 else s
        if not -1 <= layer < index:
            raise TrainerError(f"{here}: it takes its input from layer {s}, which is not above it")
        absolute.append(layer)
    return Row(here, tuple(absolute), repeats, module, tuple(args))


def build_yolo(cfg: dict[str, Any], *, nc: int, where: str = "cfg") -> Yolo:
    """The network of a model description for `nc` classes (the data's, which overrides the file's own)."""
    if "import" in cfg:
        return _imported(check_cfg(cfg, where)["import"], nc)
    depth, width = cfg["depth_multiple"], cfg["width_multiple"]
    names = {"None": None, "nc": nc, "anchors": cfg.get("anchors"), "True": True, "False": False}
    rows = parse_rows(cfg, where)
    layers: list[nn.Module] = []
    channels: list[int] = []  # of each layer's output
    for row in rows:
        inputs = [3 if s == -1 else channels[s] for s in row.sources]
        args = [names.get(a, a) if isinstance(a, str) else a for a in row.args]
        repeats = max(round(row.repeats * depth), 1) if row.repeats > 1 else row.repeats
        try:
            layer, out = _layer(row, inputs, args, repeats, width)
        except (TypeError, ValueError, IndexError, RuntimeError, AttributeError) as error:
            first = str(error).splitlines()[0]
            raise TrainerError(f"{row.where}: {row.module} cannot be built from {args}: {first}") from error
        layers.append(layer)
        channels.append(out)
    return Yolo(layers, rows)


def _imported(path: str, nc: int) -> Yolo:
    """A user's own model: any module whose outputs are those of its `detect`, one of our heads."""
    model = _IMPORTED[path](nc)
    head = getattr(model, "detect", None)
    if not isinstance(model, nn.Module) or not isinstance(head, Head) or not head.strides or head.nc != nc:
        raise TrainerError(
            f"--cfg {path}: it must make a torch module with a placed head for {nc} classes as `detect`",
            "see docs/python.md",
        )
    return cast(Yolo, model)


def _layer(row: Row, inputs: list[int], args: list[Any], repeats: int, width: float) -> tuple[nn.Module, int]:
    """One layer and the channels of its output."""
    if row.module == "Detect":
        count, anchors = args
        if not anchors:
            raise ValueError("it needs the key `anchors`")
        if len(anchors) != len(inputs):
            raise ValueError(f"{len(inputs)} inputs but {len(anchors)} levels of anchors")
        return Detect(count, anchors, inputs), 0
    if row.module == "DetectDFL":
        return DetectDFL(inputs, *args), 0
    if row.module == "Concat":
        return Concat(*args), sum(inputs)
    if len(inputs) != 1:
        raise ValueError(f"it takes one input, not {len(inputs)}")
    if row.module in PLAIN_BLOCKS:
        make, channels = PLAIN_BLOCKS[row.module], inputs[0]
    else:
        make = CHANNEL_BLOCKS[row.module]
        channels = math.ceil(args[0] * width / 8) * 8
        args = [inputs[0], channels, *args[1:]]
        if row.module in REPEATS_INSIDE:
            return make(*args[:2], repeats, *args[2:]), channels
    if repeats == 1:
        return make(*args), channels
    first = make(*args)
    again = [channels, *args[1:]] if row.module in CHANNEL_BLOCKS else args
    return nn.Sequential(first, *(make(*again) for _ in range(repeats - 1))), channels


def freeze(model: Yolo, layers: Sequence[int]) -> int:
    """Keep the parameters of the layers with these numbers as they are; returns how many parameters that is.

    As in YOLOv5, batch norm's running statistics go on following the pictures.
    """
    for number in layers:
        if not 0 <= number < len(model.model):
            raise TrainerError(
                f"--freeze: there is no layer {number}, the model has 0 to {len(model.model) - 1}",
                "trainer info --cfg ... lists them",
            )
    if set(layers) == set(range(len(model.model))):
        raise TrainerError("--freeze: no layer is left to train", f"--freeze {len(model.model) - 1} keeps the head")
    frozen = [p for number in layers for p in model.model[number].parameters()]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return sum(p.numel() for p in frozen)


def fuse(model: Yolo) -> Yolo:
    """Fold every batch norm into its convolution, in place, for evaluation; the outputs stay the same."""
    for block in _convs(model):
        if isinstance(block.bn, (nn.BatchNorm2d, nn.SyncBatchNorm)):
            block.conv = fuse_conv_bn_eval(block.conv.eval(), block.bn.eval())
            block.bn = nn.Identity()
    return model


def _convs(model: nn.Module) -> Iterator[Conv]:
    return (m for m in model.modules() if isinstance(m, Conv))
