"""Checkpoints of YOLOv5 and ultralytics: pickles of Python objects that become inert placeholders."""

import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from trainer.errors import TrainerError
from trainer.weights import torch_archive

# The classes that a detector of YOLOv5, YOLOv8, YOLO11 or YOLO26 names; all others are refused.
_BLOCKS = ("C3", "C3k", "C2f", "C3k2", "C2PSA", "PSABlock", "Attention", "Bottleneck", "SPPF", "DFL")
MODULES = (
    *(f"models.yolo.{name}" for name in ("Model", "DetectionModel", "Detect")),
    *(f"models.common.{name}" for name in ("Conv", "C3", "Bottleneck", "SPPF", "Concat")),
    "ultralytics.nn.tasks.DetectionModel",
    "ultralytics.nn.modules.head.Detect",
    *(f"ultralytics.nn.modules.conv.{name}" for name in ("Conv", "DWConv", "Concat")),
    *(f"ultralytics.nn.modules.block.{name}" for name in _BLOCKS),
    "ultralytics.utils.IterableSimpleNamespace",  # options, in a checkpoint of a running training
    *(f"torch.nn.modules.container.{name}" for name in ("Sequential", "ModuleList")),
    "torch.nn.modules.conv.Conv2d",
    "torch.nn.modules.batchnorm.BatchNorm2d",
    "torch.nn.modules.activation.SiLU",
    "torch.nn.modules.linear.Identity",
    "torch.nn.modules.pooling.MaxPool2d",
    "torch.nn.modules.upsampling.Upsample",
)
CFG_KEYS = ("nc", "depth_multiple", "width_multiple", "anchors", "backbone", "head")
# Errors of malformed files: pickle's own, and those of the few calls that a pickle may make.
MALFORMED = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RecursionError),
    *(
        ArithmeticError,
        AttributeError,
        ImportError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ),
)


def load(path: str) -> dict[str, Any]:
    """Load such a checkpoint, with the keys of this trainer: model, ema, cfg, names, imgsz, epoch, hyp.

    Half precision becomes float32. `ema` is the file's EMA model, else its model. The cfg of a network of YOLOv5 is
    the file's, with the head's anchors in pixels; that of others is made from the layers. Raise TrainerError with the
    name of any class that is not allowed.
    """
    # Classes without behaviour, new for each file, because a pickle can set attributes of the classes it names.
    placeholders = [(type(name, (), {}), name) for name in MODULES]
    try:
        torch_archive.check(path)
        with safe_globals(placeholders):  # type: ignore[arg-type]
            if refused := get_unsafe_globals_in_checkpoint(path):
                raise TrainerError(
                    f"--weights {path}: refused, because the file refers to {_telling(refused)}, which no "
                    "detector of YOLOv5, YOLOv8, YOLO11 or YOLO26 needs; nothing in it was run",
                    "take a release file of one of these detectors, or a best.pt that was trained from one",
                )
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
        model = content.get("ema") or content["model"]
        return {**_description(model), "epoch": content.get("epoch", -1)}
    except MALFORMED as error:
        first = (str(error).splitlines() or [""])[0]
        what = f"--weights {path}: not a checkpoint of YOLOv5 or ultralytics, or damaged: {type(error).__name__}: {first}"
        raise TrainerError(
            what, "download it again, or give a best.pt or last.pt that this trainer wrote"
        ) from error


def _telling(names: Sequence[str]) -> str:
    """Return the name that says most about a model: that of its head, such as Segment, if there is one."""
    return next((name for name in names if ".head." in name), names[0])


def _tensors(module: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the state dict of a placeholder, with nn.Module's names."""
    own = {**module._parameters, **module._buffers}
    left_out: set[str] = getattr(module, "_non_persistent_buffers_set", set())
    found = {prefix + k: v for k, v in own.items() if isinstance(v, Tensor) and k not in left_out}
    if any(v.numel() * v.element_size() > v.untyped_storage().nbytes() for v in found.values()):
        raise ValueError("a tensor larger than its storage")  # a copy of it could exhaust the memory
    for name, child in module._modules.items():
        if child is not None:
            found |= _tensors(child, f"{prefix}{name}.")
    return found


def _description(model: Any) -> dict[str, Any]:
    state = {k: v.float() if v.is_floating_point() else v.clone() for k, v in _tensors(model).items()}
    layers = _children(_child(model, "model"))
    is_anchor_based = "anchors" in layers[-1]._buffers
    cfg = _cfg_of_anchors(model, layers[-1]) if is_anchor_based else _cfg_of_layers(model, layers, state)
    names = model.names
    names = (
        [str(names[k]) for k in range(len(names))] if isinstance(names, Mapping) else [str(n) for n in names]
    )
    if len(names) != cfg["nc"]:
        raise ValueError(f"{len(names)} names for {cfg['nc']} classes")
    # The releases of YOLOv5 do not say it.
    imgsz = (1280 if len(model.stride) > 3 else 640) if is_anchor_based else _side(model)
    return {"model": state, "ema": state, "cfg": cfg, "names": names, "imgsz": imgsz, "hyp": {}}


def _cfg_of_anchors(model: Any, head: Any) -> dict[str, Any]:
    """Return the description of a network of YOLOv5, which is in the file."""
    # Training may have fitted other anchors than the cfg's; the head stores them.
    anchors = head._buffers["anchors"].float() * torch.as_tensor(model.stride).float().view(-1, 1, 1)
    extra = [key for key in model.yaml if key not in CFG_KEYS and (key, model.yaml[key]) != ("ch", 3)]
    if extra:  # e.g. another activation: equal names and shapes, but another network
        raise ValueError(f"its model file has {extra[0]}: {model.yaml[extra[0]]!r}, which is not supported")
    cfg = {key: model.yaml[key] for key in CFG_KEYS}
    anchors_px = [[round(v, 2) for v in a.flatten().tolist()] for a in anchors]
    return cfg | {"nc": int(model.yaml["nc"]), "anchors": anchors_px}


def _cfg_of_layers(model: Any, layers: Sequence[Any], state: dict[str, Tensor]) -> dict[str, Any]:
    """Return the description of a network of ultralytics, from its layers; remove its constant from `state`."""
    for module in _all(model):
        if _kind(module) == "BatchNorm2d" and (module.eps, module.momentum) != (1e-3, 0.03):
            raise ValueError(f"batch norm with eps {module.eps:g} and momentum {module.momentum:g}")
    for key in [key for key in state if key.endswith(".dfl.conv.weight")]:
        values = state.pop(key).flatten()
        if not torch.equal(values, torch.arange(len(values), dtype=values.dtype)):
            raise ValueError(f"{key} is not 0 to {len(values) - 1}")
    rows = [_row(layer) for layer in layers]
    nc = int(layers[-1].nc)
    return {"nc": nc, "depth_multiple": 1.0, "width_multiple": 1.0, "backbone": rows[:-1], "head": rows[-1:]}


def _side(model: Any) -> int:
    """Return the side of the images that a model of ultralytics was trained with, in pixels."""
    options = model.args if isinstance(model.args, Mapping) else vars(model.args)
    largest = int(max(torch.as_tensor(model.stride).tolist()))
    return -(-int(options.get("imgsz", 640)) // largest) * largest


def _kind(module: Any) -> str:
    """Return the name of a placeholder's class, without its module."""
    return type(module).__name__.rpartition(".")[2]


def _child(module: Any, *names: str) -> Any:
    for name in names:
        module = module._modules[name]
    return module


def _children(module: Any) -> list[Any]:
    return list(module._modules.values())


def _all(module: Any) -> list[Any]:
    """Return a module and all modules in it."""
    return [module, *(inner for child in _children(module) if child is not None for inner in _all(child))]


def _row(layer: Any) -> list[Any]:
    """Return the row of a model file that describes a layer, with its own numbers of repeats and channels."""
    kind = _kind(layer)
    if kind not in _ROWS:
        raise ValueError(f"a layer {kind}")
    return [layer.f, *_ROWS[kind](layer)]


def _only(values: Sequence[int]) -> int:
    """Return the one value of both sides."""
    first, second = values
    if first != second:
        raise ValueError(f"a layer with different sides: {first} and {second}")
    return int(first)


def _channels(layer: Any, name: str = "cv2") -> int:
    return int(_child(layer, name, "conv").out_channels)


def _share(layer: Any, parts: int) -> float:
    """Return the hidden channels as a share of a block's output, if its first convolution makes `parts` of them."""
    return _channels(layer, "cv1") / parts / _channels(layer)


def _conv(layer: Any) -> tuple[int, str, list[Any]]:
    conv = _child(layer, "conv")
    if _kind(_child(layer, "act")) != "SiLU" or _only(conv.dilation) != 1:
        raise ValueError("a convolution with another activation than SiLU, or with holes")
    numbers = (_only(conv.kernel_size), _only(conv.stride), _only(conv.padding), int(conv.groups))
    return 1, "Conv", [int(conv.out_channels), *numbers]


def _c3(layer: Any) -> tuple[int, str, list[Any]]:
    inner = _children(_child(layer, "m"))
    out = _channels(layer, "cv3")
    return len(inner), "C3", [out, bool(inner[0].add), 1, _channels(layer, "cv1") / out]


def _c2f(layer: Any) -> tuple[int, str, list[Any]]:
    inner = _children(_child(layer, "m"))
    return len(inner), "C2f", [_channels(layer), bool(inner[0].add), 1, _share(layer, 2)]


def _c3k2(layer: Any) -> tuple[int, str, list[Any]]:
    inner = _children(_child(layer, "m"))
    kinds = {_kind(module) for module in _all(inner[0])}
    bottleneck = next(module for module in _all(inner[0]) if _kind(module) == "Bottleneck")
    options = ["C3k" in kinds, _share(layer, 2), "PSABlock" in kinds, bool(bottleneck.add)]
    return len(inner), "C3k2", [_channels(layer), *options]


def _c2psa(layer: Any) -> tuple[int, str, list[Any]]:
    return len(_children(_child(layer, "m"))), "C2PSA", [_channels(layer), _share(layer, 2)]


def _sppf(layer: Any) -> tuple[int, str, list[Any]]:
    shortcut = getattr(layer, "add", False)  # which older versions do not know
    if getattr(layer, "n", 3) != 3 or (_kind(_child(layer, "cv1", "act")) == "Identity") != shortcut:
        raise ValueError("an SPPF of another kind than YOLOv8's and YOLO26's")
    return 1, "SPPF", [_channels(layer), int(_child(layer, "m").kernel_size), bool(shortcut)]


def _upsample(layer: Any) -> tuple[int, str, list[Any]]:
    return 1, "nn.Upsample", [layer.size, layer.scale_factor, layer.mode]


def _concat(layer: Any) -> tuple[int, str, list[Any]]:
    return 1, "Concat", [int(layer.d)]


def _detect(layer: Any) -> tuple[int, str, list[Any]]:
    is_pair = "one2one_cv2" in layer._modules
    is_separable = _kind(_child(layer, "cv3", "0", "0")) == "Sequential"
    if is_pair and is_separable and layer.reg_max == 1:
        return 1, "DetectEndToEnd", ["nc"]
    if is_pair or layer.reg_max != 16:
        kind = "an end-to-end head" if is_pair else "a head"
        raise ValueError(f"{kind} with reg_max {layer.reg_max}")
    return 1, "DetectDFL", ["nc", is_separable]


# By the class of a layer: its number of repeats, its name in a model file, and its arguments.
_ROWS: dict[str, Callable[[Any], tuple[int, str, list[Any]]]] = {
    "Conv": _conv,
    "C3": _c3,
    "C2f": _c2f,
    "C3k2": _c3k2,
    "C2PSA": _c2psa,
    "SPPF": _sppf,
    "Upsample": _upsample,
    "Concat": _concat,
    "Detect": _detect,
}
