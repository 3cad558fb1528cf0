"""Trained: the detector of a checkpoint, and the precision of its inference."""

from dataclasses import dataclass
from typing import Any

import torch

from trainer.config import PRECISIONS, Hyp
from trainer.detectors import Parts, build, load_weights, read_cfg
from trainer.errors import TrainerError
from trainer.models.precision import native_bf16, pick_dtype, set_tf32
from trainer.weights import checkpoint_file
from trainer.weights.checkpoint import Checkpoint


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


def build_trained(content: Checkpoint, weights: str, cfg: str = "") -> Trained:
    """Build the detector of the `content` of the file `weights`; every tensor must fit.

    `cfg` names what builds it, which a checkpoint of a user's own model (by import path) leaves to its user.
    """
    names = list(content["names"])
    described = read_cfg(cfg) if cfg else content["cfg"]
    imgsz = int(content["imgsz"])
    parts = build(described, nc=len(names), where=cfg or weights, hyp=Hyp(), imgsz=imgsz)
    checkpoint_file.transfer_all(parts.model, content["ema"], weights)
    return Trained(parts, names, imgsz)
