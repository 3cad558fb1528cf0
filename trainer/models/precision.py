"""Precision: the dtype of the network's computation per device."""

import platform
from pathlib import Path

import torch

from trainer.errors import TrainerError


def native_bf16(device: torch.device) -> bool:
    """Return whether the device has native bf16; emulated, it is slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split())
    except OSError:
        return False
    return bool(flags & ({"avx512_bf16", "amx_bf16"} if platform.machine() in ("x86_64", "AMD64") else {"bf16"}))


def full_fp32() -> None:
    """Disable TF32, torch's default for convolutions since Ampere: it keeps 10 of fp32's 23 mantissa bits."""
    torch.backends.cudnn.allow_tf32 = False


def pick_dtype(precision: str, device: torch.device, native: bool) -> torch.dtype:
    """Return the dtype of convolutions; weights, their averages and the optimizer stay in fp32.

    auto is bf16 where the device has it, else fp16 with a scaled loss on a GPU and fp32 on a CPU.
    """
    if precision == "bf16" and not native and device.type == "cuda":
        raise TrainerError("--precision bf16: this GPU has no bf16", "use --precision fp16, fp32 or auto")
    if precision == "auto":
        precision = "bf16" if native else "fp16" if device.type == "cuda" else "fp32"
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
