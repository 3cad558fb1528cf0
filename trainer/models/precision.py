"""Precision: the dtype of the network's computation per device."""

import os
import platform
from pathlib import Path

import torch
from torch import Tensor

from trainer.errors import TrainerError


def as_input(images: Tensor) -> Tensor:
    """Return a network's input, float32 (b, 3, h, w) in 0..1, from uint8 images (b, h, w, 3); others stay as they are.

    The result is channels last, which costs nothing because the pixels are already in that order.
    """
    return images.permute(0, 3, 1, 2).float() / 255 if images.dtype == torch.uint8 else images


def size_of(images: Tensor) -> tuple[int, int]:
    """Return the height and width in pixels of images as `as_input` takes them."""
    height, width = images.shape[1:3] if images.dtype == torch.uint8 else images.shape[2:]
    return height, width


def native_bf16(device: torch.device) -> bool:
    """Return whether the device has native bf16; emulated, it is slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split())
    except OSError:
        return False
    return bool(
        flags & ({"avx512_bf16", "amx_bf16"} if platform.machine() in ("x86_64", "AMD64") else {"bf16"})
    )


def set_tf32(is_allowed: bool) -> None:
    """Allow or forbid TF32, torch's default for convolutions since Ampere: it keeps 10 of fp32's 23 mantissa bits."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = is_allowed


def set_algorithms(*, deterministic: bool, has_one_shape: bool) -> None:
    """Choose cuDNN's algorithms: the fastest by a test per shape, or only deterministic ones."""
    torch.backends.cudnn.benchmark = has_one_shape and not deterministic
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when it is initialized
        torch.use_deterministic_algorithms(True)


def pick_dtype(precision: str, device: torch.device, native: bool) -> torch.dtype:
    """Return the dtype of convolutions; weights, their averages and the optimizer stay in fp32.

    auto is bf16 where the device has it, else fp16 with a scaled loss on a GPU and fp32 on a CPU.
    """
    if precision == "bf16" and not native and device.type == "cuda":
        raise TrainerError("--precision bf16: this GPU has no bf16", "use --precision fp16, fp32 or auto")
    if precision == "auto":
        precision = "bf16" if native else "fp16" if device.type == "cuda" else "fp32"
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
