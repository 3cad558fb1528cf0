"""Official checkpoints: YOLOv5's .pt files, pickles of Python objects that become inert placeholders."""

import pickle
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from trainer.errors import TrainerError

# The classes that a release of YOLOv5 names; all others are refused.
MODULES = (
    *(f"models.yolo.{name}" for name in ("Model", "DetectionModel", "Detect")),
    *(f"models.common.{name}" for name in ("Conv", "C3", "Bottleneck", "SPPF", "Concat")),
    *(f"torch.nn.modules.container.{name}" for name in ("Sequential", "ModuleList")),
    "torch.nn.modules.conv.Conv2d",
    "torch.nn.modules.batchnorm.BatchNorm2d",
    "torch.nn.modules.activation.SiLU",
    "torch.nn.modules.pooling.MaxPool2d",
    "torch.nn.modules.upsampling.Upsample",
)
CFG_KEYS = ("nc", "depth_multiple", "width_multiple", "anchors", "backbone", "head")
# Errors of malformed files: pickle's own, and those of the few calls that a pickle may make.
MALFORMED = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RecursionError),
    *(ArithmeticError, AttributeError, ImportError, LookupError, MemoryError, RuntimeError, TypeError, ValueError),
)


def load(path: str) -> dict[str, Any]:
    """Load an official checkpoint, with the keys of this trainer: model, ema, cfg, names, imgsz, epoch, hyp.

    Half precision becomes float32. `ema` is the file's EMA model, else its model. The cfg's anchors are those of the
    head, in pixels. Raise TrainerError with the name of any class that is not allowed.
    """
    # Classes without behaviour, new for each file, because a pickle can set attributes of the classes it names.
    placeholders = [(type(name, (), {}), name) for name in MODULES]
    try:
        _check_archive(path)
        with safe_globals(placeholders):  # type: ignore[arg-type]
            if refused := get_unsafe_globals_in_checkpoint(path):
                raise TrainerError(
                    f"--weights {path}: the file names {refused[0]}, which a YOLOv5 checkpoint has no need for: "
                    "refused, nothing of it was run",
                    "take a release file, or a best.pt that YOLOv5 wrote at the end of a training",
                )
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
        model = content.get("ema") or content["model"]
        return {**_description(model), "epoch": content.get("epoch", -1)}
    except MALFORMED as error:
        first = (str(error).splitlines() or [""])[0]
        what = f"--weights {path}: not a YOLOv5 checkpoint, or damaged: {type(error).__name__}: {first}"
        raise TrainerError(what, "download it again, or give a best.pt or last.pt that this trainer wrote") from error


def _check_archive(path: str) -> None:
    """Raise BadZipFile or ValueError for a damaged or compressed file: torch checks no sums."""
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is compressed, which torch never does")
        if damaged := archive.testzip():
            raise ValueError(f"the sum of {damaged} is wrong")


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
    head = list(model._modules["model"]._modules.values())[-1]
    strides = torch.as_tensor(model.stride).float()
    # Training may have fitted other anchors than the cfg's; the head stores them.
    anchors = head._buffers["anchors"].float() * strides.view(-1, 1, 1)
    extra = [key for key in model.yaml if key not in CFG_KEYS and (key, model.yaml[key]) != ("ch", 3)]
    if extra:  # e.g. another activation: equal names and shapes, but another network
        raise ValueError(f"its model file has {extra[0]}: {model.yaml[extra[0]]!r}, which is not supported")
    cfg = {key: model.yaml[key] for key in CFG_KEYS}
    cfg |= {"nc": int(model.yaml["nc"]), "anchors": [[round(v, 2) for v in a.flatten().tolist()] for a in anchors]}
    names = model.names
    names = [str(names[k]) for k in range(len(names))] if isinstance(names, Mapping) else [str(n) for n in names]
    if len(names) != cfg["nc"]:
        raise ValueError(f"{len(names)} names for {cfg['nc']} classes")
    imgsz = 1280 if len(strides) > 3 else 640  # as the releases were trained
    return {"model": state, "ema": state, "cfg": cfg, "names": names, "imgsz": imgsz, "hyp": {}}
