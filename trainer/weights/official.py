"""Reads YOLOv5's own .pt files, which are pickles of whole Python objects, without running anything they name."""

from __future__ import annotations

import collections
import io
import math
import pickle
import sys
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.errors import TrainerError

# Every class that a release of YOLOv5 names, and all that is known here: whatever else a file names is refused.
MODULES = (
    *(f"models.yolo.{name}" for name in ("Model", "DetectionModel", "Detect")),
    *(f"models.common.{name}" for name in ("Conv", "C3", "Bottleneck", "SPP", "SPPF", "Concat")),
    *(f"torch.nn.modules.container.{name}" for name in ("Sequential", "ModuleList")),
    "torch.nn.modules.conv.Conv2d",
    "torch.nn.modules.batchnorm.BatchNorm2d",
    "torch.nn.modules.activation.SiLU",
    "torch.nn.modules.pooling.MaxPool2d",
    "torch.nn.modules.upsampling.Upsample",
)
STORAGES = {
    "torch.HalfStorage": torch.float16,
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.LongStorage": torch.int64,
}
BUILTINS = ("__builtin__", "builtins")
CFG_KEYS = ("nc", "depth_multiple", "width_multiple", "anchors", "backbone", "head")
# What reading a file of the wrong shape can raise: pickle's own errors and those of the few calls that it may make.
MALFORMED = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RecursionError),
    *(ArithmeticError, AttributeError, ImportError, LookupError, MemoryError, RuntimeError, TypeError, ValueError),
)


class _Inert:
    """Stands in for an object of the file: it holds what the pickle says the object held, and does nothing."""

    def __init__(self, *arguments: object) -> None:
        pass


def load(path: str) -> dict[str, Any]:
    """The content of an official checkpoint under our checkpoints' keys: model, ema, cfg, names, imgsz, epoch, hyp.

    Half precision becomes float32; `ema` is the file's averaged model where it has one, else its model, and the cfg's
    anchors are those of the head, in pixels. Raises TrainerError naming the class where the file wants any other.
    """
    if not zipfile.is_zipfile(path):
        raise TrainerError(
            f"--weights {path}: not a whole torch file of the zip format (torch 1.6 and newer write it)",
            "fetch it again if it was cut off; a file of an older torch must be saved anew by a newer one",
        )
    try:
        content = _unpickle(path)
        model = content.get("ema") or content["model"]
        return {**_description(model), "epoch": content.get("epoch", -1)}
    except MALFORMED as error:
        first = (str(error).splitlines() or [""])[0]
        raise TrainerError(
            f"--weights {path}: not a YOLOv5 checkpoint, or damaged: {type(error).__name__}: {first}",
            "fetch it again, or give a best.pt or last.pt that this trainer wrote",
        ) from error


def _unpickle(path: str) -> Any:
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is compressed, which torch never does")
        (entry,) = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        folder = entry.removesuffix("data.pkl")
        if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
            raise ValueError("written on a big-endian machine")
        return _Unpickler(archive, folder, path).load()


class _Unpickler(pickle.Unpickler):
    """An unpickler that can name nothing but the classes above, and gets inert stand-ins for those."""

    def __init__(self, archive: zipfile.ZipFile, folder: str, path: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{folder}data.pkl")))
        self._archive, self._folder, self._path = archive, folder, path
        self._storages: dict[str, Tensor] = {}
        # Made anew for each file: a pickle can set attributes of whatever it can name.
        self._known: dict[str, Any] = {name: type(name, (_Inert,), {}) for name in MODULES}
        self._known |= {name: type(name, (), {"dtype": dtype}) for name, dtype in STORAGES.items()}
        self._known |= {f"{module}.set": set for module in BUILTINS}
        self._known["collections.OrderedDict"] = collections.OrderedDict
        self._known["torch._utils._rebuild_tensor_v2"] = lambda *arguments: _view(*arguments[:4])
        self._known["torch._utils._rebuild_parameter"] = lambda *arguments: arguments[0]

    def find_class(self, module: str, name: str) -> Any:
        found = self._known.get(f"{module}.{name}")
        if found is None:
            raise TrainerError(
                f"--weights {self._path}: the file names {module}.{name}, which a YOLOv5 checkpoint has no need for: "
                "refused, nothing of it was run",
                "take a release file, or a best.pt that YOLOv5 wrote at the end of a training",
            )
        return found

    def persistent_load(self, pid: Any) -> Tensor:
        """A storage as a flat tensor; read once, however many tensors look into it."""
        _, kind, key, _, count = pid
        if key not in self._storages:
            data = bytearray(self._archive.read(f"{self._folder}data/{key}"))
            flat = torch.frombuffer(data, dtype=kind.dtype) if data else torch.empty(0, dtype=kind.dtype)
            if len(flat) != count or sys.byteorder != "little":
                raise ValueError(f"storage {key} has {len(flat)} values, not {count}")
            self._storages[key] = flat
        return self._storages[key]


def _view(flat: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """A tensor in a storage; torch checks that it lies inside."""
    if math.prod(size) > len(flat):
        raise ValueError("a tensor larger than its storage")
    return torch.as_strided(flat, size, stride, offset)


def _tensors(module: Any, prefix: str = "") -> dict[str, Tensor]:
    """The state dict of a stand-in, as nn.Module would name it."""
    own = {**module._parameters, **module._buffers}
    left_out: set[str] = getattr(module, "_non_persistent_buffers_set", set())
    found = {prefix + k: v for k, v in own.items() if isinstance(v, Tensor) and k not in left_out}
    for name, child in module._modules.items():
        if child is not None:
            found |= _tensors(child, f"{prefix}{name}.")
    return found


def _description(model: Any) -> dict[str, Any]:
    state = {k: v.float() if v.is_floating_point() else v.clone() for k, v in _tensors(model).items()}
    head = list(model._modules["model"]._modules.values())[-1]
    strides = torch.as_tensor(model.stride).float()
    # Training may have replaced the file's anchors by better ones; only the head knows them.
    anchors = head._buffers["anchors"].float() * strides.view(-1, 1, 1)
    extra = [key for key in model.yaml if key not in CFG_KEYS and (key, model.yaml[key]) != ("ch", 3)]
    if extra:  # another activation, another number of colours: the same names and shapes, but not the same network
        raise ValueError(f"its model file has {extra[0]}: {model.yaml[extra[0]]!r}, which is not supported")
    cfg = {key: model.yaml[key] for key in CFG_KEYS}
    cfg |= {"nc": int(model.yaml["nc"]), "anchors": [[round(v, 2) for v in a.flatten().tolist()] for a in anchors]}
    names = model.names
    names = [str(names[k]) for k in range(len(names))] if isinstance(names, Mapping) else [str(n) for n in names]
    if len(names) != cfg["nc"]:
        raise ValueError(f"{len(names)} names for {cfg['nc']} classes")
    imgsz = 1280 if len(strides) > 3 else 640  # what the releases were trained at
    return {"model": state, "ema": state, "cfg": cfg, "names": names, "imgsz": imgsz, "hyp": {}}
