"""YOLO detectors, built from model files in YOLOv5's syntax: rows of [from, number, module, arguments]."""

import difflib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from trainer.config import imports, yaml_file
from trainer.config.families import ModelCfg, named_families
from trainer.config.faults import BadData
from trainer.config.other_models import known_models, other_model
from trainer.errors import TrainerError
from trainer.models.blocks import CHANNEL_BLOCKS, PLAIN_BLOCKS, REPEATS_INSIDE, Concat, Conv
from trainer.models.heads import HEADS, Detect, Head

# Users' models by import path. Only the command line adds to it: a checkpoint must not cause an import.
_IMPORTED: dict[str, Callable[[int], Any]] = {}
KEYS = ("nc", "depth_multiple", "width_multiple", "backbone", "head")
OPTIONAL_KEYS = ("anchors",)  # required by Detect alone
Model = TypeVar("Model", bound=nn.Module)
JOINING = ("Concat", *HEADS)  # these take a list of maps
MODULES = (*CHANNEL_BLOCKS, *PLAIN_BLOCKS, *JOINING)


class Row(NamedTuple):
    """One row of a model file: `sources` are absolute layer numbers (-1 is the image)."""

    sources: tuple[int, ...]
    module: str


class Yolo(nn.Module):
    """A detector: images (b, 3, h, w) in 0..1 -> raw outputs per level, of the shape that its head says."""

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

    @property
    def parts(self) -> list[tuple[str, nn.Module]]:
        """The layers with the names of their modules."""
        return [(row.module, layer) for row, layer in zip(self.rows, self.model, strict=True)]

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
        """The stride of each level, from a dry run of a 256 px image on the meta device (no arithmetic)."""
        meta = {k: v.to("meta") for k, v in (*self.named_parameters(), *self.named_buffers())}
        self.eval()  # a batch of one image would upset batch norm
        raw = torch.func.functional_call(self, meta, torch.empty(1, 3, 256, 256, device="meta"))
        self.train()
        return [256 // t.shape[2] for t in raw]


def load_cfg(cfg: str) -> ModelCfg:
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
        raise other_model("--cfg", cfg) or TrainerError(f"--cfg {cfg}: no such model", _models_like(cfg))
    content = yaml_file.read(path)
    if unknown := content.unknown((*KEYS, *OPTIONAL_KEYS)):
        raise BadData(unknown)
    return check_cfg(content.values, cfg)


def _models_like(cfg: str) -> str:
    """Return a hint with the models whose names are like `cfg`, and with the detector families."""
    if cfg.endswith((".pt", ".pth", ".safetensors")):
        return f"initial weights are another option: --weights {cfg}"
    family, mark, model = re.match(r"([^:_-]*)([:_-]?)(.*)", cfg.removesuffix(".yaml"), re.DOTALL).groups()  # type: ignore[union-attr]
    named = difflib.get_close_matches(family.lower(), named_families(), 1) if model else []
    near = [f"{name}{':' if mark == ':' else '-'}{model}" for name in named]
    near = near or difflib.get_close_matches(
        cfg, [path.name for path in Path(__file__).parent.glob("*.yaml")], 2
    )
    return (
        f"did you mean {' or '.join(near)}? Models are {known_models()}" if near else f"use {known_models()}"
    )


def check_cfg(content: Any, where: str) -> ModelCfg:
    """Check the keys of a model description and return it; errors name its origin `where`."""
    if not isinstance(content, dict):
        raise TrainerError(f"{where}: a model file is a mapping with the keys {', '.join(KEYS)}")
    if "import" in content:
        if content["import"] not in _IMPORTED:
            what = f"{where}: its model is built by {content['import']}, which a checkpoint must not import"
            raise TrainerError(what, f"allow it: --cfg {content['import']}")
        return content
    for key in KEYS:
        if key not in content:
            raise TrainerError(f"{where}: the key {key!r} is missing", f"the keys are {', '.join(KEYS)}")
    for key in ("nc", "depth_multiple", "width_multiple"):
        if isinstance(content[key], bool) or not isinstance(content[key], (int, float)) or content[key] <= 0:
            raise TrainerError(f"{where}: {key} must be a number above 0, not {content[key]!r}")
    for part in ("backbone", "head"):
        if not isinstance(content[part], list):
            raise TrainerError(f"{where}: {part} must be a list of rows [from, number, module, arguments]")
    return content


def build_yolo(cfg: ModelCfg, *, nc: int, where: str = "cfg") -> Yolo:
    """Build a model description for `nc` classes, the data set's, which override the file's."""
    if "import" in cfg:
        return _imported(check_cfg(cfg, where)["import"], nc)
    rows: list[Row] = []
    layers: list[nn.Module] = []
    channels: list[int] = []  # of each layer's output
    numbered = [
        (part, position, raw) for part in ("backbone", "head") for position, raw in enumerate(cfg[part])
    ]
    for part, position, raw in numbered:
        try:
            row, layer, out = _layer(raw, channels, cfg, nc)
        except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError, AttributeError) as error:
            first = str(error).splitlines()[0]
            what = f"{where}: {part} row {position}: {raw!r} cannot be built: {first}"
            hint = f"a row is [from, number, module, arguments]; the modules are {', '.join(MODULES)}"
            raise TrainerError(what, hint) from error
        rows.append(row)
        layers.append(layer)
        channels.append(out)
    if not rows or rows[-1].module not in HEADS or any(r.module in HEADS for r in rows[:-1]):
        raise TrainerError(
            f"{where}: the last row of the head, and only that, must be one of {', '.join(HEADS)}"
        )
    try:
        return Yolo(layers, rows)
    except (RuntimeError, ArithmeticError, LookupError) as error:
        first = str(error).splitlines()[0]
        raise TrainerError(f"{where}: the layers do not fit together: {first}") from error


def _imported(path: str, nc: int) -> Yolo:
    """Build a user's model: any module that returns the outputs of its head `detect`."""
    model = _IMPORTED[path](nc)
    head = getattr(model, "detect", None)
    if not isinstance(model, nn.Module) or not isinstance(head, Head) or not head.strides or head.nc != nc:
        what = f"--cfg {path}: it must return a torch module with a placed head for {nc} classes as `detect`"
        raise TrainerError(what, "see docs/how-to/any-program.md")
    return cast(Yolo, model)


def _layer(raw: Any, channels: list[int], cfg: ModelCfg, nc: int) -> tuple[Row, nn.Module, int]:
    """Build the layer of a row, after layers with these output channels; return it with its output channels."""
    source, repeats, module, args = raw
    if module not in MODULES:
        raise ValueError(f"unknown module {module!r}")
    if repeats < 1:
        raise ValueError(f"the number of repeats is {repeats}")
    index = len(channels)
    sources = tuple(index + s if s < 0 else s for s in (source if isinstance(source, list) else [source]))
    for layer in sources:
        if not -1 <= layer < index:
            raise ValueError(f"it takes its input from layer {layer}, which is not above it")
    inputs = [3 if s == -1 else channels[s] for s in sources]
    names = {"None": None, "nc": nc, "anchors": cfg.get("anchors"), "True": True, "False": False}
    args = [names.get(a, a) if isinstance(a, str) else a for a in args]
    repeats = max(round(repeats * cfg["depth_multiple"]), 1) if repeats > 1 else repeats
    return Row(sources, module), *_module(module, inputs, args, repeats, cfg["width_multiple"])


def _module(
    name: str, inputs: list[int], args: list[Any], repeats: int, width: float
) -> tuple[nn.Module, int]:
    """Build a module; return it and its output channels."""
    if name == "Detect":
        count, anchors = args
        if not anchors:
            raise ValueError("it needs the key `anchors`")
        if len(anchors) != len(inputs):
            raise ValueError(f"{len(inputs)} inputs, but {len(anchors)} levels of anchors")
        return Detect(count, anchors, inputs), 0
    if name in HEADS:
        return HEADS[name](inputs, *args), 0
    if name == "Concat":
        return Concat(*args), sum(inputs)
    (channels,) = inputs
    if name in PLAIN_BLOCKS:
        blocks = [PLAIN_BLOCKS[name](*args) for _ in range(repeats)]
    else:
        make = CHANNEL_BLOCKS[name]
        channels = math.ceil(args[0] * width / 8) * 8
        if name in REPEATS_INSIDE:
            return make(*inputs, channels, repeats, *args[1:]), channels
        blocks = [make(c, channels, *args[1:]) for c in (*inputs, *[channels] * (repeats - 1))]
    return blocks[0] if repeats == 1 else nn.Sequential(*blocks), channels


def fuse(model: Model) -> Model:
    """Fold the batch norm of every Conv into its convolution, in place, for evaluation; the outputs stay the same."""
    for block in model.modules():
        if isinstance(block, Conv) and isinstance(block.bn, (nn.BatchNorm2d, nn.SyncBatchNorm)):
            block.conv = fuse_conv_bn_eval(block.conv.eval(), block.bn.eval())
            block.bn = nn.Identity()
    return model
