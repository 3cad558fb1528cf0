"""Detector: inference of a trained model."""

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import PRECISIONS, Hyp
from trainer.detectors import Detections, Limits, Parts, build, load_weights, read_cfg
from trainer.distributed import comm
from trainer.errors import TrainerError
from trainer.models.precision import as_input, native_bf16, pick_dtype, set_tf32
from trainer.models.yolo import fuse
from trainer.weights import checkpoint_file


class Detector:
    """Inference model: a fused copy on its device, with its accumulated times."""

    def __init__(
        self, model: nn.Module, parts: Parts, device: torch.device, dtype: torch.dtype, limits: Limits
    ) -> None:
        """Infer with `model`: the model of `parts`, or its average."""
        self._postprocess = parts.postprocess
        self._net = fuse(copy.deepcopy(model)).eval().to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.device, self.dtype, self.limits = device, dtype, limits
        self.network_s = self.nms_s = 0.0  # sum over all calls
        self.images = 0

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> list[Detections]:
        """uint8 (b, h, w, 3) RGB, sides multiples of the stride -> detections of each image in pixels, on the CPU."""
        begin = comm.now(self.device)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            raw = self._net(as_input(images.to(self.device, non_blocking=True)))
        middle = comm.now(self.device)
        found = self._postprocess(self._net, raw, self.limits)
        self.network_s += middle - begin
        self.nms_s += time.perf_counter() - middle
        self.images += len(images)
        return found


def to_original(boxes: Tensor, pad: list[float], height: int, width: int) -> Tensor:
    """Convert boxes (n, 4) of a letterboxed image to pixels of the original; `pad` is (scale, pad_x, pad_y)."""
    scale, pad_x, pad_y = pad
    moved = (boxes - boxes.new_tensor([pad_x, pad_y, pad_x, pad_y])) / scale
    return torch.minimum(moved.clamp(min=0), moved.new_tensor([width, height, width, height]))


@dataclass(frozen=True)
class Trained:
    """A checkpoint's averaged model, its class names and the image side that it was trained at."""

    parts: Parts
    names: list[str]
    imgsz: int

    @property
    def model(self) -> Any:
        """The model."""
        return self.parts.model

    @property
    def stride(self) -> int:
        """The stride in pixels: image sides must be multiples of it."""
        return self.parts.stride


def type_for(precision: str, half: bool, device: torch.device) -> torch.dtype:
    """Return the dtype of --precision, or of --half: fp16 on a GPU, bf16 on a CPU."""
    if precision not in PRECISIONS:
        raise TrainerError(f"--precision {precision}: unknown", f"use one of {', '.join(PRECISIONS)}")
    meant = ("fp16" if device.type == "cuda" else "bf16") if half else precision
    if precision not in ("auto", meant):
        what = f"--half and --precision {precision} contradict each other: --half is {meant} on {device.type}"
        raise TrainerError(what, "give one of them")
    if half:  # also where the device would be slow at it
        return torch.float16 if meant == "fp16" else torch.bfloat16
    if precision == "fp32":
        set_tf32(False)
    return pick_dtype(precision, device, native_bf16(device))


def load_trained(weights: str, cfg: str = "") -> Trained:
    """Return the detector of a checkpoint, ours or YOLOv5's: see `build_trained`."""
    content = load_weights(weights)
    checkpoint_file.check_task(
        content, "detect", weights, "export is for boxes; trainer predict and val take all weights"
    )
    return build_trained(content, weights, cfg)


def build_trained(content: Mapping[str, Any], weights: str, cfg: str = "") -> Trained:
    """Build the detector of the `content` of the file `weights`; every tensor must fit.

    `cfg` names what builds it, which a checkpoint of a user's own model (by import path) leaves to its user.
    """
    names = list(content["names"])
    described = read_cfg(cfg) if cfg else content["cfg"]
    imgsz = int(content["imgsz"])
    parts = build(described, nc=len(names), where=cfg or weights, hyp=Hyp(), imgsz=imgsz)
    checkpoint_file.transfer_all(parts.model, content["ema"], weights)
    return Trained(parts, names, imgsz)
